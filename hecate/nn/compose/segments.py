"""Segments of a fixed number of written tokens, counted row by row from each document's start."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Tree = TypeVar("Tree")


class Piece(NamedTuple):
    """Tokens begin..end of a call in which no row begins a segment or document but at `begin`.

    `restarts`: some row begins a document; `closes`: some row completes a segment; `aligned`: all rows are at the
    beginning of a segment.
    """

    begin: int
    end: int
    restarts: bool
    closes: bool
    aligned: bool


def pieces_of(place: Tensor, like: Tensor, write: Tensor | None, reset: Tensor | None, size: int) -> list[Piece]:
    """The pieces of a call over `like` `[B, T, ...]`; `place` `[B]` tokens are in a segment."""
    shape = like.shape[:2]
    if shape[1] == 0:
        return []
    write = torch.ones(shape, dtype=torch.bool, device=place.device) if write is None else write
    reset = torch.zeros_like(write) if reset is None else reset
    count = write.long()
    before = place.unsqueeze(1) + count.cumsum(1) - count
    since = before - torch.where(reset, before, 0).cummax(1).values
    within = since % size
    closing = write & (within == size - 1)
    flags = [reset.any(0), closing.any(0), (within == 0).all(0)]
    restarts, closes, aligned = torch.stack(flags).tolist()
    cuts = {0, shape[1]} | {t for t, found in enumerate(restarts) if found}
    cuts |= {t + 1 for t, found in enumerate(closes) if found}
    return [
        Piece(begin, end, restarts[begin], closes[end - 1], aligned[begin]) for begin, end in pairwise(sorted(cuts))
    ]


def where_rows(rows: Tensor, yes: Tree, no: Tree) -> Tree:
    """A state with the tensors of `yes` in some rows `[B]`, of `no` in the others."""

    def choose(a: Tensor | None, b: Tensor | None) -> Tensor | None:
        if a is None or b is None:
            return b
        return torch.where(rows.reshape(-1, *[1] * (b.dim() - 1)), a, b)

    return pytree.tree_map(choose, yes, no)
