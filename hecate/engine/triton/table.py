"""Launch settings of the kernels: no launch tries several ways, so that a first call costs what the others do."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

FEWEST, ROUND = 16, 64  # of a side of what products take: at least, and of bfloat16, whose rows are 128 bytes then
BLOCK, SEGMENT = 16, 64  # tokens of a chunk at least and at most, the latter between kept states
CHANNELS = 16  # of a program of `channel_borders`, which leaves room for a second one beside it


class Launch(NamedTuple):
    """Values of a tile, and warps of a program."""

    tile: int
    warps: int


class Walks(NamedTuple):
    """Of `factors`, of the walks `scan` and `pull`, and of the kernels of rows behind them; apart: whether outputs of
    `scan` have a launch of their own, of all chunks at once; stages: the loads that a walk has under way at once."""

    factors: Launch
    walk: Launch
    rows: Launch
    apart: bool
    stages: int


# (oldest architecture, widest keys, operands in bfloat16): warps of `factors`, walks, walks beside a momentum, tile of
# rows. By the compiler's registers, and for keys of 128 in bfloat16 by an H200: `factors` takes .44 ms of 4 warps and
# .77 of 8, tiles of 32 values cost walks a tenth to a fifth, `gates` a seventh of 4 warps.
WALKS = {
    (90, 128, True): (4, Launch(64, 4), Launch(64, 8), 64),
    (90, 64, False): (4, Launch(64, 4), Launch(32, 4), 32),
    (90, 128, False): (4, Launch(32, 4), Launch(32, 4), 32),
    (90, 256, False): (8, Launch(16, 8), Launch(16, 8), 32),
    (0, 128, True): (8, Launch(32, 4), Launch(32, 8), 32),
    (0, 256, False): (4, Launch(16, 4), Launch(16, 8), 16),
}


def least_of(card: int, exact: str) -> int:
    """The fewest rows of what products take from memory: from sm_90 on shorter ones in bfloat16 reach beyond theirs, as
    Triton 3.6 compiles them. Older cards take operands from registers, which longer ones overflow."""
    return FEWEST if exact == "tf32x3" or card < 90 else ROUND


def walked(card: int, height: int, width: int, *, momentum: bool, narrow: bool, whole: bool, least: int) -> Walks:
    """The launches of the walks on a card; whole: a row of values is one tile; least: of the sides of what a product
    takes from memory."""
    oldest = max(known for known, *_ in WALKS if known <= card)
    widest = min(most for known, most, of in WALKS if (known, of) == (oldest, narrow) and width <= most)
    ahead, alone, beside, rows = WALKS[oldest, widest, narrow]
    tile, warps = beside if momentum else alone
    if not narrow and least == ROUND:
        tile = min(tile, ROUND // 2)  # rows of chunks of 16 tokens are short: fewer than 64 go to other instructions
    padded = max(FEWEST, 1 << (height - 1).bit_length())
    tile = padded if whole else min(padded, tile)
    walk, own = Launch(max(least, tile) if narrow else tile, warps), Launch(max(least, min(padded, rows)), 8)
    return Walks(Launch(0, ahead), walk, own, narrow and momentum, 1 + narrow)


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
    # Tokens of a program of the backward pass: as many as a card has room for beside such keys.
    segment = SEGMENT // 2 if width > 128 and exact == "tf32x3" else SEGMENT
    return Chunks(segment if narrow else BLOCK, segment, narrow)


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
