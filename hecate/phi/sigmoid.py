"""Logistic features."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hecate.phi.base import Traits
from hecate.phi.elementwise import Elementwise


class Sigmoid(Elementwise):
    """sigmoid: phi(x) = 1 / (1 + exp(-x)), componentwise.

    Strictly positive and bounded: a sum normaliser is safe, and |phi(x)|^2 < D.

    Shapes: x `[..., D]` -> `[..., D]`.
    VJP: gx = sigmoid(x) sigmoid(-x) g.
    Traits: non_negative, kernel_non_negative.
    Cost: O(D).
    Warning: every kernel of small inputs is close to D / 4: compare `elu`, which is as flat.
    Origin: a common activation; no source proposes it for linear attention. [PHI-SIGMOID-D1]
    """

    kind: Literal["sigmoid"] = "sigmoid"

    def traits(self) -> Traits:
        return Traits(
            non_negative=True, kernel_non_negative=True, componentwise=True, rising="everywhere", bounded_slope=True
        )

    def value(self, x: Tensor) -> Tensor:
        # Torch rounds the last bit of strided tensors differently.
        return torch.sigmoid(x.contiguous())

    def derivative(self, x: Tensor) -> Tensor:
        # 1 - sigmoid(x) would cancel.
        return self.value(x) * self.value(-x)

    def pull(self, x: Tensor, value: Tensor, g: Tensor) -> Tensor:
        return g * value * self.value(-x)
