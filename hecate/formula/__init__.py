"""Formulas as text: a variant's torch methods are traced and printed, and the same text runs under every compiler."""

from hecate.formula.bias import MIXES, Formula, activation_nodes, bias_formula, formula_of
from hecate.formula.nodes import Unprintable

__all__ = ["MIXES", "Formula", "Unprintable", "activation_nodes", "bias_formula", "formula_of"]
