"""Attention and a memory in one layer: MAC, MAG, MAL."""

from hecate.nn.compose.config import AttentionConfig
from hecate.nn.compose.gate import Gate
from hecate.nn.compose.layer import Composed
from hecate.nn.compose.state import ComposedState

__all__ = ["AttentionConfig", "Composed", "ComposedState", "Gate"]
