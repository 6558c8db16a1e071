"""Layers: memories as torch modules."""

from hecate.nn.memory import LayerState, Memory

__all__ = ["LayerState", "Memory"]
