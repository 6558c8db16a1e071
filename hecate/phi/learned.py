"""Initial values of learned projections."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hecate.errors import ConfigError, ShapeError
from hecate.phi.base import Params


def seeded(generator: torch.Generator | None) -> torch.Generator:
    """The generator itself, or a fresh one with seed 0: the global random state plays no part."""
    return torch.Generator().manual_seed(0) if generator is None else generator


def scaled_normal(
    shape: tuple[int, int, int],
    generator: torch.Generator,
    dtype: torch.dtype,
    device: torch.device | str | None,
) -> Tensor:
    """`[H, fan_in, fan_out]` with entries N(0, 1/fan_in): outputs keep the inputs' variance.

    Drawn in float64 where the generator lives and then cast: one seed gives one matrix in every
    dtype.
    """
    if min(shape) < 1:
        raise ShapeError(f"heads and widths must be at least 1, got {list(shape)}")
    place = generator.device
    draw = torch.randn(shape, generator=generator, dtype=torch.float64, device=place)
    return (draw / math.sqrt(shape[1])).to(dtype=dtype, device=device)


def learned(kind: str, params: Params, name: str) -> Tensor:
    """A learned parameter, or a ConfigError that says where parameters come from."""
    if name not in params["learned"]:
        raise ConfigError(
            f"feature map {kind!r} needs its learned parameter {name!r}, got "
            f"{sorted(params['learned'])}; pass params=feature_map.init(d, generator=...)"
        )
    return params["learned"][name]
