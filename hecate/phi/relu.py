"""Rectified linear features."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from hecate.phi.base import Traits
from hecate.phi.elementwise import Elementwise
from hecate.tape.ops import activate_vjp


class ReLU(Elementwise):
    """relu: phi(x) = max(x, 0) + shift.

    Sparse non-negative features. Without a shift a query may have all-zero features, and a read that is divided by
    phi(q).z is then 0/0; a small shift (1e-3 is usual) makes every feature positive. The shift does not revive
    gradients: the derivative for x < 0 stays 0.

    Shapes: x `[..., D]` -> `[..., D]`.
    VJP: gx = g for x > 0, else 0; the derivative at 0 is taken as 0.
    Traits: non_negative, kernel_non_negative; degree 1 when shift = 0.
    Cost: O(D).
    References: Rethinking Attention with Performers (Choromanski et al., 2021, arXiv 2009.14794). [PHI-RELU-D1]
    """

    kind: Literal["relu"] = "relu"
    shift: float = Field(default=0.0, ge=0)

    def traits(self) -> Traits:
        degree = 1.0 if self.shift == 0 else None
        return Traits(non_negative=True, kernel_non_negative=True, degree=degree)

    def value(self, x: Tensor) -> Tensor:
        return torch.relu(x) + self.shift if self.shift else torch.relu(x)

    def derivative(self, x: Tensor) -> Tensor:
        return (x > 0).to(x.dtype)

    def pull(self, x: Tensor, value: Tensor, g: Tensor) -> Tensor:
        return activate_vjp("relu", x, g)
