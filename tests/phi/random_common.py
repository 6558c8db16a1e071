"""What the tests of feature maps share."""

import math
from functools import lru_cache

import pytest
import torch
from torch import Tensor

from hecate.phi import FeatureMap, Params
from hecate.tape import Block
from tests.phi.examples import EXAMPLES, examples

F64 = torch.float64
EMPTY: Params = {"learned": {}, "frozen": {}}
# Both sides evaluate the same formula in float64 with a handful of roundings.
EXACT = {"rtol": 1e-13, "atol": 1e-14}
SIGMAS = 5.0  # accepted deviations of a Monte-Carlo mean, in standard errors
ALIKE = (EXAMPLES["random_maclaurin"][3], EXAMPLES["sorf"][0])  # so few draws that those of two seeds may be the same
MAPS = [
    made
    for made in examples()
    if made.is_random and made not in ALIKE and not {"maps", "inner"} & type(made).model_fields.keys()
]
each_map = pytest.mark.parametrize("feature_map", MAPS, ids=repr)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=seeded(seed))


def drawn_params(feature_map: FeatureMap, d: int, heads: int = 1) -> Params:
    return feature_map.init(d, heads=heads, generator=seeded(1), dtype=F64)


def pair(length: float, cosine: float, d: int = 8) -> tuple[Tensor, Tensor]:
    """Two vectors of one length with a given cosine between them."""
    x, y = torch.zeros(d, dtype=F64), torch.zeros(d, dtype=F64)
    x[0], y[0], y[1] = length, length * cosine, length * math.sqrt(1 - cosine**2)
    return x, y


def one_sided_pair() -> tuple[Tensor, Tensor]:
    x, y = torch.zeros(8, dtype=F64), torch.zeros(8, dtype=F64)
    x[0], x[1], y[0], y[2] = 0.5, 0.3, 0.6, 0.2
    return x, y


@lru_cache(maxsize=32)
def draws(feature_map: FeatureMap, d: int, replicas: int) -> Params:
    """So many independent draws, one per head: pairs of vectors that are estimated by one map share them."""
    return feature_map.init(d, heads=replicas, generator=seeded(1), dtype=F64)


def estimates(feature_map: FeatureMap, x: Tensor, y: Tensor, replicas: int) -> Tensor:
    """The estimated kernel of one pair under `replicas` independent draws."""
    d = x.shape[-1]
    params = draws(feature_map, d, replicas)
    fx, fy = (feature_map(v.expand(replicas, d), params) for v in (x, y))
    return (fx * fy).sum(-1)


def deviation(samples: Tensor, expected: float) -> float:
    """Distance of the sample mean from its expectation, in standard errors."""
    return float((samples.mean() - expected).abs() / (samples.std() / math.sqrt(len(samples))))


def bound_block(feature_map: FeatureMap, params) -> Block:
    """The map as a block of x alone: draws are constants."""
    return Block(
        feature_map.kind,
        lambda x: ((feature_map.forward(x, params)[0],), feature_map.forward(x, params)[1]),
        lambda residuals, g: (feature_map.vjp(residuals, g)[0],),
    )
