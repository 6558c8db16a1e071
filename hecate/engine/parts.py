"""The memories of one scan: the memory itself and, where it has one, its sum normaliser."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hecate.engine.arguments import complete_state
from hecate.engine.chunk import known_position
from hecate.engine.prepare import Sequence
from hecate.engine.tokens import Carry, flatten_state, unflatten_state
from hecate.rule import MemoryConfig, MemoryState
from hecate.rule.state import initial_state
from hecate.structure import Memory


class Part(NamedTuple):
    """One memory of a scan: the memory itself, or its sum normaliser."""

    config: MemoryConfig
    state: MemoryState
    start: MemoryState
    position: int | None = 0  # in its chunk, None if unknown

    @property
    def carry(self) -> Carry:
        """The state as flat tensors."""
        return flatten_state(self.state)

    @property
    def initial(self) -> Memory:
        """The weights at which memories start."""
        return flatten_state(self.start).memory

    @property
    def flat(self) -> tuple[Tensor, ...]:
        """Everything the program takes for this memory."""
        return *self.initial, *self.carry.flat


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
    return Part(own, carried, start, position_of(own, state.normalizer))


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
