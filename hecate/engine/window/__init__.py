"""The window engine: gradients of the last tokens, and steps along a function of a momentum's Gram matrix, in blocks."""

from hecate.engine.window.engine import Window

__all__ = ["Window"]
