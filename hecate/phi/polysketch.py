"""Sketches of tensor powers, squared."""

from __future__ import annotations

import math
from math import prod
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from hecate.errors import ConfigError
from hecate.phi.base import Params, Traits, project
from hecate.phi.monomials import Degree, bounded, powers, powers_vjp
from hecate.phi.random import RandomMap, normal, project_precisely
from hecate.sizes import Count, Size
from hecate.tape.bridge import without_autocast


class Polysketch(RandomMap):
    """polysketch: phi(x) = s (x) s with equal products merged, s a sketch of x to the degree / 2.

    (x.y)^degree for a high degree in few features. The sketch multiplies pairs of random projections, and pairs of
    projections of those, s = (a V) * (b V') / sqrt(sketch) at each of log2(degree) - 1 levels with fresh Gaussian V
    everywhere, so that E s(x).s(y) = (x.y)^(degree / 2) without bias. The outer product makes the kernel (s(x).s(y))^2
    >= 0; its mean is larger than (x.y)^degree by the variance of the sketch, and `exact_kernel` is that mean.

    Shapes: x `[..., D]` or `[..., H, D]` -> `[..., sketch (sketch + 1) / 2]`; frozen w `[H, D, (degree / 2) sketch]`
    and for each level above v1, v2, ... `[H, nodes, sketch, sketch]`.
    VJP: gs that of `polynomial` at degree 2; down the levels ga = g b / sqrt(sketch), gb = g a / sqrt(sketch), each
    times its V^T.
    Traits: is_random, kernel_non_negative, even, degree of the field.
    Cost: O(degree D sketch + degree sketch^2).
    Warning: |phi(x)|^2 grows with |x|^(2 degree): normalise keys.
    References: PolySketchFormer: Fast Transformers via Sketching Polynomial Kernels (Kacham et al., 2023, arXiv
    2310.01655). [PHI-PSKETCH-D1]
    """

    kind: Literal["polysketch"] = "polysketch"
    degree: Degree = Field(default=4, ge=4, description="a power of two")
    sketch: Size = Field(gt=0, description="width of the sketch; d_phi is about its square / 2")
    max_d_phi: Count = Field(default=65_536, gt=0)

    @model_validator(mode="after")
    def _a_power_of_two(self) -> Self:
        if self.degree & (self.degree - 1):
            raise ConfigError(
                f"must be a power of two from 4 on, got {self.degree}; degree 2 needs no sketch: "
                "take random_maclaurin with coefficients [0, 0, 1], or polynomial",
                ("degree",),
            )
        return self

    def output_dim(self, d: int) -> int:
        return bounded(self.sketch * (self.sketch + 1) // 2, self.max_d_phi, d, "sketch")

    def traits(self) -> Traits:
        degree = float(self.degree)
        return Traits(is_random=True, kernel_non_negative=True, parity="even", degree=degree)

    def shapes(self, d: int) -> dict[str, tuple[int, ...]]:
        r, leaves = self.sketch, self.degree // 2
        above = {f"v{level}": (leaves >> level, r, r) for level in range(1, self._levels)}
        return {"w": (d, leaves * r), **above}

    def draw(self, d: int, generator: torch.Generator) -> dict[str, Tensor]:
        return {
            name: normal(prod(shape[:-1]), shape[-1], generator).reshape(shape)
            for name, shape in self.shapes(d).items()
        }

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, tuple[Any, ...]]:
        w, *mixing = (self.drawn(params, name) for name in self._names)
        z = project_precisely(x, w).unflatten(-1, (-1, self.sketch))
        levels = [z]
        for v in mixing:
            levels.append(_mixed(_paired(levels[-1]), v.to(z)))
        s = _paired(levels[-1]).squeeze(-2)
        return powers(s, 2, True)[2].to(x.dtype), (s, levels, w, mixing)

    def vjp(self, residuals: tuple[Any, ...], g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        s, levels, w, mixing = residuals
        blocks = powers(s, 2, True)
        gs = powers_vjp(s, blocks, [None, None, g.to(s)], True)
        carried = _paired_vjp(levels[-1], gs.unsqueeze(-2))
        for z, v in zip(levels[-2::-1], mixing[::-1], strict=True):
            carried = _paired_vjp(z, _mixed(carried, v.to(s).mT))
        return project_precisely(carried.flatten(-2), w.mT).to(g.dtype), {}

    def exact_kernel(self, x: Tensor, y: Tensor) -> Tensor:
        """E (s(x).s(y))^2, which tends to (x.y)^degree as the sketch widens."""
        square = (x * y).sum(-1).square()
        lengths = x.square().sum(-1) * y.square().sum(-1)
        for _ in range(self._levels):
            same = (lengths + 2 * square).square() / self.sketch
            share = 1 - 1 / self.sketch
            square, lengths = same + share * square.square(), same + share * lengths.square()
        return square

    @property
    def _levels(self) -> int:
        return self.degree.bit_length() - 2

    @property
    def _names(self) -> list[str]:
        return ["w", *(f"v{level}" for level in range(1, self._levels))]


def _paired(z: Tensor) -> Tensor:
    """Products of neighbouring nodes: `[..., 2 n, sketch]` -> `[..., n, sketch]`."""
    return z[..., 0::2, :] * z[..., 1::2, :] / math.sqrt(z.shape[-1])


def _paired_vjp(z: Tensor, g: Tensor) -> Tensor:
    """Cotangent of z from that of `_paired(z)`."""
    a, b = z[..., 0::2, :], z[..., 1::2, :]
    pair = torch.stack([g * b, g * a], -2) / math.sqrt(z.shape[-1])
    return pair.flatten(-3, -2)


def _mixed(z: Tensor, v: Tensor) -> Tensor:
    """Each node `[..., n, sketch]` times a matrix of its own, v `[H, n, sketch, sketch]`."""
    with without_autocast(z.device.type):
        if v.shape[0] == 1:
            return project(z, v[0])
        return project(z.flatten(-3, -2), v.flatten(0, 1)).unflatten(-2, v.shape[:2])
