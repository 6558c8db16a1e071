from hecate.structure.base import Memory, Structure, StructureKind
from hecate.structure.layered import MLP, GatedMLP, Layered, Matrix
from hecate.structure.slots import Slots
from hecate.structure.two_pass import TwoPass
from hecate.structure.vector import Vector

__all__ = ["MLP", "GatedMLP", "Layered", "Matrix", "Memory", "Slots", "Structure", "StructureKind", "TwoPass", "Vector"]
