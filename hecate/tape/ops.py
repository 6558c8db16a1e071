"""Gates over weights: the one broadcasting rule that retentions and algorithms share."""

from __future__ import annotations

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
