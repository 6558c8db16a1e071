"""Structures: what a memory is."""

from hecate.structure.base import Memory, Structure, StructureKind
from hecate.structure.matrix import Matrix
from hecate.structure.mlp import MLP
from hecate.structure.slots import Slots
from hecate.structure.two_pass import TwoPass
from hecate.structure.vector import Vector

__all__ = ["MLP", "Matrix", "Memory", "Slots", "Structure", "StructureKind", "TwoPass", "Vector"]
