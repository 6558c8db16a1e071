"""Inner algorithms: how a write turns a gradient into a step."""

from hecate.algorithm.adaptive import Adaptive
from hecate.algorithm.base import Algorithm, AlgorithmKind
from hecate.algorithm.delta_momentum import DeltaMomentum
from hecate.algorithm.ftrl import FTRL
from hecate.algorithm.gd import GD
from hecate.algorithm.momentum import Momentum
from hecate.algorithm.newton_schulz import NewtonSchulz

__all__ = [
    "FTRL",
    "GD",
    "Adaptive",
    "Algorithm",
    "AlgorithmKind",
    "DeltaMomentum",
    "Momentum",
    "NewtonSchulz",
]
