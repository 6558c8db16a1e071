"""Squares of normalised, shifted keys."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from hecate.phi.base import Params, Traits, compute_dtype, per_head, sum_to_heads
from hecate.phi.learned import Learned, learned
from hecate.phi.monomials import bounded, powers, powers_vjp
from hecate.sizes import Count


class Rebased(Learned):
    """rebased: phi(x) = [z_i^2, sqrt(2) z_i z_j for i < j] / sqrt(D), z = scale * LN(x) + shift.

    The kernel is (z_q.z_k)^2 / D, a parabola whose least value training can move: `taylor` cannot go below 1/2, this
    map can ignore a key altogether. LN(x) is x minus its mean over its standard deviation, sqrt(variance + eps); scale
    and shift are learned per head and start at 1 and 0.

    Shapes: x `[..., D]` or `[..., H, D]` -> `[..., D (D + 1) / 2]`; learned scale, shift `[H, D]`.
    VJP: gz that of `polynomial` at degree 2; with n = LN(x): gscale = gz n and gshift = gz summed over tokens, gn = gz
    scale, gx = (gn - mean(gn) - n mean(gn n)) / sqrt(variance + eps).
    Traits: kernel_non_negative; single features are signed.
    Cost: O(D^2).
    Warning: a kernel can be exactly 0, so a sum normaliser can be. The paper learns one scale and shift for queries and
    another for keys; here one pair serves both.
    References: Linear Transformers with Learnable Kernel Functions are Better In-Context Models (Aksenov et al., 2024,
    arXiv 2402.10644). [PHI-REBASED-D1]
    """

    kind: Literal["rebased"] = "rebased"
    eps: float = Field(default=1e-5, gt=0, description="added to the variance of a key")
    max_d_phi: Count = Field(default=65_536, gt=0)

    def output_dim(self, d: int) -> int:
        return bounded(d * (d + 1) // 2, self.max_d_phi, d, "max_d_phi", cure="")

    def traits(self) -> Traits:
        return Traits(kernel_non_negative=True)

    def shapes(self, d: int) -> dict[str, tuple[int, ...]]:
        return {"scale": (d,), "shift": (d,)}

    def start(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Scale 1 and shift 0 for every head; nothing is drawn."""
        return super().start(name, shape, generator) + (name == "scale")

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, tuple[Any, ...]]:
        self.output_dim(x.shape[-1])
        scale, shift = (learned(self.kind, params, name) for name in ("scale", "shift"))
        wide = x.to(compute_dtype(x))
        centred = wide - wide.mean(-1, keepdim=True)
        deviation = (centred.square().mean(-1, keepdim=True) + self.eps).sqrt()
        normal = centred / deviation
        z = per_head(scale, x).to(wide.dtype) * normal + per_head(shift, x).to(wide.dtype)
        blocks = powers(z, 2, True)
        features = blocks[2] / math.sqrt(x.shape[-1])
        return features.to(x.dtype), (z, blocks[:2], normal, deviation, scale)

    def vjp(self, residuals: tuple[Any, ...], g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        z, below, normal, deviation, scale = residuals
        given = g.to(z.dtype) / math.sqrt(z.shape[-1])
        gz = powers_vjp(z, [*below, z], [None, None, given], True)
        gn = gz * per_head(scale, z).to(z.dtype)
        along = (gn * normal).mean(-1, keepdim=True)
        gx = (gn - gn.mean(-1, keepdim=True) - normal * along) / deviation
        heads = scale.shape[0]
        grads = {"scale": sum_to_heads(gz * normal, heads), "shift": sum_to_heads(gz, heads)}
        return gx.to(g.dtype), {name: item.to(scale.dtype) for name, item in grads.items()}
