"""Launch settings of the kernels: no launch tries several ways, so that a first call costs what the others do."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

FEWEST, ROUND = (
    16,
    64,
)  # numbers of a side of what products take: at least, and of bfloat16, whose rows are 128 bytes then
BLOCK, SEGMENT = 16, 64  # tokens of a chunk at least and at most, the latter between kept states
CHANNELS = 16  # of a program of `channel_borders`, which leaves room for a second one beside it


class Launch(NamedTuple):
    """Values of a tile, warps of a program, and the loads that it has under way at once."""

    tile: int
    warps: int
    stages: int


class Walks(NamedTuple):
    """Of the kernels; apart: whether outputs of `scan` have a launch of their own, of all chunks at once; split:
    whether `tokens` takes queries and keys in two launches."""

    factors: Launch
    scan: Launch
    pull: Launch
    tokens: Launch
    gates: Launch
    apart: bool
    split: bool


# (oldest architecture, widest keys, momentum, operands in bfloat16). By the compiler's registers, and for keys of 128
# in bfloat16 by an H200: `factors` takes .44 ms of 4 warps and .77 of 8, tiles of 32 values cost walks a tenth to a
# fifth, `gates` a seventh of 4 warps.
WALKS = {
    (90, 64, False, True): Walks(
        Launch(0, 4, 1), Launch(64, 4, 2), Launch(64, 4, 2), Launch(64, 8, 1), Launch(64, 8, 1), False, False
    ),
    (90, 64, True, True): Walks(
        Launch(0, 4, 1), Launch(64, 8, 2), Launch(64, 8, 2), Launch(64, 8, 1), Launch(64, 8, 1), True, False
    ),
    (90, 128, False, True): Walks(
        Launch(0, 4, 1), Launch(64, 4, 2), Launch(64, 4, 2), Launch(64, 8, 1), Launch(64, 8, 1), False, False
    ),
    (90, 128, True, True): Walks(
        Launch(0, 4, 1), Launch(64, 8, 2), Launch(64, 8, 2), Launch(64, 8, 1), Launch(64, 8, 1), True, False
    ),
    (90, 64, False, False): Walks(
        Launch(0, 4, 1), Launch(64, 4, 1), Launch(64, 4, 1), Launch(32, 8, 1), Launch(32, 8, 1), False, False
    ),
    (90, 64, True, False): Walks(
        Launch(0, 4, 1), Launch(32, 4, 1), Launch(32, 4, 1), Launch(32, 8, 1), Launch(32, 8, 1), False, False
    ),
    (90, 128, False, False): Walks(
        Launch(0, 4, 1), Launch(32, 4, 1), Launch(32, 4, 1), Launch(32, 8, 1), Launch(32, 8, 1), False, False
    ),
    (90, 128, True, False): Walks(
        Launch(0, 4, 1), Launch(32, 4, 1), Launch(32, 4, 1), Launch(32, 8, 1), Launch(32, 8, 1), False, False
    ),
    (90, 256, False, False): Walks(
        Launch(0, 8, 1), Launch(16, 8, 1), Launch(16, 8, 1), Launch(32, 8, 1), Launch(32, 8, 1), False, False
    ),
    (90, 256, True, False): Walks(
        Launch(0, 8, 1), Launch(16, 8, 1), Launch(16, 8, 1), Launch(32, 8, 1), Launch(32, 8, 1), False, False
    ),
    (0, 128, False, True): Walks(
        Launch(0, 8, 1), Launch(32, 4, 2), Launch(32, 4, 2), Launch(32, 8, 1), Launch(32, 8, 1), False, False
    ),
    (0, 128, True, True): Walks(
        Launch(0, 8, 1), Launch(32, 8, 2), Launch(32, 8, 2), Launch(32, 8, 1), Launch(32, 8, 1), True, False
    ),
    (0, 256, False, False): Walks(
        Launch(0, 4, 1), Launch(16, 4, 1), Launch(16, 4, 1), Launch(16, 8, 1), Launch(16, 8, 1), False, False
    ),
    (0, 256, True, False): Walks(
        Launch(0, 4, 1), Launch(16, 8, 1), Launch(16, 8, 1), Launch(16, 8, 1), Launch(16, 8, 1), False, False
    ),
}


def walked(card: int, height: int, width: int, *, momentum: bool, narrow: bool, whole: bool, least: int) -> Walks:
    """The launches of the walks on a card; whole: a row of values is one tile; least: of the sides of what a product
    takes from memory."""
    oldest = max(least for least, *_ in WALKS if least <= card)
    widest = min(most for least, most, _, of in WALKS if (least, of) == (oldest, narrow) and width <= most)
    ahead, *walks, apart, split = WALKS[oldest, widest, momentum, narrow]
    padded = max(FEWEST, 1 << (height - 1).bit_length())
    scan, pull, tokens, gates = (own._replace(tile=min(padded, own.tile)) for own in walks)
    if whole:
        scan, pull = (own._replace(tile=padded) for own in (scan, pull))
    tokens, gates = (own._replace(tile=max(least, own.tile)) for own in (tokens, gates))
    if narrow:
        scan, pull = (own._replace(tile=max(least, own.tile)) for own in (scan, pull))
    return Walks(ahead, scan, pull, tokens, gates, apart, split)


class Chunks(NamedTuple):
    """Tokens of a chunk, tokens between kept states, and whether operands of the walks' products, and what is kept
    between kernels, are bfloat16."""

    size: int
    segment: int
    narrow: bool


def chunks_of(width: int, exact: str, *, linear: bool) -> Chunks:
    """Chunks of keys of a width in a precision. In bfloat16 a chunk is a segment where u is linear; what rows follow
    one another for, or needs more digits, goes by blocks."""
    narrow = exact == "bf16" and linear and width <= 128
    segment = kept_every(width, exact)
    return Chunks(segment if narrow else BLOCK, segment, narrow)


def kept_every(width: int, exact: str) -> int:
    """Tokens between kept states, which are those of a program of the backward pass: as many as a card has room for
    beside keys of a width in a precision."""
    return SEGMENT // 2 if width > 128 and exact == "tf32x3" else SEGMENT


class Documents(NamedTuple):
    """Documents of a row for its kernels: the number of programs for a memory, of kept states in all, and tables on the
    device, of documents (first token, tokens, first kept state) and of spans between kept states (first token, end of
    the document); a row of one document has none."""

    programs: int
    segments: int
    docs: Tensor
    spans: Tensor

    @classmethod
    def of(cls, borders: tuple[int, ...] | None, length: int, segment: int, memory: Tensor) -> Documents:
        """Documents of a row of `length` tokens, with a state kept every `segment` of them, on the device of `memory`,
        which stands for tables that are not read: a token decoded in place makes no tensor anew."""
        if borders is None:
            return cls(1, -(-length // segment), memory, memory)
        tables = _tables(borders, segment)
        docs, spans = (torch.tensor(table).to(memory.device, non_blocking=True) for table in tables)
        return cls(len(tables[0]), len(tables[1]), docs, spans)

    @classmethod
    def parts(cls, rows: int, length: int, part: int, segment: int, memory: Tensor) -> Documents:
        """The parts of rows that lie end to end as documents, by tables made on the device, so that a graph of a card
        holds its own."""
        start = torch.arange(0, length, part, device=memory.device).repeat(rows, 1)
        row = torch.arange(0, rows, device=memory.device).unsqueeze(1)
        docs = start + row * length, (length - start).clamp(max=part), start // segment + row * -(-length // segment)
        at = torch.arange(0, length, segment, device=memory.device).repeat(rows, 1)
        spans = at + row * length, (at // part * part + part).clamp(max=length) + row * length
        first, second = (torch.stack(table, -1).flatten(0, 1) for table in (docs, spans))
        return cls(len(first), len(second), first, second)

    def each(self, states: Tensor) -> Tensor:
        """Room for a state of every document, in the order of documents, of memories `[N, V, P]`."""
        return states.new_empty(self.programs * len(states), *states.shape[1:])

    def met(self, first: Tensor, slot: Tensor, restart: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Cotangents of the memories, of their slots and of what they restart at, from those that programs leave: each
        document starts at the last, and at no momentum."""
        if self.docs is self.spans:
            return first, slot, restart
        whole = first.unflatten(0, (self.programs, -1)).sum(0)
        return torch.zeros_like(whole), torch.zeros_like(whole), whole


@lru_cache(16)
def _tables(borders: tuple[int, ...], segment: int) -> tuple[list[list[int]], list[list[int]]]:
    docs: list[list[int]] = []
    spans: list[list[int]] = []
    for start, end in pairwise(borders):
        docs.append([start, end - start, len(spans)])
        spans += [[at, end] for at in range(start, end, segment)]
    return docs, spans


def card_of(device: torch.device) -> int:
    """The architecture of a card; what has none counts as the newest known."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
