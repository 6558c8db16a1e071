from hecate.algorithm.base import Algorithm, AlgorithmForm, AlgorithmKind, GramForm, InnerLoss, Token, WindowForm
from hecate.algorithm.descent import FTRL, GD, Adaptive, Momentum
from hecate.algorithm.gradients import RLS, Implicit, Omega
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
