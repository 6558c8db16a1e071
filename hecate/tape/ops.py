"""What formulas share: the broadcasting of gates over weights, roots with a floor, and derivatives left to torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def over(gate: Tensor, weight: Tensor) -> Tensor:
    """A gate `[N]` or `[N, P]` shaped to multiply a weight `[N, ..., P]`."""
    ones = [1] * (weight.dim() - gate.dim())
    return gate.reshape(gate.shape[0], *ones, *gate.shape[1:])


def sum_to_gate(product: Tensor, gate: Tensor) -> Tensor:
    """The adjoint of `over`: sums `[N, ..., P]` to the shape of a gate `[N]` or `[N, P]`."""
    axes = tuple(range(1, product.dim() - gate.dim() + 1))
    # To torch, a sum over no axes is one over all.
    return product.sum(dim=axes) if axes else product


def inner_axes(x: Tensor) -> tuple[int, ...]:
    """All axes but the first, which counts memories."""
    return tuple(range(1, x.dim()))


def floored_root(square: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """max(sqrt(square), floor), and whether the root is the larger: one of 0 has no derivative."""
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


def torch_vjp(function: Callable[..., Any], inputs: tuple[Any, ...], g: Any) -> Any:
    """Cotangents of the inputs from that of `function(*inputs)`, which has no derivative by hand."""
    _, pull = torch.func.vjp(function, *inputs)  # type: ignore[misc]
    return pull(g)
