"""What the chunk engine does with the tokens of one span, by the way they are committed.

Each takes the carry and the row of its span, and returns the outputs `[N, C, V]` and the new carry.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hecate.engine.chunk.batched import (
    Leaves,
    Reads,
    factored,
    graph_of,
    predict,
    predict_states,
    read,
    summed,
    token_gradients,
    write,
)
from hecate.engine.chunk.spans import Span
from hecate.engine.loop import select
from hecate.engine.tokens import CONCAT, SELECT, UNBIND, Carry, split_time
from hecate.rule import MemoryConfig, TokenGates
from hecate.rule.rule import one, several
from hecate.structure import Memory
from hecate.structure.graph import Graph
from hecate.tape import Block, Run, Tensors


def commit_dual(
    config: MemoryConfig, carry: Carry, row: Tensors, span: Span, run: Run, label: str
) -> tuple[Tensor, Carry]:
    """A step at each token, read in the dual form: phi_k, phi_q, v, kept and the coefficients."""
    phi_k, phi_q, v = several(row[:3])
    seen, left = Reads(*row[4:7]), Leaves(*row[7:])  # type: ignore[arg-type]
    graph = _given(graph_of(config))
    anchor, kept = _anchor(carry, span, run, label), _since(carry, row[3], run, label)
    memory, slots = carry.memory, carry.slots
    grads = factored(config, graph, anchor, (phi_k, v, kept), run, label)
    y = read(graph, memory, slots, grads, seen, phi_q, run, label)
    memory, slots = write(memory, slots, grads, left, run, label)
    new = carry._replace(memory=memory, slots=slots, anchor=anchor)
    return y, _closed(new, kept, span, run, label)


def commit_built(
    config: MemoryConfig, carry: Carry, row: Tensors, span: Span, run: Run, label: str
) -> tuple[Tensor, Carry]:
    """A step at each token, built one after the other: phi_k, phi_q, v, the gates, the mask and kept."""
    phi_k, phi_q, v, *gates = several(row[:6])
    written = row[6]
    anchor, kept = _anchor(carry, span, run, label), _since(carry, row[7], run, label)
    at = config.rule.weights(anchor, run=run, label=label) if kept is None else anchor
    built = token_gradients(config, at, (phi_k, v, kept), run, label)
    columns = [several(run(UNBIND, item, label=label)) for item in (*gates, *built)]
    masks = [None] * span.size if written is None else written.unbind(1)
    states: list[Memory] = []
    for mask, *each in zip(masks, *columns, strict=True):
        before, own, grads = carry.memory, TokenGates(*each[:3]), tuple(each[3:])
        memory, slots = config.rule.apply(carry.memory, carry.slots, grads, own, run=run, label=label)
        stepped = carry._replace(memory=memory, slots=slots)
        carry = stepped if mask is None else select(mask, stepped, carry, run, label)
        states.append(carry.memory if config.read == "after" else before)
    y = predict_states(config, states, phi_q, run, label)
    return y, _closed(carry._replace(anchor=anchor), kept, span, run, label)


def _since(carry: Carry, kept: Tensor | None, run: Run, label: str) -> Tensor | None:
    """The products of retain since the span's start as those since its chunk's."""
    if kept is None:
        return None
    return one(run(_TIMES, carry.pending_retain[0], kept, label=label))


def _closed(carry: Carry, kept: Tensor | None, span: Span, run: Run, label: str) -> Carry:
    """The carry with the product that the chunk goes on with: 1 where it closes."""
    if kept is None:
        return carry
    last = one(run(_LAST, kept, label=label))
    if isinstance(span.closes, Tensor):
        last = one(run(SELECT, span.closes, torch.ones_like(last), last, label=label))
    elif span.closes:
        last = torch.ones_like(last)
    return carry._replace(pending_retain=(last,))


def _anchor(carry: Carry, span: Span, run: Run, label: str) -> Memory:
    """Where gradients are taken: the memory where a chunk opens, else as before."""
    if isinstance(span.opens, bool):
        return carry.memory if span.opens else carry.anchor
    pairs = zip(carry.memory, carry.anchor, strict=True)
    return tuple(one(run(SELECT, span.opens, now, then, label=label)) for now, then in pairs)


def commit_chunk(
    config: MemoryConfig, carry: Carry, row: Tensors, span: Span, run: Run, label: str
) -> tuple[Tensor, Carry]:
    """One step where a chunk closes: phi_k, phi_q, v, the gates and kept."""
    phi_k, phi_q, v, lr, retain, momentum = several(row[:6])
    rule, since = config.rule, _since(carry, row[6], run, label)
    weights = rule.weights(carry.memory, run=run, label=label)
    seen, at = (phi_k, v, since), weights if since is None else carry.memory
    pending = summed(config, at, carry.pending, seen, lr, run, label)
    kept = one(run(_PRODUCT, carry.pending_retain[0], retain, label=label))
    waiting = carry._replace(pending=pending, pending_retain=(kept,))
    if span.closes is False:
        return predict(config, weights, phi_q, run, label), waiting
    last = one(run(_LAST, momentum, label=label))
    gates = TokenGates(torch.ones_like(last), kept, last)
    memory, slots = rule.apply(carry.memory, carry.slots, pending, gates, run=run, label=label)
    new = carry._replace(
        memory=memory,
        slots=slots,
        pending=tuple(torch.zeros_like(total) for total in pending),
        pending_retain=(torch.ones_like(kept),),
    )
    if isinstance(span.closes, Tensor):
        new = select(span.closes, new, waiting, run, label)
    if config.read == "before":
        return predict(config, weights, phi_q, run, label), new
    # The closing token alone sees the commit.
    after = rule.weights(new.memory, run=run, label=label)
    queries = several(run(split_time([span.size - 1, 1]), phi_q, label=label))
    parts = [
        predict(config, source, asked, run, label)
        for source, asked in zip((weights, after), queries, strict=True)
        if asked.shape[1]
    ]
    return one(run(CONCAT, *parts, label=label)), new


def _given(graph: Graph | None) -> Graph:
    if graph is None:
        raise TypeError("the dual form needs a structure of linear layers")
    return graph


def _times(total: Tensor, kept: Tensor) -> tuple[Tensors, Tensors]:
    return (total.unsqueeze(1) * kept,), (total, kept)


def _times_vjp(inputs: tuple[Tensor, Tensor], g: Tensor) -> tuple[Tensor, Tensor]:
    total, kept = inputs
    return (g * kept).sum(1), total.unsqueeze(1) * g


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


_TIMES = Block("chunk.since", _times, _times_vjp)
_PRODUCT = Block("chunk.product", _product, _product_vjp)
_LAST = Block("chunk.last", _last, _last_vjp)
