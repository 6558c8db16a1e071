from hecate.algorithm.base import Algorithm, AlgorithmForm, AlgorithmKind, InnerLoss, Token
from hecate.algorithm.closed_form import RLS, Implicit
from hecate.algorithm.descent import FTRL, GD, Adaptive, Momentum
from hecate.algorithm.memory_momentum import DeepMomentum, DeltaMomentum
from hecate.algorithm.newton_schulz import NewtonSchulz
from hecate.algorithm.omega import Omega

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
    "Implicit",
    "InnerLoss",
    "Momentum",
    "NewtonSchulz",
    "Omega",
    "Token",
]
