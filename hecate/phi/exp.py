"""Componentwise exponential features."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from hecate.phi.base import Traits
from hecate.phi.elementwise import Elementwise


class Exp(Elementwise):
    """exp: phi(x) = exp(x - shift), componentwise.

    Strictly positive and sharp. Its kernel is sum_i exp(x_i + y_i - 2 shift), which is not exp(x.y): for an
    approximation of softmax use `taylor` or `favor`.

    The shift is one constant for all keys and queries. It multiplies every kernel value by exp(-2 shift), leaves
    normalised weights as they are and moves the range: features are finite for x <= shift + 88.7 in float32 and
    bfloat16, shift + 11.0 in float16, shift + 709.7 in float64. Beyond it they are infinite, visibly so. There is no
    clamp (it would change values and stop gradients) and no per-key maximum (it would change attention weights). To
    bound the inputs instead, compose with `normalise`.

    Shapes: x `[..., D]` -> `[..., D]`.
    VJP: gx = exp(x - shift) g.
    Traits: non_negative, kernel_non_negative.
    Cost: O(D).
    Warning: |phi(x)|^2 grows exponentially; delta-type rules need normalised features.
    Origin: a variant known from tutorials on linear attention. [PHI-EXP-D1]
    """

    kind: Literal["exp"] = "exp"
    shift: float = Field(default=0.0)

    def traits(self) -> Traits:
        return Traits(non_negative=True, kernel_non_negative=True, componentwise=True, rising="everywhere")

    def value(self, x: Tensor) -> Tensor:
        return (x - self.shift).exp() if self.shift else x.exp()

    def derivative(self, x: Tensor) -> Tensor:
        return self.value(x)

    def pull(self, x: Tensor, value: Tensor, g: Tensor) -> Tensor:
        return g * value

    def exact_kernel(self, x: Tensor, y: Tensor) -> Tensor:
        return (x + y - 2 * self.shift).exp().sum(-1)
