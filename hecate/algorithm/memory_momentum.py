"""Momenta that are memories of gradients themselves: one overwrites what it knows of a direction, one is a network."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from hecate.algorithm.base import Algorithm
from hecate.sizes import Size
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
        return self.erase / (1 + self.erase * _square(g))


class DeepMomentum(Algorithm):
    """deep_momentum: D = lr m'(G), m' = momentum m - c grad_m ell(m; G), m(g) = W_2 tanh(W_1 g).

    The momentum is a memory of gradients: a network that maps the rows of G to the rows of a step and is itself trained
    at every write. `objective="descent"` teaches it the step of gradient descent, ell = |m(g) + g|^2 / 2, which past
    gradients shape as far as the network generalises, with c = rate / (1 + rate B), B = |H|_F^2 + |W_2|_F^2 |G|_F^2
    with H = tanh(G W_1^T): B bounds the curvature of ell along the network, so however large G is, the network never
    steps past what it is taught. `"paper"` is the printed ell = <m(g), 1>, whose direction does not depend on the sign
    of g, with c = rate. One network per weight, shared by its rows. It starts at a fixed draw for W_1 and at W_2 = 0,
    and `momentum` decays its distance from that start.

    Shapes: G `[N, ..., P]`, a vector counts as one row; slots W_1 minus its start `[N, width, P]`, W_2 `[N, P, width]`;
    lr, momentum `[N]`.
    VJP: by torch.func through the network and its gradient.
    Traits: two slots.
    Cost: 10 V P width per weight.
    References: Nested Learning (Behrouz et al., 2025, arXiv 2512.24695), Eq 50. [ALG-DEEP-D1]
    """

    kind: Literal["deep_momentum"] = "deep_momentum"
    momentum: float = Field(0.9, ge=0, lt=1)
    width: Size = Field(16, ge=1, description="hidden units")
    rate: float = Field(0.1, gt=0, description="step size of the network's own descent")
    objective: Literal["descent", "paper"] = "descent"
    slots: ClassVar[tuple[str, ...]] = ("w_in", "w_out")
    uses_momentum: ClassVar[bool] = True
    stable_step: ClassVar[float] = math.inf

    def slot_shapes(self, weight: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        return {"w_in": (self.width, weight[-1]), "w_out": (weight[-1], self.width)}

    def direction(self, grad: Tensor, lr: Tensor, momentum: Tensor, *slots: Tensor) -> tuple[Tensor, ...]:
        rows = _rows(grad)
        start, (change, w_out) = self._start(grad), slots
        hidden = torch.tanh(rows @ (start + change).mT)
        answer = hidden @ w_out.mT
        error, rate = torch.ones_like(rows), torch.full_like(change[:, :1, :1], self.rate)
        if self.objective == "descent":
            error = answer + rows
            rate = rate / (1 + rate * (_square(hidden) + _square(w_out) * _square(rows)))
        pushed = (error @ w_out) * (1 - hidden.square())
        keep = over(momentum, change)
        change = keep * change - rate * (pushed.mT @ rows)
        w_out = keep * w_out - rate * (error.mT @ hidden)
        step = torch.tanh(rows @ (start + change).mT) @ w_out.mT
        return over(lr, grad) * step.reshape(grad.shape), change, w_out

    def _start(self, grad: Tensor) -> Tensor:
        width = grad.shape[-1]
        generator = torch.Generator().manual_seed(0)
        shape = (self.width, width)
        draw = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
        return (draw / math.sqrt(width)).to(grad)


def _rows(weight: Tensor) -> Tensor:
    """`[N, ..., P]` as matrices; a vector is one row."""
    return weight.reshape(weight.shape[0], -1, weight.shape[-1])


def _square(matrix: Tensor) -> Tensor:
    return matrix.square().sum((-2, -1), keepdim=True)
