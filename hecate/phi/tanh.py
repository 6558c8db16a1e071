"""Hyperbolic tangent features."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hecate.phi.base import Traits
from hecate.phi.elementwise import Elementwise
from hecate.tape.ops import activate


class Tanh(Elementwise):
    """tanh: phi(x) = tanh(x), componentwise.

    Bounded and odd: signs survive, outliers do not, and |phi(x)|^2 < D keeps a delta rule stable for lr < 2 / D.

    Shapes: x `[..., D]` -> `[..., D]`.
    VJP: gx = (1 - tanh(x)^2) g.
    Traits: odd.
    Cost: O(D).
    Warning: components beyond 3 all look alike and pass next to no gradient.
    Origin: a common activation; fast weight programmers use it for keys. [PHI-TANH-D1]
    """

    kind: Literal["tanh"] = "tanh"

    def traits(self) -> Traits:
        return Traits(parity="odd")

    def value(self, x: Tensor) -> Tensor:
        return activate("tanh", x, 0)

    def derivative(self, x: Tensor) -> Tensor:
        return activate("tanh", x, 1)

    def pull(self, x: Tensor, value: Tensor, g: Tensor) -> Tensor:
        return torch.ops.aten.tanh_backward(g, value)
