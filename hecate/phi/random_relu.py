"""Random rectified powers, and the arc-cosine kernels that they estimate."""

from __future__ import annotations

import math
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from hecate.checks import Size
from hecate.phi.base import Params, Traits, compute_dtype
from hecate.phi.random import Norms, RandomMap, default_width, project_precisely, projections
from hecate.tape.activation import activate_vjp

Order = Literal[0, 1, 2]


class ArcCosine(RandomMap):
    """arc_cosine: phi(x) = max(Wx, 0)^order / sqrt(num_features), a step 1[Wx > 0] at order 0.

    With W ~ N(0, I) and the angle t, the arc-cosine kernels in expectation: |x|^n |y|^n J_n(t) / (2 pi) with J_0 = pi -
    t, J_1 = sin t + (pi - t) cos t, J_2 = 3 sin t cos t + (pi - t) (1 + 2 cos^2 t), half of the paper's. The higher the
    order, the less a key at a right angle counts. Order 0 sees directions only, is bounded by 1 and costs a bit per
    feature; order 1 is `performer_relu` without its epsilon. `norms="sqrt"` gives every row of W the length sqrt(D):
    lower variance, the same kernel at orders 0 and 1, D / (D + 2) times it at order 2.

    Shapes: x `[..., D]` or `[..., H, D]` -> `[..., num_features]` (None: max(D, int(D log D))); frozen w `[H, D,
    num_features]`.
    VJP: gx = W^T (order max(Wx, 0)^(order - 1) g) / sqrt(m), 0 at the kink Wx = 0.
    Traits: is_random, non_negative, kernel_non_negative, degree order; norm_bound 1 at order 0.
    Cost: O(D num_features).
    Warning: at order 0 the derivative is 0 wherever it exists, so nothing before the map learns through it. Order 2
    grows with the fourth power of x in |phi(x)|^2: normalise keys.
    References: Kernel Methods for Deep Learning (Cho and Saul, 2009). [PHI-ARCCOS-D1]
    """

    kind: Literal["arc_cosine"] = "arc_cosine"
    order: Order = 1
    num_features: Size | None = Field(default=None, gt=0, description="d_phi")
    orthogonal: bool = True
    norms: Norms = "sqrt"

    def output_dim(self, d: int) -> int:
        return default_width(d) if self.num_features is None else self.num_features

    def traits(self) -> Traits:
        return Traits(
            is_random=True,
            non_negative=True,
            kernel_non_negative=True,
            degree=float(self.order),
            norm_bound=1.0 if self.order == 0 else None,
        )

    def draw(self, d: int, generator: torch.Generator) -> dict[str, Tensor]:
        m = self.output_dim(d)
        return {"w": projections(d, m, generator, orthogonal=self.orthogonal, norms=self.norms)}

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        w = self.drawn(params, "w")
        count = w.shape[-1]
        if self.order == 0:
            # The sign has the derivative 0 everywhere; a comparison would cut the graph instead.
            z = project_precisely(x, w).sign().relu()
            return (z / math.sqrt(count)).to(x.dtype), (w, z)
        w = w / count ** (0.5 / self.order)
        z = project_precisely(x, w).relu_()
        return (z if self.order == 1 else z.square()).to(x.dtype), (w, z)

    def vjp(self, residuals: tuple[Tensor, Tensor], g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        w, z = residuals
        wide = g.to(z.dtype)
        gz = activate_vjp("relu", z, wide) if self.order == 1 else self.order * z * wide
        return project_precisely(gz, w.mT).to(g.dtype), {}

    def exact_kernel(self, x: Tensor, y: Tensor) -> Tensor:
        d = x.shape[-1]
        shrunk = self.order == 2 and self.norms == "sqrt"
        return arc_cosine(x, y, self.order) * (d / (d + 2) if shrunk else 1.0)


def arc_cosine(x: Tensor, y: Tensor, order: Order) -> Tensor:
    """E max(w.x, 0)^order max(w.y, 0)^order for w ~ N(0, I), in float32 or better; 0 at x = 0."""
    x, y = x.to(compute_dtype(x)), y.to(compute_dtype(y))
    a, b = x.norm(dim=-1), y.norm(dim=-1)
    # Kahan's angle: accurate for nearly parallel vectors.
    u, v = x * b.unsqueeze(-1), y * a.unsqueeze(-1)
    angle = 2 * torch.atan2((u - v).norm(dim=-1), (u + v).norm(dim=-1))
    sine, cosine, rest = angle.sin(), angle.cos(), math.pi - angle
    if order == 0:
        return torch.where(a * b > 0, rest / (2 * math.pi), 0)
    if order == 1:
        return a * b * (sine + rest * cosine) / (2 * math.pi)
    square = (a * b).square()
    return square * (3 * sine * cosine + rest * (1 + 2 * cosine.square())) / (2 * math.pi)


class PerformerReLU(RandomMap):
    """performer_relu: phi(x) = (relu(Wx) + kernel_epsilon) / sqrt(num_features).

    With W ~ N(0, I) and m = num_features, the arc-cosine kernel of order 1, |x| |y| (sin t + (pi - t) cos t) / (2 pi)
    with the angle t, in expectation, plus a small term of kernel_epsilon that keeps a normaliser off zero: without it a
    query has no feature at all with probability 2^-m. `arc_cosine` has the other orders. The factor 1/sqrt(m), absent
    in the reference code, makes the kernel independent of m; it cancels in a normalised read and matters in every
    other. Both norms are unbiased up to kernel_epsilon, and `"sqrt"` (all rows of length sqrt(d)) has the lower
    variance. The reference scales x by d^(-1/4) first, which is kernel_epsilon * d^(1/4) here.

    Shapes: x `[..., D]` or `[..., H, D]` -> `[..., num_features]` (None: max(D, int(D log D))); frozen w `[H, D,
    num_features]`.
    VJP: gx = W^T (g 1[Wx > 0]) / sqrt(m); the derivative at the kink Wx = 0 is 0.
    Traits: is_random, non_negative, kernel_non_negative; degree 1 if kernel_epsilon = 0.
    Cost: O(D num_features).
    References: Rethinking Attention with Performers (Choromanski et al., 2021, arXiv 2009.14794); Kernel Methods for
    Deep Learning (Cho and Saul, 2009). [PHI-PRELU-D1]
    """

    kind: Literal["performer_relu"] = "performer_relu"
    num_features: Size | None = Field(default=None, gt=0, description="d_phi")
    kernel_epsilon: float = Field(default=1e-3, ge=0, description="added to every ReLU")
    orthogonal: bool = True
    norms: Norms = "sqrt"

    def output_dim(self, d: int) -> int:
        return default_width(d) if self.num_features is None else self.num_features

    def traits(self) -> Traits:
        degree = 1.0 if self.kernel_epsilon == 0 else None
        return Traits(is_random=True, non_negative=True, kernel_non_negative=True, degree=degree)

    def draw(self, d: int, generator: torch.Generator) -> dict[str, Tensor]:
        m = self.output_dim(d)
        return {"w": projections(d, m, generator, orthogonal=self.orthogonal, norms=self.norms)}

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        w = self.drawn(params, "w")
        w, lift = w / math.sqrt(w.shape[-1]), self._lift(w)
        # In place: a pass over fresh memory costs more than the arithmetic.
        features = torch.threshold_(project_precisely(x, w).add_(lift), lift, lift)
        return features.to(x.dtype), (w, features)

    def vjp(self, residuals: tuple[Tensor, Tensor], g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        w, features = residuals
        gz = torch.ops.aten.threshold_backward(g.to(features.dtype), features, self._lift(w))
        return project_precisely(gz, w.mT).to(g.dtype), {}

    def exact_kernel(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = x.to(compute_dtype(x)), y.to(compute_dtype(y))
        a, b = x.norm(dim=-1), y.norm(dim=-1)
        eps, length = self.kernel_epsilon, self._mean_norm(x.shape[-1])
        mean_relu: Tensor = length * (a + b) / math.sqrt(2 * math.pi)
        return arc_cosine(x, y, 1) + mean_relu * eps + eps**2

    def _lift(self, w: Tensor) -> float:
        return self.kernel_epsilon / math.sqrt(w.shape[-1])

    def _mean_norm(self, d: int) -> float:
        # Mean length of a row of W relative to that of a Gaussian vector.
        if self.norms == "chi":
            return 1.0
        ratio = math.exp(math.lgamma(d / 2) - math.lgamma((d + 1) / 2))
        return math.sqrt(d / 2) * ratio
