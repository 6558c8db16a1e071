"""Odd powers of numbers and of lengths, linear near 0 so that both they and their inverses have slopes there.

`power`: x max(|x|, floor)^m, per coordinate; `radial`: x max(|x|_q, floor)^m, per memory. The inverse of an exponent m
is the exponent -m/(1 + m) with the floor floor^(1 + m). The floor itself counts as beyond.
"""

from __future__ import annotations

import torch
from torch import Tensor


def power(x: Tensor, m: float, floor: float) -> Tensor:
    """x max(|x|, floor)^m."""
    return x * x.abs().clamp(min=floor).pow(m)


def power_vjp(x: Tensor, m: float, floor: float, g: Tensor) -> Tensor:
    """Cotangent of x."""
    size = x.abs()
    # Not a choice between two Python numbers, which would be of torch's default dtype.
    slope = 1 + m * (size >= floor).to(x.dtype)
    return slope * size.clamp(min=floor).pow(m) * g


def radial(x: Tensor, m: float, floor: float, q: float) -> Tensor:
    """x max(|x|_q, floor)^m, the norm over everything but the first axis."""
    return x * _length(x, floor, q)[0].pow(m)


def radial_vjp(x: Tensor, m: float, floor: float, q: float, g: Tensor) -> Tensor:
    """Cotangent of x."""
    length, beyond = _length(x, floor, q)
    unit = x / length
    along = (g * unit).sum(_inner(x), keepdim=True)
    slope = torch.where(beyond, m * along, 0.0) * unit.sign() * unit.abs().pow(q - 1)
    return length.pow(m) * (g + slope)


def _length(x: Tensor, floor: float, q: float) -> tuple[Tensor, Tensor]:
    """max(|x|_q, floor) and whether the norm is the larger."""
    # With the largest entry taken out, powers neither overflow nor vanish. It cancels, so it is a constant to the
    # derivative.
    largest = x.detach().abs().amax(_inner(x), keepdim=True).clamp(min=floor)
    total = (x / largest).abs().pow(q).sum(_inner(x), keepdim=True)
    beyond = largest * total.pow(1 / q) >= floor
    # A root of 0 has no derivative, and none is needed.
    length = largest * torch.where(beyond, total, 1.0).pow(1 / q)
    return torch.where(beyond, length, floor), beyond


def _inner(x: Tensor) -> tuple[int, ...]:
    return tuple(range(1, x.dim()))
