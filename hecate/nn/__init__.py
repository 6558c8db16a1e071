"""Layers: memories as torch modules."""

from hecate.nn.attention import LinearAttention, PerformerAttention, PerformerState
from hecate.nn.compose import AttentionConfig, Composed, ComposedState
from hecate.nn.conv import ShortConv, normalise_qk
from hecate.nn.gates import GateHeads
from hecate.nn.hopfield import Hopfield, Retrieved
from hecate.nn.memory import LayerState, Memory
from hecate.nn.rule import FeatureMemoryConfig
from hecate.nn.sliding import SlidingAttention, SlidingState
from hecate.nn.sums import LinearAttentionState, linear_attention

__all__ = [
    "AttentionConfig",
    "Composed",
    "ComposedState",
    "FeatureMemoryConfig",
    "GateHeads",
    "Hopfield",
    "LayerState",
    "LinearAttention",
    "LinearAttentionState",
    "Memory",
    "PerformerAttention",
    "PerformerState",
    "Retrieved",
    "ShortConv",
    "SlidingAttention",
    "SlidingState",
    "linear_attention",
    "normalise_qk",
]
