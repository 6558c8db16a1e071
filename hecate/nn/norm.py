"""Normalisation of queries and keys."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from hecate.engine.quotients import largest, levelling, near_one, reach
from hecate.errors import ConfigError, shorten

QKNorm = Literal["none", "l2", "rms"]


def check_norm(norm: QKNorm) -> None:
    """Refuses an unknown normalisation."""
    if norm not in get_args(QKNorm):
        raise ConfigError(f"qk_norm must be one of {get_args(QKNorm)}, got {shorten(norm)}")


def normalise_qk(x: Tensor, norm: QKNorm, eps: float | Tensor = 1e-6) -> Tensor:
    """`"l2"`: unit length; `"rms"`: unit root mean square; evaluated in float32 or better."""
    check_norm(norm)
    if norm == "none":
        return x
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    size, top = largest(wide), reach(wide.dtype, 0.4)
    if not near_one(size):  # too long to be squared: brought near 1, and eps with it
        level = torch.where(size > top, levelling(size), 1.0)
        wide, eps = wide * level, eps * level
    square = wide.square()
    size = square.sum(-1, keepdim=True) if norm == "l2" else square.mean(-1, keepdim=True)
    return (wide * (size + eps * eps).rsqrt()).to(x.dtype)
