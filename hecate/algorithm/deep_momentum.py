"""Momentum that is a small network of its own."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from hecate.algorithm.base import Algorithm
from hecate.sizes import Size
from hecate.tape.ops import over


class DeepMomentum(Algorithm):
    """deep_momentum: D = lr m'(G), m' = momentum m - c grad_m ell(m; G), m(g) = W_2 tanh(W_1 g).

    The momentum is a memory of gradients: a network that maps the rows of G to the rows of a step and is itself trained
    at every write. `objective="descent"` teaches it the step of gradient descent, ell = |m(g) + g|^2 / 2, which past
    gradients shape as far as the network generalises, with c = rate / (1 + rate B), B = |H|_F^2 + |W_2|_F^2 |G|_F^2
    with H = tanh(G W_1^T): B bounds the curvature of ell along the network, so however large G is, the network never
    steps past
    what it is taught. `"paper"` is the printed ell = <m(g), 1>, whose direction does not depend on the sign of g, with
    c = rate. One network per weight, shared by its rows. It starts at a fixed draw for W_1 and at W_2 = 0, and
    `momentum` decays its distance from that start.

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

    @property
    def default_momentum(self) -> float:
        return self.momentum

    @property
    def stable_step(self) -> float:
        return math.inf

    def slot_shapes(self, weight: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        return {"w_in": (self.width, weight[-1]), "w_out": (weight[-1], self.width)}

    def direction(self, grad: Tensor, lr: Tensor, momentum: Tensor, *slots: Tensor) -> tuple[Tensor, ...]:
        rows = grad.reshape(grad.shape[0], -1, grad.shape[-1])
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


def _square(matrix: Tensor) -> Tensor:
    return matrix.square().sum((-2, -1), keepdim=True)
