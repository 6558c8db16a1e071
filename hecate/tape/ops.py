"""Arithmetic that the families of variants share: gates times weights, roots with a floor, sizes far from 1, and
derivatives left to torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hecate.tape.bridge import can_inspect


def over(gate: Tensor, weight: Tensor) -> Tensor:
    """A gate `[N]`, `[N, P]` or `[N, V, 1 or P]` shaped to multiply a weight `[N, ..., P]`."""
    ones = [1] * (weight.dim() - gate.dim())
    return gate.reshape(gate.shape[0], *ones, *gate.shape[1:])


def sum_to_gate(product: Tensor, gate: Tensor) -> Tensor:
    """The adjoint of `over`: sums `[N, ..., P]` to the shape of a gate."""
    axes = tuple(range(1, product.dim() - gate.dim() + 1))
    # To torch, a sum over no axes is one over all.
    return product.sum(dim=axes) if axes else product.sum_to_size(gate.shape)


@cache
def number(value: float, dtype: torch.dtype) -> Tensor:
    """A number as a tensor `[]` on the host, which must not be written to: `x + 1e-6` makes a new one each time, which
    takes longer than the sum. Not for use while torch traces."""
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=dtype, device="cpu")


# Sizes whose squares leave a dtype's range: `levelling` brings them near 1.


def reach(dtype: torch.dtype, share: float) -> float:
    """The power of two at a share of a dtype's exponents: at 1/2 its square is about the largest number."""
    return 2.0 ** int(share * math.log2(torch.finfo(dtype).max))


def near_one(size: Tensor, share: float = 0.25, looks: bool | None = None) -> bool:
    """True if sizes are known to lie within `reach` of 1.

    They are read only on a CPU, where that does not wait, and if Python may branch on values: `looks`, if that is
    known.
    """
    if not (can_inspect(size, free=True) if looks is None else looks):
        return False
    if not size.numel():
        return True
    (low, high), far = size.aminmax(), reach(size.dtype, share)
    return low.item() * far >= 1 and high.item() <= far


def levelling(largest: Tensor) -> Tensor:
    """Powers of two that bring sizes to [1, 2), constants to derivatives; 1 for 0."""
    bottom = math.log2(torch.finfo(largest.dtype).tiny)
    power = torch.exp2(-largest.detach().log2().floor().clamp(bottom, -bottom))
    return torch.where(largest > 0, power, 1.0)


def largest(x: Tensor) -> Tensor:
    """The largest absolute value along the last axis, kept as an axis of one."""
    return x.detach().abs().amax(-1, keepdim=True)


def inner_axes(x: Tensor) -> tuple[int, ...]:
    """All axes but the first, which counts memories."""
    return tuple(range(1, x.dim()))


def floored_root(square: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """max(sqrt(square), floor), and a mask, True where the root is the larger: a root of 0 has no derivative."""
    beyond = square > floor**2
    return torch.where(beyond, square, floor**2).sqrt(), beyond


def onto_ball(x: Tensor, radius: float, axes: int | tuple[int, ...]) -> Tensor:
    """x min(1, radius/|x|_2): the projection onto a ball."""
    length, beyond = floored_root(x.square().sum(axes, keepdim=True), radius)
    return torch.where(beyond, x * (radius / length), x)


def onto_ball_vjp(x: Tensor, radius: float, axes: int | tuple[int, ...], g: Tensor) -> Tensor:
    """Cotangent of x, by a symmetric Jacobian; the border counts as inside."""
    length, beyond = floored_root(x.square().sum(axes, keepdim=True), radius)
    unit = x / length
    along = (unit * g).sum(axes, keepdim=True)
    return torch.where(beyond, (radius / length) * (g - unit * along), g)


def unit(x: Tensor, eps: float = 1e-12) -> Tensor:
    """x / max(|x|_2, eps) along the last axis, as `torch.nn.functional.normalize`; a zero vector has the divisor 1,
    since 1/eps would be its slope."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / torch.where(length == 0, 1.0, length.clamp(min=eps))


def joined(y: Tensor, *others: Tensor | None) -> Tensor:
    """y, with the others in its graph: if it does not depend on them, their gradient is 0 rather than None, for which
    data-parallel training would wait."""
    for item in others:
        if item is not None and item.requires_grad:
            y = y + item.flatten()[:0].sum().to(y.dtype)  # a sum of no numbers, whatever the item carries
    return y


def torch_vjp(function: Callable[..., Any], inputs: tuple[Any, ...], g: Any) -> Any:
    """Cotangents of the inputs from that of `function(*inputs)`, which has no derivative by hand."""
    _, pull = torch.func.vjp(function, *inputs)  # type: ignore[misc]
    return pull(g)
