"""Non-finite memories: find the token at which a memory leaves the finite numbers."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hecate.engine.sequential import select, token_step
from hecate.engine.tokens import Carry, Tokens
from hecate.errors import NonFiniteError
from hecate.rule import MemoryConfig
from hecate.structure import Memory
from hecate.tape import execute
from hecate.tape.bridge import can_inspect as can_inspect


def all_finite(y: Tensor, carry: Carry) -> bool:
    """Whether outputs and state are finite."""
    tensors = [tensor.detach() for tensor in (y, *carry.flat) if tensor.is_floating_point()]
    # A sum over anything non-finite is non-finite, and costs one pass; the converse needs a look.
    total = torch.stack([tensor.sum() for tensor in tensors]).sum()
    return math.isfinite(float(total)) or all(bool(item.isfinite().all()) for item in tensors)


class Watched(NamedTuple):
    """One memory of a scan and what it reads: `Tokens` with its own values."""

    config: MemoryConfig
    tokens: Tokens
    carry: Carry
    initial: Memory


@torch.no_grad()
def finite_writes(memories: list[Watched], *, stop: bool = False) -> Tensor:
    """`[N, T]`: which tokens leave every state finite when each other one is left unwritten.

    `stop` ends at the first token that does not.
    """
    columns = [
        [None if tensor is None else tensor.unbind(1) for tensor in memory.tokens]
        for memory in memories
    ]
    carries = [memory.carry for memory in memories]
    good: list[Tensor] = []
    for t in range(memories[0].tokens.v.shape[1]):
        tokens = [
            Tokens(*(None if column is None else column[t] for column in own))  # type: ignore[arg-type]
            for own in columns
        ]
        tried = [
            token_step(memory.config, token, carry, memory.initial, run=execute)[1]
            for memory, token, carry in zip(memories, tokens, carries, strict=True)
        ]
        floats = [item for carry in tried for item in carry.flat if item.is_floating_point()]
        ok = torch.stack([_rows(torch.isfinite(item)).all(1) for item in floats]).all(0)
        good.append(ok)
        if stop and not bool(ok.all()):
            break
        for index, (memory, token) in enumerate(zip(memories, tokens, strict=True)):
            asked = ok if token.write is None else ok & token.write
            own = token._replace(write=asked)
            skipped = token_step(memory.config, own, carries[index], memory.initial, run=execute)[1]
            carries[index] = select(ok, tried[index], skipped, execute)
    return torch.stack(good, 1)


def _rows(item: Tensor) -> Tensor:
    return item.flatten(1) if item.dim() > 1 else item.unsqueeze(1)


def raise_at_first(memories: list[Watched], y: Tensor, name: str) -> None:
    """Raises `NonFiniteError` for the first token that breaks a memory or an output of y."""
    config, tokens = memories[0].config, memories[0].tokens
    heads = y.shape[2]
    where = (~finite_writes(memories, stop=True)).nonzero()
    if where.numel():
        row, token = (int(item) for item in where[0])
        size = float(tokens.phi_k[row, token].detach().square().sum())
        lr = float(tokens.lr[row, token].detach())
        raise NonFiniteError(
            f"memory {name!r} became non-finite at batch row {row // heads}, head {row % heads}, "
            f"token {token}: lr={lr:.4g}, |phi(k)|^2={size:.4g}, lr * |phi(k)|^2={lr * size:.4g} "
            f"(a delta-type memory diverges from {config.algorithm.stable_step:g} on). Set "
            "key_norm='l2' or step='normalized', lower lr, or choose on_nonfinite='skip'"
        )
    # Time first, so that the earliest token comes first.
    broken = (~torch.isfinite(y.detach())).any(-1).transpose(0, 1).nonzero()
    if broken.numel():
        token, row, head = (int(item) for item in broken[0])
        raise NonFiniteError(
            f"an output of memory {name!r} is non-finite at batch row {row}, head {head}, token "
            f"{token}, while the memory itself is finite: the query or its features overflow"
        )
    raise NonFiniteError(
        f"memory {name!r} became non-finite in the engine's block products, although token by "
        "token it stays finite; use engine='sequential'"
    )
