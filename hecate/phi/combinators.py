"""Maps made of maps: one after another, side by side, multiplied, normalised, made odd.

Their parameters are drawn in order and kept in one flat dictionary: maps of several name them by position, `0.weight`;
maps around one keep its names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from math import prod
from typing import Any, Literal, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from hecate.checks import Count
from hecate.phi.base import FeatureMap, Params, Traits, bounded, seeded, widened
from hecate.tape.bridge import without_autocast
from hecate.variant import Conflicts, delegating

Item = TypeVar("Item")


class Several(FeatureMap):
    """Helper for maps made of several."""

    maps: tuple[FeatureMap, ...] = Field(min_length=1, strict=False)

    def inner_maps(self) -> tuple[FeatureMap, ...]:
        return self.maps

    def input_dims(self, d: int) -> list[int]:
        """The width of each map's inputs."""
        return [d] * len(self.maps)

    def shapes(self, d: int) -> dict[str, tuple[int, ...]]:
        inner = enumerate(zip(self.maps, self.input_dims(d), strict=True))
        each = [prefixed(map_.shapes(width), index) for index, (map_, width) in inner]
        return {name: shape for shapes in each for name, shape in shapes.items()}

    def init(self, d: int, *, generator: torch.Generator | None = None, **how: Any) -> Params:
        """Parameters of all maps, drawn in order from one generator: no two share their draws."""
        source, widths = seeded(generator), self.input_dims(d)
        return _merged(map_.init(width, generator=source, **how) for map_, width in zip(self.maps, widths, strict=True))

    def redraw(self, params: Params, generator: torch.Generator) -> Params:
        if not self.is_random:
            return super().redraw(params, generator)
        return _merged(map_.redraw(p, generator) if map_.is_random else p for map_, p in self.each_with(params))

    def joined(self, **traits: Any) -> Traits:
        """Traits of maps that all take x: these, and others as the caller gives them."""
        each = [map_.traits() for map_ in self.maps]
        return Traits(
            non_negative=all(t.non_negative for t in each),
            kernel_non_negative=all(t.kernel_non_negative for t in each),
            is_random=any(t.is_random for t in each),
            needs_position=any(t.needs_position for t in each),
            **traits,
        )

    def each_with(self, params: Params) -> list[tuple[FeatureMap, Params]]:
        """The maps with their parameters."""
        return [(map_, params_at(params, index)) for index, map_ in enumerate(self.maps)]

    def forward_each(self, x: Tensor, params: Params) -> tuple[list[Tensor], list[Any]]:
        """Features of maps that all take x, and the residuals of each."""
        pairs = [map_.forward(x, part) for map_, part in self.each_with(params)]
        return [features for features, _ in pairs], [residuals for _, residuals in pairs]

    def vjp_each(self, residuals: Sequence[Any], cotangents: Sequence[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The cotangent of x, summed over the maps and rounded once, and those of their parameters."""
        gxs, grads = [], {}
        for index, (map_, residual, g) in enumerate(zip(self.maps, residuals, cotangents, strict=True)):
            gx, glearned = map_.vjp(residual, g)
            gxs.append(widened(gx))
            grads.update(prefixed(glearned, index))
        return torch.stack(gxs).sum(0).to(cotangents[0].dtype), grads


class Compose(Several):
    r"""compose: phi(x) = phi_n(... phi_2(phi_1(x))), the maps applied from left to right.

    For instance a narrowing `linear` before `taylor`. Parameters are named by position: `0.weight`.

    Formula: $\phi(x) = (\phi_n \circ \cdots \circ \phi_2 \circ \phi_1)(x)$
    Shapes: x `[..., D]` -> `[..., width of the last map]`; each map's width is the next one's D.
    VJP: the maps' VJPs from right to left.
    Traits: non_negative, kernel_non_negative and norm_bound of the last map; odd if all are odd, even if the first one
    that is not odd is even; degree the product if all have one; is_random, needs_position if any is.
    Cost: the sum of the maps' costs at their widths.
    Origin: ours; composition of functions. [PHI-COMPOSE-D1]
    """

    kind: Literal["compose"] = "compose"

    def output_dim(self, d: int) -> int:
        return self._widths(d)[-1]

    def input_dims(self, d: int) -> list[int]:
        return self._widths(d)[:-1]

    def traits(self) -> Traits:
        each = [map_.traits() for map_ in self.maps]
        # Behind an odd map the sign survives, behind an even one it is gone for good.
        parity = next((t.parity for t in each if t.parity != "odd"), "odd")
        return self.joined(
            parity=parity,
            degree=_total([t.degree for t in each], lambda all_: prod(all_, start=1.0)),
            norm_bound=each[-1].norm_bound,
            forgets_length=next((t.forgets_length for t in each if t.degree is None), False),
        )._replace(non_negative=each[-1].non_negative, kernel_non_negative=each[-1].kernel_non_negative)

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, tuple[Any, ...]]:
        residuals = []
        for map_, part in self.each_with(params):
            x, residual = map_.forward(x, part)
            residuals.append(residual)
        return x, tuple(residuals)

    def vjp(self, residuals: tuple[Any, ...], g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        grads: dict[str, Tensor] = {}
        for index in reversed(range(len(self.maps))):
            g, glearned = self.maps[index].vjp(residuals[index], g)
            grads |= prefixed(glearned, index)
        return g, grads

    def exact_kernel(self, x: Tensor, y: Tensor) -> Tensor | None:
        """The last map's kernel of the images under the others, None if those have parameters or need positions."""
        for map_ in self.maps[:-1]:
            params = map_.init(x.shape[-1], dtype=x.dtype, device=x.device)
            if params["learned"] or params["frozen"] or map_.needs_position:
                return None
            x, y = map_(x), map_(y)
        return self.maps[-1].exact_kernel(x, y)

    def _widths(self, d: int) -> list[int]:
        return [*accumulate(self.maps, lambda width, map_: map_.output_dim(width), initial=d)]


class Concat(Several):
    r"""concat: phi(x) = [phi_1(x), ..., phi_n(x)].

    The kernel of the result is the sum of the kernels. Parameters are named by position: `0.weight`.

    Formula: $\phi(x) = [\phi_1(x),\, \ldots,\, \phi_n(x)]$
    $\phi(x)^\top \phi(y) = \sum_{i=1}^n \phi_i(x)^\top \phi_i(y)$
    Shapes: x `[..., D]` -> `[..., sum of the widths]`.
    VJP: g is cut at the widths; gx = sum of the maps' gx.
    Traits: non_negative, kernel_non_negative if all are; parity and degree if all agree; norm_bound the sum; is_random,
    needs_position if any is.
    Cost: the sum of the maps' costs.
    References: kernel algebra; Kernel Methods for Pattern Analysis (Shawe-Taylor and Cristianini, 2004).
    [PHI-CONCAT-D1]
    """

    kind: Literal["concat"] = "concat"

    def output_dim(self, d: int) -> int:
        return sum(map_.output_dim(d) for map_ in self.maps)

    def traits(self) -> Traits:
        each = [map_.traits() for map_ in self.maps]
        parities, degrees = {t.parity for t in each}, {t.degree for t in each}
        return self.joined(
            parity=parities.pop() if len(parities) == 1 else "none",
            degree=degrees.pop() if len(degrees) == 1 else None,
            norm_bound=_total([t.norm_bound for t in each], sum),
        )

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, Any]:
        features, residuals = self.forward_each(x, params)
        return torch.cat(features, -1), (residuals, [item.shape[-1] for item in features])

    def vjp(self, residuals: Any, g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        each, sizes = residuals
        return self.vjp_each(each, torch.split(g, sizes, -1))

    def exact_kernel(self, x: Tensor, y: Tensor) -> Tensor | None:
        return _total([map_.exact_kernel(x, y) for map_ in self.maps], lambda all_: torch.stack(all_).sum(0))


class TensorProduct(Several):
    r"""tensor_product: phi(x) = phi_1(x) (x) ... (x) phi_n(x), all products of one feature each.

    The kernel of the result is the product of the kernels: two keys are similar only if every map finds them similar.
    The last map's index runs fastest. Parameters are named by position: `0.weight`.

    Formula: $\phi(x) = \phi_1(x) \otimes \cdots \otimes \phi_n(x)$
    $\phi(x)^\top \phi(y) = \prod_{i=1}^n \phi_i(x)^\top \phi_i(y)$
    Shapes: x `[..., D]` -> `[..., product of the widths]`.
    VJP: from the last map to the first, with G the cotangent as a matrix [features so far, width of the map]: g_map =
    G^T features so far, G = G features of the map; gx = sum of the maps' gx.
    Traits: non_negative, kernel_non_negative if all are; odd for an odd number of odd maps among even ones, even for an
    even number; degree the sum, norm_bound the product if all have one; is_random, needs_position if any is.
    Cost: the sum of the maps' costs and O(d_phi).
    References: kernel algebra; Kernel Methods for Pattern Analysis (Shawe-Taylor and Cristianini, 2004).
    [PHI-TENSOR-D1]
    """

    kind: Literal["tensor_product"] = "tensor_product"
    maps: tuple[FeatureMap, ...] = Field(min_length=2, strict=False)
    max_d_phi: Count = Field(default=65_536, gt=0)

    def output_dim(self, d: int) -> int:
        width = prod([map_.output_dim(d) for map_ in self.maps])
        return bounded(width, self.max_d_phi, d, "maps", cure="take fewer or narrower maps, ")

    def traits(self) -> Traits:
        each = [map_.traits() for map_ in self.maps]
        odd = [t.parity for t in each].count("odd") % 2 == 1
        return self.joined(
            parity="none" if any(t.parity == "none" for t in each) else "odd" if odd else "even",
            degree=_total([t.degree for t in each], sum),
            norm_bound=_total([t.norm_bound for t in each], prod),
        )

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, Any]:
        self.output_dim(x.shape[-1])
        features, residuals = self.forward_each(x, params)
        factors = [widened(item) for item in features]
        products = [factors[0]]
        for factor in factors[1:]:
            products.append((products[-1].unsqueeze(-1) * factor.unsqueeze(-2)).flatten(-2))
        return products[-1].to(x.dtype), (residuals, factors, products[:-1])

    def vjp(self, residuals: Any, g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        each, factors, before = residuals
        carried, cotangents = g.to(factors[0].dtype), []
        for factor, product in zip(factors[:0:-1], before[::-1], strict=True):
            matrix = carried.unflatten(-1, (product.shape[-1], factor.shape[-1]))
            with without_autocast(g.device.type):
                cotangents.append((product.unsqueeze(-2) @ matrix).squeeze(-2))
                carried = (matrix @ factor.unsqueeze(-1)).squeeze(-1)
        return self.vjp_each(each, [item.to(g.dtype) for item in (carried, *cotangents[::-1])])

    def exact_kernel(self, x: Tensor, y: Tensor) -> Tensor | None:
        # Maps draw independently, so expectations multiply as well.
        return _total([map_.exact_kernel(x, y) for map_ in self.maps], lambda all_: torch.stack(all_).prod(0))


@delegating("inner", "shapes", "redraw")
class Wrapper(FeatureMap):
    """Helper for maps around one map of the same width."""

    inner: FeatureMap

    def inner_maps(self) -> tuple[FeatureMap, ...]:
        return (self.inner,)

    def output_dim(self, d: int) -> int:
        return self.inner.output_dim(d)

    def init(self, d: int, **how: Any) -> Params:
        return self.inner.init(d, **how)


class Normalise(Wrapper):
    r"""normalise: phi(x) = f / sqrt(|f|^2 + eps^2), or f / (sum f + eps), with f = inner(x).

    Bounds |phi(x)|^2 by 1, so that a delta-type rule is stable for every lr < 2. `norm="l2"` divides by the length,
    `"sum"`, as fast weight programmers do, by the sum of features, which must then be non-negative. eps keeps the map
    smooth near 0; features that are all 0 stay 0, and s counts as 1. Parameters are the inner map's, under their own
    names.

    Formula: $\phi(x) = \frac{z}{\sqrt{\Vert z \Vert^2 + \varepsilon^2}},\quad z = \mathrm{inner}(x)$
    $\phi(x) = \frac{z}{\sum_i z_i + \varepsilon} \quad \text{if norm is sum}$
    Shapes: x `[..., D]` -> `[..., width of inner]`.
    VJP: with n = phi(x) and s the divisor: gf = (g - n (n.g)) / s for l2, (g - n.g) / s for sum; then inner's VJP of
    gf.
    Traits: norm_bound 1; non_negative, kernel_non_negative, parity, is_random, needs_position of inner.
    Cost: inner's, plus O(d_phi).
    References: Linear Transformers Are Secretly Fast Weight Programmers (Schlag et al., 2021, arXiv 2102.11174) for the
    sum; Parallelizing Linear Transformers with the Delta Rule over Sequence Length (Yang et al., 2024, arXiv
    2406.06484) for the length. [PHI-NORM-D1]
    """

    kind: Literal["normalise"] = "normalise"
    norm: Literal["l2", "sum"] = "l2"
    eps: float = Field(default=1e-6, gt=0)

    def conflicts(self) -> Conflicts:
        if self.norm == "sum" and not self.inner.non_negative:
            signed = f"got {self.inner.kind!r}, whose features may sum to 0"
            cure = "take norm 'l2' or a non-negative map such as 'elu'"
            yield ("inner",), f"must be non-negative when norm is 'sum', {signed}; {cure}"

    def traits(self) -> Traits:
        inner = self.inner.traits()
        names = ("non_negative", "kernel_non_negative", "parity", "is_random", "needs_position")
        shared: dict[str, Any] = {name: getattr(inner, name) for name in names}
        return Traits(norm_bound=1.0, forgets_length=inner.degree is not None or inner.forgets_length, **shared)

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, tuple[Tensor, Tensor, Any]]:
        features, residuals = self.inner.forward(x, params)
        wide = widened(features)
        divisor = self._divisor(wide)
        normalised = wide / divisor
        return normalised.to(features.dtype), (normalised, divisor, residuals)

    def vjp(self, residuals: tuple[Tensor, Tensor, Any], g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        normalised, divisor, inner = residuals
        wide = g.to(normalised.dtype)
        along = (normalised * wide).sum(-1, keepdim=True)
        across = wide - (normalised * along if self.norm == "l2" else along)
        return self.inner.vjp(inner, (across / divisor).to(g.dtype))

    def exact_kernel(self, x: Tensor, y: Tensor) -> Tensor | None:
        """The cosine of inner's kernel for l2; None for sum, and where inner has none."""
        if self.norm == "sum":
            return None
        kernels = [self.inner.exact_kernel(a, b) for a, b in ((x, y), (x, x), (y, y))]
        return _total(kernels, lambda k: k[0] / ((k[1] + self.eps**2) * (k[2] + self.eps**2)).sqrt())

    def _divisor(self, features: Tensor) -> Tensor:
        largest = features.detach().abs().amax(-1, keepdim=True)
        empty = largest == 0  # where 1/eps would be the slope of every feature
        if self.norm == "sum":
            return torch.where(empty, 1.0, features.sum(-1, keepdim=True) + self.eps)
        # Squares of large features overflow, so the largest is factored out first. It cancels, and is a constant to the
        # derivative.
        largest = largest.clamp(min=self.eps)
        relative = (features / largest).square().sum(-1, keepdim=True)
        return torch.where(empty, 1.0, largest * (relative + (self.eps / largest).square()).sqrt())


class OddLift(Wrapper):
    r"""odd_lift: phi(x) = (inner(x) - inner(-x)) / 2.

    For gradients in an optimiser, where momentum through a map that is not odd drifts. Parameters are the inner map's,
    under their own names.

    Formula: $\phi(x) = \frac{1}{2} \left(\mathrm{inner}(x) - \mathrm{inner}(-x)\right)$
    Shapes: x `[..., D]` -> `[..., width of inner]`.
    VJP: gx = (inner^T(x) g + inner^T(-x) g) / 2, parameters (their cotangent at x - at -x) / 2.
    Traits: odd; degree and norm_bound of inner; is_random, needs_position of inner.
    Cost: twice inner; once if inner is odd, as it is then its own odd part.
    Warning: the odd part of an even map is 0, so even maps are refused.
    Origin: ours; the odd part of a function. [PHI-ODD-D1]
    """

    kind: Literal["odd_lift"] = "odd_lift"

    def conflicts(self) -> Conflicts:
        if self.inner.parity == "even":
            yield ("inner",), f"must not be an even map, got {self.inner.kind!r}: its odd part is 0 everywhere"

    def traits(self) -> Traits:
        inner = self.inner.traits()._replace(non_negative=False, kernel_non_negative=False, linear_at=None)
        return inner._replace(parity="odd", rising="none" if inner.rising == "none" else "everywhere")

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, tuple[Any, Any]]:
        ahead, residuals = self.inner.forward(x, params)
        if self.inner.parity == "odd":
            return ahead, (residuals, None)
        behind, mirrored = self.inner.forward(-x, params)
        return (ahead - behind) / 2, (residuals, mirrored)

    def vjp(self, residuals: tuple[Any, Any], g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        if residuals[1] is None:
            return self.inner.vjp(residuals[0], g)
        gx, ahead = self.inner.vjp(residuals[0], g)
        gmirrored, behind = self.inner.vjp(residuals[1], g)
        return (gx + gmirrored) / 2, {name: (ahead[name] - behind[name]) / 2 for name in ahead}

    def exact_kernel(self, x: Tensor, y: Tensor) -> Tensor | None:
        """(k(x, y) - k(x, -y) - k(-x, y) + k(-x, -y)) / 4 for inner's kernel k."""
        kernels = [self.inner.exact_kernel(a, b) for a in (x, -x) for b in (y, -y)]
        return _total(kernels, lambda k: torch.stack([k[0], -k[1], -k[2], k[3]]).sum(0) / 4)


def params_at(params: Params, index: int) -> Params:
    """The parameters of the map at an index, without their prefix; all share the position."""
    mark = f"{index}."
    learned, frozen = (
        {name.removeprefix(mark): t for name, t in params[group].items() if name.startswith(mark)}
        for group in ("learned", "frozen")
    )
    return {**params, "learned": learned, "frozen": frozen}


def prefixed(items: dict[str, Item], index: int) -> dict[str, Item]:
    """The inverse of `params_at` for one group."""
    return {f"{index}.{name}": item for name, item in items.items()}


def _merged(each: Iterable[Params]) -> Params:
    merged: Params = {"learned": {}, "frozen": {}}
    for index, params in enumerate(each):
        merged["learned"].update(prefixed(params["learned"], index))
        merged["frozen"].update(prefixed(params["frozen"], index))
    return merged


def _total(items: Sequence[Item | None], total: Callable[[list[Item]], Any]) -> Any:
    """The total of items; None if one of them is None."""
    known = [item for item in items if item is not None]
    return total(known) if len(known) == len(items) else None
