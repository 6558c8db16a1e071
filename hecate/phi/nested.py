"""What maps made of maps share: one flat dictionary of parameters, prefixed by position."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from hecate.phi.base import FeatureMap, Params
from hecate.phi.learned import seeded


def nested_init(
    maps: Sequence[FeatureMap],
    widths: Sequence[int],
    *,
    heads: int,
    generator: torch.Generator | None,
    dtype: torch.dtype,
    device: torch.device | str | None,
) -> Params:
    """Parameters of all maps, drawn in order from one generator: no two share their draws."""
    source = seeded(generator)
    return _merged(
        map_.init(d, heads=heads, generator=source, dtype=dtype, device=device)
        for map_, d in zip(maps, widths, strict=True)
    )


def nested_redraw(maps: Sequence[FeatureMap], params: Params, generator: torch.Generator) -> Params:
    """Fresh draws for the random maps; the parameters of the others stay."""
    return _merged(
        map_.redraw(own(params, i), generator) if map_.is_random else own(params, i)
        for i, map_ in enumerate(maps)
    )


def own(params: Params, index: int) -> Params:
    """The parameters of the map at a position, without their prefix."""
    mark = f"{index}."

    def stripped(group: dict[str, Tensor]) -> dict[str, Tensor]:
        return {k.removeprefix(mark): t for k, t in group.items() if k.startswith(mark)}

    return {"learned": stripped(params["learned"]), "frozen": stripped(params["frozen"])}


def prefixed(tensors: dict[str, Tensor], index: int) -> dict[str, Tensor]:
    """The inverse of `own` for one group."""
    return {f"{index}.{name}": tensor for name, tensor in tensors.items()}


def _merged(each: Iterable[Params]) -> Params:
    merged: Params = {"learned": {}, "frozen": {}}
    for index, params in enumerate(each):
        merged["learned"].update(prefixed(params["learned"], index))
        merged["frozen"].update(prefixed(params["frozen"], index))
    return merged
