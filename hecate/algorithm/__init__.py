"""Inner algorithms: how a write turns a gradient into a step."""

from hecate.algorithm.adaptive import Adaptive
from hecate.algorithm.base import Algorithm, AlgorithmForm, AlgorithmKind, InnerLoss, Token
from hecate.algorithm.deep_momentum import DeepMomentum
from hecate.algorithm.delta_momentum import DeltaMomentum
from hecate.algorithm.ftrl import FTRL
from hecate.algorithm.gd import GD
from hecate.algorithm.implicit import Implicit
from hecate.algorithm.momentum import Momentum
from hecate.algorithm.newton_schulz import NewtonSchulz
from hecate.algorithm.omega import Omega
from hecate.algorithm.rls import RLS

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
