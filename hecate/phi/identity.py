"""The identity."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from hecate.phi.base import FeatureMap, Params, Traits
from hecate.tape import Block

# A program of no blocks: there is nothing in it for autograd to record. A view, in which cotangents meet before x.
_SAME = Block("phi.identity", lambda x: ((x.view_as(x),), None), lambda _, g: (g,), lambda run, x: (x.view_as(x),))


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
        return Traits(parity="odd", degree=1)

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, None]:
        return x, None

    def vjp(self, residuals: None, g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return g, {}

    def block(self, params: Params) -> tuple[Block, tuple[Tensor, ...]]:
        return _SAME, ()

    def exact_kernel(self, x: Tensor, y: Tensor) -> Tensor:
        return (x * y).sum(-1)
