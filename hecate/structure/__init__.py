"""Structures: what a memory is."""

from hecate.structure.base import Memory, Structure, StructureKind
from hecate.structure.gated_mlp import GatedMLP
from hecate.structure.layered import Layered
from hecate.structure.matrix import Matrix
from hecate.structure.mlp import MLP
from hecate.structure.slots import Slots
from hecate.structure.two_pass import TwoPass
from hecate.structure.vector import Vector

__all__ = ["MLP", "GatedMLP", "Layered", "Matrix", "Memory", "Slots", "Structure", "StructureKind", "TwoPass", "Vector"]
