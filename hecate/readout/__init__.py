"""Readouts: maps of a query before a memory answers it."""

from hecate.readout.readouts import Asked, Direct, Means, Readout, ReadoutKind
from hecate.variant import import_variants

__all__ = ["Asked", "Direct", "Means", "Readout", "ReadoutKind"]
__all__ += import_variants(__name__, Readout)
