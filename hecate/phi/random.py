"""Random feature maps: draws, orthogonal blocks, redrawing and precise projections, which all of them share,
features of the softmax kernel (FAVOR+), and rectified powers with their arc-cosine kernels."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import torch
from pydantic import Field
from torch import Tensor

from hecate.checks import Size
from hecate.errors import ConfigError, ShapeError
from hecate.phi.base import FeatureMap, Params, Traits, compute_dtype, project_precisely
from hecate.variant import Conflicts

Norms = Literal["chi", "sqrt"]


class RandomMap(FeatureMap):
    """A feature map with frozen random draws. A variant gives `draw`, the draws of one head, and their `shapes` where
    they are not those of one projection.

    Draws are made in float64 on the CPU, head after head, and then cast: one seed gives one map on every dtype and
    device, and the first heads of a map do not depend on how many follow. Without a generator the seed is 0; the global
    random state is neither read nor changed. [PHI-RAND-I1]"""

    def shapes(self, d: int) -> dict[str, tuple[int, ...]]:
        """By default those of a projection `w` onto the features."""
        return {"w": (d, self.output_dim(d))}

    def draw(self, d: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Fresh draws for one head: float64 CPU tensors without the head axis."""
        raise NotImplementedError(f"{type(self).__name__} does not define draw")

    def fresh(self, d: int, heads: int, generator: torch.Generator) -> dict[str, Tensor]:
        if d < 1 or heads < 1:
            raise ShapeError(f"{self.kind} needs a width and a head count of at least 1, got {d} and {heads}")
        if generator.device.type != "cpu":
            raise ConfigError(
                f"{self.kind} draws on the CPU, so that a seed gives the same map on every device, "
                f"got a generator on {generator.device}; pass a CPU torch.Generator"
            )
        draws = [self.draw(d, generator) for _ in range(heads)]
        return {name: torch.stack([one[name] for one in draws]) for name in draws[0]}

    def redraw(self, params: Params, generator: torch.Generator) -> Params:
        """New params with fresh draws of the same shapes, dtypes and device; learned ones stay."""
        if not self.is_random:
            return super().redraw(params, generator)
        (w,) = self.parameters(params, "w")
        fresh = self.init(w.shape[-2], heads=w.shape[0], generator=generator, dtype=torch.float64)
        frozen = {name: value.to(params["frozen"][name]) for name, value in fresh["frozen"].items()}
        return {"learned": params["learned"], "frozen": frozen}


class Projected(RandomMap):
    """Helper for maps of random projections w. A variant has the fields below, wherever they stand among its others."""

    if TYPE_CHECKING:
        num_features: int | None
        orthogonal: bool
        norms: Norms

    def output_dim(self, d: int) -> int:
        return default_width(d) if self.num_features is None else self.num_features

    def draw(self, d: int, generator: torch.Generator) -> dict[str, Tensor]:
        m = self.shapes(d)["w"][1]
        return {"w": projections(d, m, generator, orthogonal=self.orthogonal, norms=self.norms)}


def normal(d: int, m: int, generator: torch.Generator) -> Tensor:
    """Standard normal `[d, m]` in float64 on the CPU."""
    return torch.randn(d, m, dtype=torch.float64, device="cpu", generator=generator)


def signs(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """1 or -1 with even chances, in float64 on the CPU."""
    return 2.0 * torch.randint(0, 2, shape, device="cpu", generator=generator).double() - 1


def haar(d: int, generator: torch.Generator) -> Tensor:
    """A Haar-distributed orthogonal `[d, d]`: QR of a Gaussian, the diagonal of R made positive.

    Without the signs Q is not Haar (LAPACK fixes them by convention), which biases every one-sided map.
    References: How to generate random matrices from the classical compact groups (Mezzadri, 2006, arXiv
    math-ph/0609050). [PHI-RAND-D1]
    """
    gaussian, threads = normal(d, d, generator), torch.get_num_threads()
    torch.set_num_threads(1)  # LAPACK's sums depend on it: the same seed would give other last bits
    try:
        q, r = torch.linalg.qr(gaussian)
    finally:
        torch.set_num_threads(threads)
    signed: Tensor = q * torch.where(r.diagonal() < 0, -1.0, 1.0)
    return signed


def projections(d: int, m: int, generator: torch.Generator, *, orthogonal: bool, norms: Norms = "chi") -> Tensor:
    """m projection vectors as the columns of a `[d, m]` matrix.

    `orthogonal` stacks ceil(m / d) independent Haar blocks and cuts them to m columns; otherwise the directions are
    independent. `norms="chi"` gives lengths of fresh Gaussian vectors, so that each column is marginally N(0, I);
    `"sqrt"` gives all columns the length sqrt(d). [PHI-RAND-D2]"""
    if orthogonal:
        columns = torch.cat([haar(d, generator) for _ in range(-(-m // d))], dim=1)[:, :m]
    else:
        columns = normal(d, m, generator)
        if norms == "chi":
            return columns
        columns = columns / columns.norm(dim=0)
    return columns * (normal(d, m, generator).norm(dim=0) if norms == "chi" else math.sqrt(d))


def default_width(d: int) -> int:
    """The usual number of random features: int(d log d), but never fewer than d."""
    return max(d, int(d * math.log(d)))


Order = Literal[0, 1, 2]


class Favor(Projected):
    r"""favor: phi(x) = exp(Wx' - |x'|^2/2) / sqrt(m), W ~ N(0, I), x' = x d^(-1/4).

    The softmax kernel exp(q.k / sqrt(d)) in expectation. `scale="none"` uses x' = x and estimates exp(q.k), for keys
    that are l2-normalised. m is num_features. `variant="hyperbolic"` is [exp(Wx'), exp(-Wx')] exp(-|x'|^2/2) /
    sqrt(num_features); `"trigonometric"` is [cos(Wx'), sin(Wx')] exp(+|x'|^2/2) / sqrt(m) with m = num_features / 2.
    Positive maps are accurate where the kernel is small, the trigonometric one where x is close to y. `norms="sqrt"`
    gives every row of W the length sqrt(d): lower variance for a smaller kernel (SMREG), which `exact_kernel` then
    returns. No maximum over tokens is subtracted, which would make a causal memory see the future.

    Formula: $\phi(x) = \frac{1}{\sqrt{m}} \exp\left(W^\top \tilde x - \frac{1}{2} \Vert \tilde x \Vert^2\right),\quad
    \tilde x = d^{-1/4} x,\quad W_{ij} \sim \mathcal{N}(0, 1)$
    $\phi(x) = \frac{1}{\sqrt{2 m}} [\exp(W^\top \tilde x),\ \exp(-W^\top \tilde x)] \exp\left(-\frac{1}{2} \Vert \tilde
    x \Vert^2\right) \quad \text{if hyperbolic}$
    $\phi(x) = \frac{1}{\sqrt{m}} [\cos(W^\top \tilde x),\ \sin(W^\top \tilde x)] \exp\left(\frac{1}{2} \Vert \tilde x
    \Vert^2\right) \quad \text{if trigonometric}$
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

    def conflicts(self) -> Conflicts:
        if self.variant != "positive" and self.num_features is not None and self.num_features % 2:
            even = f"must be even for variant {self.variant!r} (features come in pairs), got {self.num_features}"
            yield ("num_features",), f"{even}; use {self.num_features + 1} or variant 'positive'"

    def output_dim(self, d: int) -> int:
        width = super().output_dim(d)
        return width if self.variant == "positive" else width + width % 2

    def traits(self) -> Traits:
        positive = self.variant != "trigonometric"
        return Traits(is_random=True, non_negative=positive, kernel_non_negative=positive)

    def shapes(self, d: int) -> dict[str, tuple[int, ...]]:
        return {"w": (d, self.output_dim(d) // (1 if self.variant == "positive" else 2))}

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, tuple[Tensor, ...]]:
        (w,) = self.parameters(params, "w")
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


class ArcCosine(Projected):
    r"""arc_cosine: phi(x) = max(Wx, 0)^order / sqrt(num_features), a step 1[Wx > 0] at order 0.

    With W ~ N(0, I) and the angle t, the arc-cosine kernels in expectation: |x|^n |y|^n J_n(t) / (2 pi) with J_0 = pi -
    t, J_1 = sin t + (pi - t) cos t, J_2 = 3 sin t cos t + (pi - t) (1 + 2 cos^2 t), half of the paper's. The higher the
    order, the less a key at a right angle counts. Order 0 sees directions only, is bounded by 1 and costs a bit per
    feature; order 1 is `performer_relu` without its epsilon. `norms="sqrt"` gives every row of W the length sqrt(D):
    lower variance, the same kernel at orders 0 and 1, D / (D + 2) times it at order 2.

    Formula: $\phi(x) = \frac{1}{\sqrt{m}} \max(W^\top x, 0)^n,\quad n = \mathrm{order} \quad \text{above 0}$
    $\phi(x) = \frac{1}{\sqrt{m}} \mathbf{1}[W^\top x > 0] \quad \text{at order 0}$
    $W_{ij} \sim \mathcal{N}(0, 1)$
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
    num_features: Size | None = Field(default=None, gt=0, description="d_phi; None for max(D, int(D log D))")
    orthogonal: bool = True
    norms: Norms = "sqrt"

    def traits(self) -> Traits:
        degree, bound = float(self.order), 1.0 if self.order == 0 else None
        return Traits(is_random=True, non_negative=True, kernel_non_negative=True, degree=degree, norm_bound=bound)

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        (w,) = self.parameters(params, "w")
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
        gz = torch.ops.aten.threshold_backward(wide, z, 0) if self.order == 1 else self.order * z * wide
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


class PerformerReLU(Projected):
    r"""performer_relu: phi(x) = (relu(Wx) + kernel_epsilon) / sqrt(num_features).

    With W ~ N(0, I) and m = num_features, the arc-cosine kernel of order 1 (`arc_cosine` has the others), |x| |y| (sin
    t + (pi - t) cos t) / (2 pi) with the angle t, in expectation, plus a small term of kernel_epsilon that keeps a
    normaliser off zero: without it a query has no feature at all with probability 2^-m. The factor 1/sqrt(m), absent in
    the reference code, makes the kernel independent of m. Both norms are unbiased up to kernel_epsilon; `"sqrt"` (all
    rows of length sqrt(d)) varies less. The reference scales x by d^(-1/4), which is kernel_epsilon * d^(1/4) here.

    Formula: $\phi(x) = \frac{1}{\sqrt{m}} \left(\max(W^\top x, 0) + \varepsilon\right),\quad W_{ij} \sim \mathcal{N}(0,
    1)$
    Shapes: x `[..., D]` or `[..., H, D]` -> `[..., num_features]` (None: max(D, int(D log D))); frozen w `[H, D,
    num_features]`.
    VJP: gx = W^T (g 1[Wx > 0]) / sqrt(m); the derivative at the kink Wx = 0 is 0.
    Traits: is_random, non_negative, kernel_non_negative; degree 1 if kernel_epsilon = 0.
    Cost: O(D num_features).
    References: Rethinking Attention with Performers (Choromanski et al., 2021, arXiv 2009.14794); Kernel Methods for
    Deep Learning (Cho and Saul, 2009). [PHI-PRELU-D1]
    """

    kind: Literal["performer_relu"] = "performer_relu"
    num_features: Size | None = Field(default=None, gt=0, description="d_phi; None for max(D, int(D log D))")
    kernel_epsilon: float = Field(default=1e-3, ge=0, description="added to every ReLU")
    orthogonal: bool = True
    norms: Norms = "sqrt"

    def traits(self) -> Traits:
        degree = 1.0 if self.kernel_epsilon == 0 else None
        return Traits(is_random=True, non_negative=True, kernel_non_negative=True, degree=degree)

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        (w,) = self.parameters(params, "w")
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
        eps, length, d = self.kernel_epsilon, 1.0, x.shape[-1]
        if self.norms == "sqrt":  # the mean length of a row of W relative to that of a Gaussian vector
            length = math.sqrt(d / 2) * math.exp(math.lgamma(d / 2) - math.lgamma((d + 1) / 2))
        mean_relu: Tensor = length * (a + b) / math.sqrt(2 * math.pi)
        return arc_cosine(x, y, 1) + mean_relu * eps + eps**2

    def _lift(self, w: Tensor) -> float:
        return self.kernel_epsilon / math.sqrt(w.shape[-1])
