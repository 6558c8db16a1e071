"""The memory microscope: analysis and figures of a trained memory while it reads."""

from hecate.cms.health import Strength, write_strength
from hecate.microscope.look import look
from hecate.microscope.view import Attention, MemoryView, Recall, View, implicit_attention, nonlinearity

__all__ = [
    "Attention", "MemoryView", "Recall", "Strength", "View", "implicit_attention", "look", "nonlinearity",
    "write_strength",
]  # fmt: skip
