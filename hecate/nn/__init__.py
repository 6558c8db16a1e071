"""Layers: memories as torch modules."""

from hecate.nn.attention import LinearAttention, LinearAttentionState, linear_attention
from hecate.nn.attention.hopfield import Hopfield, Retrieved
from hecate.nn.attention.performer import PerformerAttention, PerformerState
from hecate.nn.compose import AttentionConfig, Composed, ComposedState
from hecate.nn.conv import ShortConv, normalise_qk
from hecate.nn.feature_memory import FeatureMemoryConfig
from hecate.nn.gates import GateHeads
from hecate.nn.memory import LayerState, Memory
from hecate.nn.sliding import SlidingAttention, SlidingState

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
