"""Layers: memories as torch modules."""

from hecate.nn.conv import ShortConv
from hecate.nn.gates import GateHeads
from hecate.nn.memory import Memory
from hecate.nn.norm import normalise_qk
from hecate.nn.state import LayerState

__all__ = ["GateHeads", "LayerState", "Memory", "ShortConv", "normalise_qk"]
