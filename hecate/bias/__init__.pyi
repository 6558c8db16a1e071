from hecate.bias.losses import KL, L1, L2, Bias, BiasKind, Dot, ErrorBias, Huber, Lp, Robust, Yaad

__all__ = ["KL", "L1", "L2", "Bias", "BiasKind", "Dot", "ErrorBias", "Huber", "Lp", "Robust", "Yaad"]
