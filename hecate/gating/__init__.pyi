from hecate.gating.base import Gating, GatingKind, Masks, Plain, Sizes, Written
from hecate.gating.corrections import Comba, Complement, Curvature, Hypergradient
from hecate.gating.heads import Head, Heads
from hecate.gating.mamba import Mamba2, Mamba3
from hecate.gating.mlstm import MLSTM
from hecate.gating.momentum_delta import MomentumDeltaGates
from hecate.gating.raven import Raven
from hecate.gating.readouts import ABC, GSA, KalmaNet, Mesa
from hecate.gating.rwkv7 import RWKV7
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
