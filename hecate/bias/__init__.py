"""Attentional biases: the inner losses that a memory descends at every write."""

from hecate.bias.losses import Bias, BiasKind, ErrorBias
from hecate.variant import import_variants

__all__ = ["Bias", "BiasKind", "ErrorBias"]
__all__ += import_variants(__name__, Bias)
