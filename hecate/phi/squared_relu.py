"""Squared rectified linear features."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hecate.phi.base import Traits
from hecate.phi.elementwise import Elementwise


class SquaredReLU(Elementwise):
    """squared_relu: phi(x) = max(x, 0)^2.

    Sharper than relu: large components dominate the kernel. It approximates no softmax. Features are non-negative, not
    positive: half of them are exactly 0 for symmetric inputs.

    Shapes: x `[..., D]` -> `[..., D]`.
    VJP: gx = 2 max(x, 0) g; continuous at 0, the second derivative is not.
    Traits: non_negative, kernel_non_negative, degree 2.
    Cost: O(D).
    Warning: |phi(x)|^2 grows with the fourth power of x; normalise keys for delta-type rules.
    References: Primer: Searching for Efficient Transformers for Language Modeling (So et al., 2021, arXiv 2109.08668)
    for the activation. [PHI-SQRELU-D1]
    """

    kind: Literal["squared_relu"] = "squared_relu"

    def traits(self) -> Traits:
        return Traits(non_negative=True, kernel_non_negative=True, degree=2, componentwise=True, rising="odd_part")

    def value(self, x: Tensor) -> Tensor:
        return torch.relu(x).square()

    def derivative(self, x: Tensor) -> Tensor:
        return 2 * torch.relu(x)
