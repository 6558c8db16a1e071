"""Squared, shifted leaky rectified linear features."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from hecate.phi.base import Traits
from hecate.phi.elementwise import Elementwise


class LeakyReLUSquared(Elementwise):
    """leaky_relu_squared: phi(x) = (x + shift)^2 for x > 0, (slope x + shift)^2 otherwise.

    A sharp non-negative map that keeps a gradient for negative inputs.

    Shapes: x `[..., D]` -> `[..., D]`.
    VJP: gx = 2 (x + shift) g for x > 0, 2 slope (slope x + shift) g otherwise; at 0 the second holds.
    Traits: non_negative, kernel_non_negative; degree 2 when shift = 0.
    Cost: O(D).
    Warning: not monotone. It is 0 at x = -shift/slope (-5 by default) and rises again below: the most negative inputs
    do not matter least.
    Origin: a variant known from tutorials on linear attention. [PHI-LEAKY2-D1]
    """

    kind: Literal["leaky_relu_squared"] = "leaky_relu_squared"
    slope: float = Field(default=0.01, ge=0, lt=1)
    shift: float = Field(default=0.05, ge=0)

    def traits(self) -> Traits:
        degree = 2.0 if self.shift == 0 else None
        return Traits(non_negative=True, kernel_non_negative=True, degree=degree, componentwise=True, rising="odd_part")

    def value(self, x: Tensor) -> Tensor:
        return self._root(x).square()

    def derivative(self, x: Tensor) -> Tensor:
        return self.pull(x, x, torch.ones_like(x))

    def pull(self, x: Tensor, value: Tensor, g: Tensor) -> Tensor:
        outer = 2 * self._root(x) * g
        return torch.ops.aten.leaky_relu_backward(outer, x, self.slope, False)

    def _root(self, x: Tensor) -> Tensor:
        return torch.nn.functional.leaky_relu(x, self.slope) + self.shift
