"""Normalisation of queries and keys."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from hecate.errors import ConfigError, shorten
from hecate.tape import can_inspect
from hecate.tape.ops import largest, levelling, reach

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
    mean = torch.sum if norm == "l2" else torch.mean
    size = mean(wide.square(), -1, keepdim=True)
    if not (can_inspect(size, free=True) and math.isfinite(size.sum().item())):
        # Too long to be squared: brought near 1, and eps with it.
        longest = largest(wide)
        level = torch.where(longest > reach(wide.dtype, 0.4), levelling(longest), 1.0)
        wide, eps = wide * level, eps * level
        size = mean(wide.square(), -1, keepdim=True)
    return (wide * (size + eps * eps).rsqrt()).to(x.dtype)
