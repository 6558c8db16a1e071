"""Attentional biases: the inner losses that a memory descends at every write."""

from hecate.bias.base import Bias, BiasKind, ErrorBias, KernelForm
from hecate.bias.dot import Dot
from hecate.bias.huber import Huber
from hecate.bias.kl import KL
from hecate.bias.l1 import L1
from hecate.bias.l2 import L2
from hecate.bias.lp import Lp
from hecate.bias.robust import Robust
from hecate.bias.yaad import Yaad

__all__ = ["KL", "L1", "L2", "Bias", "BiasKind", "Dot", "ErrorBias", "Huber", "KernelForm", "Lp", "Robust", "Yaad"]
