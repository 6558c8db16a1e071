"""The memory microscope: pictures of a trained memory at work."""

from hecate.microscope.look import look
from hecate.microscope.view import Attention, MemoryView, Recall, View, implicit_attention, nonlinearity
from hecate.nn.strength import Strength, write_strength

__all__ = [
    "Attention",
    "MemoryView",
    "Recall",
    "Strength",
    "View",
    "implicit_attention",
    "look",
    "nonlinearity",
    "write_strength",
]
