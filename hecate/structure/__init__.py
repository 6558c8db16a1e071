"""Structures: the models that serve as memories."""

from hecate.structure.base import Cascade, Memory, Structure, StructureKind, starts
from hecate.structure.memories import Layered
from hecate.variant import import_variants

__all__ = ["Cascade", "Layered", "Memory", "Structure", "StructureKind", "starts"]
__all__ += import_variants(__name__, Structure)
