"""Layers: memories as torch modules."""

from hecate.nn.attention import (
    Hopfield,
    LinearAttention,
    LinearAttentionState,
    PerformerAttention,
    PerformerState,
    Retrieved,
    linear_attention,
)
from hecate.nn.compose import AttentionConfig, Composed, ComposedState
from hecate.nn.conv import ShortConv, normalise_qk
from hecate.nn.gates import GateHeads
from hecate.nn.memory import LayerState, Memory
from hecate.nn.rule import FeatureMemoryConfig
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
