"""Maps whose kernel is a polynomial of the inner product, in the layout in which block engines work with them.

Where phi(x).phi(y) = sum_i a_i (x.y)^i, tokens meet each other in kernels of d numbers each, and features are needed only
where tokens meet a state. There any features F of the same kernel serve, since F(x) = E phi(x) with E^T E = I: a memory
M of phi is M E^T of F and comes back as (M E^T) E. Merged monomials of degree 2 have to be gathered one by one; in
blocks of `BLOCK` components they are outer products x_I x_J^T for I <= J, a quarter wider than phi and made and pulled
back by a few broadcast products. [PHI-SERIES-D1]
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
        features: x `[..., d]` -> `[..., width]`.
        pullback: (x, cotangent of the features) -> that of x.
        spread: weights `[..., P]` of phi -> those of the features; its transpose is `gathered`.
        gathered: weights of the features -> those of phi `[..., P]`; undoes `spread`.
    """

    coefficients: tuple[float, ...]
    width: int
    features: Callable[[Tensor], Tensor]
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
    return PowerForm((0.0, 1.0), width, _same, lambda x, g: g, _same, _same)


def own_features(
    coefficients: tuple[float, ...],
    width: int,
    forward: Callable[[Tensor], tuple[Tensor, Any]],
    vjp: Callable[[Any, Tensor], Tensor],
) -> PowerForm:
    """The form of a map that works with its own features, from its forward and its derivative."""
    return PowerForm(
        coefficients, width, lambda x: forward(x)[0], lambda x, g: vjp(forward(x)[1], g), _same, _same
    )


def merged_squares(coefficients: tuple[float, float, float], d: int) -> PowerForm:
    """The form of [sqrt(a_0), sqrt(a_1) x, sqrt(a_2) merged products], ordered as in `hecate.phi.polynomial`."""
    zeroth, first, second = (math.sqrt(a) for a in coefficients)
    parts = [slice(at, min(at + BLOCK, d)) for at in range(0, d, BLOCK)]

    def features(x: Tensor) -> Tensor:
        found = [torch.full_like(x[..., :1], zeroth), first * x]
        for part in parts:
            own = second * x[..., part]
            others = torch.cat((x[..., part], math.sqrt(2) * x[..., part.stop :]), -1)
            found.append((own.unsqueeze(-1) * others.unsqueeze(-2)).flatten(-2))
        return torch.cat(found, -1)

    def pullback(x: Tensor, g: Tensor) -> Tensor:
        widths = [1, d, *((part.stop - part.start) * (d - part.start) for part in parts)]
        _, linear, *blocks = g.split(widths, -1)
        shares = list((first * linear).split(BLOCK, -1))
        for at, (part, block) in enumerate(zip(parts, blocks, strict=True)):
            own, size = x[..., part], part.stop - part.start
            others = torch.cat((own, math.sqrt(2) * x[..., part.stop :]), -1)
            pairs = second * block.unflatten(-1, (size, -1))
            shares[at] = shares[at] + (pairs @ others.unsqueeze(-1)).squeeze(-1)
            back = (own.unsqueeze(-2) @ pairs).squeeze(-2)
            shares[at] = shares[at] + back[..., :size]
            for later in range(at + 1, len(parts)):
                there = slice(parts[later].start - part.start, parts[later].stop - part.start)
                shares[later] = shares[later] + math.sqrt(2) * back[..., there]
        return torch.cat(shares, -1)

    where, factor, first_place, second_place = _places(d)

    def spread(weights: Tensor) -> Tensor:
        return weights.index_select(-1, where.to(weights.device)) * factor.to(weights)

    def gathered(weights: Tensor) -> Tensor:
        scaled = torch.cat((weights * factor.to(weights), torch.zeros_like(weights[..., :1])), -1)
        found = [scaled.index_select(-1, places.to(weights.device)) for places in (first_place, second_place)]
        return found[0] + found[1]

    return PowerForm(coefficients, len(where), features, pullback, spread, gathered)


@lru_cache(maxsize=16)
def _places(d: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For every feature its place in phi and E's number; for every number of phi the one or two features that hold it,
    one past the last feature where there is no second."""
    pairs = torch.tensor([(i, j) for at in range(0, d, BLOCK) for i in range(at, min(at + BLOCK, d)) for j in range(at, d)])
    low, high = pairs.aminmax(dim=1)
    where = torch.cat((torch.arange(1 + d), 1 + d + high * (high + 1) // 2 + low))
    # Both orders of a pair within a block hold it, each 1 / sqrt(2) times.
    twice = (low // BLOCK == high // BLOCK) & (low != high)
    factor = torch.cat((torch.ones(1 + d, dtype=torch.float64), torch.where(twice, math.sqrt(0.5), 1.0).double()))
    places = torch.full((2, 1 + d + d * (d + 1) // 2), len(where))
    ordered = torch.cat((torch.ones(1 + d, dtype=torch.bool), pairs[:, 0] <= pairs[:, 1]))
    here = torch.arange(len(where))
    places[0, where[ordered]] = here[ordered]
    places[1, where[~ordered]] = here[~ordered]
    return where, factor, places[0], places[1]


def _same(x: Tensor) -> Tensor:
    return x
