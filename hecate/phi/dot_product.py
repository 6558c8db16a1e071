"""Random features of kernels of the dot product: its powers, SLAY's kernel on the sphere, x^2 / (2 + eps - 2 x) of
the cosine x, the softmax kernel (FAVOR+), and the arc-cosine kernels of rectified powers."""

from __future__ import annotations

import math
from functools import reduce
from itertools import accumulate
from operator import mul
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from hecate.checks import Count, Size
from hecate.phi.base import Params, Parity, Traits, bounded, per_head, project, project_precisely, widened
from hecate.phi.combinators import Normalise
from hecate.phi.elementwise import Identity
from hecate.phi.polynomial import Degree, powers, powers_vjp
from hecate.phi.random import Norms, Projected, RandomMap, signs
from hecate.tape.bridge import without_autocast
from hecate.variant import Conflicts

_UNIT = Normalise(inner=Identity())


class RandomMaclaurin(RandomMap):
    r"""random_maclaurin: phi_i(x) = sqrt(a_n / (p_n d_phi)) prod_(j <= n) w_ij.x, n = n_i random.

    Any kernel sum_n a_n (x.y)^n with a_n >= 0 in expectation: rows w_ij are random signs, and feature i is a product of
    n_i of them, n_i drawn with probability p_n in proportion to 2^-n among the n with a_n > 0. The series is
    `"exponential"`, a_n = 1 / n! up to degree (it is cut there, and the kernel is the cut series), `"binomial"` for (1
    + x.y)^degree, or given by the coefficients a_0, a_1, ... themselves.

    Formula: $\phi(x)_i = \sqrt{\frac{a_n}{p_n P}} \prod_{j=1}^{n} w_{ij}^\top x,\quad n = n_i \sim p_n \propto
    2^{-n},\quad w_{ij,l} = \pm 1$
    $\mathrm{E}[\phi(x)^\top \phi(y)] = \sum_n a_n (x^\top y)^n$
    Shapes: x `[..., D]` or `[..., H, D]` -> `[..., d_phi]` (None: 4 D); frozen w `[H, D, degree d_phi]` with columns of
    0 where n_i < j, offset `[H, degree d_phi]` with 1 there, so that the factor is 1, and scale `[H, d_phi]`.
    VJP: with the factors z_ij: gz_ij = scale_i g_i prod_(l != j) z_il, gx = W^T gz.
    Traits: is_random; even or odd if all n with a_n > 0 are, degree n if there is only one.
    Cost: O(D d_phi degree).
    Warning: the variance of a kernel value is (sum_n a_n^2 m^n / p_n - k^2) / d_phi with m = |x|^2 |y|^2 + 2 (x.y)^2 -
    2 sum_i x_i^2 y_i^2: keep keys at or below length 1. Features and kernel have either sign: no sum normaliser.
    References: Random Feature Maps for Dot Product Kernels (Kar and Karnick, 2012, arXiv 1201.6530). [PHI-MACL-D1]
    """

    kind: Literal["random_maclaurin"] = "random_maclaurin"
    d_phi: Size | None = Field(default=None, gt=0, description="number of features; null: 4 D")
    series: Literal["exponential", "binomial"] | None = Field(
        default=None, description="null: exponential, unless coefficients are given"
    )
    degree: Degree | None = Field(default=None, ge=1, description="last power of the series; null: 8")
    coefficients: tuple[float, ...] | None = Field(
        default=None, description="a_0, a_1, ... in place of a series, none negative"
    )
    widening: ClassVar[int] = 4

    def conflicts(self) -> Conflicts:
        if self.coefficients is None:
            return
        for name in ("series", "degree"):
            if (setting := getattr(self, name)) is not None:
                yield (name,), f"must be left out when coefficients are given, got {setting!r}"
        if min(self.coefficients, default=0.0) < 0 or not any(self.coefficients[1:]):
            which = "without a negative one, as their square roots scale the features, and with an a_n > 0 beyond a_0"
            yield ("coefficients",), f"must be a_0, a_1, ... {which}, got {list(self.coefficients)}"

    def traits(self) -> Traits:
        used = [n for n, a in enumerate(self.terms) if a > 0]
        parities: set[Parity] = {"odd" if n % 2 else "even" for n in used}
        parity = parities.pop() if len(parities) == 1 else "none"
        return Traits(is_random=True, parity=parity, degree=float(used[0]) if len(used) == 1 else None)

    @property
    def terms(self) -> list[float]:
        """a_0, a_1, ..., up to the last power."""
        if self.coefficients is not None:
            return list(self.coefficients)
        powers = range(1 + (8 if self.degree is None else self.degree))
        if self.series == "binomial":
            return [float(math.comb(powers[-1], n)) for n in powers]
        return [1 / math.factorial(n) for n in powers]

    @property
    def probabilities(self) -> list[float]:
        """p_0, p_1, ..., p_degree: how often a feature has n factors."""
        shares = [2.0**-n if a > 0 else 0.0 for n, a in enumerate(self.terms)]
        return [share / sum(shares) for share in shares]

    def shapes(self, d: int) -> dict[str, tuple[int, ...]]:
        width = self.output_dim(d)
        factors = (len(self.terms) - 1) * width
        return {"w": (d, factors), "offset": (factors,), "scale": (width,)}

    def draw(self, d: int, generator: torch.Generator) -> dict[str, Tensor]:
        both = [self.terms, self.probabilities]
        a, p = torch.tensor(both, dtype=torch.float64, device="cpu")
        width = self.output_dim(d)
        n = torch.multinomial(p, width, replacement=True, generator=generator)
        unused = torch.arange(1, len(a), device="cpu").unsqueeze(-1) > n  # [degree, d_phi]
        offset = unused.flatten().double()
        w = signs((d, len(offset)), generator) * (1 - offset)
        return {"w": w, "offset": offset, "scale": (a[n] / (p[n] * width)).sqrt()}

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, tuple[Tensor, ...]]:
        w, offset, scale = self.parameters(params, "w", "offset", "scale")
        z = project_precisely(x, w)
        z = (z + per_head(offset, x).to(z)).unflatten(-1, (-1, scale.shape[-1]))
        features = reduce(mul, z.unbind(-2)) * per_head(scale, x).to(z)
        return features.to(x.dtype), (z, w, scale)

    def vjp(self, residuals: tuple[Tensor, ...], g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        z, w, scale = residuals
        factors = z.unbind(-2)
        # No division by a factor, which may be 0.
        scaled = g.to(z) * per_head(scale, g).to(z)
        *before, last = accumulate(factors[:-1], mul, initial=scaled)
        after = [*accumulate(factors[:0:-1], mul)][::-1]
        gz = torch.stack([*map(mul, before, after), last], -2)
        return project_precisely(gz.flatten(-2), w.mT).to(g.dtype), {}

    def exact_kernel(self, x: Tensor, y: Tensor) -> Tensor:
        """The series up to its degree, sum_n a_n (x.y)^n."""
        z = (x * y).sum(-1)
        return torch.stack([a * z**n for n, a in enumerate(self.terms)]).sum(0)


class Polysketch(RandomMap):
    r"""polysketch: phi(x) = s (x) s with equal products merged, s a sketch of x to the degree / 2.

    (x.y)^degree for a high degree in few features. The sketch multiplies pairs of random projections, and pairs of
    projections of those, s = (a V) * (b V') / sqrt(sketch) at each of log2(degree) - 1 levels with fresh Gaussian V
    everywhere, so that E s(x).s(y) = (x.y)^(degree / 2) without bias. The outer product makes the kernel (s(x).s(y))^2
    >= 0; its mean is larger than (x.y)^degree by the variance of the sketch, and `exact_kernel` is that mean.

    Formula: $\phi(x) = \mathrm{sym}(s \otimes s),\quad \phi(x)^\top \phi(y) = (s(x)^\top s(y))^2$
    $z_j^{(0)} = W_j^\top x,\quad z_j^{(l+1)} = V_{l+1,j}^\top \frac{z_{2j}^{(l)} \odot z_{2j+1}^{(l)}}{\sqrt{r}},\quad
    s = \frac{z_0^{(L)} \odot z_1^{(L)}}{\sqrt{r}}$
    $\mathrm{E}[s(x)^\top s(y)] = (x^\top y)^{n/2},\quad n = \mathrm{degree},\quad r = \mathrm{sketch}$
    Shapes: x `[..., D]` or `[..., H, D]` -> `[..., sketch (sketch + 1) / 2]` (None: the least of 4 D or more); frozen w
    `[H, D, (degree / 2) sketch]` and for each level above v1, v2, ... `[H, nodes, sketch, sketch]`.
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
    sketch: Size | None = Field(
        default=None,
        gt=0,
        description="width of the sketch; d_phi is about its square / 2; null: the least of 4 D or more",
    )
    max_d_phi: Count = Field(default=65_536, gt=0)

    def conflicts(self) -> Conflicts:
        if self.degree & (self.degree - 1):
            cure = "degree 2 needs no sketch: take random_maclaurin with coefficients [0, 0, 1], or polynomial"
            yield ("degree",), f"must be a power of two from 4 on, got {self.degree}; {cure}"

    def output_dim(self, d: int) -> int:
        width = self._sketch(d)
        return bounded(width * (width + 1) // 2, self.max_d_phi, d, "sketch")

    def traits(self) -> Traits:
        degree = float(self.degree)
        return Traits(is_random=True, kernel_non_negative=True, parity="even", degree=degree)

    def shapes(self, d: int) -> dict[str, tuple[int, ...]]:
        r, leaves = self._sketch(d), self.degree // 2
        above = {f"v{level}": (leaves >> level, r, r) for level in range(1, self._levels)}
        return {"w": (d, leaves * r), **above}

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, tuple[Any, ...]]:
        w, *mixing = self.parameters(params, *self.shapes(x.shape[-1]))
        z = project_precisely(x, w).unflatten(-1, (self.degree // 2, -1))
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
        width, square = self._sketch(x.shape[-1]), (x * y).sum(-1).square()
        lengths = x.square().sum(-1) * y.square().sum(-1)
        for _ in range(self._levels):
            same = (lengths + 2 * square).square() / width
            share = 1 - 1 / width
            square, lengths = same + share * square.square(), same + share * lengths.square()
        return square

    def _sketch(self, d: int) -> int:
        return math.ceil((math.sqrt(1 + 32 * d) - 1) / 2) if self.sketch is None else self.sketch

    @property
    def _levels(self) -> int:
        return self.degree.bit_length() - 2


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

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, tuple[Any, ...]]:
        self.output_dim(x.shape[-1])
        (w,) = self.parameters(params, "w")
        unit, unit_residuals = _UNIT.forward(widened(x, w), params)
        z = project_precisely(unit, w)
        points = self.quadrature()
        speed = z.new_tensor([[math.sqrt(2 * s)] for s, _ in points])
        shift = z.new_tensor([[(logarithm - math.log(w.shape[-1])) / 2 - s] for s, logarithm in points])
        e = (speed * z.unsqueeze(-2) + shift).exp().flatten(-2)
        blocks = powers(unit, 2, True)
        features = (e.unsqueeze(-1) * blocks[2].unsqueeze(-2)).flatten(-2)
        return features.to(x.dtype), (unit, unit_residuals, w, speed, e, blocks)

    def vjp(self, residuals: tuple[Any, ...], g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        unit, unit_residuals, w, speed, e, blocks = residuals
        wide = g.to(e.dtype).unflatten(-1, (e.shape[-1], -1))
        ge = (wide * blocks[2].unsqueeze(-2)).sum(-1)
        gz = (speed * (ge * e).unflatten(-1, (-1, w.shape[-1]))).sum(-2)
        gp = (wide * e.unsqueeze(-1)).sum(-2)
        gunit = project_precisely(gz, w.mT) + powers_vjp(unit, blocks, [None, None, gp], True)
        return _UNIT.vjp(unit_residuals, gunit)[0].to(g.dtype), {}

    def _features(self, d: int) -> int:
        return math.ceil(8 / (self.nodes * (d + 1))) if self.m is None else self.m

    def exact_kernel(self, x: Tensor, y: Tensor) -> Tensor:
        """c^2 sum_r w_r exp(2 s_r c): the quadrature's value, not the kernel that it approximates."""
        x, y = _UNIT(widened(x)), _UNIT(widened(y))
        c = (x * y).sum(-1)
        total = torch.stack([torch.exp(2 * s * c + logarithm) for s, logarithm in self.quadrature()]).sum(0)
        return c.square() * total

    def quadrature(self) -> list[tuple[float, float]]:
        """Nodes s_r and logarithms of weights w_r, such that sum_r w_r exp(2 s_r c) is near 1 / (2 + eps - 2 c)."""
        low, high = math.log(0.01 / (4 + self.eps)), math.log(12 / self.eps)
        step = (high - low) / (self.nodes - 1)
        points = [math.exp(low + step * r) for r in range(self.nodes)]
        return [(s, math.log(step * s) - (2 + self.eps) * s) for s in points]


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
        x, y = (widened(v) * self._factor(v) for v in (x, y))
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
    x, y = widened(x), widened(y)
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
        x, y = widened(x), widened(y)
        a, b = x.norm(dim=-1), y.norm(dim=-1)
        eps, length, d = self.kernel_epsilon, 1.0, x.shape[-1]
        if self.norms == "sqrt":  # the mean length of a row of W relative to that of a Gaussian vector
            length = math.sqrt(d / 2) * math.exp(math.lgamma(d / 2) - math.lgamma((d + 1) / 2))
        mean_relu: Tensor = length * (a + b) / math.sqrt(2 * math.pi)
        return arc_cosine(x, y, 1) + mean_relu * eps + eps**2

    def _lift(self, w: Tensor) -> float:
        return self.kernel_epsilon / math.sqrt(w.shape[-1])
