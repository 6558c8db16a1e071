"""The exact compiled engine for memories made of linear layers: perceptrons, gated ones, a matrix with a link.

The token loop in kernels that walk the structure's graph (`hecate.engine.cpu.layers`), one memory after the other. The
forward keeps the state of every sqrt(T)-th token; the backward goes through such a segment again and walks it in
reverse. What a graph, bias, link and algorithm are is data to the kernels, so there is one compilation per dtype, kept
on disk. Threads share memories as in `compiled`. [ENG-LAYERS-D1]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import chain, repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hecate.activation import Activation, ReLU
from hecate.engine.call import Call, Plan
from hecate.engine.cpu.arrays import BYTES, NO_MASK, ROWS, arrays, padded, share_out
from hecate.engine.cpu.engine import TOKENS, no_kernels
from hecate.engine.cpu.family import at_once, link_part, printed_part, ready
from hecate.engine.engine import TokenEngine, chunk_refusal
from hecate.engine.loop import sequential
from hecate.engine.tokens import Carry, Tokens, in_folds
from hecate.formula import activation_nodes
from hecate.rule import MemoryConfig
from hecate.rule.rule import acts_of
from hecate.structure import Memory, Structure
from hecate.structure.bound import FLOOR
from hecate.structure.graph import Act, Add, Apply, Graph, Linear, Multiply, Normalise, Op
from hecate.tape import ByHand, Run, Tensors, execute, several

SHARE = 1 << 18  # tokens x cells that are worth another thread
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
        return ByHand("engine.compiled_layers", partial(_scan, config), partial(_scan_vjp, config), plain)


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
    """A graph as the kernels walk it, for weights of these shapes `[V, P]`.

    Attributes:
        nodes: the columns of `hecate.engine.cpu.layers.NODE` of every node.
        act, eps: the part of its activation, and eps of its norms.
        places: where each weight lies in a state, with its rows and columns, padded; wide: as `at_once` says of these.
        size: numbers of a state.
        row: numbers of a token's values; `ones` is where the constant lies in it, `last` the prediction.
    """

    def __init__(self, graph: Graph, shapes: Sequence[tuple[int, ...]], inputs: int, per: int) -> None:
        def padded(width: int) -> int:
            return -(-width // per) * per

        self.places: list[tuple[int, int, int]] = []
        self.size = 0
        for height, width in shapes:
            self.places.append((self.size, -(-height // ROWS) * ROWS, padded(width)))
            self.size += self.places[-1][1] * self.places[-1][2]
        self.wide = at_once([width for _, width in shapes], [width for _, _, width in self.places], per)
        self.act, self.eps = printed_part(activation_nodes(_activation(graph))), 0.0
        at, ats, sizes = padded(inputs), [0], [inputs]
        rows: list[list[int]] = []
        for node in graph.nodes:
            if isinstance(node, Linear):
                o, height, width = self.places[node.weight]
                size, columns = shapes[node.weight]
                rows.append([0, node.weight, o, height, width, node.source, 0, at, size, padded(size), columns])
                behind = 0
            else:
                size = sizes[node.sources[0]]
                if isinstance(node.op, Normalise):
                    self.eps = node.op.eps
                behind = {1: 2 * padded(size), 4: per}.get(OPS[type(node.op)], 0)
                sources = (*node.sources, node.sources[0])[:2]
                rows.append([OPS[type(node.op)], 0, 0, 0, 0, *sources, at, size, padded(size), size])
            ats.append(at)
            sizes.append(size)
            at += padded(size) + behind
        self.ones, self.row, self.last = at, at + per, ats[-1]
        ats.append(self.ones)  # the index -1, for ONE
        for row in rows:
            row[5], row[6] = ats[row[5]], ats[row[6]]
        self.nodes = np.array(rows, dtype=np.int64)
        self.widest = max(padded(size) for size in sizes)


@lru_cache(maxsize=256)
def _route(
    structure: Structure, shapes: tuple[tuple[int, ...], ...], inputs: int, per: int, acts: tuple[Any, ...]
) -> Route:
    # If its activations have other nodes, as after a redefinition, it is another graph.
    return Route(structure.graph(), shapes, inputs, per)  # as tuples, graphs of different operations may be equal


def _activation(graph: Graph) -> Activation:
    """The activation of the graph, or any where it has none."""
    return next((node.op.act for node in graph.nodes if isinstance(node, Apply) and isinstance(node.op, Act)), ReLU())


class Scan:
    """The inputs of one call: states packed `[N, size]`, and tokens `[B, T, H, *]` as they lie; `[N, T, *]` are those
    of one head."""

    def __init__(self, config: MemoryConfig, inputs: Tensors) -> None:
        """From memory, slots, initial memory and the fields of `Tokens`, flat."""
        graph, self.config = config.structure.graph(), config
        count = graph.weights
        states = count * (1 + len(config.algorithm.slots))
        self.memory, self.slots = several(inputs[:count]), several(inputs[count:states])
        self.initial = several(inputs[states : states + count])
        self.tokens = tokens = Tokens(*inputs[states + count :])  # type: ignore[arg-type]
        first, self.inputs, self.width = self.memory[0], tokens.phi_k.shape[-1], tokens.v.shape[-1]
        self.per = BYTES // first.element_size()
        keys, values = ((-(-size // self.per) * self.per,) for size in (self.inputs, self.width))
        self.sizes = keys, keys, values  # sizes of phi(k), phi(q) and v in whole vectors
        self.shapes = [tuple(weight.shape[1:]) for weight in self.memory]
        self.route = _route(config.structure, tuple(self.shapes), self.inputs, self.per, config.forms.acts)
        self.count, self.length = len(first), tokens.v.shape[1]
        self.heads = tokens.lr.shape[2] if tokens.lr.dim() == 3 else 1
        self.segment = max(1, math.isqrt(max(self.length - 1, 0)) + 1)
        self.new, self.zeros = first.new_empty, first.new_zeros
        self.link = link_part(config, self.route.wide)
        self.starts = tokens.reset is not None or config.retention.anchored  # whether the start is used

    @property
    def spare(self) -> int:
        """Numbers of scratch space for the link."""
        if not any(self.link.scratch):
            return 0
        return max([self.link.room(height, width) for _, height, width in self.route.places])

    def packed(self, weights: Memory) -> Tensor:
        """A state `[N, size]` from its weights, padded to whole vectors and whole fours of rows."""
        # Padding is 0 and stays 0, so it changes no write, norm or sum.
        state = self.zeros(self.count, self.route.size)
        for weight, (height, width), (o, rows, columns) in zip(weights, self.shapes, self.route.places, strict=True):
            state[:, o : o + rows * columns].unflatten(1, (rows, columns))[:, :height, :width] = weight.detach()
        return state

    def unpacked(self, state: Tensor) -> Memory:
        """The weights of a state."""
        return tuple(
            state[:, o : o + rows * columns].unflatten(1, (rows, columns))[:, :height, :width].contiguous()
            for (height, width), (o, rows, columns) in zip(self.shapes, self.route.places, strict=True)
        )

    def launch(self, kernel: str, given: Sequence[Tensor], scratch: Sequence[int]) -> None:
        """Runs a kernel over all memories, each worker with scratch space of its own."""
        config, tokens, route, none = self.config, self.tokens, self.route, self.new(0)
        masks = [NO_MASK if mask is None else mask for mask in tokens[6:8]]
        retain = tokens.retain if config.retention.uses_retain else torch.ones_like(tokens.lr)
        initial = self.packed(self.initial) if self.starts else none
        tensors = (*tokens[:4], retain, tokens.momentum, *masks, initial, *given)
        rows = arrays(tensors, chain(self.sizes, repeat(())))
        number = rows[0].dtype.type
        arguments = (
            self.heads, self.length, route.nodes, number(route.eps), len(route.nodes), route.size, route.row,
            self.sizes[0][0], self.sizes[2][0], route.last, self.width, route.ones, *rows,
            self.segment, int(config.retention.dual), int(config.retention.centring),
            int(config.decay_order == "before_gradient"), int(config.read == "before"),
            int(config.retention.anchored), number(FLOOR if config.blocks else 0.0),
        )  # fmt: skip
        learn, act, link, back = printed_part(config.forms.formula), route.act, self.link, kernel == "backward"
        wanted = [("layers", (), "layers", back), (learn.name, (), "learn", False), (act.name, (), "act", False)]
        wanted.append((link.name, link.options, "link", False))
        wanted += [(learn.name, (), "learn", True), (link.name, link.options, "link", True)] if back else []
        run, do, active, linked, *undo = ready(tuple(wanted), number)
        numbers = [np.array(part.numbers, number) for part in (learn, act, link)]
        parts = (do, numbers[0], active, numbers[1], linked, numbers[2], *undo)

        def work(lo: int, hi: int) -> None:
            run(lo, hi, *arguments, *arrays([self.zeros(size) for size in scratch]), *parts)

        share_out(work, self.count, self.count * self.length * route.size, SHARE)


def _scan(config: MemoryConfig, inputs: Tensors, keeps: bool) -> tuple[Tensors, Tensors]:
    """Outputs and final states; and the record for `_scan_vjp` if asked for."""
    call = Scan(config, inputs)
    route, (*shape, v) = call.route, call.tokens.v.shape
    memory, none = call.packed(call.memory), call.new(0)
    slot = call.packed(call.slots) if call.slots else none
    y = call.new(*shape, *call.sizes[2])
    kept = call.new(call.count, -(-call.length // call.segment), route.size) if keeps else none
    record = kept, torch.empty_like(kept) if call.slots else none
    linked = route.size if config.retention.dual else 0
    scratch = [linked, route.row, route.row, 2 * route.widest, 3 * route.widest, call.spare, route.row, route.row]
    call.launch("forward", (memory, slot, y, *record), scratch)
    return (y[..., :v], *call.unpacked(memory), *(call.unpacked(slot) if call.slots else ())), record


def _scan_vjp(config: MemoryConfig, inputs: Tensors, record: Tensors, cotangents: Sequence[Tensor]) -> Tensors:
    """Cotangents of all inputs."""
    call = Scan(config, inputs)
    route, tokens, segment = call.route, call.tokens, call.segment
    gy, *finals = cotangents
    weights, (*shape, v), none = len(call.shapes), tokens.v.shape, call.new(0)
    memory, slots = call.packed(tuple(finals[:weights])), tuple(finals[weights:])
    slot = call.packed(slots) if slots else none
    initial = call.zeros(memory.shape) if call.starts else none
    gk, gq, gv = (call.zeros(*shape, *size) for size in call.sizes)
    gates = [call.zeros(*shape) for _ in range(3)]
    states, linked = (segment + 2) * route.size, config.retention.dual
    scratch = [
        states if linked else 0, segment * route.row, segment * route.row, segment * call.sizes[2][0],
        3 * route.widest, call.spare, states, states if slots else 0, route.size if linked else 0,
        route.row, route.row, route.row, route.size if config.decay_order == "before_gradient" else 0, *[route.row] * 4,
    ]  # fmt: skip
    given = (*several(record), padded(gy, *call.sizes[2]), memory, slot, initial, gk, gq, gv, *gates)
    call.launch("backward", given, scratch)
    glr, gretain, gmomentum = gates
    return (
        *call.unpacked(memory), *(call.unpacked(slot) if slots else ()),
        *(call.unpacked(initial) if call.starts else (None,) * weights),
        gk[..., : call.inputs], gq[..., : call.inputs], gv[..., :v],
        glr, gretain if config.retention.uses_retain else None, gmomentum if slots else None, *(None,) * 4,
    )  # fmt: skip
