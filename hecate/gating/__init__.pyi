from hecate.gating.base import Gating, GatingKind, Masks, Plain, Sizes, Written
from hecate.gating.corrections import Comba, Complement, Curvature, Hypergradient, LargeChunk, TargetConv
from hecate.gating.heads import Head, Heads
from hecate.gating.published import ABC, GSA, MLSTM, RWKV7, KalmaNet, Mamba2, Mamba3, Mesa, MomentumDeltaGates, Raven

__all__ = [
    "ABC",
    "GSA",
    "MLSTM",
    "RWKV7",
    "Comba",
    "Complement",
    "Curvature",
    "Gating",
    "GatingKind",
    "Head",
    "Heads",
    "Hypergradient",
    "KalmaNet",
    "LargeChunk",
    "Mamba2",
    "Mamba3",
    "Masks",
    "Mesa",
    "MomentumDeltaGates",
    "Plain",
    "Raven",
    "Sizes",
    "TargetConv",
    "Written",
]
