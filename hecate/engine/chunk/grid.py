"""Where the tokens of a chunk engine stand when chunks differ between memories.

A masked token does not move its memory's place in the chunk, and a reset starts a chunk anew. So every memory lays its
own tokens into cells of at most S: a cell begins where a chunk opens, where a reset is, and after S tokens. Cells are
filled from the right, so the token that closes a chunk is the last of its cell; what stays empty writes nothing, and
nobody reads it. [ENG-CHUNK-D4]
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hecate.engine.tokens import expand_to
from hecate.tape import Block, Tensors, can_inspect


class Grid(NamedTuple):
    """The cells of N memories, K each, and the maps between tokens and places.

    `places` `[N, T]` names the place of a token in `[N, K S]`, `tokens` the token at a place, T for none. Masks are
    `[N, K]`: whether a cell holds the token that opens or that closes a chunk, and whether the memory restarts before
    it. `write` is `[N, K S]`; `position` that after the last token.
    """

    cells: int
    places: Tensor
    tokens: Tensor
    write: Tensor
    opens: Tensor
    closes: Tensor
    resets: Tensor | None
    position: Tensor

    def lay(self, fill: float = 0.0) -> Block:
        """`[N, T, ...]` -> `[N, K S, ...]`, empty places filled."""

        def forward(x: Tensor) -> tuple[Tensors, None]:
            return (_take(_padded(x, fill), self.tokens),), None

        def vjp(_: None, g: Tensor) -> tuple[Tensor]:
            return (_take(g, self.places),)

        return Block("chunk.lay", forward, vjp)

    def collect(self) -> Block:
        """`[N, K S, ...]` -> `[N, T, ...]`."""

        def forward(x: Tensor) -> tuple[Tensors, None]:
            return (_take(x, self.places),), None

        def vjp(_: None, g: Tensor) -> tuple[Tensor]:
            return (_take(_padded(g, 0.0), self.tokens),)

        return Block("chunk.collect", forward, vjp)


def grid_of(write: Tensor | None, reset: Tensor | None, position: Tensor, length: int, chunk: int, size: int) -> Grid:
    """The cells of a sequence from its masks `[N, T]` and the positions `[N]` at its start."""
    shape = (position.shape[0], length)
    written = _all(shape, position) if write is None else write
    place, carried, cell, offset = _cells(written, reset, position, chunk, size)
    cells = _count(cell, reset, length, chunk, size)
    ones = torch.ones_like(cell)
    filled = torch.zeros(shape[0], cells, dtype=cell.dtype, device=cell.device)
    filled = filled.scatter_add(1, cell, ones)
    # From the right: the last token of a cell stands at its end.
    places = cell * size + (size - filled.gather(1, cell)) + offset
    empty = torch.full((shape[0], cells * size), length, dtype=cell.dtype, device=cell.device)
    steps = torch.arange(length, device=cell.device).expand(shape)
    tokens = empty.scatter(1, places, steps)

    def laid(mask: Tensor) -> Tensor:
        return _take(torch.cat([mask, torch.zeros_like(mask[:, :1])], 1), tokens)

    def within(mask: Tensor) -> Tensor:
        return laid(mask).unflatten(1, (cells, size)).any(-1)

    return Grid(
        cells,
        places,
        tokens,
        laid(written),
        within(written & (place == 0) & ~carried),
        within(written & (place == chunk - 1)),
        None if reset is None else within(reset),
        (place[:, -1] + written[:, -1]) % chunk,
    )


def steps_of(write: Tensor | None, reset: Tensor | None, position: Tensor, length: int, chunk: int, size: int) -> int:
    """How many cells the longest memory has: the steps that the chunk engine takes."""
    shape = (position.shape[0], length)
    written = _all(shape, position) if write is None else write
    cell = _cells(written, reset, position, chunk, size)[2]
    return _count(cell, reset, length, chunk, size)


def _all(shape: tuple[int, int], like: Tensor) -> Tensor:
    return torch.ones(shape, dtype=torch.bool, device=like.device)


def _cells(
    written: Tensor, reset: Tensor | None, position: Tensor, chunk: int, size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Per token: its place in the chunk, whether only the carried state lies before it, its cell, and its place in the
    cell."""
    count = written.long().cumsum(1) - written.long()
    base = (-position).unsqueeze(1).expand_as(count)
    if reset is not None:
        base = torch.where(reset, count, base).cummax(1).values
    writes = count - base
    number = writes.div(chunk, rounding_mode="floor")
    first = torch.ones_like(written[:, :1])
    new = torch.cat([first, number[:, 1:] != number[:, :-1]], 1)
    if reset is not None:
        new = new | reset
    steps = torch.arange(written.shape[1], device=written.device).expand_as(count)
    offset = (steps - torch.where(new, steps, 0).cummax(1).values) % size
    cell = (new | (offset == 0)).long().cumsum(1) - 1
    return writes % chunk, (base < 0) & (count == 0), cell, offset


def _count(cell: Tensor, reset: Tensor | None, length: int, chunk: int, size: int) -> int:
    """The number of cells; what it can be at most where values may not be seen."""
    if can_inspect(cell):
        return int(cell[:, -1].max()) + 1 if cell.numel() else 1
    return length if reset is not None else min(length, length // chunk + 2 + length // size)


def _padded(x: Tensor, fill: float) -> Tensor:
    return torch.cat([x, torch.full_like(x[:, :1], fill)], 1)


def _take(x: Tensor, index: Tensor) -> Tensor:
    """`x[n, index[n, i]]`."""
    wide = expand_to(index, x)
    return x.gather(1, wide.expand(*index.shape, *x.shape[2:]))
