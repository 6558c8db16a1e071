from hecate.readout.base import Asked, Direct, Means, Readout, ReadoutKind
from hecate.readout.keys import Ridge, Slots

__all__ = ["Asked", "Direct", "Means", "Readout", "ReadoutKind", "Ridge", "Slots"]
