"""Formulas as text: a variant's torch methods are traced and printed, and the same text runs under every compiler."""

from hecate.formula.knobs import (
    MIXES,
    Descent,
    Formula,
    RetentionFormula,
    Weights,
    activation_nodes,
    bias_formula,
    descent_formula,
    descent_texts,
    formula_of,
    map_formula,
    retention_formula,
    retention_texts,
)  # fmt: skip
from hecate.formula.nodes import Unprintable
from hecate.formula.printer import Text

__all__ = [
    "MIXES", "Descent", "Formula", "RetentionFormula", "Text", "Unprintable", "Weights", "activation_nodes",
    "bias_formula", "descent_formula", "descent_texts", "formula_of", "map_formula", "retention_formula",
    "retention_texts",
]  # fmt: skip
