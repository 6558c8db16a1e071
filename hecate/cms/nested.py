"""Nested levels: after a commit of a slower level, the faster one restarts from its memory.

The slowest goes first, so that a commit of several levels at one token hands the slowest memory down through all of
them. A restart is a fresh start with slots at zero; the short convolution, the feature memory and the token counts go
on, since they belong to the sequence. It takes place after the committing token. [CMS-NEST-D1]
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from hecate.cms.config import CMSConfig
from hecate.errors import ConfigError
from hecate.nn import LayerState, Memory
from hecate.nn.memory import where_rows
from hecate.rule import MemoryState
from hecate.tape.bridge import can_inspect


def check_shapes(config: CMSConfig, memories: tuple[Memory, ...]) -> None:
    """Refuses neighbours whose memories cannot be copied into one another."""
    for index, (fast, slow) in enumerate(pairwise(memories), 1):
        shapes = [
            {name: tuple(tensor.shape) for name, tensor in memory.initial.tensors.items()} for memory in (fast, slow)
        ]
        if shapes[0] != shapes[1]:
            names = [level.name for level in config.levels[index - 1 : index + 1]]
            raise ConfigError(
                f"nested levels {names[0]!r} and {names[1]!r}: memories are {shapes[0]} and "
                f"{shapes[1]} per level, but a restart copies one into the other; give both the "
                "same structure, heads, d_key, d_value and width of phi",
                path=("levels", index, "memory"),
            )


def in_windows(write: Tensor, count: Tensor, periods: list[int]) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Windows that end where some row closes one of `periods`, and their last tokens.

    `write` tells which tokens are written, `count` how many have been, both `[B, T]`; what comes with each window are
    the columns `[B]` of its last token.
    """
    length = count.shape[1]
    if length == 0:
        none = count.new_zeros(count.shape[0])
        yield slice(0, 0), none.bool(), none
        return
    ends: list[int] = []
    if periods and not count.is_meta:
        if not can_inspect(write, count):
            raise ConfigError(
                "composition 'nested' cuts a sequence where levels commit, which counts and masks "
                "tell; it has to look at them, and neither torch.compile nor torch.func lets it; "
                "use another composition there"
            )
        # Later periods are multiples of the first.
        ends = (write & (count % periods[0] == 0)).any(0).nonzero().flatten().tolist()
    borders = sorted({0, *(end + 1 for end in ends), length})
    for start, end in pairwise(borders):
        yield slice(start, end), write[:, end - 1], count[:, end - 1]


def restarted(
    periods: list[int], levels: tuple[LayerState, ...], write: Tensor, count: Tensor
) -> tuple[LayerState, ...]:
    """The levels' states with faster ones restarted in rows whose slower one has just committed."""
    new = list(levels)
    for index in reversed(range(1, len(levels))):
        committed = write & (count % periods[index] == 0)
        slow, fast = new[index], new[index - 1]
        fresh = _fresh(slow.memory, fast.memory)
        new[index - 1] = fast._replace(memory=where_rows(committed, fresh, fast.memory))
    return tuple(new)


def _fresh(source: MemoryState, like: MemoryState) -> MemoryState:
    """A start from the memory of `source`: the faster level has just closed a window of its own, so nothing is pending
    and its next token takes a new anchor."""
    normalizer = like.normalizer
    if normalizer is not None and source.normalizer is not None:
        normalizer = _fresh(source.normalizer, normalizer)
    return like._replace(
        memory={name: source.memory[name].to(own.dtype) for name, own in like.memory.items()},
        slots={name: torch.zeros_like(slot) for name, slot in like.slots.items()},
        normalizer=normalizer,
    )
