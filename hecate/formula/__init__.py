"""Formulas as text: a variant's torch methods are traced and printed, and the same text runs under every compiler."""

from hecate.formula.bias import MIXES, Formula, activation_nodes, bias_formula, formula_of
from hecate.formula.nodes import Unprintable
from hecate.formula.retention import RetentionFormula, retention_formula, retention_texts

__all__ = [
    "MIXES", "Formula", "RetentionFormula", "Unprintable", "activation_nodes", "bias_formula", "formula_of",
    "retention_formula", "retention_texts",
]  # fmt: skip
