from hecate.gating.base import Gating, GatingKind, Masks, Plain, Sizes, Written
from hecate.gating.corrections import Comba, Complement, Curvature, Hypergradient
from hecate.gating.heads import Head, Heads
from hecate.gating.readouts import ABC, GSA, KalmaNet, Mesa, Raven
from hecate.gating.recurrent import MLSTM, RWKV7, Mamba2, Mamba3, MomentumDeltaGates
from hecate.gating.target import LargeChunk, TargetConv

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
