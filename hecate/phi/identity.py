"""The identity."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from hecate.phi.base import FeatureMap, Params, Traits


class Identity(FeatureMap):
    """identity: phi(x) = x.

    The plain key space of DeltaNet, Titans and their relatives; copy-free.

    Shapes: x `[..., D]` -> `[..., D]`.
    VJP: gx = g.
    Traits: odd, degree 1.
    Cost: none.
    References: Linear Transformers Are Secretly Fast Weight Programmers (Schlag et al., 2021,
    arXiv 2102.11174). [PHI-ID-D1]
    """

    kind: Literal["identity"] = "identity"

    def traits(self) -> Traits:
        return Traits(parity="odd", degree=1, componentwise=True, rising="everywhere", bounded_slope=True)

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, None]:
        return x, None

    def vjp(self, residuals: None, g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return g, {}

    def exact_kernel(self, x: Tensor, y: Tensor) -> Tensor:
        return (x * y).sum(-1)
