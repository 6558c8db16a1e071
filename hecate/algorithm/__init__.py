"""Inner algorithms: how a write turns a gradient into a step."""

from hecate.algorithm.base import Algorithm, AlgorithmForm, AlgorithmKind, GramForm, InnerLoss, Token, WindowForm
from hecate.variant import import_variants

__all__ = ["Algorithm", "AlgorithmForm", "AlgorithmKind", "GramForm", "InnerLoss", "Token", "WindowForm"]
__all__ += import_variants(__name__, Algorithm)
