"""Normalisation of queries and keys."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

QKNorm = Literal["none", "l2", "rms"]


def normalise_qk(x: Tensor, norm: QKNorm, eps: float = 1e-6) -> Tensor:
    """`"l2"`: unit length; `"rms"`: unit root mean square; evaluated in float32 or better."""
    if norm == "none":
        return x
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    square = wide.square()
    size = square.sum(-1, keepdim=True) if norm == "l2" else square.mean(-1, keepdim=True)
    return (wide * (size + eps * eps).rsqrt()).to(x.dtype)
