"""The line of slots that attention looks back on, who sees what in it, and windows of it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Line(NamedTuple):
    """N slots, those kept from earlier calls and T new tokens, in the order of writing.

    Rows are 1 where all sequences are alike. Slots that nobody may see come first: masked tokens and places that were
    never filled.

    Fields:
        order: where each slot is in kept and new tokens, `[B, N]`; None: in that order.
        document: of each slot, `[B or 1, N]`; -1 for one of an earlier call or of no document.
        own: document of each new token, `[B or 1, T]`.
        rank: slot that each new token has, or would have had unmasked, `[B or 1, T]`.
        end: slots from here on are hidden from the token, `[B or 1, T]`.
    """

    order: Tensor | None
    document: Tensor
    own: Tensor
    rank: Tensor
    end: Tensor


def line_of(present: Tensor | None, like: Tensor, write: Tensor | None, reset: Tensor | None) -> Line:
    """The line of kept slots `present` `[B, K]` and the new tokens of `like` `[B, T, ...]`."""
    batch, length = like.shape[:2]
    kept = 0 if present is None else present.shape[1]
    rows = batch if present is not None or write is not None else 1
    own = torch.zeros(rows, length, dtype=torch.int64, device=like.device)
    if reset is not None:
        own = reset.cumsum(1)
    document = own
    if write is not None:
        document = torch.where(write, own, -1)
    if present is not None:
        past = torch.where(present, 0, -1)
        document = torch.cat([past, document.expand(batch, -1)], 1)
    rank = kept + torch.arange(length, device=like.device).unsqueeze(0)
    if write is None:
        return Line(None, document, own, rank, rank + 1)
    count = write.cumsum(1)
    hidden = length - count[:, -1:]
    stays = torch.cat([write.new_ones(batch, kept), write], 1)
    order = stays.int().argsort(dim=1, stable=True)
    end = kept + hidden + count
    rank = end - write.long()
    return Line(order, document.gather(1, order), own, rank, end)


def in_order(line: Line, x: Tensor) -> Tensor:
    """x `[B, N, ...]` of kept and new tokens, slot by slot."""
    if line.order is None:
        return x
    return torch.take_along_dim(x, line.order.reshape(*x.shape[:2], *[1] * (x.dim() - 2)), 1)


def last(x: Tensor, count: int | None) -> Tensor:
    """The last slots of x `[B, N, ...]`, zeros ahead of them where N is less; None: all of them."""
    if count is None:
        return x
    missing = max(count - x.shape[1], 0)
    x = F.pad(x, (0, 0) * (x.dim() - 2) + (missing, 0))
    # A copy: a view would keep the whole line in memory.
    return x[:, x.shape[1] - count :].clone()


class Blocks:
    """Queries in blocks, and for every block the window of slots that they may see.

    A sequence no longer than a window or 64 tokens, or without window, is a single block that sees the line.
    """

    def __init__(self, line: Line, window: int | None) -> None:
        self.line, self.length, slots = line, line.rank.shape[1], line.document.shape[1]
        self.window = window
        self.single = window is None or self.length <= max(64, window)
        self.reaches_all = window is None or self.length <= window
        self.lead = self.tail = 0
        self.size, self.reach = self.length, slots
        self.starts: Tensor | None = None
        if window is not None and not self.single:
            self.size = max(64, window // 2)
            self.reach = window - 1 + self.size
            # As many slots ahead of the first token as its window reaches back.
            self.lead = max(window - 1 - (slots - self.length), 0)
            self.tail = -self.length % self.size
            if line.order is not None:
                self.starts = line.rank[:, :: self.size] + self.lead - (window - 1)

    def queries(self, q: Tensor) -> Tensor:
        """`[B, T, ...]` -> `[B, blocks, size, ...]`."""
        padded = F.pad(q, (0, 0) * (q.dim() - 2) + (0, self.tail))
        return padded.unflatten(1, (-1, self.size))

    def slots(self, x: Tensor) -> Tensor:
        """`[B, N, ...]` -> `[B, blocks, reach, ...]`."""
        if self.single:
            return x.unsqueeze(1)
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (self.lead, self.tail))
        if self.starts is None:
            return x.unfold(1, self.reach, self.size).movedim(-1, 2)
        index = self._places(self.starts).clamp(max=x.shape[1] - 1)
        flat = index.reshape(*[x.shape[0], -1], *[1] * (x.dim() - 2))
        return torch.take_along_dim(x, flat, 1).unflatten(1, (-1, self.reach))

    def _places(self, starts: Tensor) -> Tensor:
        return starts.unsqueeze(-1) + torch.arange(self.reach, device=starts.device)

    def visible(self) -> Tensor:
        """Whether a query sees a slot, `[B or 1, blocks, size, reach]`."""
        line, starts = self.line, self.starts
        if starts is None:
            starts = torch.arange(0, self.length, self.size, device=line.rank.device).unsqueeze(0)
        place = (self._places(starts) - self.lead).unsqueeze(2)
        # Slots added ahead and behind are zeros: by then, of no document.
        shown = self.slots(line.document + 1).unsqueeze(2) - 1
        own, rank, end = (self.queries(x).unsqueeze(-1) for x in (line.own, line.rank, line.end))
        seen = (shown == own) & (place < end)
        return seen if self.window is None else seen & (place > rank - self.window)
