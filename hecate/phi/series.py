"""Maps whose kernel is a polynomial of the inner product, in the layout in which block engines work with them.

Where phi(x).phi(y) = sum_i a_i (x.y)^i, tokens meet each other in kernels of d numbers each, and features are needed
only where tokens meet a state. There any features F of the same kernel serve, since F(x) = E phi(x) with E^T E = I: a
memory M of phi is M E^T of F and comes back as (M E^T) E. Merged monomials of degree 2 have to be gathered one by one;
in blocks of `BLOCK` components they are outer products x_I x_J^T for I <= J, a quarter wider than phi and made and
pulled back by a few broadcast products. [PHI-SERIES-D1]
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

BLOCK = 16


class PowerForm(NamedTuple):
    """phi(x).phi(y) = sum_i coefficients[i] (x.y)^i for x, y of one width, and features of that kernel.

    Fields:
        coefficients: a_0 .. a_n.
        width: of the features.
        features: (x `[..., d]`, out or None) -> `[..., width]`, put into `out` if given.
        pullback: (x, cotangent of the features) -> that of x.
        spread: weights `[..., P]` of phi -> those of the features; its transpose is `gathered`.
        gathered: weights of the features -> those of phi `[..., P]`; undoes `spread`.
    """

    coefficients: tuple[float, ...]
    width: int
    features: Callable[..., Tensor]
    pullback: Callable[[Tensor, Tensor], Tensor]
    spread: Callable[[Tensor], Tensor]
    gathered: Callable[[Tensor], Tensor]

    def kernel(self, product: Tensor) -> Tensor:
        """sum_i a_i z^i of inner products z."""
        total = torch.full_like(product, self.coefficients[-1])
        for factor in reversed(self.coefficients[:-1]):
            total = total * product + factor
        return total


def given_features(width: int) -> PowerForm:
    """The form of features that are there already: phi(x) = x."""
    return PowerForm((0.0, 1.0), width, _put, lambda x, g: g, _same, _same)


def own_features(
    coefficients: tuple[float, ...],
    width: int,
    forward: Callable[[Tensor], tuple[Tensor, Any]],
    vjp: Callable[[Any, Tensor], Tensor],
) -> PowerForm:
    """The form of a map that works with its own features, from its forward and its derivative."""

    def features(x: Tensor, out: Tensor | None = None) -> Tensor:
        return _put(forward(x)[0], out)

    return PowerForm(coefficients, width, features, lambda x, g: vjp(forward(x)[1], g), _same, _same)


def merged_squares(coefficients: tuple[float, float, float], d: int) -> PowerForm:
    """The form of [sqrt(a_0), sqrt(a_1) x, sqrt(a_2) merged products], ordered as in `hecate.phi.polynomial`."""
    zeroth, first, second = (math.sqrt(a) for a in coefficients)
    parts = [slice(at, min(at + BLOCK, d)) for at in range(0, d, BLOCK)]

    widths = [1, d, *((part.stop - part.start) * (d - part.start) for part in parts)]

    def factors(x: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        """The factors of a block's products: own components, and these with all later ones."""
        return second * x[..., part], torch.cat((x[..., part], math.sqrt(2) * x[..., part.stop :]), -1)

    def features(x: Tensor, out: Tensor | None = None) -> Tensor:
        if out is None:
            pairs = [factors(x, part) for part in parts]
            blocks = [(own.unsqueeze(-1) * others.unsqueeze(-2)).flatten(-2) for own, others in pairs]
            return torch.cat((torch.full_like(x[..., :1], zeroth), first * x, *blocks), -1)
        constant, linear, *blocks = out.split(widths, -1)
        constant.fill_(zeroth)
        torch.mul(x, first, out=linear)
        for part, block in zip(parts, blocks, strict=True):
            own, others = factors(x, part)
            torch.mul(own.unsqueeze(-1), others.unsqueeze(-2), out=block.unflatten(-1, (own.shape[-1], -1)))
        return out

    def pullback(x: Tensor, g: Tensor) -> Tensor:
        _, linear, *blocks = g.split(widths, -1)
        gx = first * linear
        for part, block in zip(parts, blocks, strict=True):
            (own, others), size = factors(x, part), part.stop - part.start
            pairs = block.unflatten(-1, (size, -1))
            gown = second * (pairs @ others.unsqueeze(-1)).squeeze(-1)
            gothers = (own.unsqueeze(-2) @ pairs).squeeze(-2)
            later = torch.cat((gown + gothers[..., :size], math.sqrt(2) * gothers[..., size:]), -1)
            gx = gx + torch.nn.functional.pad(later, (part.start, 0))
        return gx

    where, factor, first_place, second_place = _places(d)

    def spread(weights: Tensor) -> Tensor:
        return _columns(weights, where) * factor.to(weights)

    def gathered(weights: Tensor) -> Tensor:
        scaled = torch.cat((weights * factor.to(weights), torch.zeros_like(weights[..., :1])), -1)
        return _columns(scaled, first_place) + _columns(scaled, second_place)

    return PowerForm(coefficients, len(where), features, pullback, spread, gathered)


@lru_cache(maxsize=16)
def _places(d: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For every feature its place in phi and E's number; for every number of phi the one or two features that hold it,
    one past the last feature where there is no second."""
    pairs = torch.tensor(
        [(i, j) for at in range(0, d, BLOCK) for i in range(at, min(at + BLOCK, d)) for j in range(at, d)]
    )
    low, high = pairs.aminmax(dim=1)
    where = torch.cat((torch.arange(1 + d), 1 + d + high * (high + 1) // 2 + low))
    # Both orders of a pair within a block hold it, each 1 / sqrt(2) times.
    twice = (low // BLOCK == high // BLOCK) & (low != high)
    once = torch.ones(len(twice), dtype=torch.float64).masked_fill(twice, math.sqrt(0.5))
    factor = torch.cat((torch.ones(1 + d, dtype=torch.float64), once))
    places = torch.full((2, 1 + d + d * (d + 1) // 2), len(where))
    ordered = torch.cat((torch.ones(1 + d, dtype=torch.bool), pairs[:, 0] <= pairs[:, 1]))
    here = torch.arange(len(where))
    places[0, where[ordered]] = here[ordered]
    places[1, where[~ordered]] = here[~ordered]
    return where, factor, places[0], places[1]


def _columns(x: Tensor, index: Tensor) -> Tensor:
    """Columns of `[..., n]`; on a CPU ten times faster from a matrix."""
    return x.reshape(-1, x.shape[-1]).index_select(1, index.to(x.device)).reshape(*x.shape[:-1], len(index))


def _same(x: Tensor) -> Tensor:
    return x


def _put(found: Tensor, out: Tensor | None = None) -> Tensor:
    return found if out is None else out.copy_(found)
