from hecate.algorithm.base import Algorithm, AlgorithmForm, AlgorithmKind, GramForm, InnerLoss, Token, WindowForm
from hecate.algorithm.descent import FTRL, GD, RLS, Adaptive, Implicit, Momentum, Omega
from hecate.algorithm.momenta import DeepMomentum, DeltaMomentum, NewtonSchulz

__all__ = [
    "FTRL",
    "GD",
    "RLS",
    "Adaptive",
    "Algorithm",
    "AlgorithmForm",
    "AlgorithmKind",
    "DeepMomentum",
    "DeltaMomentum",
    "GramForm",
    "Implicit",
    "InnerLoss",
    "Momentum",
    "NewtonSchulz",
    "Omega",
    "Token",
    "WindowForm",
]
