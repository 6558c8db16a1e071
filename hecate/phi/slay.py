"""Random features of a kernel on the sphere that has no exponential: x^2 / (2 + eps - 2 x) of the cosine x."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from hecate.checks import Count, Size
from hecate.phi.base import Params, Traits, bounded, compute_dtype, project_precisely
from hecate.phi.combinators import Normalise
from hecate.phi.elementwise import Identity
from hecate.phi.polynomial import powers, powers_vjp
from hecate.phi.random import RandomMap, normal

_UNIT = Normalise(inner=Identity())


class SLAY(RandomMap):
    r"""slay: phi(x) = [sqrt(w_r) (u (x) u) (x) exp(sqrt(2 s_r) W^T u - s_r) / sqrt(m) for r], u = x / |x|.

    The kernel c^2 / (2 + eps - 2 c) of the cosine c of two vectors, in expectation: 1 / (C - 2 c) with C = 2 + eps is
    the integral of exp(-s (C - 2 c)) over s > 0, of which node s_r takes a share w_r, exp(2 s c) has positive random
    features (W ~ N(0, I), of shape D x m, the same for all nodes), and c^2 is exact, by the D (D + 1) / 2 merged
    products of `polynomial`. Nodes lie evenly in log s over [0.01 / (C + 2), 12 / eps], weights are the trapezoid
    rule's; `exact_kernel` is what they add up to. With 8 nodes its worst relative error is 0.8 % at eps = 1, 2.0 % at
    0.1 and 4.8 % at 0.01.

    Formula: $\phi(x) = \left[\sqrt{\frac{w_r}{m}}\, \exp(\sqrt{2 s_r}\, W^\top u - s_r) \otimes \mathrm{sym}(u \otimes
    u)\right]_r,\quad u = \frac{x}{\Vert x \Vert},\quad W_{ij} \sim \mathcal{N}(0, 1)$
    $\mathrm{E}[\phi(x)^\top \phi(y)] \approx \frac{c^2}{2 + \varepsilon - 2 c},\quad c = \frac{x^\top y}{\Vert x \Vert
    \Vert y \Vert}$
    Shapes: x `[..., D]` or `[..., H, D]` -> `[..., nodes m D (D + 1) / 2]`; frozen w `[H, D, m]` (None: as few as
    make 4 D features, 1 from D = 3 on).
    VJP: with p = u (x) u and e_r the exponentials, scaled: gp = sum g e_r, ge_r = g.p, gu = W sum_r sqrt(2 s_r) ge_r
    e_r plus that of `polynomial` at degree 2, gx = (gu - u (u.gu)) / |x|.
    Traits: is_random, kernel_non_negative; single features are signed.
    Cost: O(nodes m D^2).
    Warning: Gauss-Laguerre nodes, s = t / C, fit eps = 1 and fail near c = 1 below: with 8 of them the worst relative
    error is 26 % at eps = 0.1 and 87 % at eps = 0.01. The relative variance of a node's features grows like exp(const
    s), so the large nodes that a small eps needs are out of reach: of the kernel of a unit vector with itself, 1 / eps,
    the median estimate at D = 8 and m = 128 is 65 % at eps = 1, 42 % at 0.5 and 12 % at 0.1. Squares of isotropic
    projections for c^2 estimate (1 + 2 c^2) instead, an offset that no width removes. |phi(x)|^2 is near 1 / eps and
    varies: normalise features for delta-type rules.
    References: SLAY: Geometry-Aware Spherical Linearized Attention with Yat-Kernel (Luna et al., 2026, arXiv
    2602.04915), with another quadrature and the exact square. [PHI-SLAY-D1]
    """

    kind: Literal["slay"] = "slay"
    eps: float = Field(default=1.0, ge=1e-3, description="1 / eps is the kernel of a vector with itself")
    nodes: int = Field(default=8, ge=2, le=256, description="of the quadrature")
    m: Size | None = Field(
        default=None, gt=0, description="random features of a node; null: as few as make 4 D features, often 1"
    )
    max_d_phi: Count = Field(default=65_536, gt=0)
    promises = Traits(is_random=True, kernel_non_negative=True, forgets_length=True)

    def output_dim(self, d: int) -> int:
        return bounded(self.nodes * self._features(d) * (d * (d + 1) // 2), self.max_d_phi, d, "m")

    def shapes(self, d: int) -> dict[str, tuple[int, ...]]:
        return {"w": (d, self._features(d))}

    def draw(self, d: int, generator: torch.Generator) -> dict[str, Tensor]:
        return {"w": normal(d, self._features(d), generator)}

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, tuple[Any, ...]]:
        self.output_dim(x.shape[-1])
        (w,) = self.parameters(params, "w")
        unit, kept = _UNIT.forward(x.to(torch.promote_types(compute_dtype(x), w.dtype)), params)
        z = project_precisely(unit, w)
        place: dict[str, Any] = {"dtype": z.dtype, "device": z.device}
        points = self.quadrature()
        speed = torch.tensor([[math.sqrt(2 * s)] for s, _ in points], **place)
        shift = torch.tensor([[(logarithm - math.log(w.shape[-1])) / 2 - s] for s, logarithm in points], **place)
        e = (speed * z.unsqueeze(-2) + shift).exp().flatten(-2)
        blocks = powers(unit, 2, True)
        features = (e.unsqueeze(-1) * blocks[2].unsqueeze(-2)).flatten(-2)
        return features.to(x.dtype), (unit, kept, w, speed, e, blocks)

    def vjp(self, residuals: tuple[Any, ...], g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        unit, kept, w, speed, e, blocks = residuals
        wide = g.to(e.dtype).unflatten(-1, (e.shape[-1], -1))
        ge = (wide * blocks[2].unsqueeze(-2)).sum(-1)
        gz = (speed * (ge * e).unflatten(-1, (-1, w.shape[-1]))).sum(-2)
        gp = (wide * e.unsqueeze(-1)).sum(-2)
        gunit = project_precisely(gz, w.mT) + powers_vjp(unit, blocks, [None, None, gp], True)
        return _UNIT.vjp(kept, gunit)[0].to(g.dtype), {}

    def _features(self, d: int) -> int:
        return math.ceil(8 / (self.nodes * (d + 1))) if self.m is None else self.m

    def exact_kernel(self, x: Tensor, y: Tensor) -> Tensor:
        """c^2 sum_r w_r exp(2 s_r c): the quadrature's value, not the kernel that it approximates."""
        x, y = (_UNIT(item.to(compute_dtype(item))) for item in (x, y))
        c = (x * y).sum(-1)
        total = torch.stack([torch.exp(2 * s * c + logarithm) for s, logarithm in self.quadrature()]).sum(0)
        return c.square() * total

    def quadrature(self) -> list[tuple[float, float]]:
        """Nodes s_r and logarithms of weights w_r, such that sum_r w_r exp(2 s_r c) is near 1 / (2 + eps - 2 c)."""
        low, high = math.log(0.01 / (4 + self.eps)), math.log(12 / self.eps)
        step = (high - low) / (self.nodes - 1)
        points = [math.exp(low + step * r) for r in range(self.nodes)]
        return [(s, math.log(step * s) - (2 + self.eps) * s) for s in points]
