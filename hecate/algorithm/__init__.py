"""Inner algorithms: how a write turns a gradient into a step."""

from hecate.algorithm.base import Algorithm, AlgorithmKind
from hecate.algorithm.gd import GD
from hecate.algorithm.momentum import Momentum

__all__ = ["GD", "Algorithm", "AlgorithmKind", "Momentum"]
