"""Attentional biases: the inner losses that a memory descends at every write."""

from hecate.bias.base import Bias, BiasKind, ErrorBias, KernelForm
from hecate.bias.dot import Dot
from hecate.bias.huber import Huber
from hecate.bias.l2 import L2
from hecate.bias.lp import Lp

__all__ = ["L2", "Bias", "BiasKind", "Dot", "ErrorBias", "Huber", "KernelForm", "Lp"]
