"""The random features of the softmax kernel (FAVOR+)."""

from __future__ import annotations

import math
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from hecate.checks import Size
from hecate.errors import ConfigError
from hecate.phi.base import Params, Traits, compute_dtype
from hecate.phi.random import Norms, RandomMap, default_width, project_precisely, projections


class Favor(RandomMap):
    """favor: phi(x) = exp(Wx' - |x'|^2/2) / sqrt(m), W ~ N(0, I), x' = x d^(-1/4).

    The softmax kernel exp(q.k / sqrt(d)) in expectation, so linear attention with it estimates softmax attention.
    `scale="none"` uses x' = x and estimates exp(q.k); choose it when keys are l2-normalised. m is num_features.
    `variant="hyperbolic"` is [exp(Wx'), exp(-Wx')] exp(-|x'|^2/2) / sqrt(num_features); `"trigonometric"` is [cos(Wx'),
    sin(Wx')] exp(+|x'|^2/2) / sqrt(m) with m = num_features / 2. Positive maps are accurate where the kernel is small,
    the trigonometric one where x is close to y. `norms="sqrt"` gives every row of W the length sqrt(d): lower variance
    for a smaller kernel (SMREG), which `exact_kernel` then returns. No feature depends on another token: there is no
    maximum to subtract, which would make a causal memory see the future.

    Shapes: x `[..., D]` or `[..., H, D]` -> `[..., num_features]` (None: max(D, int(D log D)),
    made even for pairs); frozen w `[H, D, num_features]`, or half as many columns for pairs.
    VJP: for x' and positive: gx' = W^T (g phi) - x' sum(g phi); hyperbolic: W^T (g+ phi+ - g-
    phi-) - x' sum(g phi); trigonometric: W^T (g_sin phi_cos - g_cos phi_sin) + x' sum(g phi).
    Traits: is_random; positive and hyperbolic also non_negative, kernel_non_negative.
    Cost: O(D num_features) multiplications, one exponential per feature (one per token when trigonometric).
    Warning: the relative variance of the positive map is about exp(|x' + y'|^2) / m, 3000 / m for x' and y' of length 2
    at a right angle: keep keys short. In float32 positive features can overflow from D = 170 on, trigonometric ones
    from |x'| = 13 on. A trigonometric kernel can be negative: no sum normaliser.
    References: Rethinking Attention with Performers (Choromanski et al., 2021, arXiv 2009.14794). [PHI-FAVOR-D1]
    """

    kind: Literal["favor"] = "favor"
    num_features: Size | None = Field(default=None, gt=0, description="d_phi; even for pairs")
    variant: Literal["positive", "hyperbolic", "trigonometric"] = "positive"
    orthogonal: bool = True
    norms: Norms = "chi"
    scale: Literal["softmax", "none"] = "softmax"

    @model_validator(mode="after")
    def _even_pairs(self) -> Self:
        if self.variant != "positive" and self.num_features is not None and self.num_features % 2:
            raise ConfigError(
                f"must be even for variant {self.variant!r} (features come in pairs), "
                f"got {self.num_features}; use {self.num_features + 1} or variant 'positive'",
                ("num_features",),
            )
        return self

    def output_dim(self, d: int) -> int:
        if self.num_features is not None:
            return self.num_features
        width = default_width(d)
        return width if self.variant == "positive" else width + width % 2

    def traits(self) -> Traits:
        positive = self.variant != "trigonometric"
        return Traits(is_random=True, non_negative=positive, kernel_non_negative=positive)

    def shapes(self, d: int) -> dict[str, tuple[int, ...]]:
        return {"w": (d, self.output_dim(d) // (1 if self.variant == "positive" else 2))}

    def draw(self, d: int, generator: torch.Generator) -> dict[str, Tensor]:
        m = self.shapes(d)["w"][1]
        return {"w": projections(d, m, generator, orthogonal=self.orthogonal, norms=self.norms)}

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, tuple[Tensor, ...]]:
        w = self.drawn(params, "w")
        z = project_precisely(x, w) * self._factor(x)
        scaled = x.to(z.dtype) * self._factor(x)
        half = scaled.square().sum(-1, keepdim=True) / 2
        if self.variant == "trigonometric":
            amplitude = (half - math.log(w.shape[-1]) / 2).exp()
            features = torch.cat([z.cos(), z.sin()], -1) * amplitude
        else:
            both = z if self.variant == "positive" else torch.cat([z, -z], -1)
            features = (both - half - math.log(both.shape[-1]) / 2).exp()
        return features.to(x.dtype), (scaled, w, features)

    def vjp(self, residuals: tuple[Tensor, ...], g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        scaled, w, features = residuals
        gf = g * features
        radial = scaled * gf.sum(-1, keepdim=True)
        if self.variant == "positive":
            gz = gf
        elif self.variant == "hyperbolic":
            plus, minus = gf.chunk(2, -1)
            gz = plus - minus
        else:
            (gcos, gsin), (cos, sin) = g.chunk(2, -1), features.chunk(2, -1)
            gz, radial = gsin * cos - gcos * sin, -radial
        return ((project_precisely(gz, w.mT) - radial) * self._factor(scaled)).to(g.dtype), {}

    def exact_kernel(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = (v.to(compute_dtype(v)) * self._factor(v) for v in (x, y))
        if self.norms == "chi":
            return (x * y).sum(-1).exp()
        half = (x.square() + y.square()).sum(-1) / 2
        if self.variant == "trigonometric":
            return half.exp() * sphere_mean(-(x - y).square().sum(-1), x.shape[-1])
        return (-half).exp() * sphere_mean((x + y).square().sum(-1), x.shape[-1])

    def _factor(self, x: Tensor) -> float:
        return float(x.shape[-1] ** -0.25) if self.scale == "softmax" else 1.0


def sphere_mean(square: Tensor, d: int) -> Tensor:
    """E exp(w.z) for w uniform on the sphere of radius sqrt(d), from |z|^2; E cos(w.z) from -|z|^2.

    The hypergeometric series 0F1(d/2; d |z|^2 / 4), summed in float64. For -|z|^2 terms cancel:
    the absolute error is about 1e-16 exp(|z|^2 / 2). [PHI-FAVOR-D4]
    """
    argument = square.double() * d / 4
    total = term = torch.ones_like(argument)
    largest = float(argument.abs().max()) if argument.numel() else 0.0
    for k in range(60 + int(2 * math.sqrt(largest))):
        term = term * argument / ((k + 1) * (d / 2 + k))
        total = total + term
    return total.to(square.dtype)
