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

import math
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
    if not rule.algorithm.takes_any_gradient():
        return f"algorithm {rule.algorithm.kind!r} has a gradient of its own"
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


class _Piece(NamedTuple):
    """The tokens of a sequence that fall into one chunk."""

    size: int
    continues: bool
    closes: bool


def _pieces(position: int, length: int, chunk: int) -> list[_Piece]:
    pieces: list[_Piece] = []
    at = -position
    while at < length:
        begin, end = max(at, 0), min(at + chunk, length)
        pieces.append(_Piece(end - begin, at < 0, end == at + chunk))
        at += chunk
    return pieces


def chunked(
    config: MemoryConfig,
    tokens: Tokens,
    carry: Carry,
    initial: Memory,
    *,
    run: Run,
    position: int | None = 0,
) -> tuple[Tensor, Carry]:
    """Runs a sequence chunk by chunk: outputs `[N, T, V]` and the final carry.

    `position` is that of every memory in its chunk at the start; the carried chunk is finished
    first, the last one may stay unfinished. `initial` is not needed, because nothing is reset. A
    tape keeps one carry per segment of about sqrt(chunks) chunks, which is taped again when its
    turn comes.
    """
    pieces = _pieces(position or 0, tokens.v.shape[1], config.chunk)
    step = _commit_chunk if config.commit == "chunk" else _commit_tokens
    columns = _columns(config, tokens, [piece.size for piece in pieces], run)
    width, each = len(carry.flat), len(columns[0])

    def loop(run: Run, *inputs: Tensor, first: int = 0) -> Tensors:
        own, rows = carry.rebuilt(inputs[:width]), inputs[width:]
        outputs: list[Tensor] = []
        for at in range(0, len(rows), each):
            index = first + at // each
            row = rows[at : at + each]
            y, own = step(config, own, row, pieces[index], run, f"chunk {index}")
            outputs.append(y)
        return one(run(CONCAT, *outputs, label="outputs")), *own.flat

    size = math.isqrt(len(pieces) - 1) + 1
    outputs: list[Tensor] = []
    flat = carry.flat
    for first in range(0, len(pieces), size):
        rows = (tensor for column in columns[first : first + size] for tensor in column)
        block = checkpoint("segment", partial(loop, first=first))
        y, *rest = several(run(block, *flat, *rows, label=f"segment {first // size}"))
        outputs.append(y)
        flat = tuple(rest)
    carry = carry.rebuilt(flat)
    moved = (carry.position + tokens.v.shape[1]) % config.chunk
    return one(run(CONCAT, *outputs, label="outputs")), carry._replace(position=moved)


def _commit_tokens(
    config: MemoryConfig, carry: Carry, row: Memory, piece: _Piece, run: Run, label: str
) -> tuple[Tensor, Carry]:
    phi_k, phi_q, v, *gates = row
    memory, slots = carry.memory, carry.slots
    anchor = carry.anchor if piece.continues else memory
    grads = gradients(config, anchor, phi_k, v, run=run, label=label)
    y = read(config, memory, slots, grads, Reads(*gates[:3]), phi_q, run=run, label=label)
    memory, slots = write(memory, slots, grads, Leaves(*gates[3:]), run=run, label=label)
    return y, carry._replace(memory=memory, slots=slots, anchor=anchor)


def _commit_chunk(
    config: MemoryConfig, carry: Carry, row: Memory, piece: _Piece, run: Run, label: str
) -> tuple[Tensor, Carry]:
    phi_k, phi_q, v, lr, retain, momentum = row
    grads = gradients(config, carry.memory, phi_k, v, run=run, label=label)
    pending = summed(carry.pending, grads, lr, run=run, label=label)
    kept = one(run(_PRODUCT, carry.pending_retain[0], retain, label=label))
    if not piece.closes:
        y = predict(config, carry.memory, phi_q, run=run, label=label)
        return y, carry._replace(pending=pending, pending_retain=(kept,))
    last = one(run(_LAST, momentum, label=label))
    gates = TokenGates(torch.ones_like(last), kept, last)
    rule = config.rule
    memory, slots = rule.apply(carry.memory, carry.slots, pending, gates, run=run, label=label)
    committed = carry._replace(
        memory=memory,
        slots=slots,
        pending=tuple(torch.zeros_like(total) for total in pending),
        pending_retain=(torch.ones_like(kept),),
    )
    if config.read == "before":
        return predict(config, carry.memory, phi_q, run=run, label=label), committed
    # The closing token alone sees the commit.
    queries = several(run(split_time([piece.size - 1, 1]), phi_q, label=label))
    parts = [
        predict(config, source, asked, run=run, label=label)
        for source, asked in zip((carry.memory, memory), queries, strict=True)
        if asked.shape[1]
    ]
    return one(run(CONCAT, *parts, label=label)), committed


def _columns(config: MemoryConfig, tokens: Tokens, sizes: list[int], run: Run) -> list[Tensors]:
    """What each chunk needs of the tokens, chunk by chunk."""
    if config.commit == "chunk":
        return _cut(tokens[:6], sizes, run)
    vectors = _cut((tokens.phi_k, tokens.phi_q, tokens.v), sizes, run)
    return [
        (*own, *row) for own, row in zip(vectors, _rows(config, tokens, sizes, run), strict=True)
    ]


def _cut(tensors: tuple[Tensor | None, ...], sizes: list[int], run: Run) -> list[Tensors]:
    block = split_time(sizes)
    cut = [several(run(block, tensor, label="split")) for tensor in tensors]
    return list(zip(*cut, strict=True))


def _rows(config: MemoryConfig, tokens: Tokens, sizes: list[int], run: Run) -> list[Tensors]:
    """`Reads` and `Leaves` of every chunk; chunks of equal size share one call."""
    groups: list[list[int]] = []
    for size in sizes:
        if groups and groups[-1][-1] == size:
            groups[-1].append(size)
        else:
            groups.append([size])
    gates = (tokens.lr, tokens.retain, tokens.momentum)
    spans = _cut(gates, [sum(group) for group in groups], run)
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
        decays = config.retention.uses_retain
        a, end = (seen.bases[0], after.bases[0][..., -1]) if decays else (None, None)
        weights, into = seen.writes * lr.unsqueeze(-2), last_row(after) * lr
        if slot is None:
            return (weights, a, None, into, end, None, None, None), None
        slots = (after.bases[1][..., -1], last_row(slot) * lr, slot.bases[0][..., -1])
        return (weights, a, seen.bases[1], into, end, *slots), None

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
