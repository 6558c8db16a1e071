"""What maps made of maps share: their parameters, drawn in order and kept in one flat dictionary.

Maps of several name parameters by position, `0.weight`; maps around one keep its names.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import torch
from pydantic import Field
from torch import Tensor

from hecate.phi.base import FeatureMap, Params
from hecate.phi.learned import seeded

Item = TypeVar("Item")


class Wrapper(FeatureMap):
    """Helper for maps around one map of the same width. Not a variant itself: it has no kind."""

    inner: FeatureMap

    def inner_maps(self) -> tuple[FeatureMap, ...]:
        return (self.inner,)

    def output_dim(self, d: int) -> int:
        return self.inner.output_dim(d)

    def init(
        self,
        d: int,
        *,
        heads: int = 1,
        generator: torch.Generator | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> Params:
        """Parameters of the inner map, under its own names."""
        return self.inner.init(d, heads=heads, generator=generator, dtype=dtype, device=device)

    def shapes(self, d: int) -> dict[str, tuple[int, ...]]:
        """Those of the inner map."""
        return self.inner.shapes(d)

    def redraw(self, params: Params, generator: torch.Generator) -> Params:
        """The inner map's."""
        return self.inner.redraw(params, generator)


class Several(FeatureMap):
    """Helper for maps made of several. Not a variant itself: it has no kind."""

    maps: tuple[FeatureMap, ...] = Field(min_length=1, strict=False)

    def inner_maps(self) -> tuple[FeatureMap, ...]:
        return self.maps

    def input_dims(self, d: int) -> list[int]:
        """The width that each map is given."""
        return [d] * len(self.maps)

    def shapes(self, d: int) -> dict[str, tuple[int, ...]]:
        """Those of all maps, named by position."""
        given = enumerate(zip(self.maps, self.input_dims(d), strict=True))
        each = [prefixed(map_.shapes(width), index) for index, (map_, width) in given]
        return {name: shape for shapes in each for name, shape in shapes.items()}

    def init(
        self,
        d: int,
        *,
        heads: int = 1,
        generator: torch.Generator | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> Params:
        """Parameters of all maps, drawn in order from one generator: no two share their draws."""
        source = seeded(generator)
        return _merged(
            map_.init(width, heads=heads, generator=source, dtype=dtype, device=device)
            for map_, width in zip(self.maps, self.input_dims(d), strict=True)
        )

    def redraw(self, params: Params, generator: torch.Generator) -> Params:
        """Fresh draws for the random maps; the parameters of the others stay."""
        if not self.is_random:
            return super().redraw(params, generator)
        return _merged(
            map_.redraw(own(params, i), generator) if map_.is_random else own(params, i)
            for i, map_ in enumerate(self.maps)
        )


def own(params: Params, index: int) -> Params:
    """The parameters of the map at an index, without their prefix; all share the position."""
    mark = f"{index}."

    def stripped(group: dict[str, Tensor]) -> dict[str, Tensor]:
        return {k.removeprefix(mark): t for k, t in group.items() if k.startswith(mark)}

    return {**params, "learned": stripped(params["learned"]), "frozen": stripped(params["frozen"])}


def prefixed(items: dict[str, Item], index: int) -> dict[str, Item]:
    """The inverse of `own` for one group."""
    return {f"{index}.{name}": item for name, item in items.items()}


def _merged(each: Iterable[Params]) -> Params:
    merged: Params = {"learned": {}, "frozen": {}}
    for index, params in enumerate(each):
        merged["learned"].update(prefixed(params["learned"], index))
        merged["frozen"].update(prefixed(params["frozen"], index))
    return merged
