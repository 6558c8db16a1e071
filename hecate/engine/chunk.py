"""The chunk engine: exact evaluation of gradients frozen at a chunk's start, and of chunk commits.

All gradients of a chunk are taken at one state, so predictions, bias gradients and backpropagation
are batched products over its C tokens. For structures made of linear layers every gradient is rank
one per layer, and where retention and algorithm are linear the state after token t is read without
being built, layer by layer (the dual form):

    W_t h = a_t W_0 h + s_t S_0 h - sum_{i <= t} K[t, i] lr_i d_i (h_i . h)

with the coefficients of `hecate.engine.coefficients`. Any other retention or algorithm steps from
token to token, on gradients that are known beforehand, and all its states are read at once.
`commit="chunk"` reads one state throughout and takes one step per chunk, whatever algorithm and
retention. Masks and resets lay each memory's tokens into cells of its own (`hecate.engine.grid`).
[ENG-CHUNK-D1]
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from hecate.engine import layers
from hecate.engine.anchored import graph_of, predict, predict_states, summed, token_gradients
from hecate.engine.finite import can_inspect
from hecate.engine.grid import Grid, grid_of
from hecate.engine.layers import Leaves, Reads
from hecate.engine.pieces import Piece, coefficient_rows, cut, pieces_of
from hecate.engine.sequential import select
from hecate.engine.tokens import CONCAT, SELECT, UNBIND, Carry, Tokens, restart, split_time
from hecate.rule import MemoryConfig, MemoryState, TokenGates
from hecate.rule.rule import one, several
from hecate.structure import Memory
from hecate.structure.graph import Graph
from hecate.tape import Block, Run, Tensors, checkpoint

DUAL = 128  # tokens whose pairs are held at once in the dual form
BUILT = 16  # tokens whose states are built at once


def chunk_refusal(config: MemoryConfig) -> str | None:
    """Why the chunk engine cannot run a config exactly; None if it can."""
    if config.chunk == 1:
        return "chunk=1 takes each gradient at the state before its token, not at a chunk's start"
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


Step = Callable[[MemoryConfig, Carry, Tensors, Piece, Run, str], tuple[Tensor, Carry]]


def cell_size(config: MemoryConfig, *, channelwise: bool) -> int:
    """The most tokens that one step takes."""
    if config.commit == "chunk":
        return config.chunk
    return min(config.chunk, DUAL if _dual(config, channelwise) else BUILT)


def _dual(config: MemoryConfig, channelwise: bool) -> bool:
    """Whether states can be read without being built."""
    linear = config.retention.linear and config.algorithm.kind in ("gd", "momentum")
    return linear and graph_of(config) is not None and not channelwise


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

    `position` is that of every memory in its chunk at the start, None if it is not known or not one
    number; the carried chunk is finished first, the last one may stay unfinished. A tape keeps one
    carry per segment of about sqrt(steps) steps, which is taped again when its turn comes.
    """
    length, channelwise = tokens.v.shape[1], tokens.retain.dim() == 3
    size = min(cell_size(config, channelwise=channelwise), length)
    grid: Grid | None = None
    moved = (carry.position + length) % config.chunk
    masked = tokens.write is not None or tokens.reset is not None
    if masked or position is None or position >= config.chunk:
        start = carry.position
        grid = grid_of(tokens.write, tokens.reset, start, length, config.chunk, size)
        tokens, moved = _laid(grid, tokens, run), grid.position
        pieces = [Piece(size, True, True)] * grid.cells
    else:
        pieces = pieces_of(position, length, config.chunk, size)
    step, columns = _columns(config, tokens, [piece.size for piece in pieces], run)
    rows = [_borders(grid, at) + column for at, column in enumerate(columns)]
    y, carry = _loop(config, step, rows, pieces, carry, initial, run)
    if grid is not None:
        y = one(run(grid.collect(), y, label="outputs"))
    return y, carry._replace(position=moved)


def _loop(
    config: MemoryConfig,
    step: Step,
    rows: list[Tensors],
    pieces: list[Piece],
    carry: Carry,
    initial: Memory,
    run: Run,
) -> tuple[Tensor, Carry]:
    width, each = len(carry.flat), len(rows[0])

    def loop(run: Run, *inputs: Tensor, first: int = 0) -> Tensors:
        own, start = carry.rebuilt(inputs[:width]), inputs[width : width + len(initial)]
        rest = inputs[width + len(initial) :]
        outputs: list[Tensor] = []
        for at in range(0, len(rest), each):
            index = first + at // each
            label = f"chunk {index}"
            opens, closes, resets, *row = rest[at : at + each]
            if resets is not None:
                own = select(resets, restart(config, start, own), own, run, label)
            piece = pieces[index]
            if opens is not None:
                piece = piece._replace(opens=opens, closes=closes)
            y, own = step(config, own, tuple(row), piece, run, label)
            outputs.append(y)
        return one(run(CONCAT, *outputs, label="outputs")), *own.flat

    size = math.isqrt(len(pieces) - 1) + 1
    outputs: list[Tensor] = []
    flat = carry.flat
    for first in range(0, len(pieces), size):
        given = (tensor for row in rows[first : first + size] for tensor in row)
        block = checkpoint("segment", partial(loop, first=first))
        y, *left = several(run(block, *flat, *initial, *given, label=f"segment {first // size}"))
        outputs.append(y)
        flat = tuple(left)
    return one(run(CONCAT, *outputs, label="outputs")), carry.rebuilt(flat)


def _commit_dual(
    config: MemoryConfig, carry: Carry, row: Tensors, piece: Piece, run: Run, label: str
) -> tuple[Tensor, Carry]:
    phi_k, phi_q, v = several(row[:3])
    seen, left = Reads(*row[3:6]), Leaves(*row[6:])  # type: ignore[arg-type]
    graph = _given(graph_of(config))
    anchor = _anchor(carry, piece, run, label)
    memory, slots = carry.memory, carry.slots
    grads = layers.gradients(graph, config.bias, anchor, phi_k, v, run=run, label=label)
    y = layers.read(graph, memory, slots, grads, seen, phi_q, run=run, label=label)
    memory, slots = layers.write(memory, slots, grads, left, run=run, label=label)
    return y, carry._replace(memory=memory, slots=slots, anchor=anchor)


def _commit_built(
    config: MemoryConfig, carry: Carry, row: Tensors, piece: Piece, run: Run, label: str
) -> tuple[Tensor, Carry]:
    phi_k, phi_q, v, *gates = several(row[:6])
    written = row[6]
    anchor = _anchor(carry, piece, run, label)
    built = token_gradients(config, anchor, phi_k, v, run=run, label=label)
    columns = [several(run(UNBIND, item, label=label)) for item in (*gates, *built)]
    masks = [None] * piece.size if written is None else written.unbind(1)
    states: list[Memory] = []
    for mask, *each in zip(masks, *columns, strict=True):
        before, own, grads = carry.memory, TokenGates(*each[:3]), tuple(each[3:])
        memory, slots = config.rule.apply(
            carry.memory, carry.slots, grads, own, run=run, label=label
        )
        stepped = carry._replace(memory=memory, slots=slots)
        carry = stepped if mask is None else select(mask, stepped, carry, run, label)
        states.append(carry.memory if config.read == "after" else before)
    y = predict_states(config, states, phi_q, run=run, label=label)
    return y, carry._replace(anchor=anchor)


def _anchor(carry: Carry, piece: Piece, run: Run, label: str) -> Memory:
    """Where gradients are taken: the memory where a chunk opens, else as before."""
    if isinstance(piece.opens, bool):
        return carry.memory if piece.opens else carry.anchor
    pairs = zip(carry.memory, carry.anchor, strict=True)
    return tuple(one(run(SELECT, piece.opens, now, then, label=label)) for now, then in pairs)


def _commit_chunk(
    config: MemoryConfig, carry: Carry, row: Tensors, piece: Piece, run: Run, label: str
) -> tuple[Tensor, Carry]:
    phi_k, phi_q, v, lr, retain, momentum = several(row)
    pending = summed(config, carry.memory, carry.pending, (phi_k, v, lr), run=run, label=label)
    kept = one(run(_PRODUCT, carry.pending_retain[0], retain, label=label))
    waiting = carry._replace(pending=pending, pending_retain=(kept,))
    if piece.closes is False:
        return predict(config, carry.memory, phi_q, run=run, label=label), waiting
    last = one(run(_LAST, momentum, label=label))
    gates = TokenGates(torch.ones_like(last), kept, last)
    rule = config.rule
    memory, slots = rule.apply(carry.memory, carry.slots, pending, gates, run=run, label=label)
    new = carry._replace(
        memory=memory,
        slots=slots,
        pending=tuple(torch.zeros_like(total) for total in pending),
        pending_retain=(torch.ones_like(kept),),
    )
    if isinstance(piece.closes, Tensor):
        new = select(piece.closes, new, waiting, run, label)
    if config.read == "before":
        return predict(config, carry.memory, phi_q, run=run, label=label), new
    # The closing token alone sees the commit.
    queries = several(run(split_time([piece.size - 1, 1]), phi_q, label=label))
    parts = [
        predict(config, source, asked, run=run, label=label)
        for source, asked in zip((carry.memory, new.memory), queries, strict=True)
        if asked.shape[1]
    ]
    return one(run(CONCAT, *parts, label=label)), new


def _laid(grid: Grid, tokens: Tokens, run: Run) -> Tokens:
    """The tokens in their cells."""
    lay = grid.lay()
    phi_k, phi_q, v, lr, retain, momentum = (
        one(run(lay, tensor, label="cells")) for tensor in tokens[:6]
    )
    kept = one(run(SELECT, grid.write, retain, torch.ones_like(retain), label="cells"))
    return Tokens(phi_k, phi_q, v, lr, kept, momentum, grid.write)


def _borders(grid: Grid | None, at: int) -> Tensors:
    if grid is None:
        return None, None, None
    resets = None if grid.resets is None else grid.resets[:, at]
    return grid.opens[:, at], grid.closes[:, at], resets


def _columns(
    config: MemoryConfig, tokens: Tokens, sizes: list[int], run: Run
) -> tuple[Step, list[Tensors]]:
    """The step to take, and what each needs of its tokens."""
    if config.commit == "chunk":
        return _commit_chunk, cut(tokens[:6], sizes, run)
    if not _dual(config, tokens.retain.dim() == 3):
        return _commit_built, cut(tokens[:7], sizes, run)
    vectors = cut(tokens[:3], sizes, run)
    rows = coefficient_rows(config, tokens, sizes, run)
    return _commit_dual, [(*own, *row) for own, row in zip(vectors, rows, strict=True)]


def _given(graph: Graph | None) -> Graph:
    if graph is None:
        raise TypeError("the dual form needs a structure of linear layers")
    return graph


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
