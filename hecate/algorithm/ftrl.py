"""Follow the regularised leader."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from hecate.algorithm.base import Algorithm
from hecate.tape.ops import over, sum_to_gate


class FTRL(Algorithm):
    """ftrl: A' = A - lr G, D = W(A') - W(A), W(A) = soft(A, l1) / (1 + l2).

    All steps so far are summed in A and the regulariser |W|^2 / 2 + l2 |W|^2 / 2 + l1 |W|_1 is applied to the sum:
    under retention `none` the memory is its start plus W(A), the minimiser of <-A, W> plus the regulariser. Lazy, where
    retention `elastic_net` thresholds at every token: small steps in one direction add up here and are cut off there.
    l1 = l2 = 0 is gd.

    Shapes: G, A `[N, ...]`; lr `[N]`.
    VJP: with m = 1[|A| > l1] / (1 + l2), m' that of A', and a = g_A' + m' g_D: g_G = -lr a, g_lr = -<G, a>, g_A = a - m
    g_D. At the threshold |A| = l1 the slope is 0.
    Traits: one slot; contracts while lr |phi|^2 curvature < 2 (1 + l2).
    Cost: two thresholds per weight.
    References: MIRAS (Behrouz et al., 2025, arXiv 2504.13173); Follow-the-Regularized-Leader and Mirror Descent
    (McMahan, 2011). [ALG-FTRL-D1]
    """

    kind: Literal["ftrl"] = "ftrl"
    l1: float = Field(0.01, ge=0)
    l2: float = Field(0.0, ge=0)
    slots: ClassVar[tuple[str, ...]] = ("sum",)

    @property
    def weighted_sum(self) -> bool:
        return self.l1 == 0

    @property
    def stable_step(self) -> float:
        return 2.0 * (1 + self.l2)

    def direction(self, grad: Tensor, lr: Tensor, momentum: Tensor, *slots: Tensor) -> tuple[Tensor, ...]:
        total = slots[0] - over(lr, grad) * grad
        return self._link(total) - self._link(slots[0]), total

    def direction_vjp(self, inputs: tuple[Tensor, ...], *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        grad, lr, _, before = inputs
        gdirection, gtotal = cotangents
        total = before - over(lr, grad) * grad
        a = gtotal + self._slope(total) * gdirection
        gbefore = a - self._slope(before) * gdirection
        return -over(lr, grad) * a, -sum_to_gate(grad * a, lr), None, gbefore

    def _link(self, total: Tensor) -> Tensor:
        return torch.nn.functional.softshrink(total, self.l1) / (1 + self.l2)

    def _slope(self, total: Tensor) -> Tensor:
        return (total.abs() > self.l1).to(total.dtype) / (1 + self.l2)
