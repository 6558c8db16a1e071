"""The memories of one scan: the memory itself and, where it has one, its sum normaliser."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hecate.bias import Dot
from hecate.engine.arguments import complete_state
from hecate.engine.chunk import known_position
from hecate.engine.prepare import Sequence
from hecate.engine.tokens import Carry, Tokens, flatten_memory, flatten_state, unflatten_state
from hecate.rule import MemoryConfig, MemoryState
from hecate.rule.rule import one, several
from hecate.rule.state import initial_state
from hecate.structure import Memory
from hecate.tape import Block, Run, Tensors


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


def part_of(config: MemoryConfig, own: MemoryState, start: MemoryState, given: MemoryState | None) -> Part:
    """A memory that goes on from `own`, the complete form of the state given, and restarts at `start`."""
    # Flattened apart even where they are one state: to a program they are two inputs.
    return Part(config, own, flatten_state(own), flatten_memory(start), position_of(config, given))


def normalizer_part(config: MemoryConfig, state: MemoryState, sequence: Sequence, dtype: torch.dtype) -> Part:
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
    main, *others = (unflatten_state(carry, part.state) for part, carry in zip(parts, carries, strict=True))
    return main._replace(normalizer=others[0] if others else None)


def counts_along(part: Part, engine: str) -> bool:
    """Whether a memory and its normaliser take the same steps, so that one scan can run both."""
    same = type(part.config.bias) is Dot and part.carry.memory[0].dim() == 3
    return same and engine in ("compiled", "parallel")


def counting_along(
    engine: Callable[..., tuple[Tensor, Carry]],
    config: MemoryConfig,
    tokens: Tokens,
    carries: list[Carry],
    initials: list[Memory],
    *,
    run: Run,
) -> list[tuple[Tensor, Carry]]:
    """Outputs and states of a memory and of its normaliser, run as one more row of the memory.

    That is exact where a row never looks at another and the value is all that differs.
    """
    carry, count = carries
    joined = several(run(_WITH_LAST, *carry.memory, *count.memory, label="normalizer"))
    slots = tuple(
        one(run(_WITH_LAST, *pair, label="normalizer")) for pair in zip(carry.slots, count.slots, strict=True)
    )
    initial = several(run(_WITH_LAST, *initials[0], *initials[1], label="normalizer"))
    tokens = tokens._replace(v=one(run(_WITH_ONE, tokens.v, label="normalizer")))
    both = carry._replace(memory=joined, slots=slots)
    y, both = engine(config.counting, tokens, both, initial, run=run)
    outputs = several(run(last_apart(-1), y, label="normalizer"))
    memories, *others = (several(run(last_apart(1), item, label="normalizer")) for item in (*both.memory, *both.slots))
    return [
        (outputs[index], own._replace(memory=(memories[index],), slots=tuple(slot[index] for slot in others)))
        for index, own in enumerate(carries)
    ]


def last_apart(axis: int) -> Block:
    """All but the last along an axis, and the last."""

    def forward(x: Tensor) -> tuple[Tensors, None]:
        size = x.shape[axis] - 1
        return (x.narrow(axis, 0, size), x.narrow(axis, size, 1)), None

    def vjp(_: None, *cotangents: Tensor) -> tuple[Tensor]:
        return (torch.cat(cotangents, axis),)

    return Block("last_apart", forward, vjp)


def _with_last(x: Tensor, last: Tensor) -> tuple[Tensors, None]:
    return (torch.cat((x, last), 1),), None


def _with_last_vjp(_: None, g: Tensor) -> tuple[Tensor, Tensor]:
    return g[:, :-1], g[:, -1:]


def _with_one(v: Tensor) -> tuple[Tensors, None]:
    return (torch.cat((v, torch.ones_like(v[..., :1])), -1),), None


def _with_one_vjp(_: None, g: Tensor) -> tuple[Tensor]:
    return (g[..., :-1],)


_WITH_LAST = Block("with_last", _with_last, _with_last_vjp)
_WITH_ONE = Block("with_one", _with_one, _with_one_vjp)


def split_carries(flat: tuple[Tensor, ...], parts: list[Part]) -> list[Carry]:
    """The states of all parts from their tensors one after the other."""
    carries: list[Carry] = []
    at = 0
    for part in parts:
        width = len(part.carry.flat)
        carries.append(part.carry.rebuilt(flat[at : at + width]))
        at += width
    return carries
