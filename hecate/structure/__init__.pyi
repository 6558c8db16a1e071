from hecate.structure.base import Cascade, Memory, Structure, StructureKind, starts
from hecate.structure.memories import MLP, GatedMLP, Layered, Matrix, Slots, TwoPass, Vector

__all__ = [
    "MLP",
    "Cascade",
    "GatedMLP",
    "Layered",
    "Matrix",
    "Memory",
    "Slots",
    "Structure",
    "StructureKind",
    "TwoPass",
    "Vector",
    "starts",
]
