"""Many tokens at one state, and one token at each of many states, as blocks of batched products.

A stack of linear layers answers all tokens at once (`hecate.engine.chunk.dual`). Any other structure is asked as if
every token had a memory of its own. So is one whose tokens each see the state
decayed by a product of their own, `kept`, unless it is a matrix that decays in proportion, where that scales keys.
[ENG-CHUNK-D5]

Shapes: h, d `[N, C, width]`, weights `[N, out, in]`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hecate.bias import Bias
from hecate.engine.chunk.dual import along, times
from hecate.engine.loop import STACK, per_weight, regained
from hecate.engine.tokens import expand_to, linear_block, rates_of
from hecate.rule import MemoryConfig
from hecate.structure import Memory
from hecate.structure.graph import Graph, evaluate, trace, traced
from hecate.tape import Block, Run, Tensors, execute, formula_block, one, several

Maybe = Tensor | None
Seen = tuple[Tensor, Tensor, Maybe]  # keys, values and kept


class Gradients(NamedTuple):
    """The gradients of a chunk's tokens in factors, one pair for each layer."""

    d: Memory
    h: Memory


def shared_graph(config: MemoryConfig, *, decayed: bool = False) -> Graph | None:
    """The structure's layers, if it is made of such; `decayed` if the tokens of a chunk share a product of the anchor
    too."""
    proportional = config.forms.linear and config.retention.linear and not config.retention.anchored
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


def token_gradients(config: MemoryConfig, anchor: Memory, row: Seen, run: Run, start: Memory = ()) -> Memory:
    """The gradient of every token (p, v, kept): `[N, C, ...]` for each weight.

    The anchor is the weights at which they are taken; with `kept`, what is carried, which the products decay, towards
    the start if it is given.
    """
    p, v, kept = row
    graph = shared_graph(config, decayed=kept is not None)
    if graph is not None:
        return per_weight(run, _SPREAD, *factored(config, graph, anchor, row, run))
    size = p.shape[1]
    weights = _repeated(anchor, size, run)
    if kept is not None:
        # Every token has the anchor as its own retain has left it: C memories of N become N C.
        product = one(run(_fold(size), kept))
        weights = config.rule.decayed(weights, product, run=run)
        weights = regained(config, weights, _repeated(start, size, run), product, run)
        weights = config.rule.weights(weights, run=run)
    # [N, C, *] to [N C, *] and back: no rule has to know of chunks.
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


def summed(
    config: MemoryConfig, anchor: Memory, pending: Memory, row: Seen, lr: Tensor, run: Run, start: Memory = ()
) -> Memory:
    """The gradients of `token_gradients`, weighted by lr `[N, C]` or of each weight `[N, C, W]`, added to those of the
    chunk so far."""
    graph, rates = shared_graph(config, decayed=row[2] is not None), rates_of(lr, 2, len(pending), run)
    if graph is not None:
        return per_weight(run, _SUM_OUTER, pending, *factored(config, graph, anchor, row, run), rates)
    return per_weight(run, _SUM, pending, token_gradients(config, anchor, row, run, start), rates)


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
        # Weights are shared by all tokens: their cotangents are sums over them.
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


def _fold(size: int) -> Block:
    return linear_block("chunk.fold", lambda x: x.flatten(0, 1), lambda g: g.unflatten(0, (-1, size)))


def _unfold(size: int) -> Block:
    return linear_block("chunk.unfold", lambda x: x.unflatten(0, (-1, size)), lambda g: g.flatten(0, 1))


def _spread_vjp(d: Tensor, h: Tensor, g: Tensor) -> Tensors:
    return (g @ h.unsqueeze(-1)).squeeze(-1), (d.unsqueeze(-2) @ g).squeeze(-2)


def _scale_vjp(p: Tensor, kept: Tensor, g: Tensor) -> Tensors:
    gkept = g * p
    return times(kept, g), gkept if kept.dim() == 3 else gkept.sum(-1)


def _sum_vjp(_: Tensor, grads: Tensor, lr: Tensor, g: Tensor) -> Tensors:
    spread = g.unsqueeze(1)
    return g, expand_to(lr, grads) * spread, (grads * spread).flatten(2).sum(-1)


def _sum_outer_vjp(_: Tensor, d: Tensor, h: Tensor, lr: Tensor, g: Tensor) -> Tensors:
    pulled = torch.bmm(h, g.mT)
    return g, times(lr, pulled), torch.bmm(times(lr, d), g), along(d, pulled)


_SPREAD = formula_block("chunk.spread", lambda d, h: d.unsqueeze(-1) * h.unsqueeze(-2), _spread_vjp)
_SCALE = formula_block("chunk.decayed", lambda p, kept: times(kept, p), _scale_vjp)
_SUM = formula_block("chunk.sum", lambda total, grads, lr: total + (expand_to(lr, grads) * grads).sum(1), _sum_vjp)
_SUM_OUTER = formula_block(
    "chunk.sum", lambda total, d, h, lr: torch.baddbmm(total, times(lr, d).mT, h), _sum_outer_vjp
)
