from hecate.bias.base import Bias, BiasKind, KernelForm
from hecate.bias.error import L1, L2, ErrorBias, Huber, Lp, Robust, Yaad
from hecate.bias.pairing import KL, Dot

__all__ = ["KL", "L1", "L2", "Bias", "BiasKind", "Dot", "ErrorBias", "Huber", "KernelForm", "Lp", "Robust", "Yaad"]
