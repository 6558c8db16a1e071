"""Where a sequence is cut so that each stretch reads the boxes in one state."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hecate.tape.bridge import can_inspect


class Stretches(NamedTuple):
    """Cuts of a sequence of T tokens.

    Fields:
        borders: 0, the cuts, T.
        opens: `[B, T]`, whether a chunk starts with the token; None where one does at every cut.
        position: `[B]`, tokens written since the last chunk's start.
    """

    borders: list[int]
    opens: Tensor | None
    position: Tensor


def stretches(period: int, position: Tensor, write: Tensor | None, reset: Tensor | None, length: int) -> Stretches:
    """A cut wherever a chunk of `period` written tokens ends, or a document starts, in any row.

    Masked tokens do not count; a reset starts a chunk. Where values cannot be looked at, every token is a stretch of
    its own, which is as exact and slower. [SELF-CHUNK-D1]
    """
    if period == 1:
        return Stretches([*range(length + 1)], None, position)
    shape = (len(position), length)
    written = position.new_ones(shape) if write is None else write.long()
    before, since = written.cumsum(1) - written, -position.unsqueeze(1).expand(shape)
    if reset is not None:
        # Counts only grow, so the largest one at a reset so far is that of the last reset.
        since = torch.where(reset, before, since).cummax(1).values
    place = before - since
    after = (place + written) % period
    place = place % period
    if can_inspect(place):
        ends = (place > after).any(0)[:-1]
        if reset is not None:
            ends = ends | reset.any(0)[1:]
        cuts = [at + 1 for at, end in enumerate(ends.tolist()) if end]
    else:
        cuts = [*range(1, length)]
    return Stretches([0, *cuts, length], place == 0, after[:, -1])
