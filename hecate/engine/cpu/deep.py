"""The exact compiled engine for memories made of linear layers: perceptrons, gated ones, a matrix with a link.

The token loop in kernels that walk the structure's graph (`hecate.engine.cpu.layers`), one memory after the other. The
forward keeps the state of every sqrt(T)-th token; the backward goes through such a segment again and walks it in
reverse. What a graph, bias, link and algorithm are is data to the kernels, so there is one compilation per dtype, kept
on disk. Threads share memories as in `compiled`. [ENG-LAYERS-D1]
"""

from __future__ import annotations

import math
from functools import lru_cache, partial
from typing import Any

import numpy as np
from torch import Tensor

from hecate.activation import Activation, ReLU
from hecate.engine.call import Call, Plan
from hecate.engine.cpu.arrays import whole
from hecate.engine.cpu.engine import TOKENS, no_kernels
from hecate.engine.cpu.family import layout_of, printed_part, walked, walked_vjp
from hecate.engine.engine import TokenEngine, chunk_refusal
from hecate.engine.loop import sequential
from hecate.engine.tokens import Carry, Tokens, in_folds
from hecate.formula import activation_nodes
from hecate.rule import MemoryConfig
from hecate.rule.rule import acts_of
from hecate.structure import Memory, Structure
from hecate.structure.graph import Act, Add, Apply, Graph, Linear, Multiply, Normalise, Op
from hecate.tape import ByHand, Run, Tensors, execute, several

OPS: dict[type, int] = {Act: 1, Add: 2, Multiply: 3, Normalise: 4}


class CompiledLayers(TokenEngine):
    """Kernels of numba on a CPU, the state in cache, for structures of linear layers and retentions that add."""

    name = "compiled_layers"
    steady = anchors = bounds = True
    traceable = False

    def refuses(self, config: MemoryConfig) -> str | None:
        """Refuses configs without a kernel."""
        rule = config.rule
        structure, retention, algorithm = rule.structure, rule.retention, config.forms.algorithm
        if (reason := chunk_refusal(config)) is not None:
            return reason
        if not structure.factored:
            return f"structure {structure.kind!r} is not made of linear layers"
        if (reason := _unwalked(structure)) is not None:
            return f"structure {structure.kind!r} has {reason}"
        if algorithm is None or algorithm.nesterov:
            return f"algorithm {rule.algorithm.kind!r} as configured has no kernel"
        if config.forms.unprinted is not None:
            return config.forms.unprinted
        if not retention.additive:
            return f"retention {retention.kind!r} as configured has no kernel"
        if retention.dual:
            if isinstance(config.forms.retention, str):
                return f"retention {retention.kind!r} as configured has no kernel: {config.forms.retention}"
            if config.decay_order == "before_gradient":
                return f"retention {retention.kind!r} ahead of the gradient has no kernel"
            if algorithm.momentum and retention.centring:
                return f"retention {retention.kind!r} takes steps without their mean: no kernel with momentum"
        return None

    def unfit(self, plan: Plan) -> str | None:
        """Another device, another dtype, a retain per channel, no numba."""
        if plan.channels:
            return "its kernels know no retain per phi channel"
        return no_kernels(plan, "layers")

    def cost(self, plan: Plan) -> float:
        """Less than the token loop, more than blocks of a linear memory; from `TOKENS` on."""
        return math.inf if plan.length < TOKENS else 70.0 * plan.length

    def about(self, plan: Plan) -> str:
        """A word on whether the call is long enough for its kernels."""
        if plan.length < TOKENS:
            return f"its kernels are worth loading from {TOKENS} tokens on"
        return "a kernel walks the layers, the state in cache"

    def scan(self, call: Call, tokens: Tokens, carry: Carry, initial: Memory, *, run: Run) -> tuple[Tensor, Carry]:
        """In the kernels."""
        if call.traced:
            from hecate.engine.cpu.operator import scanned  # torch takes its time to register operators

            return scanned(self.name, call.config, tokens, carry, initial, run=run)
        kernel = self.kernel(call.config, carry)
        # One flat row for the block: what the backward returns is in this order, too.
        inputs = (*carry.memory, *carry.slots, *initial, *tokens)
        y, *states = several(run(kernel.block(), *inputs, label="tokens"))
        count = len(carry.memory)
        return y, carry._replace(memory=tuple(states[:count]), slots=tuple(states[count:]))

    def kernel(self, config: MemoryConfig, like: Any) -> ByHand:
        """Kernels as a `ByHand` of (*memory, *slots, *initial, *tokens); like: a carry of that layout, for plain torch,
        which the operator for torch.compile does not need."""
        plain = partial(_by_loop, config, like)
        there, back = partial(walked, config, route_of=_route), partial(walked_vjp, config, route_of=_route)
        return ByHand("engine.compiled_layers", there, back, plain)


def _unwalked(structure: Structure) -> str | None:
    """The first part of a structure's graph that the kernels cannot walk; None if they can walk all of it."""
    graph = structure.graph()
    layers = [node.weight for node in graph.nodes if isinstance(node, Linear)]
    ops: list[Op] = [node.op for node in graph.nodes if isinstance(node, Apply)]
    unknown = [op.name for op in ops if type(op) not in OPS]
    if unknown:
        return f"an operation {unknown[0]!r}, which has no kernel"
    if len(layers) != len(set(layers)):
        return "a weight in several layers, whose gradient has no rank one"
    acts = {op.act for op in ops if isinstance(op, Act)}
    if len(acts) > 1:
        return "several activations, of which its kernels know one"
    for act in acts - acts_of(structure):  # the config's own are checked with the config
        if isinstance(reason := activation_nodes(act), str):
            return f"an activation {act.kind!r}, which has no kernel: {reason}"
    if len({op.eps for op in ops if isinstance(op, Normalise)}) > 1:
        return "norms of several eps, of which its kernels know one"
    return None


def _by_loop(config: MemoryConfig, like: Carry, *inputs: Tensor | None) -> Tensors:
    """The kernels' function, in plain torch."""
    count = len(like.memory)
    states = count + len(like.slots)
    given = several(inputs[: states + count])
    own = like._replace(memory=given[:count], slots=given[count:states])
    rest = Tokens(*inputs[states + count :])  # type: ignore[arg-type]
    y, new = in_folds(sequential, config, rest, own, given[states:], run=execute)
    return y, *new.memory, *new.slots


class Route:
    """A graph as the kernels walk it, for weights that lie in these places and have so many columns.

    Attributes:
        nodes: the columns of `hecate.engine.cpu.passes.node` of every node.
        act, eps: the part of its activation, and eps of its norms.
        row: numbers of a token's values, the constant behind them all.
        scratch: numbers that the kernels need beside.
    """

    def __init__(self, graph: Graph, shapes: tuple[tuple[int, ...], ...], inputs: int, per: int) -> None:
        self.act, self.eps = printed_part(activation_nodes(_activation(graph))), 0.0
        places = layout_of(shapes, per).places
        at, ats, sizes = whole(inputs, per), [0], [inputs]
        rows: list[list[int]] = []
        for node in graph.nodes:
            if isinstance(node, Linear):
                size, columns = shapes[node.weight]
                rows.append([0, *places[node.weight], node.source, 0, at, size, whole(size, per), columns])
                behind = 0
            else:
                size = sizes[node.sources[0]]
                if isinstance(node.op, Normalise):
                    self.eps = node.op.eps
                behind = {1: 2 * whole(size, per), 4: per}.get(OPS[type(node.op)], 0)
                sources = (*node.sources, node.sources[0])[:2]
                rows.append([OPS[type(node.op)], 0, 0, 0, *sources, at, size, whole(size, per), size])
            ats.append(at)
            sizes.append(size)
            at += whole(size, per) + behind
        ats.append(at)  # the index -1, for ONE
        self.row = at + per
        for row in rows:
            row[4], row[5] = ats[row[4]], ats[row[5]]
        self.nodes = np.array(rows, dtype=np.int64)
        self.scratch = 7 * self.row + 3 * max(whole(size, per) for size in sizes)


@lru_cache(maxsize=256)
def _route(
    structure: Structure, shapes: tuple[tuple[int, ...], ...], inputs: int, per: int, acts: tuple[Any, ...]
) -> Route:
    # If its activations have other nodes, as after a redefinition, it is another graph.
    return Route(structure.graph(), shapes, inputs, per)  # as tuples, graphs of different operations may be equal


def _activation(graph: Graph) -> Activation:
    """The activation of the graph, or any where it has none."""
    return next((node.op.act for node in graph.nodes if isinstance(node, Apply) and isinstance(node.op, Act)), ReLU())
