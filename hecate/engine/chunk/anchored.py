"""Many tokens at one state, and one token at each of many states, whatever the structure.

Structures of linear layers take batched products; any other is asked as if every token had a
memory of its own. So is one whose tokens each see the state decayed by a product of their own, `kept`, unless it is a
matrix that decays in proportion, where that scales keys. [ENG-CHUNK-D5]
"""

from __future__ import annotations

import torch
from torch import Tensor

from hecate.engine.chunk import layers
from hecate.engine.chunk.layers import Gradients
from hecate.rule import MemoryConfig
from hecate.rule.rule import one, several
from hecate.structure import Layered, Memory
from hecate.structure.graph import Graph
from hecate.tape import Block, Run, Tensors


def graph_of(config: MemoryConfig) -> Graph | None:
    """The structure's layers, if it is made of such."""
    structure = config.structure
    if not isinstance(structure, Layered) or not structure.factored:
        return None
    return structure.graph()


def shared_graph(config: MemoryConfig, *, decayed: bool) -> Graph | None:
    """The structure's layers, if the tokens of a chunk can share one product of the anchor."""
    proportional = config.structure.linear and config.retention.linear
    return graph_of(config) if proportional or not decayed else None


def predict(config: MemoryConfig, weights: Memory, p: Tensor, *, run: Run, label: str) -> Tensor:
    """The answers of one memory to many keys or queries `[N, C, P]`."""
    graph = graph_of(config)
    if graph is not None:
        return layers.predict(graph, weights, p, run=run, label=label)
    return _each(config, _repeated(weights, p.shape[1], run, label), p, run, label)


def predict_states(config: MemoryConfig, states: list[Memory], p: Tensor, *, run: Run, label: str) -> Tensor:
    """The answer of the t-th state to the t-th query."""
    memory = tuple(one(run(_STACK, *column, label=label)) for column in zip(*states, strict=True))
    weights = config.rule.weights(memory, run=run, label=label)
    return _each(config, weights, p, run, label)


def token_gradients(
    config: MemoryConfig, anchor: Memory, row: tuple[Tensor, Tensor, Tensor | None], *, run: Run, label: str
) -> Memory:
    """The gradient of every token (p, v, kept): `[N, C, ...]` for each weight.

    The anchor is the weights at which they are taken; with `kept`, what is carried, which the products decay.
    """
    p, v, kept = row
    graph = shared_graph(config, decayed=kept is not None)
    if graph is not None:
        grads = factored(config, graph, anchor, row, run=run, label=label)
        return layers.spread(grads, run=run, label=label)
    size = p.shape[1]
    weights = _repeated(anchor, size, run, label)
    if kept is not None:
        product = one(run(_FOLD, kept, label=label))
        decayed = config.rule.decayed(weights, product, run=run, label=label)
        weights = config.rule.weights(decayed, run=run, label=label)
    keys, values = (one(run(_FOLD, item, label=label)) for item in (p, v))
    block = config.structure.gradient_block(config.bias.block())
    flat = several(run(block, keys, values, *weights, label=label))
    return tuple(one(run(_unfold(size), grad, label=label)) for grad in flat)


def factored(
    config: MemoryConfig,
    graph: Graph,
    anchor: Memory,
    row: tuple[Tensor, Tensor, Tensor | None],
    *,
    run: Run,
    label: str,
) -> Gradients:
    """The same in factors. `kept`, `[N, C]` or `[N, C, P]`, is a matrix's alone: the error of a key p_t at `kept_t W`
    is that of `kept_t p_t` at W, and what it writes at is p_t."""
    p, v, kept = row
    if kept is None:
        return layers.gradients(graph, config.bias, anchor, p, v, run=run, label=label)
    seen = one(run(_SCALE, p, kept, label=label))
    grads = layers.gradients(graph, config.bias, anchor, seen, v, run=run, label=label)
    return grads._replace(h=(p,))


def summed(
    config: MemoryConfig,
    anchor: Memory,
    pending: Memory,
    row: tuple[Tensor, Tensor, Tensor | None],
    lr: Tensor,
    *,
    run: Run,
    label: str,
) -> Memory:
    """The lr-weighted gradients of `token_gradients`, added to those of the chunk so far."""
    graph = shared_graph(config, decayed=row[2] is not None)
    if graph is not None:
        grads = factored(config, graph, anchor, row, run=run, label=label)
        return layers.summed(pending, grads, lr, run=run, label=label)
    each = token_gradients(config, anchor, row, run=run, label=label)
    pairs = zip(pending, each, strict=True)
    return tuple(one(run(_SUM, total, grad, lr, label=label)) for total, grad in pairs)


def _each(config: MemoryConfig, weights: Memory, p: Tensor, run: Run, label: str) -> Tensor:
    queries = one(run(_FOLD, p, label=label))
    flat = one(run(config.structure.predict_block(), queries, *weights, label=label))
    return one(run(_unfold(p.shape[1]), flat, label=label))


def _repeated(weights: Memory, size: int, run: Run, label: str) -> Memory:
    def forward(weight: Tensor) -> tuple[Tensors, None]:
        wide = weight.unsqueeze(1).expand(weight.shape[0], size, *weight.shape[1:])
        return (wide.flatten(0, 1),), None

    def vjp(_: None, g: Tensor) -> tuple[Tensor]:
        return (g.unflatten(0, (-1, size)).sum(1),)

    block = Block("chunk.repeat", forward, vjp)
    return several(tuple(one(run(block, weight, label=label)) for weight in weights))


def _scale(p: Tensor, kept: Tensor) -> tuple[Tensors, tuple[Tensor, Tensor]]:
    return (_channels(kept) * p,), (p, kept)


def _scale_vjp(inputs: tuple[Tensor, Tensor], g: Tensor) -> tuple[Tensor, Tensor]:
    p, kept = inputs
    gkept = g * p
    return _channels(kept) * g, gkept if kept.dim() == 3 else gkept.sum(-1)


def _channels(kept: Tensor) -> Tensor:
    return kept if kept.dim() == 3 else kept.unsqueeze(-1)


def _fold(x: Tensor) -> tuple[Tensors, int]:
    return (x.flatten(0, 1),), x.shape[1]


def _fold_vjp(size: int, g: Tensor) -> tuple[Tensor]:
    return (g.unflatten(0, (-1, size)),)


def _unfold(size: int) -> Block:
    def forward(x: Tensor) -> tuple[Tensors, None]:
        return (x.unflatten(0, (-1, size)),), None

    def vjp(_: None, g: Tensor) -> tuple[Tensor]:
        return (g.flatten(0, 1),)

    return Block("chunk.unfold", forward, vjp)


def _stack(*states: Tensor) -> tuple[Tensors, int]:
    return (torch.stack(states, 1).flatten(0, 1),), len(states)


def _stack_vjp(size: int, g: Tensor) -> tuple[Tensor, ...]:
    return g.unflatten(0, (-1, size)).unbind(1)


def _sum(total: Tensor, grads: Tensor, lr: Tensor) -> tuple[Tensors, tuple[Tensor, Tensor]]:
    return (total + (_wide(lr, grads) * grads).sum(1),), (grads, lr)


def _sum_vjp(inputs: tuple[Tensor, Tensor], g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    grads, lr = inputs
    spread = g.unsqueeze(1)
    return g, _wide(lr, grads) * spread, (grads * spread).flatten(2).sum(-1)


def _wide(lr: Tensor, grads: Tensor) -> Tensor:
    return lr.reshape(*lr.shape, *[1] * (grads.dim() - 2))


_SCALE = Block("chunk.decayed", _scale, _scale_vjp)
_FOLD = Block("chunk.fold", _fold, _fold_vjp)
_STACK = Block("chunk.states", _stack, _stack_vjp)
_SUM = Block("chunk.sum", _sum, _sum_vjp)
