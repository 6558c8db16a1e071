"""Learned projections: initial values, and the affine map with its derivative."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hecate.errors import ConfigError, ShapeError
from hecate.phi.base import FeatureMap, Params, per_head, project_vjp, sum_to_heads
from hecate.phi.random import project_precisely
from hecate.sizes import without_storage


class Learned(FeatureMap):
    """Helper for maps with learned parameters of the `shapes` that a variant gives: matrices start from N(0, 1/fan_in),
    vectors at 0. Not a variant itself: it has no kind."""

    def init(
        self,
        d: int,
        *,
        heads: int = 1,
        generator: torch.Generator | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> Params:
        """Fresh parameters for every head, drawn in the order of `shapes`."""
        shapes, source = self.shapes(d), seeded(generator)
        found = without_storage(shapes, heads, dtype, device)
        if found is None:
            found = {
                name: self.start(name, (heads, *shape), source).to(dtype=dtype, device=device)
                for name, shape in shapes.items()
            }
        return {"learned": found, "frozen": {}}

    def start(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """How a parameter `[H, ...]` starts: in float64, where the generator lives."""
        if len(shape) == 2:
            return torch.zeros(shape, dtype=torch.float64, device=generator.device)
        return scaled_normal(shape, generator)


def seeded(generator: torch.Generator | None) -> torch.Generator:
    """The generator itself, or a fresh one with seed 0: the global random state plays no part."""
    return torch.Generator().manual_seed(0) if generator is None else generator


def scaled_normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """`[H, fan_in, fan_out]` with entries N(0, 1/fan_in): outputs keep the inputs' variance.

    In float64, to be cast: one seed gives one matrix in every dtype.
    """
    if min(shape) < 1:
        raise ShapeError(f"heads and widths must be at least 1, got {list(shape)}")
    place = generator.device
    draw = torch.randn(shape, generator=generator, dtype=torch.float64, device=place)
    return draw / math.sqrt(shape[1])


def learned(kind: str, params: Params, name: str) -> Tensor:
    """A learned parameter, or a ConfigError that says where parameters come from."""
    if name not in params["learned"]:
        raise ConfigError(
            f"feature map {kind!r} needs its learned parameter {name!r}, got "
            f"{sorted(params['learned'])}; pass params=feature_map.init(d, generator=...)"
        )
    return params["learned"][name]


def affine(kind: str, x: Tensor, params: Params) -> Tensor:
    """x weight + bias per head, from the learned parameters of those names; float32 or better."""
    weight, bias = (learned(kind, params, name) for name in ("weight", "bias"))
    product = project_precisely(x, weight)
    return product + per_head(bias, x).to(product)


def affine_vjp(x: Tensor, params: Params, g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Cotangents of x, weight and bias from the cotangent g of `affine`."""
    weight, bias = (params["learned"][name] for name in ("weight", "bias"))
    gx, gweight = project_vjp(x.to(g.dtype), weight.to(g.dtype), g)
    gbias = sum_to_heads(g, bias.shape[0])
    return gx.to(x.dtype), {"weight": gweight.to(weight.dtype), "bias": gbias.to(bias.dtype)}
