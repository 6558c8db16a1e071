from hecate.readout.base import Asked, Direct, Means, Readout, ReadoutKind
from hecate.readout.ridge import Ridge
from hecate.readout.slots import Slots

__all__ = ["Asked", "Direct", "Means", "Readout", "ReadoutKind", "Ridge", "Slots"]
