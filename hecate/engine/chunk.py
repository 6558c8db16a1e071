"""The chunk engine: exact evaluation of gradients frozen at a chunk's start, and of chunk commits.

All gradients of a chunk are taken at one state, so predictions, bias gradients and backpropagation
are batched products over its C tokens. For structures made of linear layers every gradient is rank
one per layer, and the state after token t is read without being built, layer by layer (the dual
form):

    W_t h = a_t W_0 h + s_t S_0 h - sum_{i <= t} K[t, i] lr_i d_i (h_i . h)

with the coefficients of `hecate.engine.coefficients`. `commit="chunk"` reads one state throughout
and takes one step per chunk, whatever algorithm and retention. [ENG-CHUNK-D1]
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from hecate.engine.coefficients import coefficients, last_row
from hecate.engine.finite import can_inspect
from hecate.engine.layers import (
    STRUCTURES,
    Leaves,
    Reads,
    gradients,
    predict,
    read,
    summed,
    write,
)
from hecate.engine.tokens import CONCAT, UNBIND, Carry, Tokens, split_time
from hecate.rule import MemoryConfig, MemoryState, TokenGates
from hecate.rule.rule import one, several
from hecate.structure import Memory
from hecate.tape import Block, Run, Tensors, checkpoint


def chunk_refusal(
    config: MemoryConfig,
    *,
    channelwise: bool = False,
    masked: bool = False,
    position: int | None = 0,
) -> str | None:
    """Why the chunk engine cannot run a scan exactly; None if it can."""
    rule, commit = config.rule, config.commit
    if config.chunk == 1:
        return "chunk=1 takes each gradient at the state before its token, not at a chunk's start"
    if type(rule.structure) not in STRUCTURES:
        return f"structure {rule.structure.kind!r} is not known to be made of linear layers"
    if commit == "token":
        if not rule.retention.linear:
            return f"retention {rule.retention.kind!r} is not linear, and commit='token' applies it"
        if rule.algorithm.kind not in ("gd", "momentum"):
            return (
                f"algorithm {rule.algorithm.kind!r} is not a linear recurrence of the gates alone, "
                "and commit='token' steps at each token"
            )
        if channelwise:
            return "retain per phi channel with commit='token'"
    if masked or config.on_nonfinite == "skip":
        what = "on_nonfinite='skip'" if config.on_nonfinite == "skip" else "write or reset masks"
        return f"{what} can move the borders of chunks apart between memories"
    if position is None or position >= config.chunk:
        return "the state's memories are not known to stand at the same place of their chunk"
    return None


def known_position(state: MemoryState | None) -> int | None:
    """Tokens since the chunk's start, 0 without a state; None if memories differ or none may
    look."""
    if state is None or state.position.numel() == 0:
        return 0
    if not can_inspect(state.position):
        return None
    low, high = (int(end) for end in state.position.aminmax())
    return low if low == high and low >= 0 else None


class _Layout(NamedTuple):
    """How many flat tensors of each sort a chunk takes, in this order."""

    config: MemoryConfig
    memory: int
    slots: int
    anchor: int

    def cut(self, flat: Tensors) -> list[Tensors]:
        """Memory, slots, anchor (or what is pending), and the rest."""
        parts: list[Tensors] = []
        for width in (self.memory, self.slots, self.anchor):
            parts.append(flat[:width])
            flat = flat[width:]
        return [*parts, flat]


def chunked(
    config: MemoryConfig,
    tokens: Tokens,
    carry: Carry,
    initial: Memory,
    *,
    run: Run,
    position: int = 0,
) -> tuple[Tensor, Carry]:
    """Runs a sequence chunk by chunk: outputs `[N, T, V]` and the final carry.

    `position` is that of every memory in its chunk at the start; the carried chunk is finished
    first, the last one may stay unfinished. `initial` is not needed, because nothing is reset.
    """
    length, size = tokens.v.shape[1], config.chunk
    first = min(size - position, length) if position else 0
    full, rest = divmod(length - first, size)
    sizes = [piece for piece in (first, *[size] * full, rest) if piece]
    runs = _commit_chunks if config.commit == "chunk" else _commit_tokens
    outputs, carry = runs(config, tokens, carry, run, sizes, position)
    y = one(run(CONCAT, *outputs, label="outputs"))
    return y, carry._replace(position=(carry.position + length) % size)


def _commit_tokens(
    config: MemoryConfig, tokens: Tokens, carry: Carry, run: Run, sizes: list[int], position: int
) -> tuple[list[Tensor], Carry]:
    rows = _rows(config, tokens, run, sizes)
    columns = _columns((tokens.phi_k, tokens.phi_q, tokens.v), run, sizes)
    memory, slots, anchor = carry.memory, carry.slots, carry.anchor
    outputs: list[Tensor] = []
    for index, (column, row) in enumerate(zip(columns, rows, strict=True)):
        carried = anchor if position and not index else ()
        anchor = carried or memory
        layout = _Layout(config, len(memory), len(slots), len(carried))
        block = checkpoint("chunk", partial(_token_chunk, layout))
        flat = (*memory, *slots, *carried, *column, *row)
        y, *new = several(run(block, *flat, label=f"chunk {index}"))
        memory, slots = tuple(new[: len(memory)]), tuple(new[len(memory) :])
        outputs.append(y)
    return outputs, carry._replace(memory=memory, slots=slots, anchor=anchor)


def _token_chunk(layout: _Layout, run: Run, *flat: Tensor) -> Tensors:
    memory, slots, anchor, rest = layout.cut(flat)
    phi_k, phi_q, v, *row = rest
    config = layout.config
    grads = gradients(config, anchor or memory, phi_k, v, run=run, label="write")
    y = read(config, memory, slots, grads, Reads(*row[:3]), phi_q, run=run, label="read")
    memory, slots = write(memory, slots, grads, Leaves(*row[3:]), run=run, label="write")
    return y, *memory, *slots


def _commit_chunks(
    config: MemoryConfig, tokens: Tokens, carry: Carry, run: Run, sizes: list[int], position: int
) -> tuple[list[Tensor], Carry]:
    columns = _columns(tokens[:6], run, sizes)
    memory, slots, pending = carry.memory, carry.slots, (*carry.pending, *carry.pending_retain)
    layout = _Layout(config, len(memory), len(slots), len(pending))
    outputs: list[Tensor] = []
    for index, (column, size) in enumerate(zip(columns, sizes, strict=True)):
        position += size
        chunk = partial(_summed_chunk, layout, position % config.chunk == 0)
        flat = (*memory, *slots, *pending, *column)
        y, *new = several(run(checkpoint("chunk", chunk), *flat, label=f"chunk {index}"))
        memory, slots, pending, _ = layout.cut(tuple(new))
        outputs.append(y)
    return outputs, carry._replace(
        memory=memory, slots=slots, pending=pending[:-1], pending_retain=pending[-1:]
    )


def _summed_chunk(layout: _Layout, closes: bool, run: Run, *flat: Tensor) -> Tensors:
    memory, slots, pending, rest = layout.cut(flat)
    phi_k, phi_q, v, lr, retain, momentum = rest
    config, rule = layout.config, layout.config.rule
    grads = gradients(config, memory, phi_k, v, run=run, label="write")
    *totals, kept = pending
    totals = summed(tuple(totals), grads, lr, run=run, label="write")
    kept = one(run(_PRODUCT, kept, retain, label="write"))
    if not closes:
        y = predict(config, memory, phi_q, run=run, label="read")
        return y, *memory, *slots, *totals, kept
    last = one(run(_LAST, momentum, label="write"))
    gates = TokenGates(torch.ones_like(last), kept, last)
    committed, carried = rule.apply(memory, slots, totals, gates, run=run, label="commit")
    waiting = tuple(torch.zeros_like(total) for total in totals)
    end = (*committed, *carried, *waiting, torch.ones_like(kept))
    if config.read == "before":
        return predict(config, memory, phi_q, run=run, label="read"), *end
    inside, closing = several(run(split_time([phi_q.shape[1] - 1, 1]), phi_q, label="read"))
    parts = [
        predict(config, source, queries, run=run, label="read")
        for source, queries in ((memory, inside), (committed, closing))
        if queries.shape[1]
    ]
    return one(run(CONCAT, *parts, label="read")), *end


def _columns(
    tensors: tuple[Tensor | None, ...], run: Run, sizes: list[int]
) -> list[tuple[Tensor, ...]]:
    """Tensors `[N, T, ...]` cut into the pieces of each chunk."""
    block = split_time(sizes)
    cut = [several(run(block, one((tensor,)), label="split")) for tensor in tensors]
    return list(zip(*cut, strict=True))


def _rows(config: MemoryConfig, tokens: Tokens, run: Run, sizes: list[int]) -> list[Tensors]:
    """`Reads` and `Leaves` of every chunk; chunks of equal size share one call."""
    groups: list[list[int]] = []
    for size in sizes:
        if groups and groups[-1][-1] == size:
            groups[-1].append(size)
        else:
            groups.append([size])
    gates = (tokens.lr, tokens.retain, tokens.momentum)
    spans = _columns(gates, run, [sum(group) for group in groups])
    rows: list[Tensors] = []
    for group, span in zip(groups, spans, strict=True):
        outputs = run(_coefficients(config, group[0]), *span, label="coefficients")
        each = [
            [None] * len(group) if out is None else several(run(UNBIND, out, label="coefficients"))
            for out in outputs
        ]
        rows += zip(*each, strict=True)
    return rows


def _coefficients(config: MemoryConfig, size: int) -> Block:
    """Gates `[N, c C]` -> `Reads` and `Leaves`, with the chunks on axis 1."""

    def forward(*gates: Tensor) -> tuple[Tensors, None]:
        lr, retain, momentum = (gate.unflatten(1, (-1, size)) for gate in gates)
        after, before, slot = coefficients(config, retain, momentum)
        seen = after if config.read == "after" else before
        a = seen.bases[0] if config.retention.uses_retain else None
        weights, into = seen.writes * lr.unsqueeze(-2), last_row(after) * lr
        ends = [base[..., -1] for base in after.bases]
        if slot is None:
            return (weights, a, None, into, ends[0], None, None, None), None
        slots = (last_row(slot) * lr, slot.bases[0][..., -1])
        return (weights, a, seen.bases[1], into, *ends, *slots), None

    return Block("chunk.coefficients", forward)


def _product(total: Tensor, gates: Tensor) -> tuple[Tensors, Tensors]:
    return (total * gates.prod(1),), (total, gates)


def _product_vjp(inputs: tuple[Tensor, Tensor], g: Tensor) -> tuple[Tensor, Tensor]:
    # Products of all gates but one, without division: a gate of 0 has its true gradient.
    total, gates = inputs
    ones = torch.ones_like(gates[:, :1])
    earlier = torch.cat([ones, gates[:, :-1]], 1).cumprod(1)
    later = torch.cat([ones, gates[:, 1:].flip(1)], 1).cumprod(1).flip(1)
    return g * gates.prod(1), (g * total).unsqueeze(1) * earlier * later


def _last(gates: Tensor) -> tuple[Tensors, Tensor]:
    return (gates[:, -1],), gates


def _last_vjp(gates: Tensor, g: Tensor) -> tuple[Tensor]:
    return (torch.cat([torch.zeros_like(gates[:, :-1]), g.unsqueeze(1)], 1),)


_PRODUCT = Block("chunk.product", _product, _product_vjp)
_LAST = Block("chunk.last", _last, _last_vjp)
