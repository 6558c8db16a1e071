from hecate.readout.readouts import Asked, Direct, Means, Readout, ReadoutKind, Ridge, Slots

__all__ = ["Asked", "Direct", "Means", "Readout", "ReadoutKind", "Ridge", "Slots"]
