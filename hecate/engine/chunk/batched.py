"""Many tokens at one state, and one token at each of many states, as blocks of batched products.

In a stack of linear layers the gradients of a chunk's tokens, all taken at one anchor, are rank one per layer,
G_i = d_i h_i^T: h_i the layer's input, d_i the cotangent of its output. States between the tokens are read through
their coefficients (`hecate.engine.coefficients`) and never built. The structure's own graph says which layers there are
and what lies between them. [ENG-CHUNK-D2]

Any other structure is asked as if every token had a memory of its own. So is one whose tokens each see the state
decayed by a product of their own, `kept`, unless it is a matrix that decays in proportion, where that scales keys.
[ENG-CHUNK-D5]

Shapes: h, d `[N, C, width]`, weights W, M, S `[N, out, in]`, coefficients `[N, C]` or `[N, C, C]`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hecate.bias import Bias
from hecate.engine.loop import STACK, per_weight
from hecate.engine.tokens import expand_to, linear_block
from hecate.rule import MemoryConfig
from hecate.structure import Memory
from hecate.structure.graph import Graph, Linear, Op, evaluate, source, trace, traced
from hecate.tape import Block, Run, Tensors, execute, formula_block, one, several
from hecate.tape.ops import over, sum_to_gate

Maybe = Tensor | None
Seen = tuple[Tensor, Tensor, Maybe]  # keys, values and kept


class Gradients(NamedTuple):
    """The gradients of a chunk's tokens in factors, one pair for each layer."""

    d: Memory
    h: Memory


def shared_graph(config: MemoryConfig, *, decayed: bool = False) -> Graph | None:
    """The structure's layers, if it is made of such; `decayed` if the tokens of a chunk share a product of the anchor
    too."""
    proportional = config.forms.linear and config.retention.linear
    return config.structure.graph() if config.structure.factored and (proportional or not decayed) else None


def predict(config: MemoryConfig, weights: Memory, p: Tensor, run: Run = execute) -> Tensor:
    """The answers of one memory to many keys or queries `[N, C, P]`."""
    graph = None if config.forms.transposed else shared_graph(config)
    if graph is not None:
        return one(run(predict_block(graph), p, *weights))
    return _each(config, _repeated(weights, p.shape[1], run), p, run)


def predict_states(config: MemoryConfig, states: list[Memory], p: Tensor, run: Run) -> Tensor:
    """The answer of the t-th state to the t-th query."""
    memory = per_weight(run, _fold(len(states)), per_weight(run, STACK, *states))
    return _each(config, config.rule.weights(memory, run=run), p, run)


def token_gradients(config: MemoryConfig, anchor: Memory, row: Seen, run: Run) -> Memory:
    """The gradient of every token (p, v, kept): `[N, C, ...]` for each weight.

    The anchor is the weights at which they are taken; with `kept`, what is carried, which the products decay.
    """
    p, v, kept = row
    graph = shared_graph(config, decayed=kept is not None)
    if graph is not None:
        return per_weight(run, _SPREAD, *factored(config, graph, anchor, row, run))
    size = p.shape[1]
    weights = _repeated(anchor, size, run)
    if kept is not None:
        product = one(run(_fold(size), kept))
        weights = config.rule.weights(config.rule.decayed(weights, product, run=run), run=run)
    block = config.structure.gradient_block(config.bias.block())
    flat = several(run(block, *per_weight(run, _fold(size), (p, v)), *weights))
    return per_weight(run, _unfold(size), flat)


def factored(config: MemoryConfig, graph: Graph, anchor: Memory, row: Seen, run: Run) -> Gradients:
    """The same in factors. `kept`, `[N, C]` or `[N, C, P]`, is a matrix's alone: the error of a key p_t at `kept_t W`
    is that of `kept_t p_t` at W, and what it writes at is p_t."""
    p, v, kept = row
    seen = p if kept is None else one(run(_SCALE, p, kept))
    found = several(run(_gradients(graph, config.bias), seen, v, *anchor))
    grads = Gradients(found[: len(anchor)], found[len(anchor) :])
    return grads if kept is None else grads._replace(h=(p,))


def summed(config: MemoryConfig, anchor: Memory, pending: Memory, row: Seen, lr: Tensor, run: Run) -> Memory:
    """The lr-weighted gradients of `token_gradients`, added to those of the chunk so far."""
    graph, rates = shared_graph(config, decayed=row[2] is not None), (lr,) * len(pending)
    if graph is not None:
        return per_weight(run, _SUM_OUTER, pending, *factored(config, graph, anchor, row, run), rates)
    return per_weight(run, _SUM, pending, token_gradients(config, anchor, row, run), rates)


def read(graph: Graph, memory: Memory, slots: Memory, grads: Gradients, reads: Tensors, q: Tensor, run: Run) -> Tensor:
    """Each query through the layers of its own token's state `a M + s S - weights d h^T`.

    `reads` are (weights, a, s): `weights[t, i]` is K[t, i] lr_i; a is None where it is 1, s where there is no momentum.
    """
    values = [q]
    for node in graph.nodes:
        if isinstance(node, Linear):
            at = node.weight
            layer = (grads.h[at], grads.d[at], *reads, memory[at], slots[at] if slots else None)
            values.append(one(run(_READ, source(values, node.source), *layer)))
        else:
            values.append(one(run(_apply(node.op), *(values[at] for at in node.sources))))
    return values[-1]


def write(memory: Memory, slots: Memory, grads: Gradients, leaves: Tensors, run: Run) -> tuple[Memory, Memory]:
    """Weights and slots after the chunk's last token: `a M + s S - (into d) h^T` and `e S - (slot d) h^T`.

    `leaves` are (into, a, s, slot, e), None as in `read`.
    """
    held = slots or [None] * len(memory)
    new = [several(run(_WRITE, *row, *leaves)) for row in zip(memory, held, *grads, strict=True)]
    return tuple(each[0] for each in new), tuple(slot for each in new for slot in each[1:])


def _each(config: MemoryConfig, weights: Memory, p: Tensor, run: Run) -> Tensor:
    queries = one(run(_fold(p.shape[1]), p))
    return one(run(_unfold(p.shape[1]), one(run(config.structure.read_block(), queries, *weights))))


def _repeated(weights: Memory, size: int, run: Run) -> Memory:
    def wide(weight: Tensor) -> Tensor:
        return weight.unsqueeze(1).expand(weight.shape[0], size, *weight.shape[1:]).flatten(0, 1)

    return per_weight(run, linear_block("chunk.repeat", wide, lambda g: g.unflatten(0, (-1, size)).sum(1)), weights)


def predict_block(graph: Graph) -> Block:
    """(p, *weights) -> predictions."""

    def forward(p: Tensor, *weights: Tensor) -> tuple[Tensors, Any]:
        values = evaluate(graph, weights, p)
        return (values[-1],), (weights, values)

    def vjp(residuals: Any, g: Tensor) -> Tensors:
        weights, values = residuals
        gweights, gp = traced(graph, weights, values).backpropagated(g)
        return gp, *gweights

    return Block("chunk.predict", forward, vjp)


def _gradients(graph: Graph, bias: Bias) -> Block:
    """(p, v, *weights) -> d and h of every weight."""
    loss = bias.block()

    def forward(p: Tensor, v: Tensor, *weights: Tensor) -> tuple[Tensors, Any]:
        past = trace(graph, weights, p)
        (u,), kept = loss.apply((past.values[-1], v))
        d, h, flowed = past.factors(one((u,)))
        return (*d, *h), (past, flowed, kept)

    def vjp(residuals: Any, *cotangents: Tensor) -> Tensors:
        past, flowed, kept = residuals
        above, gu, values = past.factors_vjp(flowed, cotangents[: graph.weights], cotangents[graph.weights :])
        gpred, gv = loss.pullback(kept, [gu])
        values.add(len(graph.nodes), gpred)
        gweights, gp = past.through(values, above)
        return gp, gv, *gweights

    return Block("chunk.gradients", forward, vjp if loss.hand_written else None)


def _apply(op: Op) -> Block:
    def vjp(*given: Tensor) -> Tensors:
        return op.vjp(op.slopes(*given[:-1]), given[-1])

    return formula_block(f"chunk.{op.name}", op.forward, vjp)


def _read(
    q: Tensor, h: Tensor, d: Tensor, weights: Tensor, a: Maybe, s: Maybe, memory: Tensor, slot: Maybe
) -> tuple[Tensors, Any]:
    scores = torch.bmm(q, h.mT)
    attend = scores * weights
    base = _times(a, torch.bmm(q, memory.mT))
    if s is not None and slot is not None:
        base = torch.addcmul(base, s.unsqueeze(-1), torch.bmm(q, slot.mT))
    z = torch.baddbmm(base, attend, d, alpha=-1)
    return (z,), (q, h, d, weights, a, s, memory, slot, scores, attend)


def _read_vjp(residuals: Any, g: Tensor) -> Tensors:
    q, h, d, weights, a, s, memory, slot, scores, attend = residuals
    gattend = -torch.bmm(g, d.mT)
    gscores = gattend * weights
    # z = a (q M^T) + ...: the cotangents of q and of a share g M.
    back = torch.bmm(g, memory)
    gq = torch.baddbmm(_times(a, back), gscores, h)
    ga = None if a is None else _along(back, q)
    gmemory = torch.bmm(g.mT, _times(a, q)) if g.shape[-1] > q.shape[-1] else torch.bmm(_times(a, g).mT, q)
    gs = gslot = None
    if slot is not None:
        back = torch.bmm(g, slot)
        gs, gq = _along(back, q), torch.addcmul(gq, s.unsqueeze(-1), back)
        gslot = torch.bmm(g.mT, _times(s, q)) if g.shape[-1] > q.shape[-1] else torch.bmm(_times(s, g).mT, q)
    return (gq, torch.bmm(gscores.mT, q), -torch.bmm(attend.mT, g), gattend * scores, ga, gs, gmemory, gslot)


def _write(
    memory: Tensor, slot: Maybe, d: Tensor, h: Tensor, into: Tensor, a: Maybe, s: Maybe, slot_into: Maybe, e: Maybe
) -> tuple[Tensors, Any]:
    inputs = (memory, slot, d, h, into, a, s, slot_into, e)
    kept = memory if a is None else over(a, memory) * memory
    if slot is None or s is None or slot_into is None or e is None:
        return (torch.baddbmm(kept, _times(into, d).mT, h, alpha=-1),), inputs
    kept = torch.addcmul(kept, over(s, slot), slot)
    new = torch.baddbmm(kept, _times(into, d).mT, h, alpha=-1)
    carried = torch.baddbmm(over(e, slot) * slot, _times(slot_into, d).mT, h, alpha=-1)
    return (new, carried), inputs


def _write_vjp(inputs: Any, g: Tensor, gcarried: Tensor | None = None) -> Tensors:
    memory, slot, d, h, into, a, s, slot_into, e = inputs
    gd, ginto, gh = _sum_pulled(d, h, -into, g)
    gmemory, ga = (g, None) if a is None else (over(a, g) * g, _gate(g, memory, a))
    if gcarried is None:
        return gmemory, None, gd, gh, -ginto, ga, None, None, None
    gd, gslot_into, gh = _sum_pulled(d, h, -slot_into, gcarried, gd, gh)
    gslot = torch.addcmul(over(s, g) * g, over(e, g), gcarried)
    gs, ge = _gate(g, slot, s), _gate(gcarried, slot, e)
    return gmemory, gslot, gd, gh, -ginto, ga, gs, -gslot_into, ge


def _fold(size: int) -> Block:
    return linear_block("chunk.fold", lambda x: x.flatten(0, 1), lambda g: g.unflatten(0, (-1, size)))


def _unfold(size: int) -> Block:
    return linear_block("chunk.unfold", lambda x: x.unflatten(0, (-1, size)), lambda g: g.flatten(0, 1))


def _spread_vjp(d: Tensor, h: Tensor, g: Tensor) -> Tensors:
    return (g @ h.unsqueeze(-1)).squeeze(-1), (d.unsqueeze(-2) @ g).squeeze(-2)


def _scale_vjp(p: Tensor, kept: Tensor, g: Tensor) -> Tensors:
    gkept = g * p
    return _times(kept, g), gkept if kept.dim() == 3 else gkept.sum(-1)


def _sum_vjp(_: Tensor, grads: Tensor, lr: Tensor, g: Tensor) -> Tensors:
    spread = g.unsqueeze(1)
    return g, expand_to(lr, grads) * spread, (grads * spread).flatten(2).sum(-1)


def _sum_outer_vjp(_: Tensor, d: Tensor, h: Tensor, lr: Tensor, g: Tensor) -> Tensors:
    gd, glr, gh = _sum_pulled(d, h, lr, g)
    return g, gd, gh, glr


def _times(weight: Tensor | None, rows: Tensor) -> Tensor:
    """`[N, C]` or `[N, C, width]` times `[N, C, width]`; None is 1."""
    return rows if weight is None else (weight if weight.dim() == 3 else weight.unsqueeze(-1)) * rows


def _sum_pulled(
    d: Tensor, h: Tensor, weight: Tensor, g: Tensor, gd: Maybe = None, gh: Maybe = None
) -> tuple[Tensor, ...]:
    """Cotangents of (d, weight, h) from that of sum_i weight_i d_i h_i^T, those of d and h added to what is given."""
    pulled = torch.bmm(h, g.mT)
    gweight = _along(d, pulled)
    if gd is None or gh is None:
        return _times(weight, pulled), gweight, torch.bmm(_times(weight, d), g)
    gd = torch.addcmul(gd, weight.unsqueeze(-1), pulled)
    return gd, gweight, torch.baddbmm(gh, _times(weight, d), g)


def _along(a: Tensor, b: Tensor) -> Tensor:
    """<a, b> along the last axis."""
    return (a * b).sum(-1)


def _gate(g: Tensor, weight: Tensor, gate: Tensor) -> Tensor:
    """The cotangent of a gate `[N]`, or `[N, P]`, that multiplies a weight."""
    if gate.dim() > 1:
        return sum_to_gate(g * weight, gate)
    return torch.bmm(g.flatten(1).unsqueeze(1), weight.flatten(1).unsqueeze(2)).flatten()


_READ = Block("chunk.read", _read, _read_vjp)
_WRITE = Block("chunk.write", _write, _write_vjp)
_SPREAD = formula_block("chunk.spread", lambda d, h: d.unsqueeze(-1) * h.unsqueeze(-2), _spread_vjp)
_SCALE = formula_block("chunk.decayed", lambda p, kept: _times(kept, p), _scale_vjp)
_SUM = formula_block("chunk.sum", lambda total, grads, lr: total + (expand_to(lr, grads) * grads).sum(1), _sum_vjp)
_SUM_OUTER = formula_block(
    "chunk.sum", lambda total, d, h, lr: torch.baddbmm(total, _times(lr, d).mT, h), _sum_outer_vjp
)
