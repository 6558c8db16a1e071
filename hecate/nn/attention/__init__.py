"""Attention in linear time, and the memory of infinitely many features that it approximates."""

from hecate.nn.attention.hopfield import Hopfield, Retrieved

__all__ = ["Hopfield", "Retrieved"]
