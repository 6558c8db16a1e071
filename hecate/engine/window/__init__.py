"""The window engine: windows of gradients, and steps by the Gram matrix of a momentum, in blocks."""

from hecate.engine.window.engine import Window

__all__ = ["Window"]
