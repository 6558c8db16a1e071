"""Deterministic parameter-free projection."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from hecate.errors import ConfigError
from hecate.phi.base import FeatureMap, Params, Traits, compute_dtype
from hecate.phi.crelu import halves, halves_vjp
from hecate.sizes import Size


class DPFP(FeatureMap):
    """dpfp: phi(x) = [y * roll(y, 1), ..., y * roll(y, nu)], y = [relu(x), relu(-x)].

    Sparse products of rectified components: orthants of key space get features of their own, which widens the state to
    2 D nu without parameters or randomness.

    Shapes: x `[..., D]` -> `[..., 2 D nu]`; `roll(y, j)[i] = y[i - j]`.
    VJP: gy = sum_j (g_j roll(y, j) + roll(g_j y, -j)), gx = gy[:D] for x > 0, -gy[D:] for x < 0, 0 at x = 0.
    Traits: non_negative, kernel_non_negative, degree 2.
    Cost: O(D nu).
    Warning: |phi(x)|^2 grows with the fourth power of x, so normalise features for delta-type rules. For small D all
    features may be 0 (always for D = 1). The negative half is relu(-x): an implementation with -relu(x) loses the sign
    of x and half the rank. nu above D repeats products in other places.
    References: Linear Transformers Are Secretly Fast Weight Programmers (Schlag et al., 2021, arXiv 2102.11174).
    [PHI-DPFP-D1]
    """

    kind: Literal["dpfp"] = "dpfp"
    nu: Size = Field(default=1, ge=1)

    def output_dim(self, d: int) -> int:
        if self.nu > 2 * d - 1:
            raise ConfigError(
                f"must be at most 2 d - 1 = {2 * d - 1} for inputs of width {d}, got {self.nu}; "
                "a roll by 2 d is none, and larger ones repeat the first",
                ("nu",),
            )
        return 2 * d * self.nu

    def traits(self) -> Traits:
        return Traits(non_negative=True, kernel_non_negative=True, degree=2)

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, tuple[Tensor, list[Tensor]]]:
        self.output_dim(x.shape[-1])
        y = halves(x.to(compute_dtype(x)))
        rolled = [y.roll(j, -1) for j in range(1, self.nu + 1)]
        products = [y * other for other in rolled]
        return torch.cat(products, -1).to(x.dtype), (y, rolled)

    def vjp(self, residuals: tuple[Tensor, list[Tensor]], g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        y, rolled = residuals
        parts = g.to(y.dtype).chunk(self.nu, -1)
        gy = (parts[0] * y).roll(-1, -1)
        for j, gj in enumerate(parts[1:], start=2):
            gy = gy + (gj * y).roll(-j, -1)
        for gj, other in zip(parts, rolled, strict=True):
            gy = torch.addcmul(gy, gj, other)
        return halves_vjp(y, gy).to(g.dtype), {}
