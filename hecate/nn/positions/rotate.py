"""Rotation of channels in pairs, each pair at its own speed."""

from __future__ import annotations

import torch
from torch import Tensor

BASE = 10_000.0


def turn_pairs(x: Tensor, position: Tensor, pairs: int, base: float) -> Tensor:
    """Channels (c, c + pairs) of x `[..., D]` turned by position * base^(-c / pairs).

    position: whole numbers that broadcast to `[...]`. Channels from 2 * pairs on stay.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    steps = torch.arange(pairs, dtype=torch.float64, device=x.device)
    angle = position.unsqueeze(-1) * base ** (-steps / pairs)
    cos, sin = angle.cos().to(wide), angle.sin().to(wide)
    a, b, rest = x.split([pairs, pairs, x.shape[-1] - 2 * pairs], -1)
    turned = torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
    return torch.cat([turned.to(x.dtype), rest], -1)


def rotated(x: Tensor, position: Tensor) -> Tensor:
    """The first half of the channels turned in pairs by position * 10000^(-pair / pairs).

    The product of two rotated vectors depends on their positions by the difference alone; the second half of the
    channels carries no position. [ATT-ROT-D1]

    Shapes: x `[..., D]`, D divisible by 4; position int64 that broadcasts to `[...]`.
    """
    return turn_pairs(x, position, x.shape[-1] // 4, BASE)
