"""The memories of one scan: the memory itself and, where it has one, its sum normaliser."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hecate.engine.arguments import complete_state
from hecate.engine.chunk import known_position
from hecate.engine.prepare import Sequence
from hecate.engine.tokens import Carry, flatten_memory, flatten_state, unflatten_state
from hecate.rule import MemoryConfig, MemoryState
from hecate.rule.state import initial_state
from hecate.structure import Memory


class Part(NamedTuple):
    """One memory of a scan: the memory itself, or its sum normaliser."""

    config: MemoryConfig
    state: MemoryState
    carry: Carry  # the state as flat tensors
    initial: Memory  # the weights at which memories start
    position: int | None = 0  # in its chunk, None if unknown

    @property
    def flat(self) -> tuple[Tensor, ...]:
        """Everything the program takes for this memory."""
        return *self.initial, *self.carry.flat


def part_of(
    config: MemoryConfig, own: MemoryState, start: MemoryState, given: MemoryState | None
) -> Part:
    """A memory that goes on from `own`, the complete form of the state given, and restarts at
    `start`."""
    # Flattened apart even where they are one state: to a program they are two inputs.
    return Part(config, own, flatten_state(own), flatten_memory(start), position_of(config, given))


def normalizer_part(
    config: MemoryConfig, state: MemoryState, sequence: Sequence, dtype: torch.dtype
) -> Part:
    """z, the sum of weights: the same memory with bias dot and the value 1 at every token."""
    own = config.counting
    batch, _, heads = sequence.lr.shape
    width = state.memory["weight"].shape[-1]
    zero = torch.zeros(batch, heads, 1, width, dtype=dtype, device=sequence.v.device)
    start = initial_state(own, {"weight": zero}, batch, sequence.retain, d_phi=width, d_v=1)
    carried = complete_state(own, state.normalizer, start, sequence, dtype)
    return part_of(own, carried, start, state.normalizer)


def position_of(config: MemoryConfig, state: MemoryState | None) -> int | None:
    """Where in its chunk a state is, None if it cannot be told.

    Looking at values waits for the device, so it is done only where there are chunks.
    """
    return known_position(state) if config.chunk > 1 else 0


def merged(parts: list[Part], carries: list[Carry]) -> MemoryState:
    """The new state, with that of the normaliser inside."""
    main, *others = (
        unflatten_state(carry, part.state) for part, carry in zip(parts, carries, strict=True)
    )
    return main._replace(normalizer=others[0] if others else None)


def split_carries(flat: tuple[Tensor, ...], parts: list[Part]) -> list[Carry]:
    """The states of all parts from their tensors one after the other."""
    carries: list[Carry] = []
    at = 0
    for part in parts:
        width = len(part.carry.flat)
        carries.append(part.carry.rebuilt(flat[at : at + width]))
        at += width
    return carries
