"""One ceiling for all sizes, held by arithmetic before anything is allocated or repeated.

A size out of the question is a `ConfigError` with the bytes, the limit and the knob, never the traceback of what would
have allocated it. [VAR-SIZE-I1]
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from hecate.errors import ConfigError, shorten

MAX_SIZE = 1 << 20
"""Largest width, vocabulary, batch or other size that a user sets."""
MAX_DEPTH = 1 << 10
"""Most layers, taps and whatever else is built or run one after another."""
MAX_NUMBERS = 1 << 31
"""Most numbers of one tensor: 8 GiB in float32."""
MAX_COUNT = (1 << 63) - 1
"""Largest of the counts that nothing is allocated for: a period, a number of steps, a limit."""

Size = Annotated[int, Field(le=MAX_SIZE)]
Depth = Annotated[int, Field(le=MAX_DEPTH)]
Count = Annotated[int, Field(le=MAX_COUNT)]


def check_shapes(shapes: Mapping[str, tuple[int, ...]], cure: str, *lead: int) -> None:
    """Refuses tensors `[*lead, *shape]` of more than `MAX_NUMBERS` numbers; `cure`: what helps."""
    for name, shape in shapes.items():
        whole = (*lead, *shape)
        if prod(whole) > MAX_NUMBERS:
            raise ConfigError(
                f"{name!r} would be a tensor {list(whole)} of {readable(4 * prod(whole))} in "
                f"float32, more than the limit of {readable(4 * MAX_NUMBERS)}; {cure}"
            )


def check_size(size: int, what: str, cure: str, limit: int = MAX_SIZE) -> int:
    """The size, refused where it is no whole number or above the limit."""
    if not hasattr(size, "__index__") or size > limit:
        raise ConfigError(f"{what} must be a whole number up to {limit:,}, got {shorten(size)}; {cure}")
    return size


def without_storage(
    shapes: Mapping[str, tuple[int, ...]], heads: int, dtype: torch.dtype, device: torch.device | str | None
) -> dict[str, Tensor] | None:
    """Tensors `[H, ...]` where the device is "meta", for which nothing is drawn; None elsewhere."""
    if device is None or torch.device(device).type != "meta":
        return None
    return {name: torch.empty(heads, *shape, dtype=dtype, device=device) for name, shape in shapes.items()}


def readable(count: float) -> str:
    """A number of bytes in words."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:,.4g} {unit}"
        count /= 1024
    return f"{count:,.4g} TiB"
