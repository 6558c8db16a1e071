"""Softmax over the features of one key, of the key itself or of a learned projection."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from hecate.phi.base import FeatureMap, Params, Traits, compute_dtype
from hecate.phi.learned import affine, affine_vjp


class Softmax(FeatureMap):
    r"""softmax: phi(x) = softmax(x / temperature) over the components of x.

    Positive features that sum to 1: a soft choice of a slot, not the softmax of attention, which runs over keys.
    `half_space` appends softmax(-x / temperature), which sees the smallest components as sharply as the largest.

    Formula: $\phi(x) = \mathrm{softmax}(x / \tau),\quad \tau = \mathrm{temperature}$
    $\phi(x) = [\mathrm{softmax}(x / \tau),\ \mathrm{softmax}(-x / \tau)] \quad \text{with half space}$
    Shapes: x `[..., D]` -> `[..., D]`, with half_space `[..., 2 D]`.
    VJP: with f = phi(x): gx = f (g - f.g) / temperature, minus the same of the other half.
    Traits: non_negative, kernel_non_negative, norm_bound 1 (half_space 2).
    Cost: O(D).
    Warning: a constant added to all components of x changes nothing, in either form.
    References: Efficient Attention: Attention with Linear Complexities (Shen et al., 2018, arXiv 1812.01243) for one
    half; The Hedgehog & the Porcupine (Zhang et al., 2024, arXiv 2402.04347) for both. [PHI-SOFTMAX-D1]
    """

    kind: Literal["softmax"] = "softmax"
    temperature: float = Field(default=1.0, gt=0, description="small: close to an argmax")
    half_space: bool = Field(default=False, description="append softmax(-x / temperature)")

    def output_dim(self, d: int) -> int:
        return 2 * d if self.half_space else d

    def traits(self) -> Traits:
        bound = 2.0 if self.half_space else 1.0
        return Traits(non_negative=True, kernel_non_negative=True, norm_bound=bound)

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, Tensor]:
        z = x.to(compute_dtype(x)) / self.temperature
        features = both_softmax(z) if self.half_space else z.softmax(-1)
        return features.to(x.dtype), features

    def vjp(self, residuals: Tensor, g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        pull = both_softmax_vjp if self.half_space else softmax_vjp
        return (pull(residuals, g.to(residuals.dtype)) / self.temperature).to(g.dtype), {}


def softmax_vjp(features: Tensor, g: Tensor) -> Tensor:
    """Cotangent of z from that of `features = z.softmax(-1)`."""
    pulled: Tensor = torch.ops.aten._softmax_backward_data(g, features, -1, features.dtype)
    return pulled


def both_softmax(z: Tensor) -> Tensor:
    """`[softmax(z), softmax(-z)]`, each with a sum of 1: `[..., 2 D]`."""
    return torch.cat([z.softmax(-1), (-z).softmax(-1)], -1)


def joint_softmax(z: Tensor) -> Tensor:
    """`softmax([2 z, -2 z])`, both halves with a sum of 1 together: `[..., 2 D]`."""
    return torch.cat([2 * z, -2 * z], -1).softmax(-1)


def joint_softmax_vjp(features: Tensor, g: Tensor) -> Tensor:
    """Cotangent of z from that of `features = joint_softmax(z)`."""
    up, down = softmax_vjp(features, g).chunk(2, -1)
    return 2 * (up - down)


def both_softmax_vjp(features: Tensor, g: Tensor) -> Tensor:
    """Cotangent of z from that of `features = both_softmax(z)`."""
    (up, down), (gup, gdown) = features.chunk(2, -1), g.chunk(2, -1)
    return softmax_vjp(up, gup) - softmax_vjp(down, gdown)


class Hedgehog(FeatureMap):
    r"""hedgehog: phi(x) = [softmax(z), softmax(-z)], z = x W + b, W and b learned per head; joint: softmax([2 z,
    -2 z]).

    Spiky, positive features that can be trained until linear attention mimics softmax attention. W starts as the
    identity and b at 0, where phi is `softmax` with half_space. `joint` is one softmax over both halves, as the library
    flash-linear-attention has it: another kernel, in which the half with the largest component takes what the other
    loses.

    Formula: $\phi(x) = [\mathrm{softmax}(z),\ \mathrm{softmax}(-z)],\quad z = W^\top x + b$
    $\phi(x) = \mathrm{softmax}([2 z,\ -2 z]) \quad \text{if joint}$
    Shapes: x `[..., D]` or `[..., H, D]` -> `[..., 2 D]`; learned weight `[H, D, D]`, bias `[H, D]`.
    VJP: gz = f (g - f.g) of the first half minus that of the second, joint twice that with f.g over both; gx = gz W^T,
    gW = x^T gz and gb = gz summed over tokens.
    Traits: non_negative, kernel_non_negative, norm_bound 2 (joint 1).
    Cost: O(D^2).
    Warning: the paper learns one map for queries and another for keys; here one serves both, so that phi(q).phi(k) is a
    kernel. Give q and k projections of their own before the map.
    References: The Hedgehog & the Porcupine: Expressive Linear Attentions with Softmax Mimicry (Zhang et al., 2024,
    arXiv 2402.04347). [PHI-HEDGEHOG-D1]
    """

    kind: Literal["hedgehog"] = "hedgehog"
    widening: ClassVar[int] = 2
    joint: bool = Field(default=False, description="one softmax over [2 z, -2 z]")

    def traits(self) -> Traits:
        return Traits(non_negative=True, kernel_non_negative=True, norm_bound=1.0 if self.joint else 2.0)

    def shapes(self, d: int) -> dict[str, tuple[int, ...]]:
        return {"weight": (d, d), "bias": (d,)}

    def start(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        if name == "bias":
            return super().start(name, shape, generator)
        return torch.eye(shape[-1], dtype=torch.float64).repeat(shape[0], 1, 1)

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, tuple[Tensor, ...]]:
        weight, bias = self.parameters(params, "weight", "bias")
        features = (joint_softmax if self.joint else both_softmax)(affine(x, weight, bias))
        return features.to(x.dtype), (features, x, weight, bias)

    def vjp(self, residuals: tuple[Tensor, ...], g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        features, x, weight, bias = residuals
        pull = joint_softmax_vjp if self.joint else both_softmax_vjp
        return affine_vjp(x, weight, bias, pull(features, g.to(features.dtype)))
