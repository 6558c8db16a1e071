"""A diagonal memory of width P as P memories of one number: how block engines run it.

Each coordinate is a 1 x 1 matrix memory with its own key, query and value and the token's gates, so `[N, T, P]` becomes
`[N P, T, 1]` at the edge of an engine, and retain per channel a gate per memory. That is exact for a bias that treats
coordinates apart. [STR-VECTOR-R1]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from hecate.engine.tokens import Carry, Tokens
from hecate.rule import MemoryConfig
from hecate.rule.rule import one
from hecate.structure import Memory
from hecate.tape import Block, Run, Tensors


def coordinate_refusal(config: MemoryConfig) -> str | None:
    """Why a diagonal memory is not a memory per coordinate; None if it is, or is not diagonal."""
    if config.structure.diagonal and config.bias.kernel_form() is None:
        return (
            f"bias {config.bias.kind!r} as configured is not known to treat coordinates apart, "
            f"as structure {config.structure.kind!r} needs here"
        )
    return None


def by_coordinate(
    engine: Callable[..., tuple[Tensor, Carry]],
    config: MemoryConfig,
    tokens: Tokens,
    carry: Carry,
    initial: Memory,
    *,
    run: Run,
) -> tuple[Tensor, Carry]:
    """Runs an engine for matrix memories on the coordinates of diagonal ones."""
    width = tokens.v.shape[-1]

    def of(tensors: Tensors, block: Block) -> Memory:
        return tuple(one(run(block, tensor, label="coordinates")) for tensor in tensors)

    scalars = _Linear(lambda x: x.repeat_interleave(width, 0), lambda g: _rows(g, width).sum(1))
    channels = _Linear(lambda x: x.mT.flatten(0, 1), lambda g: _rows(g, width).mT)
    vectors = _Linear(lambda x: x.mT.flatten(0, 1).unsqueeze(-1), lambda g: _rows(g.squeeze(-1), width).mT)
    weights = _Linear(lambda w: w.reshape(-1, 1, 1), lambda g: g.reshape(-1, width))
    retain = channels if tokens.retain.dim() == 3 else scalars
    own = Tokens(
        *of(tokens[:3], vectors.block),
        *of(tokens[3:4], scalars.block),
        *of(tokens[4:5], retain.block),
        *of(tokens[5:6], scalars.block),
        *(None if mask is None else mask.repeat_interleave(width, 0) for mask in tokens[6:]),
    )
    memory, slots, first = (of(item, weights.block) for item in (carry.memory, carry.slots, initial))
    y, new = engine(config, own, carry._replace(memory=memory, slots=slots), first, run=run)
    memory, slots = (of(item, weights.inverse) for item in (new.memory, new.slots))
    return one(of((y,), vectors.inverse)), carry._replace(memory=memory, slots=slots)


class _Linear(NamedTuple):
    """A linear map of a tensor and its adjoint, which undoes it where it only moves numbers."""

    there: Callable[[Tensor], Tensor]
    back: Callable[[Tensor], Tensor]

    @property
    def block(self) -> Block:
        return Block("coordinates", lambda x: ((self.there(x),), None), lambda _, g: (self.back(g),))

    @property
    def inverse(self) -> Block:
        """The way back as a tape block."""
        return _Linear(self.back, self.there).block


def _rows(x: Tensor, width: int) -> Tensor:
    """`[N P, T]` -> `[N, P, T]`."""
    return x.unflatten(0, (-1, width))
