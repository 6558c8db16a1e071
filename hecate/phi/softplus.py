"""Softplus features."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from hecate.phi.base import Traits
from hecate.phi.elementwise import Elementwise


class Softplus(Elementwise):
    """softplus: phi(x) = log(1 + exp(beta x)) / beta.

    A smooth, strictly positive relu; beta sets how sharp the bend is. Evaluated without a threshold, so it is positive
    down to the underflow of exp(beta x) and has all derivatives everywhere.

    Shapes: x `[..., D]` -> `[..., D]`.
    VJP: gx = sigmoid(beta x) g.
    Traits: non_negative, kernel_non_negative.
    Cost: O(D).
    Origin: a common activation; no source proposes it for linear attention. [PHI-SOFTPLUS-D1]
    """

    kind: Literal["softplus"] = "softplus"
    beta: float = Field(default=1.0, gt=0)

    def traits(self) -> Traits:
        return Traits(
            non_negative=True, kernel_non_negative=True, componentwise=True, rising="everywhere", bounded_slope=True
        )

    def value(self, x: Tensor) -> Tensor:
        # torch's softplus returns x itself above a threshold, which drops exp(-beta x).
        return -torch.nn.functional.logsigmoid(-self.beta * x) / self.beta

    def derivative(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.beta * x)
