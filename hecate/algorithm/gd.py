"""Gradient descent."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from hecate.algorithm.base import Algorithm
from hecate.tape.ops import over, sum_to_gate


class GD(Algorithm):
    """gd: D = -lr G.

    One step of plain gradient descent per write.

    Shapes: G `[N, ...]`, lr `[N]`.
    VJP: g_G = -lr g, g_lr = -<G, g>.
    Traits: no slots; contracts while lr |phi|^2 curvature < 2.
    Cost: one multiplication.
    References: MIRAS (Behrouz et al., 2025, arXiv 2504.13173). [ALG-GD-D1]
    """

    kind: Literal["gd"] = "gd"

    def direction(
        self, grad: Tensor, lr: Tensor, momentum: Tensor, *slots: Tensor
    ) -> tuple[Tensor, ...]:
        return (-over(lr, grad) * grad,)

    def direction_vjp(
        self, inputs: tuple[Tensor, ...], *cotangents: Tensor
    ) -> tuple[Tensor | None, ...]:
        (grad, lr, _), (g,) = inputs, cotangents
        return -over(lr, grad) * g, -sum_to_gate(grad * g, lr), None
