"""Steps scaled coordinate by coordinate."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from hecate.algorithm.base import Algorithm
from hecate.tape.ops import over, sum_to_gate


class Adaptive(Algorithm):
    """adaptive: D = -lr S' / sqrt(E' + eps^2), S' and E' running means of G and G^2.

    S' = momentum S + (1 - momentum) G and E' = decay E + (1 - decay) G^2: Adam's diagonal scaling as an inner
    algorithm, without bias correction: an early step is shortened in S and lengthened through E, and the state needs no
    step counter. momentum = 0 is RMSProp.

    Shapes: G, S, E `[N, ...]`; lr, momentum `[N]`.
    VJP: with r = 1/sqrt(E' + eps^2), h = -lr g_D, s = g_S' + h r and e = g_E' - h S' r^3 / 2:
    g_G = (1 - momentum) s + 2 (1 - decay) G e, g_S = momentum s, g_E = decay e, g_lr = -<S' r, g_D>, g_momentum = <S -
    G, s>.
    Traits: two slots; a coordinate's step is at most lr / sqrt(1 - decay) long, so no lr diverges at once.
    Cost: a root and a few multiplications per weight.
    Warning: where gradients are exactly 0 the slope of a step is lr (1 - momentum) / eps.
    References: Adam (Kingma and Ba, 2015, arXiv 1412.6980); MIRAS (Behrouz et al., 2025, arXiv 2504.13173).
    [ALG-ADAPT-D1]
    """

    kind: Literal["adaptive"] = "adaptive"
    momentum: float = Field(0.9, ge=0, lt=1)
    decay: float = Field(0.99, ge=0, lt=1)
    eps: float = Field(1e-3, gt=0)
    slots: ClassVar[tuple[str, ...]] = ("momentum", "square")
    uses_momentum: ClassVar[bool] = True

    @property
    def default_momentum(self) -> float:
        return self.momentum

    @property
    def stable_step(self) -> float:
        return math.inf

    def direction(self, grad: Tensor, lr: Tensor, momentum: Tensor, *slots: Tensor) -> tuple[Tensor, ...]:
        carried, square, root = self._moments(grad, momentum, *slots)
        return -over(lr, grad) * carried * root, carried, square

    def direction_vjp(self, inputs: tuple[Tensor, ...], *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        grad, lr, momentum, mean, before = inputs
        gdirection, gcarried, gsquare = cotangents
        carried, _, root = self._moments(grad, momentum, mean, before)
        scaled = -over(lr, grad) * gdirection
        s = gcarried + scaled * root
        e = gsquare - 0.5 * scaled * carried * root**3
        keep = over(momentum, grad)
        return (
            (1 - keep) * s + 2 * (1 - self.decay) * grad * e,
            -sum_to_gate(carried * root * gdirection, lr),
            sum_to_gate((mean - grad) * s, momentum),
            keep * s,
            self.decay * e,
        )

    def _moments(self, grad: Tensor, momentum: Tensor, mean: Tensor, square: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        keep = over(momentum, grad)
        carried = keep * mean + (1 - keep) * grad
        square = self.decay * square + (1 - self.decay) * grad.square()
        return carried, square, (square + self.eps**2).rsqrt()
