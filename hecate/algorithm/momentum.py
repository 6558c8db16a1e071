"""Gradient descent with momentum."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from hecate.algorithm.base import Algorithm, AlgorithmForm
from hecate.tape.ops import over, sum_to_gate


class Momentum(Algorithm):
    """momentum: S' = momentum S - lr G, D = S', or with nesterov D = momentum S' - lr G.

    The momentum of Titans: past surprise carries over, without bias correction and without dampening. `nesterov` looks
    one step ahead along S'. Retention acts on the memory alone; S decays by `momentum` only. (Titans writes eta for
    momentum and theta for lr.)

    Shapes: G, S `[N, ...]`; lr, momentum `[N]`.
    VJP: with d = g_D + g_S': g_G = -lr d, g_lr = -<G, d>, g_momentum = <S, d>, g_S = momentum d.
    nesterov: d = momentum g_D + g_S', g_G -= lr g_D, g_lr -= <G, g_D>, g_momentum += <S', g_D>.
    Traits: one slot; contracts while lr |phi|^2 curvature < 2 (1 + momentum); with nesterov
    that over 1 + 2 momentum.
    Cost: one multiply-add and one more tensor of state per weight.
    References: Titans (Behrouz et al., 2025, arXiv 2501.00663).
    [ALG-MOM-D1, ALG-NEST-D1]
    """

    kind: Literal["momentum"] = "momentum"
    momentum: float = Field(0.9, ge=0, lt=1)
    nesterov: bool = False
    slots: ClassVar[tuple[str, ...]] = ("momentum",)
    uses_momentum: ClassVar[bool] = True
    linear: ClassVar[bool] = True

    @property
    def default_momentum(self) -> float:
        return self.momentum

    @property
    def stable_step(self) -> float:
        limit = 2.0 * (1.0 + self.momentum)
        return limit / (1.0 + 2.0 * self.momentum) if self.nesterov else limit

    @property
    def kernel(self) -> AlgorithmForm:
        return AlgorithmForm(momentum=True, nesterov=self.nesterov)

    def direction(self, grad: Tensor, lr: Tensor, momentum: Tensor, *slots: Tensor) -> tuple[Tensor, ...]:
        keep = over(momentum, grad)
        carried = torch.addcmul(keep * slots[0], over(lr, grad), grad, value=-1)
        if not self.nesterov:
            return carried, carried
        return torch.addcmul(keep * carried, over(lr, grad), grad, value=-1), carried

    def direction_vjp(self, inputs: tuple[Tensor, ...], *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        grad, lr, momentum, slot = inputs
        ahead, carried = cotangents
        keep = over(momentum, grad)
        if self.nesterov:
            g, gstep = carried + keep * ahead, carried + keep * ahead + ahead
            look = sum_to_gate((keep * slot - over(lr, grad) * grad) * ahead, momentum)
        else:
            g = gstep = carried + ahead
            look = torch.zeros_like(momentum)
        return (
            -over(lr, grad) * gstep,
            -sum_to_gate(grad * gstep, lr),
            sum_to_gate(slot * g, momentum) + look,
            keep * g,
        )
