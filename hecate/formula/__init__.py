"""Formulas as text: a variant's torch methods are traced and printed, and the same text runs under every compiler."""

from hecate.formula.knobs import (
    MIXES,
    AlgorithmFormula,
    Formula,
    RetentionFormula,
    Weights,
    activation_nodes,
    activation_text,
    algorithm_formula,
    algorithm_texts,
    bias_formula,
    formula_of,
    is_cheap,
    map_formula,
    map_nodes,
    printable,
    retention_formula,
    retention_texts,
)  # fmt: skip
from hecate.formula.nodes import Unprintable
from hecate.formula.printer import Text

__all__ = [
    "MIXES", "AlgorithmFormula", "Formula", "RetentionFormula", "Text", "Unprintable", "Weights", "activation_nodes",
    "activation_text", "algorithm_formula", "algorithm_texts", "bias_formula", "formula_of", "is_cheap",
    "map_formula", "map_nodes", "printable", "retention_formula", "retention_texts",
]  # fmt: skip
