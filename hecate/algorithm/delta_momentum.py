"""Momentum that overwrites what it knows of a gradient's direction."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from hecate.algorithm.base import Algorithm
from hecate.tape.ops import over, sum_to_gate


class DeltaMomentum(Algorithm):
    """delta_momentum: S' = S (momentum I - c G^T G) - lr G, D = S'.

    The momentum as a delta-rule memory of gradients: along the rows of G the old content is erased before the new one
    is added. `form="stable"` takes c = erase / (1 + erase |G|_F^2), for which the bracket never has an eigenvalue
    outside [momentum - 1, momentum]; `form="paper"` takes c = 1 as printed, which diverges while |G|^2 > 1 + momentum.

    Shapes: G, S `[N, ..., P]`, a vector counts as one row; lr, momentum `[N]`.
    VJP: with d = g_D + g_S', W = S G^T, H = d G^T: g_S = momentum d - c H G, g_G = -lr d -
    c (W^T d + H^T S) + 2 c^2 <d, W G> G (the last term for `stable` only), g_momentum = <S, d>, g_lr = -<G, d>.
    Traits: one slot.
    Cost: two products of V^2 P.
    References: Nested Learning (Behrouz et al., 2025, arXiv 2512.24695), Eq 49, whose G^T G lacks a factor.
    [ALG-DMOM-D1]
    """

    kind: Literal["delta_momentum"] = "delta_momentum"
    momentum: float = Field(0.9, ge=0, lt=1)
    erase: float = Field(1.0, ge=0)
    form: Literal["stable", "paper"] = "stable"
    slots: ClassVar[tuple[str, ...]] = ("momentum",)
    uses_momentum: ClassVar[bool] = True

    @property
    def default_momentum(self) -> float:
        return self.momentum

    def direction(self, grad: Tensor, lr: Tensor, momentum: Tensor, *slots: Tensor) -> tuple[Tensor, ...]:
        g, s = _rows(grad), _rows(slots[0])
        erased = self._factor(g) * ((s @ g.mT) @ g)
        carried = over(momentum, grad) * slots[0] - over(lr, grad) * grad - erased.reshape(grad.shape)
        return carried, carried

    def direction_vjp(self, inputs: tuple[Tensor, ...], *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        grad, lr, momentum, slot = inputs
        both = cotangents[0] + cotangents[1]
        g, s, d = _rows(grad), _rows(slot), _rows(both)
        c, w, h = self._factor(g), s @ g.mT, d @ g.mT
        gg = c * (w.mT @ d + h.mT @ s)
        if self.form == "stable":
            gg = gg - 2 * c.square() * (d * (w @ g)).sum((-2, -1), keepdim=True) * g
        return (
            -over(lr, grad) * both - gg.reshape(grad.shape),
            -sum_to_gate(grad * both, lr),
            sum_to_gate(slot * both, momentum),
            over(momentum, grad) * both - (c * (h @ g)).reshape(grad.shape),
        )

    def _factor(self, g: Tensor) -> Tensor:
        if self.form == "paper":
            return torch.ones_like(g[:, :1, :1])
        return self.erase / (1 + self.erase * g.square().sum((-2, -1), keepdim=True))


def _rows(weight: Tensor) -> Tensor:
    return weight.reshape(weight.shape[0], -1, weight.shape[-1])
