"""A diagonal memory of width P as P memories of one number: how block engines run it.

Each coordinate is a 1 x 1 matrix memory with its own key, query and value and the token's gates, so `[N, T, P]` becomes
`[N P, T, 1]` at the edge of an engine, and retain per channel a gate per memory. That is exact for a bias that treats
coordinates apart. [STR-VECTOR-R1]
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from hecate.engine.tokens import Carry, Tokens, linear_block
from hecate.rule import MemoryConfig
from hecate.rule.rule import one
from hecate.structure import Memory
from hecate.tape import Run, Tensors


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

    def of(tensors: Tensors, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Memory:
        block = linear_block("coordinates", there, back)
        return tuple(one(run(block, tensor, label="coordinates")) for tensor in tensors)

    def split(x: Tensor) -> Tensor:  # `[N P, ...]` -> `[N, P, ...]`
        return x.unflatten(0, (-1, width))

    scalars = (lambda x: x.repeat_interleave(width, 0)), (lambda g: split(g).sum(1))
    channels = (lambda x: x.mT.flatten(0, 1)), (lambda g: split(g).mT)
    vectors = (lambda x: x.mT.flatten(0, 1).unsqueeze(-1)), (lambda g: split(g.squeeze(-1)).mT)
    weights = (lambda w: w.reshape(-1, 1, 1)), (lambda g: g.reshape(-1, width))
    own = Tokens(
        *of(tokens[:3], *vectors),
        *of(tokens[3:4], *scalars),
        *of(tokens[4:5], *(channels if tokens.retain.dim() == 3 else scalars)),
        *of(tokens[5:6], *scalars),
        *(None if mask is None else mask.repeat_interleave(width, 0) for mask in tokens[6:]),
    )
    memory, slots, first = (of(item, *weights) for item in (carry.memory, carry.slots, initial))
    y, new = engine(config, own, carry._replace(memory=memory, slots=slots), first, run=run)
    memory, slots = (of(item, *weights[::-1]) for item in (new.memory, new.slots))
    return one(of((y,), *vectors[::-1])), carry._replace(memory=memory, slots=slots)
