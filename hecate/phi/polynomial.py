"""Polynomial features: tensor powers of a key, in full or with equal entries merged, and their derivatives.

The block of degree i holds all products of i components. Merged ("symmetric"), the C(d + i - 1, i) distinct monomials
are kept, each times the square root of its number of occurrences in the full power, so that in both layouts the inner
product of two blocks is (x.y)^i.

Monomials of degree i are ordered by their largest variable v: each is a monomial of degree i - 1 in the variables 0 ..
v times x_v, and those are a prefix of the block before. All tables below follow from that and are computed on the
device, without atomics, so results are reproducible bit by bit.

Block engines have a layout of their own. Where phi(x).phi(y) = sum_i a_i (x.y)^i, products of tokens with each other
are kernels of their d numbers, and features are needed only for products with a state. For these, any features F of the
same kernel will do, since F(x) = E phi(x) with E^T E = I: a memory M of phi becomes M E^T, of F, and comes back as (M
E^T) E. Merged monomials of degree 2 have to be gathered one by one; F takes them in blocks of `BLOCK` components, as
outer products x_I x_J^T for I <= J, which make it a quarter wider than phi and take a few broadcast products, forward
and backward. [PHI-SERIES-D1]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from math import comb, prod
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from hecate.checks import Count
from hecate.phi.base import FeatureMap, Params, PowerForm, Traits, bounded, per_head, sum_to_heads, widened
from hecate.variant import Conflicts, still_declared

BLOCK = 16
Coefficients = Literal["exponential", "ones", "learned"]
Degree = Annotated[int, Field(le=64)]
"""Highest power: beyond it factorials and powers leave the range of floats."""


class Polynomial(FeatureMap):
    r"""polynomial: phi(x) = [sqrt(a_i multinomial(b)) x^b for |b| = i] for i = 0 .. degree.

    Every monomial up to a degree, so scaled that the kernel is exactly sum_i a_i (x.y)^i: capacity of order d^degree.
    The coefficients are 1/i! (the exponential's series), ones, or learned: softplus of one number per degree and head,
    which keeps them positive, starting at 1/i!. `form="raw"` is [x, vec(x x^T)], of degree 2 without a constant, kernel
    x.y + (x.y)^2.

    Formula: $\phi(x) = \left[\sqrt{a_{|b|} \frac{|b|!}{b_1! \cdots b_d!}}\; x_1^{b_1} \cdots x_d^{b_d}\right]_{|b| \leq
    n},\quad n = \mathrm{degree},\quad a_i = \frac{1}{i!}$
    $\phi(x)^\top \phi(y) = \sum_{i=0}^n a_i (x^\top y)^i$
    $\phi(x) = [x,\ \mathrm{vec}(x x^\top)] \quad \text{if raw}$
    Shapes: x `[..., D]` (`[..., H, D]` when learned) -> `[..., C(D + degree, degree)]`; raw `[..., D + D^2]`; learned
    coefficients `[H, degree + 1]`.
    VJP: from degree to degree, g_(i-1) += x.G_i and gx += G_i m_(i-1), G_i the cotangent of all products of m_(i-1)
    with a component of x; coefficient c_i receives sigmoid(c_i) / (2 a_i) times g.phi of its block.
    Traits: kernel_non_negative for even degree with fixed coefficients (symmetric form only).
    Cost: O(degree D^degree / degree!).
    Warning: |phi(x)|^2 grows like |x|^(2 degree); normalise keys for delta-type rules. Components alone (x^p without
    cross terms) have capacity d only, and unscaled monomials do not give powers of x.y.
    References: ATLAS (Behrouz et al., 2025, arXiv 2505.23735). [PHI-POLY-D1]
    """

    kind: Literal["polynomial"] = "polynomial"
    degree: Degree = Field(default=2, ge=1)
    form: Literal["symmetric", "raw"] = "symmetric"
    coefficients: Coefficients | None = Field(
        default=None, description="null: exponential when symmetric, ones when raw"
    )
    max_d_phi: Count = Field(default=65_536, gt=0)

    def conflicts(self) -> Conflicts:
        raw = self.form == "raw"
        if raw and self.degree != 2:
            yield ("degree",), f"must be 2 when form is 'raw', got {self.degree}; form 'symmetric' takes any degree"
        if raw and self.coefficients not in (None, "ones"):
            reason = f"must be 'ones' or null when form is 'raw', got {self.coefficients!r}"
            yield ("coefficients",), f"{reason}; form 'symmetric' takes all"

    def output_dim(self, d: int) -> int:
        width = sum(widths(d, self.degree, self._symmetric)[self._first :])
        return bounded(width, self.max_d_phi, d, "degree")

    def traits(self) -> Traits:
        sure = self._symmetric and self.degree % 2 == 0 and self.coefficients != "learned"
        return Traits(kernel_non_negative=sure, linear_at=1 - self._first)

    def shapes(self, d: int) -> dict[str, tuple[int, ...]]:
        return {"coefficients": (self.degree + 1,)} if self.coefficients == "learned" else {}

    def start(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        # The inverse of softplus at 1/i!, so that training starts at the exponential.
        start = [math.log(math.expm1(1 / math.factorial(i))) for i in range(self.degree + 1)]
        return torch.tensor(start, dtype=torch.float64).repeat(shape[0], 1)

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, tuple[Any, ...]]:
        self.output_dim(x.shape[-1])
        raw = self.parameters(params, "coefficients")[0] if self.coefficients == "learned" else None
        wide = widened(x)
        roots, blocks = self._roots(wide, raw), powers(wide, self.degree, self._symmetric)
        parts = [roots[i] * blocks[i] for i in range(self._first, self.degree + 1)]
        return torch.cat(parts, -1).to(x.dtype), (x, blocks, raw, roots)

    def vjp(self, residuals: tuple[Any, ...], g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        x, blocks, raw, roots = residuals
        wide = widened(x)
        sizes = widths(x.shape[-1], self.degree, self._symmetric)
        missing = [torch.zeros_like(blocks[0])] * self._first
        grads = [*missing, *torch.split(g.to(wide.dtype), sizes[self._first :], -1)]
        scaled = [roots[i] * part for i, part in enumerate(grads)]
        gx = powers_vjp(wide, blocks, scaled, self._symmetric).to(x.dtype)
        if raw is None:
            return gx, {}
        groots = torch.cat([(b * p).sum(-1, keepdim=True) for b, p in zip(blocks, grads, strict=True)], -1)
        factor = raw.sigmoid() / (2 * torch.nn.functional.softplus(raw).sqrt())
        return gx, {"coefficients": sum_to_heads(groots, raw.shape[0]).to(raw.dtype) * factor}

    def exact_kernel(self, x: Tensor, y: Tensor) -> Tensor | None:
        """sum_i a_i (x.y)^i; None with learned a_i, which are not part of the configuration."""
        if self.coefficients == "learned":
            return None
        z, fixed = (x * y).sum(-1), self._fixed()
        powers_of_z = [z**i * fixed[i] for i in range(self._first, self.degree + 1)]
        return torch.stack(powers_of_z).sum(0)

    def power_form(self, d: int) -> PowerForm | None:
        if self.coefficients == "learned" or not still_declared(self, "power_form", _FORMULAS):
            return None
        fixed = [a if i >= self._first else 0.0 for i, a in enumerate(self._fixed())]
        return _power_form(self, d, fixed, merged=self._symmetric)

    @property
    def _symmetric(self) -> bool:
        return self.form == "symmetric"

    @property
    def _first(self) -> int:
        return 0 if self._symmetric else 1

    def _fixed(self) -> list[float]:
        if not self._symmetric or self.coefficients == "ones":
            return [1.0] * (self.degree + 1)
        return [1 / math.factorial(i) for i in range(self.degree + 1)]

    def _roots(self, x: Tensor, raw: Tensor | None) -> list[float] | list[Tensor]:
        """sqrt(a_i) by degree: numbers, or `[..., 1]` tensors when they are learned."""
        if raw is None:
            return [math.sqrt(a) for a in self._fixed()]
        roots = torch.nn.functional.softplus(per_head(raw, x).to(x.dtype)).sqrt()
        return list(torch.split(roots, 1, -1))


class Taylor(FeatureMap):
    r"""taylor: phi(x) = [1, x', vec(x' x'^T) / sqrt(2), ...] up to order, x' = x / d^(1/4).

    The series of softmax's kernel: phi(x).phi(y) = 1 + z + z^2/2 + ... with z = x.y / sqrt(d). Close to exp(z) while
    |z| is small, which keys of unit norm guarantee. `compact` merges equal products, which nearly halves the width at
    order 2 and leaves the kernel as it is.

    Formula: $\phi(x) = \left[\frac{1}{\sqrt{i!}}\, \tilde x^{\otimes i}\right]_{i=0}^{n},\quad \tilde x = d^{-1/4}
    x,\quad n = \mathrm{order}$
    $\phi(x)^\top \phi(y) = \sum_{i=0}^n \frac{1}{i!} \left(\frac{x^\top y}{\sqrt{d}}\right)^i$
    Shapes: x `[..., D]` -> `[..., C(D + order, order)]`; not compact: `[..., 1 + D + ... + D^order]`.
    VJP: that of `polynomial` at x', with gx = gx' / d^(1/4).
    Traits: kernel_non_negative for even order (at order 2 the kernel is at least 1/2; single features are signed).
    Cost: O(order D^order / order!) when compact.
    Warning: the width is quadratic in D at order 2: project keys to about 16 components first.
    References: Simple Linear Attention Language Models Balance the Recall-Throughput Tradeoff (Arora et al., 2024,
    arXiv 2402.18668). [PHI-TAYLOR-D1]
    """

    kind: Literal["taylor"] = "taylor"
    order: Degree = Field(default=2, ge=1)
    compact: bool = True
    max_d_phi: Count = Field(default=65_536, gt=0)

    def output_dim(self, d: int) -> int:
        return bounded(sum(widths(d, self.order, self.compact)), self.max_d_phi, d, "order")

    def traits(self) -> Traits:
        return Traits(kernel_non_negative=self.order % 2 == 0)

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, tuple[Tensor, Sequence[Tensor]]]:
        self.output_dim(x.shape[-1])
        scaled = widened(x) / math.sqrt(math.sqrt(x.shape[-1]))
        blocks = powers(scaled, self.order, self.compact)
        parts = [block * _root(i) for i, block in enumerate(blocks)]
        return torch.cat(parts, -1).to(x.dtype), (scaled, blocks)

    def vjp(self, residuals: tuple[Tensor, Sequence[Tensor]], g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        scaled, blocks = residuals
        sizes = widths(scaled.shape[-1], self.order, self.compact)
        parts = torch.split(g.to(scaled.dtype), sizes, -1)
        gblocks = [part * _root(i) for i, part in enumerate(parts)]
        gscaled = powers_vjp(scaled, blocks, gblocks, self.compact)
        return (gscaled / math.sqrt(math.sqrt(scaled.shape[-1]))).to(g.dtype), {}

    def exact_kernel(self, x: Tensor, y: Tensor) -> Tensor:
        """The series itself, 1 + z + z^2/2 + ..., not the exponential that it approximates."""
        z = (x * y).sum(-1) / math.sqrt(x.shape[-1])
        return torch.stack([z**i / math.factorial(i) for i in range(self.order + 1)]).sum(0)

    def power_form(self, d: int) -> PowerForm | None:
        if not still_declared(self, "power_form", _FORMULAS):
            return None
        series = [d ** (-i / 2) / math.factorial(i) for i in range(self.order + 1)]
        return _power_form(self, d, series, merged=self.compact)


_FORMULAS = ("forward", "vjp", "features", "block")


def _power_form(feature_map: FeatureMap, d: int, coefficients: list[float], *, merged: bool) -> PowerForm:
    """The form of a map without parameters whose kernel has these coefficients."""
    if merged and len(coefficients) == 3:
        return merged_squares((coefficients[0], coefficients[1], coefficients[2]), d)
    none: Params = {"learned": {}, "frozen": {}}

    def features(x: Tensor, out: Tensor | None = None) -> Tensor:
        return _put(feature_map.forward(x, none)[0], out)

    def pullback(x: Tensor, g: Tensor) -> Tensor:
        return feature_map.vjp(feature_map.forward(x, none)[1], g)[0]

    return PowerForm(tuple(coefficients), feature_map.output_dim(d), features, pullback, _same, _same)


def _root(i: int) -> float:
    return 1 / math.sqrt(math.factorial(i))


class Rebased(FeatureMap):
    r"""rebased: phi(x) = [z_i^2, sqrt(2) z_i z_j for i < j] / sqrt(D), z = scale * LN(x) + shift.

    The kernel is (z_q.z_k)^2 / D: `taylor` cannot go below 1/2, this map can ignore a key altogether. LN(x) is x minus
    its mean over its standard deviation, sqrt(variance + eps); scale and shift are learned and start at 1 and 0.

    Formula: $\phi(x) = \frac{1}{\sqrt{d}} \left[z_i^2,\ \sqrt{2}\, z_i z_j\right]_{i < j},\quad z = \mathrm{scale}
    \odot \frac{x - \mathrm{mean}(x)}{\sqrt{\mathrm{var}(x) + \varepsilon}} + \mathrm{shift}$
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
    promises = Traits(kernel_non_negative=True)

    def output_dim(self, d: int) -> int:
        return bounded(d * (d + 1) // 2, self.max_d_phi, d, "max_d_phi", cure="")

    def shapes(self, d: int) -> dict[str, tuple[int, ...]]:
        return {"scale": (d,), "shift": (d,)}

    def start(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return super().start(name, shape, generator) + (name == "scale")

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, tuple[Any, ...]]:
        self.output_dim(x.shape[-1])
        scale, shift = self.parameters(params, "scale", "shift")
        wide = widened(x)
        centred = wide - wide.mean(-1, keepdim=True)
        deviation = (centred.square().mean(-1, keepdim=True) + self.eps).sqrt()
        normal = centred / deviation
        z = per_head(scale, x).to(wide.dtype) * normal + per_head(shift, x).to(wide.dtype)
        blocks = powers(z, 2, True)
        features = blocks[2] / math.sqrt(x.shape[-1])
        return features.to(x.dtype), (z, blocks[:2], normal, deviation, scale)

    def vjp(self, residuals: tuple[Any, ...], g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        z, below, normal, deviation, scale = residuals
        gsquares = g.to(z.dtype) / math.sqrt(z.shape[-1])
        gz = powers_vjp(z, [*below, z], [None, None, gsquares], True)
        gn = gz * per_head(scale, z).to(z.dtype)
        along = (gn * normal).mean(-1, keepdim=True)
        gx = (gn - gn.mean(-1, keepdim=True) - normal * along) / deviation
        heads = scale.shape[0]
        grads = {"scale": sum_to_heads(gz * normal, heads), "shift": sum_to_heads(gz, heads)}
        return gx.to(g.dtype), {name: item.to(scale.dtype) for name, item in grads.items()}


class _Step(NamedTuple):
    parent: Tensor  # [N_i] index of the monomial of degree i - 1
    variable: Tensor  # [N_i] index of the component that it is multiplied by
    scale: Tensor  # [N_i] square root of the growth of the multiplicity
    sizes: Tensor  # [d] number of monomials that end in each variable
    starts: Tensor  # [d] index of the first of them


def widths(d: int, degree: int, symmetric: bool) -> list[int]:
    """Widths of the blocks of degree 0 .. `degree`."""
    return [comb(d + i - 1, i) if symmetric else d**i for i in range(degree + 1)]


def powers(x: Tensor, degree: int, symmetric: bool) -> list[Tensor]:
    """Blocks of degree 0 .. `degree`, each `[..., N_i]`."""
    blocks = [torch.ones_like(x[..., :1])]
    if not symmetric:
        for _ in range(degree):
            blocks.append((blocks[-1].unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2))
        return blocks
    for step in _steps(x, degree):
        factors = _take(x, step.variable) * step.scale
        blocks.append(_take(blocks[-1], step.parent) * factors)
    return blocks


def powers_vjp(x: Tensor, blocks: Sequence[Tensor], cotangents: Sequence[Tensor | None], symmetric: bool) -> Tensor:
    """Cotangent of x from the cotangents of the blocks of degree 0 .. p; None stands for zeros."""
    degree = len(blocks) - 1
    steps = _steps(x, degree) if symmetric else [None] * degree
    gx, carried = torch.zeros_like(x), cotangents[degree]
    for i in range(degree, 0, -1):
        g, step = carried, steps[i - 1]
        if g is None:
            carried = cotangents[i - 1]
            continue
        if i == 1:  # the block of degree 1 is x itself
            return gx + g
        if step is None:
            spread = g.unflatten(-1, (-1, x.shape[-1])).mT
        else:
            spread = _spread(g * step.scale, step, blocks[i - 1].shape[-1])
        # Sums rather than many products of small matrices, which are slower and autocast.
        gx = gx + (spread * blocks[i - 1].unsqueeze(-2)).sum(-1)
        below, cotangent = (spread * x.unsqueeze(-1)).sum(-2), cotangents[i - 1]
        carried = below if cotangent is None else below + cotangent
    return gx


def _spread(g: Tensor, step: _Step, width: int) -> Tensor:
    """`[..., N_i]` -> `[..., d, N_(i-1)]`: the cotangents of all products x_v m, 0 for those left out."""
    columns = torch.arange(width, device=g.device)
    mask = columns < step.sizes.unsqueeze(-1)
    # Products that are left out read a column of zeros behind the others.
    where = torch.where(mask, step.starts.unsqueeze(-1) + columns, g.shape[-1])
    spread = _take(torch.cat([g, torch.zeros_like(g[..., :1])], -1), where.flatten())
    return spread.unflatten(-1, where.shape)


def _take(x: Tensor, index: Tensor) -> Tensor:
    """Columns of `[..., n]`; on a CPU ten times faster from a matrix."""
    *lead, width = x.shape
    return x.reshape(prod(lead), width).index_select(1, index.to(x.device)).reshape(*lead, len(index))


def _steps(x: Tensor, degree: int) -> list[_Step]:
    d, device = x.shape[-1], x.device
    sizes = torch.ones(d, dtype=torch.int64, device=device)
    last = run = torch.zeros(1, dtype=torch.int64, device=device)
    steps = []
    for i in range(1, degree + 1):
        total, ends = comb(d + i - 1, i), sizes.cumsum(0)
        starts = ends - sizes
        variable = torch.zeros(total, dtype=torch.int64, device=device).scatter(0, starts[1:], 1).cumsum(0)
        parent = torch.arange(total, device=device) - starts[variable]
        run = torch.where(last[parent] == variable, run[parent], 0) + 1
        steps.append(_Step(parent, variable, (i / run.to(x.dtype)).sqrt(), sizes, starts))
        sizes, last = ends, variable
    return steps


# The layout of block engines.


def given_features(width: int) -> PowerForm:
    """The form of features that are already computed: phi(x) = x."""
    return PowerForm((0.0, 1.0), width, _put, lambda x, g: g, _same, _same)


def merged_squares(coefficients: tuple[float, float, float], d: int) -> PowerForm:
    """The form of [sqrt(a_0), sqrt(a_1) x, sqrt(a_2) merged products], ordered as in `powers`."""
    zeroth, first, second = (math.sqrt(a) for a in coefficients)
    parts = [slice(at, min(at + BLOCK, d)) for at in range(0, d, BLOCK)]

    widths = [1, d, *((part.stop - part.start) * (d - part.start) for part in parts)]

    def factors(x: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        """The factors of a block's products: its components, and its and all later components."""
        return second * x[..., part], torch.cat((x[..., part], math.sqrt(2) * x[..., part.stop :]), -1)

    def features(x: Tensor, out: Tensor | None = None) -> Tensor:
        if out is None:
            pairs = [factors(x, part) for part in parts]
            blocks = [(xs.unsqueeze(-1) * others.unsqueeze(-2)).flatten(-2) for xs, others in pairs]
            return torch.cat((torch.full_like(x[..., :1], zeroth), first * x, *blocks), -1)
        constant, linear, *blocks = out.split(widths, -1)
        constant.fill_(zeroth)
        torch.mul(x, first, out=linear)
        for part, block in zip(parts, blocks, strict=True):
            xs, others = factors(x, part)
            torch.mul(xs.unsqueeze(-1), others.unsqueeze(-2), out=block.unflatten(-1, (xs.shape[-1], -1)))
        return out

    def pullback(x: Tensor, g: Tensor) -> Tensor:
        _, linear, *blocks = g.split(widths, -1)
        gx = first * linear
        for part, block in zip(parts, blocks, strict=True):
            (xs, others), size = factors(x, part), part.stop - part.start
            pairs = block.unflatten(-1, (size, -1))
            gown = second * (pairs @ others.unsqueeze(-1)).squeeze(-1)
            gothers = (xs.unsqueeze(-2) @ pairs).squeeze(-2)
            later = torch.cat((gown + gothers[..., :size], math.sqrt(2) * gothers[..., size:]), -1)
            gx = gx + torch.nn.functional.pad(later, (part.start, 0))
        return gx

    places = _places.__wrapped__ if torch.compiler.is_compiling() else _places  # torch warns that it traces no cache
    where, factor, first_place, second_place = places(d)

    def spread(weights: Tensor) -> Tensor:
        return _take(weights, where) * factor.to(weights)

    def gathered(weights: Tensor) -> Tensor:
        scaled = torch.cat((weights * factor.to(weights), torch.zeros_like(weights[..., :1])), -1)
        return _take(scaled, first_place) + _take(scaled, second_place)

    return PowerForm(coefficients, len(where), features, pullback, spread, gathered)


@lru_cache(maxsize=16)
def _places(d: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For each feature of F, its index in phi and its entry of E; for each of phi, the one or two indices in F, the
    second one past the end of F if there is none."""
    near: Any = {"device": "cpu"}  # whatever the default is: they are kept
    pairs = torch.tensor([(i, j) for i in range(d) for j in range(i - i % BLOCK, d)], **near)
    low, high = pairs.aminmax(dim=1)
    where = torch.cat((torch.arange(1 + d, **near), 1 + d + high * (high + 1) // 2 + low))
    # A pair within a block is there in both orders, each times 1 / sqrt(2).
    twice = (low // BLOCK == high // BLOCK) & (low != high)
    once = torch.ones(len(twice), dtype=torch.float64, **near).masked_fill(twice, math.sqrt(0.5))
    factor = torch.cat((torch.ones(1 + d, dtype=torch.float64, **near), once))
    places = torch.full((2, 1 + d + d * (d + 1) // 2), len(where), **near)
    ordered = torch.cat((torch.ones(1 + d, dtype=torch.bool, **near), pairs[:, 0] <= pairs[:, 1]))
    here = torch.arange(len(where), **near)
    places[0, where[ordered]] = here[ordered]
    places[1, where[~ordered]] = here[~ordered]
    return where, factor, places[0], places[1]


def _same(x: Tensor) -> Tensor:
    return x


def _put(features: Tensor, out: Tensor | None = None) -> Tensor:
    return features if out is None else out.copy_(features)
