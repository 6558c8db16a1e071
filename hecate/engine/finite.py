"""Non-finite memories: find the token at which a memory or its output leaves the finite numbers."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hecate.engine.loop import select, token_step
from hecate.engine.quotients import DIVIDE
from hecate.engine.tokens import Carry, Tokens
from hecate.errors import NonFiniteError
from hecate.rule import MemoryConfig
from hecate.structure import Memory
from hecate.tape import execute, one
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
def finite_writes(memories: list[Watched]) -> Tensor:
    """`[N, T]`: which tokens leave every state finite when each other one is left unwritten."""
    columns = _columns(memories)
    carries = [memory.carry for memory in memories]
    good: list[Tensor] = []
    for t in range(memories[0].tokens.v.shape[1]):
        tokens = _at(columns, t)
        tried = [carry for _, carry in _stepped(memories, tokens, carries)]
        ok = _finite(tried)
        good.append(ok)
        masked = [token._replace(write=ok if token.write is None else ok & token.write) for token in tokens]
        skipped = [carry for _, carry in _stepped(memories, masked, carries)]
        carries = [select(ok, *pair, execute) for pair in zip(tried, skipped, strict=True)]
    return torch.stack(good, 1)


def _columns(memories: list[Watched]) -> list[list[tuple[Tensor, ...] | None]]:
    return [[None if tensor is None else tensor.unbind(1) for tensor in memory.tokens] for memory in memories]


def _at(columns: list[list[tuple[Tensor, ...] | None]], t: int) -> list[Tokens]:
    return [
        Tokens(*(None if column is None else column[t] for column in own))  # type: ignore[arg-type]
        for own in columns
    ]


def _stepped(memories: list[Watched], tokens: list[Tokens], carries: list[Carry]) -> list[tuple[Tensor, Carry]]:
    return [
        token_step(memory.config, token, carry, memory.initial, run=execute)[:2]
        for memory, token, carry in zip(memories, tokens, carries, strict=True)
    ]


def _finite(carries: list[Carry]) -> Tensor:
    """`[N]`: whether all states of a memory are finite."""
    floats = [item for carry in carries for item in carry.flat if item.is_floating_point()]
    flat = (item.flatten(1) if item.dim() > 1 else item.unsqueeze(1) for item in floats)
    return torch.stack([torch.isfinite(item).all(1) for item in flat]).all(0)


@torch.no_grad()
def raise_at_first(memories: list[Watched], y: Tensor, name: str) -> None:
    """Raises `NonFiniteError` for the first token that breaks a memory or an output.

    Token by token, because the blocks of an engine may spoil outputs ahead of that token. y
    `[B, T, H, V]` tells the heads and the dtype in which outputs are given.
    """
    columns = _columns(memories)
    carries = [memory.carry for memory in memories]
    for t in range(y.shape[1]):
        tokens = _at(columns, t)
        stepped = _stepped(memories, tokens, carries)
        carries = [carry for _, carry in stepped]
        read, *weights = (output for output, _ in stepped)
        for weight in weights:
            read = one(execute(DIVIDE.block(keeps=False), read, weight))
        kept, told = _finite(carries), torch.isfinite(read.to(y.dtype)).all(1)
        broken = (~(kept & told)).nonzero()
        if broken.numel():
            row = int(broken[0])
            place = f"batch row {row // y.shape[2]}, head {row % y.shape[2]}, token {t}"
            step = _step_of(memories[0].config, tokens[0], row)
            if not bool(kept[row]):
                raise NonFiniteError(f"memory {name!r} became non-finite at {place}: {step}")
            reason = "the query or its features overflow"
            if bool(torch.isfinite(tokens[0].phi_q[row]).all()):
                reason = f"it overflows {y.dtype}, {step}"
            raise NonFiniteError(
                f"an output of memory {name!r} is non-finite at {place}, while the memory itself is finite: {reason}"
            )
    raise NonFiniteError(
        f"memory {name!r} became non-finite in the engine's block products, although token by "
        "token it stays finite; use engine='sequential'"
    )


def _step_of(config: MemoryConfig, token: Tokens, row: int) -> str:
    size, lr = float(token.phi_k[row].square().sum()), float(token.lr[row])
    return (
        f"lr={lr:.4g}, |phi(k)|^2={size:.4g}, lr * |phi(k)|^2={lr * size:.4g} (a delta-type memory "
        f"diverges beyond {config.algorithm.stable_step:g}). Set key_norm='l2' or "
        "step='normalized', lower lr, or choose on_nonfinite='skip'"
    )
