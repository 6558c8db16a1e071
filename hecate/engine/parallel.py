"""The exact chunk-parallel engine for linear memories.

Within a block of C tokens every state is a combination of the block's first state and its own
writes, with coefficients that depend on the gates alone. With R[t, j] the product of retain over j
< l <= t, P[j, i] that of momentum over i < l <= j, and K = R P (both lower triangular):

    M_t = a_t M_0 + s_t S_0 - sum_{i <= t} K[t, i] lr_i u_i p_i^T

For bias dot u_t = -v_t; for l2 the errors solve one unit lower triangular system. gd is the case P
= I. A masked token multiplies by one and adds nothing; a reset cuts every product that crosses it.
[ENG-PAR-D1]
"""

from __future__ import annotations

import torch
from torch import Tensor

from hecate.bias import L2, Bias, Dot
from hecate.engine.coefficients import Rows, coefficients, last_row, neutral
from hecate.engine.implicit import implicit_gradients
from hecate.engine.tokens import Carry, Tokens
from hecate.rule import MemoryConfig
from hecate.rule.rule import several
from hecate.structure import Memory
from hecate.tape import Block, Run, Tensors
from hecate.tape.ops import over

CHUNK = 64
CHANNEL_CHUNK = 16  # per-channel products are C x C x P tensors


def parallel_refusal(config: MemoryConfig) -> str | None:
    """Why the parallel engine cannot run a config exactly; None if it can."""
    rule = config.rule
    if config.chunk > 1 or config.commit == "chunk":
        return (
            f"chunk={config.chunk}, commit={config.commit!r} take gradients at a remembered state"
        )
    if not rule.structure.linear:
        return f"structure {rule.structure.kind!r} is not linear in its weights"
    if not rule.retention.linear:
        return f"retention {rule.retention.kind!r} is not linear"
    if rule.algorithm.kind not in ("gd", "momentum"):
        return f"algorithm {rule.algorithm.kind!r} is not a linear recurrence of the gates alone"
    return None


def parallel(
    config: MemoryConfig,
    tokens: Tokens,
    carry: Carry,
    initial: Memory,
    *,
    run: Run,
    size: int = CHUNK,
) -> tuple[Tensor, Carry]:
    """Runs a sequence block by block: outputs `[N, T, V]` and the final carry."""
    states = len(carry.memory) + len(carry.slots)

    def forward(*inputs: Tensor) -> tuple[Tensors, None]:
        own = carry._replace(memory=inputs[:1], slots=inputs[1:states])
        rest = Tokens(*inputs[states + 1 :])
        y, new = _scan(config, rest, own, inputs[states : states + 1], size)
        return (y, *new.memory, *new.slots), None

    block = Block("engine.parallel", forward)
    y, memory, *slots = several(
        run(block, *carry.memory, *carry.slots, *initial, *tokens, label="blocks")
    )
    return y, carry._replace(memory=(memory,), slots=tuple(slots))


def _scan(
    config: MemoryConfig, tokens: Tokens, carry: Carry, initial: Memory, size: int
) -> tuple[Tensor, Carry]:
    length = tokens.v.shape[1]
    if tokens.retain.dim() == 3:
        size = min(size, CHANNEL_CHUNK)
    chunks = _chunked(tokens, min(size, length))
    # An axis G before time: 1, or the P phi channels where retain differs between them.
    retain = chunks.retain.unsqueeze(2) if chunks.retain.dim() == 3 else chunks.retain.mT
    write, reset = (
        None if mask is None else mask.unsqueeze(2) for mask in (chunks.write, chunks.reset)
    )
    after, before, slot_rows = coefficients(
        config, retain, chunks.momentum.unsqueeze(2), write, reset
    )
    seen = before
    if config.decay_order == "before_gradient":
        seen = before.scaled(neutral(retain, write))
    read = after if config.read == "after" else before

    stepped = chunks.lr.unsqueeze(-1) * chunks.phi_k
    keys = [last_row(rows).mT * stepped for rows in (after, slot_rows) if rows is not None]
    attend = _pairs(read, chunks.phi_q, stepped)
    # L[t, i]: how much the write of token i moves the prediction of a later token t.
    lower = None if isinstance(config.bias, Dot) else _pairs(seen, chunks.phi_k, stepped).tril(-1)
    fixed, moving = _errors(config, chunks, seen, lower)
    solve = None if isinstance(config.bias, Dot | L2) else config.bias
    leaving = [torch.stack([weight[..., -1] for weight in after.bases], -1)]
    if slot_rows is not None:
        leaving.append(slot_rows.bases[0][..., 0, -1])

    memory, slot = carry.memory[0], carry.slots[0] if carry.slots else None
    first = initial[0] if tokens.reset is not None else None
    columns = [
        None if tensor is None else tensor.unbind(1)
        for tensor in (fixed, moving, lower, attend, _spread(read, chunks.phi_q), *keys, *leaving)
    ]
    outputs: list[Tensor] = []
    for c in range(chunks.lr.shape[1]):
        parts = [None if column is None else column[c] for column in columns]
        y, memory, slot = _block(solve, parts, memory, slot, first)
        outputs.append(y)
    y = torch.stack(outputs, 1).flatten(1, 2)[:, :length]
    return y, carry._replace(memory=(memory,), slots=() if slot is None else (slot,))


def _block(
    bias: Bias | None,
    parts: list[Tensor | None],
    memory: Tensor,
    slot: Tensor | None,
    initial: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Outputs of one block and the states that leave it."""
    fixed, moving, lower, attend, queries, keys, *rest = parts
    states = [state for state in (memory, slot, initial) if state is not None]
    bases = torch.cat(states, -1).mT
    if bias is not None:
        errors = implicit_gradients(bias, _given(moving) @ bases, _given(lower), _given(fixed))
    else:
        errors = _given(fixed) if moving is None else moving @ bases + _given(fixed)
    y = _given(queries) @ bases - _given(attend) @ errors
    weights = _given(rest[-2] if slot is not None else rest[-1]).unsqueeze(1).unbind(-1)
    memory = -errors.mT @ _given(keys)
    for state, weight in zip(states, weights, strict=True):
        memory = memory + weight * state
    if slot is not None:
        slot = over(_given(rest[-1]), slot) * slot - errors.mT @ _given(rest[0])
    return y, memory, slot


def _spread(rows: Rows, vectors: Tensor) -> Tensor:
    """`[N, c, C, P]` weighted for each base state, side by side: `[N, c, C, bases * P]`."""
    return torch.cat([weight.mT * vectors for weight in rows.bases], -1)


def _pairs(rows: Rows, a: Tensor, b: Tensor) -> Tensor:
    """`sum_p a[t, p] writes[t, i, p] b[i, p]`: the writes as vectors see them, `[N, c, C, C]`."""
    if rows.writes.shape[2] == 1:
        return (a @ b.mT) * rows.writes.squeeze(2)
    return (a.mT.unsqueeze(-1) * rows.writes * b.mT.unsqueeze(-2)).sum(2)


def _errors(
    config: MemoryConfig, chunks: Tokens, seen: Rows, lower: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """u, the gradients by the predictions, as `moving @ bases + fixed` for states not yet known.

    Where no linear system gives u, the values and the rows of the predictions' base instead.
    """
    if lower is None:
        return -chunks.v, None
    if not isinstance(config.bias, L2):
        return chunks.v, _spread(seen, chunks.phi_k)
    right = torch.cat([-chunks.v, _spread(seen, chunks.phi_k)], -1)
    solved = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
    width = chunks.v.shape[-1]
    return solved[..., :width], solved[..., width:]


def _chunked(tokens: Tokens, size: int) -> Tokens:
    """Time split into blocks `[N, c, C, ...]`; padding and masked tokens write nothing."""
    length = tokens.v.shape[1]
    missing = -length % size

    def split(tensor: Tensor, fill: float) -> Tensor:
        if missing:
            tail = tensor.new_full((tensor.shape[0], missing, *tensor.shape[2:]), fill)
            tensor = torch.cat([tensor, tail], 1)
        return tensor.unflatten(1, (-1, size))

    lr = tokens.lr if tokens.write is None else torch.where(tokens.write, tokens.lr, 0.0)
    write = tokens.write
    if write is None and missing:
        write = torch.ones_like(lr, dtype=torch.bool)
    return Tokens(
        split(tokens.phi_k, 0),
        split(tokens.phi_q, 0),
        split(tokens.v, 0),
        split(lr, 0),
        split(tokens.retain, 1),
        split(tokens.momentum, 1),
        None if write is None else split(write, 0),
        None if tokens.reset is None else split(tokens.reset, 0),
    )


def _given(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise TypeError("a block of the parallel engine lacks a tensor it needs")
    return tensor
