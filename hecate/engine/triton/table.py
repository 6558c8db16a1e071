"""Launch settings of the kernels, from a table: there is no autotuning, so a first call times no variants."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

FEWEST, ROUND = 16, 64  # least side of an operand; least of a bfloat16 one, whose rows then have 128 bytes
BLOCK, SEGMENT = 16, 64  # fewest and most tokens of a chunk, the latter also between saved states
CHANNELS = 16  # channels per program of `channel_borders`: two programs fit side by side


class Launch(NamedTuple):
    """Values per tile, and warps per program."""

    tile: int
    warps: int


class Walks(NamedTuple):
    """Launches of `factors`, of the walks `scan` and `pull`, and of the kernels of rows after them; apart: outputs of
    `scan` have a launch of their own, over all chunks in parallel; stages: loads that a walk has in flight."""

    factors: Launch
    walk: Launch
    rows: Launch
    apart: bool
    stages: int


# (oldest architecture, widest keys, operands in bfloat16): warps of `factors`, walks, walks with momentum, tile of
# rows. By the compiler's registers and, for bfloat16 keys of 128, by an H200: `factors` takes .44 ms with 4 warps and
# .77 with 8; tiles of 32 values make walks a tenth to a fifth slower, 4 warps make `gates` a seventh slower.
WALKS = {
    (90, 128, True): (4, Launch(64, 4), Launch(64, 8), 64),
    (90, 64, False): (4, Launch(64, 4), Launch(32, 4), 32),
    (90, 128, False): (4, Launch(32, 4), Launch(32, 4), 32),
    (90, 256, False): (8, Launch(16, 8), Launch(16, 8), 32),
    (0, 128, True): (8, Launch(32, 4), Launch(32, 8), 32),
    (0, 256, False): (4, Launch(16, 4), Launch(16, 8), 16),
}


def least_of(card: int, exact: str) -> int:
    """Fewest rows of an operand in shared memory: from sm_90 on, Triton 3.6 compiles shorter bfloat16 operands so that
    they are read out of bounds. Older cards hold operands in registers, which longer ones overflow."""
    return FEWEST if exact == "tf32x3" or card < 90 else ROUND


def walked(card: int, height: int, width: int, *, momentum: bool, narrow: bool, whole: bool, least: int) -> Walks:
    """The launches for a card; whole: one tile per row of values; least: side of an operand in shared memory."""
    oldest = max(known for known, *_ in WALKS if known <= card)
    widest = min(most for known, most, of in WALKS if (known, of) == (oldest, narrow) and width <= most)
    ahead, alone, beside, rows = WALKS[oldest, widest, narrow]
    tile, warps = beside if momentum else alone
    if not narrow and least == ROUND:
        tile = min(tile, ROUND // 2)  # in chunks of 16 tokens, products of fewer than 64 rows use other instructions
    padded = max(FEWEST, 1 << (height - 1).bit_length())
    tile = padded if whole else min(padded, tile)
    walk, rows_launch = Launch(max(least, tile) if narrow else tile, warps), Launch(max(least, min(padded, rows)), 8)
    return Walks(Launch(0, ahead), walk, rows_launch, narrow and momentum, 1 + narrow)


class Chunks(NamedTuple):
    """Tokens per chunk, tokens between saved states, and whether the walks' operands, and tensors saved between
    kernels, are bfloat16."""

    size: int
    segment: int
    narrow: bool


def chunks_of(width: int, exact: str, *, linear: bool) -> Chunks:
    """Chunks for a width of keys and a precision. In bfloat16 a chunk is a whole segment if u is linear; rules that
    solve rows one after another, or need more digits, have chunks of BLOCK tokens."""
    narrow = exact == "bf16" and linear and width <= 128
    # Tokens per program of the backward pass: as many as a card has room for beside such keys.
    segment = SEGMENT // 2 if width > 128 and exact == "tf32x3" else SEGMENT
    return Chunks(segment if narrow else BLOCK, segment, narrow)


class Documents(NamedTuple):
    """The documents of a row, for its kernels: programs per memory, saved states in all, and tables on the device of
    documents (first token, tokens, first saved state) and of spans between saved states (first token, end of the
    document); a row of one document has no tables."""

    programs: int
    segments: int
    docs: Tensor
    spans: Tensor

    @classmethod
    def of(cls, borders: tuple[int, ...] | None, length: int, segment: int, memory: Tensor) -> Documents:
        """Documents of a row of `length` tokens, with a state saved every `segment` tokens, on the device of `memory`.
        This stands in for tables that are not read, so that a single document allocates nothing."""
        if borders is None:
            return cls(1, -(-length // segment), memory, memory)
        tables = _tables(borders, segment)
        docs, spans = (torch.tensor(table).to(memory.device, non_blocking=True) for table in tables)
        return cls(len(tables[0]), len(tables[1]), docs, spans)

    @classmethod
    def parts(cls, rows: int, length: int, part: int, segment: int, memory: Tensor) -> Documents:
        """The parts of rows, laid end to end, as documents. Their tables are made on the device, where a graph owns
        them."""
        start = torch.arange(0, length, part, device=memory.device).repeat(rows, 1)
        row = torch.arange(0, rows, device=memory.device).unsqueeze(1)
        docs = start + row * length, (length - start).clamp(max=part), start // segment + row * -(-length // segment)
        at = torch.arange(0, length, segment, device=memory.device).repeat(rows, 1)
        spans = at + row * length, (at // part * part + part).clamp(max=length) + row * length
        first, second = (torch.stack(table, -1).flatten(0, 1) for table in (docs, spans))
        return cls(len(first), len(second), first, second)

    def met(self, first: Tensor, slot: Tensor, restart: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Cotangents of the memories, slots and restart weights, from those of the programs: each document starts from
        the restart weights and without momentum."""
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
    """The architecture of a card; other devices count as the newest known."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
