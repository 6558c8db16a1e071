"""Learned features that mimic softmax attention."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from hecate.phi.base import Params, Traits
from hecate.phi.learned import Learned, affine, affine_vjp
from hecate.phi.softmax import both_softmax, both_softmax_vjp


class Hedgehog(Learned):
    """hedgehog: phi(x) = [softmax(z), softmax(-z)], z = x W + b, W and b learned per head.

    Spiky, positive features that can be trained until linear attention mimics softmax attention. W starts as the
    identity and b at 0, where phi is `softmax` with half_space.

    Shapes: x `[..., D]` or `[..., H, D]` -> `[..., 2 D]`; learned weight `[H, D, D]`, bias `[H, D]`.
    VJP: gz = f (g - f.g) of the first half minus that of the second; gx = gz W^T, gW = x^T gz and gb = gz summed over
    tokens.
    Traits: non_negative, kernel_non_negative, norm_bound 2.
    Cost: O(D^2).
    Warning: the paper learns one map for queries and another for keys. Here one map serves both, so that phi(q).phi(k)
    is a kernel; give q and k projections of their own before the map.
    References: The Hedgehog & the Porcupine: Expressive Linear Attentions with Softmax Mimicry (Zhang et al., 2024,
    arXiv 2402.04347). [PHI-HEDGEHOG-D1]
    """

    kind: Literal["hedgehog"] = "hedgehog"

    def output_dim(self, d: int) -> int:
        return 2 * d

    def traits(self) -> Traits:
        return Traits(non_negative=True, kernel_non_negative=True, norm_bound=2.0)

    def shapes(self, d: int) -> dict[str, tuple[int, ...]]:
        return {"weight": (d, d), "bias": (d,)}

    def start(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """The identity and no bias, for every head; nothing is drawn."""
        if name == "bias":
            return super().start(name, shape, generator)
        return torch.eye(shape[-1], dtype=torch.float64).repeat(shape[0], 1, 1)

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, tuple[Tensor, Tensor, Any]]:
        features = both_softmax(affine(self.kind, x, params))
        return features.to(x.dtype), (features, x, params)

    def vjp(self, residuals: tuple[Tensor, Tensor, Any], g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        features, x, params = residuals
        return affine_vjp(x, params, both_softmax_vjp(features, g.to(features.dtype)))
