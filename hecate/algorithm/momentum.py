"""Gradient descent with momentum."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from hecate.algorithm.base import Algorithm
from hecate.tape.ops import over, sum_to_gate


class Momentum(Algorithm):
    """momentum: S' = momentum S - lr G, D = S'.

    The momentum of Titans: past surprise carries over, without bias correction and without
    dampening. Retention acts on the memory alone; S decays by `momentum` only. (Titans writes eta
    for momentum and theta for lr.)

    Shapes: G, S `[N, ...]`; lr, momentum `[N]`.
    VJP: with d = g_D + g_S': g_G = -lr d, g_lr = -<G, d>, g_momentum = <S, d>, g_S = momentum d.
    Traits: one slot; contracts while lr |phi|^2 curvature < 2 (1 + momentum).
    Cost: one multiply-add and one more tensor of state per weight.
    References: Titans (Behrouz et al., 2025, arXiv 2501.00663). [ALG-MOM-D1]
    """

    kind: Literal["momentum"] = "momentum"
    momentum: float = Field(0.9, ge=0, lt=1)
    slots: ClassVar[tuple[str, ...]] = ("momentum",)
    uses_momentum: ClassVar[bool] = True

    @property
    def default_momentum(self) -> float:
        return self.momentum

    @property
    def stable_step(self) -> float:
        return 2.0 * (1.0 + self.momentum)

    def direction(
        self, grad: Tensor, lr: Tensor, momentum: Tensor, *slots: Tensor
    ) -> tuple[Tensor, ...]:
        carried = torch.addcmul(over(momentum, grad) * slots[0], over(lr, grad), grad, value=-1)
        return carried, carried

    def direction_vjp(
        self, inputs: tuple[Tensor, ...], *cotangents: Tensor
    ) -> tuple[Tensor | None, ...]:
        grad, lr, momentum, slot = inputs
        g = cotangents[0] + cotangents[1]
        return (
            -over(lr, grad) * g,
            -sum_to_gate(grad * g, lr),
            sum_to_gate(slot * g, momentum),
            over(momentum, grad) * g,
        )
