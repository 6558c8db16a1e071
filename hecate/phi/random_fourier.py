"""Random Fourier features."""

from __future__ import annotations

import math
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from hecate.errors import ConfigError
from hecate.phi.base import Params, Traits, compute_dtype, per_head
from hecate.phi.random import RandomMap, project_precisely, projections
from hecate.sizes import Size


class RandomFourier(RandomMap):
    """random_fourier: phi(x) = sqrt(2/d_phi) cos(Wx + b), W ~ N(0, 1/sigma^2), b ~ U[0, 2 pi).

    The Gaussian kernel exp(-|x - y|^2 / (2 sigma^2)) in expectation: sigma is the distance within which two keys count
    as alike. `form="paired"` is [cos(Wx), sin(Wx)] / sqrt(m) with d_phi = 2m and no b; at equal width it never has the
    larger variance, and |phi(x)| = 1. `orthogonal` draws W in Haar blocks with chi norms, which lowers the variance
    where the kernel is large. Bounded features keep a delta rule stable for every lr < 1.

    Shapes: x `[..., D]` or `[..., H, D]` -> `[..., d_phi]`; frozen w `[H, D, d_phi]` and b `[H, d_phi]`, or w `[H, D,
    d_phi / 2]` alone when paired.
    VJP: gx = W^T (-sqrt(2/d_phi) sin(Wx + b) g); paired: gx = W^T (cos(Wx) g_sin - sin(Wx) g_cos)
    / sqrt(m).
    Traits: is_random, norm_bound 2 (paired: 1). Neither features nor kernel are non-negative.
    Cost: O(D d_phi) multiplications, one cosine per feature.
    Warning: the error of a phase grows with |Wx|: in float32 up to 6e-5 at |x| = 100 and 6e-3 at 1e4. Phases are never
    computed below float32; float64 draws make them float64.
    References: Random Features for Large-Scale Kernel Machines (Rahimi and Recht, 2007); Random Feature Attention (Peng
    et al., 2021, arXiv 2103.02143); Orthogonal Random Features (Yu et al., 2016, arXiv 1610.09072). [PHI-RFF-D1]
    """

    kind: Literal["random_fourier"] = "random_fourier"
    d_phi: Size = Field(gt=0, description="number of features; even when paired")
    sigma: float = Field(default=1.0, gt=0, description="bandwidth of the Gaussian kernel")
    form: Literal["phased", "paired"] = "phased"
    orthogonal: bool = False

    @model_validator(mode="after")
    def _even_pairs(self) -> Self:
        if self.form == "paired" and self.d_phi % 2:
            raise ConfigError(
                f"must be even for form 'paired' (a cosine and a sine each), got {self.d_phi}; "
                f"use {self.d_phi + 1} or form 'phased'",
                ("d_phi",),
            )
        return self

    def output_dim(self, d: int) -> int:
        return self.d_phi

    def traits(self) -> Traits:
        bound = 1.0 if self.form == "paired" else 2.0
        return Traits(is_random=True, norm_bound=bound, bounded_slope=True, decodes=True)

    def shapes(self, d: int) -> dict[str, tuple[int, ...]]:
        if self.form == "paired":
            return {"w": (d, self.d_phi // 2)}
        return {"w": (d, self.d_phi), "b": (self.d_phi,)}

    def draw(self, d: int, generator: torch.Generator) -> dict[str, Tensor]:
        m = self.shapes(d)["w"][1]
        w = projections(d, m, generator, orthogonal=self.orthogonal) / self.sigma
        if self.form == "paired":
            return {"w": w}
        turns = torch.rand(m, dtype=torch.float64, device="cpu", generator=generator)
        return {"w": w, "b": 2 * math.pi * turns}

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, tuple[Tensor, ...]]:
        w = self.drawn(params, "w")
        phase = project_precisely(x, w)
        if self.form == "phased":
            b = self.drawn(params, "b").to(phase)
            phase = phase + per_head(b, x)
            features = phase.cos() * math.sqrt(2 / self.d_phi)
        else:
            features = torch.cat([phase.cos(), phase.sin()], -1) / math.sqrt(self.d_phi // 2)
        return features.to(x.dtype), (w, phase)

    def vjp(self, residuals: tuple[Tensor, ...], g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        w, phase = residuals
        if self.form == "phased":
            gphase = phase.sin() * g * -math.sqrt(2 / self.d_phi)
        else:
            gcos, gsin = g.chunk(2, -1)
            gphase = (phase.cos() * gsin - phase.sin() * gcos) / math.sqrt(self.d_phi // 2)
        return project_precisely(gphase, w.mT).to(g.dtype), {}

    def exact_kernel(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = x.to(compute_dtype(x)), y.to(compute_dtype(y))
        return (-(x - y).square().sum(-1) / (2 * self.sigma**2)).exp()
