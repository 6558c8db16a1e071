"""Positions of tokens, counted across calls, for feature maps that depend on them."""

from __future__ import annotations

import torch
from torch import Tensor

from hecate.engine.prepare import Sequence
from hecate.errors import ShapeError
from hecate.rule import MemoryConfig, MemoryState


def numbered(config: MemoryConfig, state: MemoryState | None, sequence: Sequence) -> tuple[Sequence, Tensor | None]:
    """The sequence with its tokens' positions, and the count of tokens at its end.

    A position is the number of tokens written since the start or the last reset; both are None where phi needs none.
    [ENG-POS-D1]
    """
    needed, seen = config.feature_map.needs_position, None if state is None else state.seen
    if state is not None and (seen is not None) != needed:
        raise ShapeError(
            f"state.seen is {'a count' if seen is not None else 'None'}, but feature_map "
            f"{config.feature_map.kind!r} needs {'one' if needed else 'none'}; was the state made "
            "with another config?"
        )
    if not needed:
        return sequence, None
    k, written = sequence.k, sequence.write
    if seen is None:
        seen = torch.zeros(k.shape[:1], dtype=torch.int64, device=k.device)
    if seen.shape != k.shape[:1] or seen.dtype != torch.int64 or seen.device != k.device:
        raise ShapeError(
            f"state.seen must be int64 {list(k.shape[:1])} on {k.device}, got {seen.dtype} "
            f"{list(seen.shape)} on {seen.device}"
        )
    position, seen = counted(seen, written, sequence.reset, k.shape[1])
    return sequence._replace(position=position), seen


def counted(seen: Tensor, write: Tensor | None, reset: Tensor | None, length: int) -> tuple[Tensor, Tensor]:
    """`written_before`, and the count `[B]` after the last token."""
    position = written_before(seen, write, reset, length)
    if length:
        seen = position[:, -1] + (1 if write is None else write[:, -1])
    return position, seen


def written_before(seen: Tensor, write: Tensor | None, reset: Tensor | None, length: int) -> Tensor:
    """Tokens written before each of `length` tokens since the start or the last reset, `[B, T]`.

    `seen` `[B]` counts those of earlier calls.
    """
    if write is None:
        write = torch.ones(*seen.shape, length, dtype=torch.bool, device=seen.device)
    before = write.cumsum(1) - write.long()
    start = -seen.unsqueeze(1)
    if reset is not None:
        # Counts only grow, so the largest one at a reset so far is that of the last reset.
        start = torch.where(reset, before, start).cummax(1).values
    return before - start
