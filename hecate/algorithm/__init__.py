"""Inner algorithms: how a write turns a gradient into a step."""

from hecate.algorithm.base import Algorithm, AlgorithmForm, AlgorithmKind, InnerLoss, Token
from hecate.variant import import_variants

__all__ = ["Algorithm", "AlgorithmForm", "AlgorithmKind", "InnerLoss", "Token"]
__all__ += import_variants(__name__, Algorithm)
