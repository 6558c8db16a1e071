"""The memory microscope: pictures of a trained memory at work."""

from hecate.microscope.attention import Attention, implicit_attention, nonlinearity
from hecate.microscope.look import look
from hecate.microscope.view import MemoryView, Recall, View

__all__ = ["Attention", "MemoryView", "Recall", "View", "implicit_attention", "look", "nonlinearity"]
