"""Attention of linear cost, by sums over features of keys."""

from hecate.nn.attention.functional import LinearAttentionState, linear_attention
from hecate.nn.attention.hopfield import Hopfield, Retrieved
from hecate.nn.attention.linear import LinearAttention, PerformerAttention, PerformerState

__all__ = [
    "Hopfield",
    "LinearAttention",
    "LinearAttentionState",
    "PerformerAttention",
    "PerformerState",
    "Retrieved",
    "linear_attention",
]
