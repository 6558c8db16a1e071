"""Positions in attention: rotation of channels in pairs."""

from __future__ import annotations

import torch
from torch import Tensor

BASE = 10_000.0


def rotated(x: Tensor, position: Tensor) -> Tensor:
    """The first half of the channels turned in pairs by position * 10000^(-pair / pairs).

    The product of two rotated vectors depends on their positions by the difference alone; the
    second half of the channels carries no position. [ATT-ROT-D1]

    Shapes: x `[..., D]`, D divisible by 4; position int64 that broadcasts to `[...]`.
    """
    pairs = x.shape[-1] // 4
    wide = torch.promote_types(x.dtype, torch.float32)
    steps = torch.arange(pairs, dtype=torch.float64, device=x.device)
    angle = position.unsqueeze(-1) * BASE ** (-steps / pairs)
    cos, sin = angle.cos().to(wide), angle.sin().to(wide)
    a, b, rest = x.split([pairs, pairs, 2 * pairs], -1)
    turned = torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
    return torch.cat([turned.to(x.dtype), rest], -1)
