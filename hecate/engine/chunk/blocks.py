"""Blocks of the chunk engine: many tokens at one state, one token at each of many states, and a step in the dual form:
gradients in factors, the reads through them, the write.

In a stack of linear layers the gradients of a chunk's tokens, all taken at one anchor, are rank one per layer,
G_i = d_i h_i^T: h_i the layer's input, d_i the cotangent of its output. States between the tokens are read through
their coefficients (`hecate.engine.coefficients`) and never built. The structure's own graph says which layers there are
and what lies between them. [ENG-CHUNK-D2]

A stack of linear layers answers all tokens at once. Any other structure is asked as if every token had a memory of its
own. So is one whose tokens each see the state decayed by a product of their own, `decay`, unless it is a matrix that
decays in proportion, where that scales keys. [ENG-CHUNK-D5]

Shapes: h, d `[N, C, width]`, weights W, M, S `[N, out, in]`, coefficients `[N, C]` or `[N, C, C]`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hecate.bias import Bias
from hecate.engine.loop import STACK, per_weight, rates_of, regained
from hecate.engine.tokens import expand_to, linear_block
from hecate.rule import MemoryConfig
from hecate.structure import Memory
from hecate.structure.bound import Lengths
from hecate.structure.graph import INPUT, ONE, Cotangents, Graph, Linear, evaluate, source, trace, traced
from hecate.tape import Block, Run, Tensors, execute, formula_block, is_traced, one, several
from hecate.tape.ops import over, sum_to_gate

Maybe = Tensor | None
# (total, x, y, sign=1) -> total + sign x y: in place, if no one else uses the total and torch need not see it.
Plus = Callable[..., Tensor]


class Row(NamedTuple):
    """Inputs of a step beside the states. `seen[t, i]` is K[t, i] lr_i, None where queries meet what gradients are
    taken at; a, `end` and the like are None where they are 1 or belong to no slot; `keys` and `write` are those of
    `hecate.structure.bound.lengths`, where steps are normalised.

    The t-th query meets `a M + s S - seen d h^T`; after the chunk M is `end M + slot_end S - (into d) h^T` and S
    `slot_kept S - (slot_into d) h^T`; with a start M0 `(1 - a) M0` and `(1 - end) M0` more.
    """

    phi_k: Tensor
    phi_q: Tensor
    v: Tensor
    decay: Maybe
    seen: Any
    a: Maybe
    s: Any
    into: Tensor
    end: Any
    slot_end: Any
    slot_into: Any
    slot_kept: Any
    keys: Maybe
    write: Maybe

    def weighed(self, c: Tensor) -> Row:
        """The row with writes of the lengths c."""
        seen = None if self.seen is None else self.seen * c.unsqueeze(-2)
        return self._replace(
            seen=seen, into=self.into * c, slot_into=None if self.slot_into is None else self.slot_into * c
        )


class Dual:
    """The block of a config.

    States are memory, slots, the weights that queries meet in place of the memory, those at which gradients are taken,
    and the start that it goes back to, `counts` of each: none where they are the memory, or nothing goes back; `reads`
    is whether there are outputs. `row.decay`, `[N, C]` or `[N, C, P]`, is a matrix's alone: the error of a key p_t at
    `decay_t W` is that of `decay_t p_t` at W, and what it writes at is p_t. (*row, *states) -> (y if it `reads`,
    *memory, *slots).
    """

    def __init__(self, config: MemoryConfig, graph: Graph, counts: tuple[int, ...], *, reads: bool = True) -> None:
        self.config, self.graph, self.reads, self.loss = config, graph, reads, config.bias.block()
        self.given, self.ends = list(map(bool, counts)), list(accumulate(counts, initial=len(Row._fields)))
        linear = [node for node in graph.nodes if isinstance(node, Linear) and config.retention.linear]
        self.biases = {node.weight for node in linear if node.source == ONE}  # h and scores are 1

    def block(self) -> Block:
        """For a tape."""
        return Block("chunk.step", self.forward, self.vjp if self.loss.hand_written else None)

    def states(self, inputs: Tensors) -> list[Memory]:
        """Memory, slots, the weights that are met, those at which gradients are taken, the start."""
        states: list[Any] = [inputs[at:end] for at, end in zip(self.ends, self.ends[1:], strict=False)]
        return [group or (states[0] if index in (2, 3) else ()) for index, group in enumerate(states)]

    def forward(self, *inputs: Tensor | None) -> tuple[Tensors, Any]:
        """Outputs, and what the VJP needs beside them."""
        row, (memory, slots, met, anchor, start) = Row(*inputs[: self.ends[0]]), self.states(inputs)  # type: ignore[arg-type]
        past, plus = trace(self.graph, anchor, times(row.decay, row.phi_k)), _apart if is_traced(*inputs) else _in_place
        # One pass to the predictions, one back from u: d of every layer, with h on its way.
        (u,), of_bias = self.loss.apply((past.values[-1], row.v))
        d, layer_inputs, flowed = past.factors(one((u,)))
        h = (row.phi_k,) if row.decay is not None else self.faced(layer_inputs)
        steps = None if row.keys is None else Lengths.of(past, row.write, row.keys, self.config.blocks)
        row, none = row if steps is None else row.weighed(steps.c), [None] * len(memory)
        # Where a chunk waits for its end, queries meet what gradients are taken at.
        met = anchor if row.seen is None else met
        values, records = self.read(row, (met, slots, start), d, h, plus) if self.reads else ([], [])
        columns = zip(memory, slots or none, start or none, d, h, strict=True)
        new = zip(*(_written(row, plus, *each) for each in columns), strict=True)
        outputs = (*values[-1:], *(weight for column in new for weight in column))
        return outputs, (inputs, past, of_bias, d, h, flowed, steps, values, records)

    def faced(self, h: Sequence[Tensor]) -> Sequence[Tensor]:
        """Layers' inputs as the retention takes the steps along them."""
        retention = self.config.retention
        return h if retention.linear else [retention.centred(item, item.new_ones(len(item))) for item in h]

    def read(
        self, row: Row, states: tuple[Memory, Memory, Memory], d: Memory, h: Sequence[Any], plus: Plus
    ) -> tuple[list[Tensor], list[Any]]:
        """The value of every node for the queries, each at its own token's state, and what the layers kept; `states`
        are the weights that are met, slots and start."""
        met, slots, start = states
        values: list[Tensor] = [row.phi_q]
        records: list[Any] = []
        for node in self.graph.nodes:
            if isinstance(node, Linear):
                at, slot = node.weight, slots[node.weight] if slots else None
                q = source(values, node.source)
                if row.seen is None:
                    values.append(torch.bmm(q, met[at].mT))
                    records.append((None, None))
                    continue
                # [N, C, C]: of a query with the inputs of all writes, weighed by what its state has of each.
                scores = None if at in self.biases else torch.bmm(q, h[at].mT)
                attend = row.seen if scores is None else scores * row.seen
                z = _answer(row, plus, q, met[at], slot, start[at] if start else None)
                values.append(plus(z, attend, d[at], -1))
                records.append((scores, attend))
            else:
                values.append(node.op.forward(*(values[at] for at in node.sources)))
                records.append(None)
        return values, records

    def vjp(self, residuals: Any, *cotangents: Tensor) -> Tensors:
        """Cotangents of all inputs."""
        inputs, past, of_bias, d, h, flowed, steps, values, records = residuals
        unweighed, (memory, slots, met, anchor, start) = Row(*inputs[: self.ends[0]]), self.states(inputs)
        gstates, count, (*_, own_met, apart, _) = list(cotangents[self.reads :]), len(memory), self.given
        row = unweighed if steps is None else unweighed.weighed(steps.c)
        back = _Back(row, _apart if is_traced(*inputs, *cotangents) else _in_place, own_met)
        back.anchor = [None] * count if apart else back.memory
        met = anchor if row.seen is None else met
        none, gq = [None] * count, None
        for each in zip(memory, slots or none, start or none, d, h, gstates, gstates[count:] or none, strict=False):
            back.written(*each)
        if self.reads:
            gq = self.unread(back, cotangents[0], values, records, (met, slots or none, d, h, start or none))
        gh = [None] if row.decay is not None else self.faced(back.h)
        above, gu, arrived = past.factors_vjp(flowed, back.d, gh, back.anchor)
        gpred, gv = self.loss.pullback(of_bias, [gu])
        arrived.add(len(self.graph.nodes), gpred)
        if steps is None:
            gweights, gp = past.through(arrived, above)
        else:
            gweights, gp, gkeys = steps.vjp(back.weighed(unweighed, steps.c), arrived, above)
            back.add("keys", gkeys)
        if row.decay is not None:
            gdecay = gp * row.phi_k
            back.add("decay", gdecay if row.decay.dim() == 3 else gdecay.sum(-1))
            gp = back.h[0] + times(row.decay, gp)
        of_row = (gp, gq, gv, *map(back.gate, Row._fields[3:]))
        of_states = (*(back.memory if apart else gweights), *(back.slots if slots else ()), *back.met)
        return (*of_row, *of_states, *(gweights if apart else ()), *(back.start if start else ()))

    def unread(self, back: _Back, gy: Tensor, values: list[Tensor], records: list[Any], columns: Any) -> Tensor:
        """The cotangent of the queries; the others are added to those of the write."""
        flowing = Cotangents(values)
        flowing.add(len(self.graph.nodes), gy)
        for index in reversed(range(len(self.graph.nodes))):
            node, g = self.graph.nodes[index], flowing[index + 1]
            if g is None:
                continue
            if isinstance(node, Linear):
                layer = [column[node.weight] for column in columns]
                pulled = back.read(node.weight, g, source(values, node.source), *layer, *records[index])
                flowing.add(node.source, pulled)
            else:
                slopes = node.op.slopes(values[index + 1], *(values[at] for at in node.sources))
                for at, share in zip(node.sources, node.op.vjp(slopes, g), strict=True):
                    flowing.add(at, share)
        return flowing.filled(INPUT)


# A layer. Gates `[N, C]` weigh the inputs of its tokens.


def _answer(row: Row, plus: Plus, q: Tensor, memory: Tensor, slot: Maybe, start: Maybe) -> Tensor:
    """z = a (q M^T) + s (q S^T), nobody else's, and with a start (1 - a) (q M0^T)."""
    gated = times(row.a, q)
    z = torch.bmm(gated, memory.mT)
    z = z if start is None else plus(z, q - gated, start.mT)
    return z if slot is None else plus(z, times(row.s, q), slot.mT)


def _written(
    row: Row, plus: Plus, memory: Tensor, slot: Maybe, start: Maybe, d: Tensor, h: Tensor
) -> tuple[Tensor, ...]:
    """A weight and its slot after the chunk's last token."""

    def step(total: Tensor, into: Maybe, add: Plus = plus) -> Tensor:
        return add(total, d.mT, times(into, h), -1)

    if start is not None:
        decayed = torch.lerp(start, memory, over(row.end, memory))
    else:
        decayed = memory if row.end is None else over(row.end, memory) * memory
    if slot is None:
        return (step(decayed, row.into, _apart if row.end is None else plus),)
    decayed = torch.addcmul(decayed, over(row.slot_end, slot), slot)
    return step(decayed, row.into), step(over(row.slot_kept, slot) * slot, row.slot_into)


class _Back:
    """Cotangents of a step's layers, and of its gates by name, as they come in; of the weights that are met where
    those are inputs of their own."""

    def __init__(self, row: Row, plus: Plus, separate: bool) -> None:
        self.row, self.plus, self.separate = row, plus, separate
        self.gates: dict[str, Tensor] = {}  # of `into`, `slot_into` and `seen` with their sign turned
        self.minus: dict[str, Any] = {
            name: None if gate is None else -gate for name, gate in (("into", row.into), ("slot_into", row.slot_into))
        }
        columns: Any = [], [], [], [], [], []
        self.d, self.h, self.memory, self.slots, self.met, self.start = columns
        self.anchor: list[Maybe]

    def add(self, name: str, g: Tensor) -> None:
        """Adds to a gate's."""
        self.gates[name] = self.gates[name] + g if name in self.gates else g

    def gate(self, name: str) -> Maybe:
        """The cotangent of a gate."""
        g = self.gates.get(name)
        return -g if g is not None and name in ("into", "slot_into", "seen") else g

    def weighed(self, row: Row, c: Tensor) -> Tensor:
        """The cotangent of lengths c; those of what they weigh become the given row's."""
        gc = torch.zeros_like(c)
        for name in ("seen", "into", "slot_into"):
            if name in self.gates:
                g, factor = self.gates[name], getattr(row, name)
                gc = gc - (g * factor if factor.dim() == 2 else (g * factor).sum(-2))
                self.gates[name] = g * (c if factor.dim() == 2 else c.unsqueeze(-2))
        return gc

    def written(
        self, memory: Tensor, slot: Maybe, start: Maybe, d: Tensor, h: Tensor, g: Tensor, gslot: Any
    ) -> None:  # fmt: skip
        """The reverse of `_written`."""
        row, gmemory, gstart = self.row, g, None
        gd, gh = self.stepped("into", d, h, g, None, None)
        if row.end is not None:
            gmemory = over(row.end, g) * g
            gstart = None if start is None else g - gmemory
            self.add("end", sum_to_gate(g * (memory if start is None else memory - start), row.end))
        if slot is not None:
            gd, gh = self.stepped("slot_into", d, h, gslot, gd, gh)
            self.add("slot_end", sum_to_gate(g * slot, row.slot_end))
            self.add("slot_kept", sum_to_gate(gslot * slot, row.slot_kept))
            gslot = torch.addcmul(over(row.slot_end, g) * g, over(row.slot_kept, g), gslot)
        columns = self.d, self.h, self.memory, self.slots, self.start
        for column, item in zip(columns, (gd, gh, gmemory, gslot, gstart), strict=True):
            column.append(item)
        self.met += [None] if self.separate else []

    def stepped(self, name: str, d: Tensor, h: Tensor, g: Tensor, gd: Maybe, gh: Maybe) -> tuple[Tensor, Tensor]:
        """Cotangents of d and h from that of -d^T (into h), added to those known."""
        minus, pulled = self.minus[name], torch.bmm(d, g)
        self.add(name, along(h, pulled))
        gh = times(minus, pulled) if gh is None else torch.addcmul(gh, minus.unsqueeze(-1), pulled)
        gated = times(minus, h)
        return torch.bmm(gated, g.mT) if gd is None else self.plus(gd, gated, g.mT), gh

    def read(
        self, at: int, g: Tensor, q: Tensor, met: Tensor, slot: Maybe, d: Tensor, h: Tensor, start: Maybe,
        scores: Maybe, attend: Maybe,
    ) -> Tensor:  # fmt: skip
        """The cotangent of a layer's queries from that of its answers z = a (q M^T) + s (q S^T) - attend d, and with a
        start (1 - a) (q M0^T)."""
        fresh = self.separate or self.row.end is None  # else what is there is nobody else's
        if attend is None:
            known, add = self.anchor[at], _apart if fresh else self.plus
            self.anchor[at] = torch.bmm(g.mT, q) if known is None else add(known, g.mT, q)
            return torch.bmm(g, met)
        gattend = torch.bmm(g, d.mT)
        self.d[at] = self.plus(self.d[at], attend.mT, g, -1)
        self.add("seen", gattend if scores is None else gattend * scores)
        if scores is not None:
            gattend = gattend * self.row.seen
            self.h[at] = self.plus(self.h[at], gattend.mT, q, -1)
        gq: Maybe = None
        for name, weight, base in (("a", met, start), ("s", slot, None)):
            gate = getattr(self.row, name)
            if weight is None:
                continue
            pulled, gated = torch.bmm(g, weight), times(gate, q)
            if base is not None:
                gq = torch.bmm(g, base)
                pulled = pulled - gq
                self.start[at] = self.plus(self.start[at], g.mT, q - gated)
            if gate is not None:
                self.add(name, along(pulled, q))
            gq = times(gate, pulled) if gq is None else torch.addcmul(gq, gate.unsqueeze(-1), pulled)
            if name == "s":
                self.slots[at] = self.plus(self.slots[at], g.mT, gated)
            elif self.separate:
                self.met[at] = torch.bmm(g.mT, gated)
            else:
                self.memory[at] = (_apart if fresh else self.plus)(self.memory[at], g.mT, gated)
        return self.plus(gq, gattend, h, -1)  # a constant needs no cotangent


def _apart(total: Tensor, x: Tensor, y: Tensor, sign: int = 1) -> Tensor:
    return torch.baddbmm(total, x, y, alpha=sign)


def _in_place(total: Tensor, x: Tensor, y: Tensor, sign: int = 1) -> Tensor:
    return total.baddbmm_(x, y, alpha=sign)


def times(weight: Maybe, rows: Tensor) -> Tensor:
    """`[N, C]` or `[N, C, width]` times `[N, C, width]`; None is 1."""
    return rows if weight is None else (weight if weight.dim() == 3 else weight.unsqueeze(-1)) * rows


def along(a: Tensor, b: Tensor) -> Tensor:
    """<a, b> along the last axis."""
    return (a * b).sum(-1)


Pairs = tuple[Tensor, Tensor, Maybe]  # keys, values and decay


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
    return _each(config, _repeated(weights, p, run), p, run)


def predict_each(config: MemoryConfig, states: list[Memory], p: Tensor, run: Run) -> Tensor:
    """The answer of the t-th state to the t-th query."""
    memory = per_weight(run, _fold(p), per_weight(run, STACK, *states))
    return _each(config, config.rule.weights(memory, run=run), p, run)


def token_gradients(config: MemoryConfig, anchor: Memory, row: Pairs, run: Run, start: Memory = ()) -> Memory:
    """The gradient of every token (p, v, decay): `[N, C, ...]` for each weight.

    The anchor is the weights at which they are taken; with `decay`, what is carried, which the products decay, towards
    the start if it is given.
    """
    p, v, decay = row
    graph = shared_graph(config, decayed=decay is not None)
    if graph is not None:
        return per_weight(run, _SPREAD, *factored(config, graph, anchor, row, run))
    weights = _repeated(anchor, p, run)
    if decay is not None:
        # Every token has the anchor as its own retain has left it: C memories of N become N C.
        product = one(run(_fold(p), decay))
        weights = config.rule.decayed(weights, product, run=run)
        weights = regained(config, weights, _repeated(start, p, run), product, run)
        weights = config.rule.weights(weights, run=run)
    # [N, C, *] to [N C, *] and back: no rule has to know of chunks.
    block = config.structure.gradient_block(config.bias.block())
    flat = several(run(block, *per_weight(run, _fold(p), (p, v)), *weights))
    return per_weight(run, _unfold(p), flat)


def factored(config: MemoryConfig, graph: Graph, anchor: Memory, row: Pairs, run: Run) -> tuple[Memory, Memory]:
    """The same in factors d and h of every layer. `decay`, `[N, C]` or `[N, C, P]`, is a matrix's alone: the error of a
    key p_t at `decay_t W` is that of `decay_t p_t` at W, and what it writes at is p_t."""
    p, v, decay = row
    keys = p if decay is None else one(run(_SCALE, p, decay))
    factors = several(run(_gradients(graph, config.bias), keys, v, *anchor))
    d, h = factors[: len(anchor)], factors[len(anchor) :]
    return d, h if decay is None else (p,)


def summed(
    config: MemoryConfig, anchor: Memory, pending: Memory, row: Pairs, lr: Tensor, run: Run, start: Memory = ()
) -> Memory:
    """The gradients of `token_gradients`, weighted by lr `[N, C]` or of each weight `[N, C, W]`, added to those of the
    chunk so far."""
    graph, rates = shared_graph(config, decayed=row[2] is not None), rates_of(lr, 2, len(pending), run)
    if graph is not None:
        return per_weight(run, _SUM_OUTER, pending, *factored(config, graph, anchor, row, run), rates)
    return per_weight(run, _SUM, pending, token_gradients(config, anchor, row, run, start), rates)


def _each(config: MemoryConfig, weights: Memory, p: Tensor, run: Run) -> Tensor:
    queries = one(run(_fold(p), p))
    return one(run(_unfold(p), one(run(config.structure.read_block(), queries, *weights))))


def _repeated(weights: Memory, tokens: Tensor, run: Run) -> Memory:
    sizes = tokens.shape[:2]

    def wide(weight: Tensor) -> Tensor:
        return weight.unsqueeze(1).expand(*sizes, *weight.shape[1:]).flatten(0, 1)

    return per_weight(run, linear_block("chunk.repeat", wide, lambda g: g.unflatten(0, sizes).sum(1)), weights)


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
        (u,), of_bias = loss.apply((past.values[-1], v))
        d, h, flowed = past.factors(one((u,)))
        return (*d, *h), (past, flowed, of_bias)

    def vjp(residuals: Any, *cotangents: Tensor) -> Tensors:
        past, flowed, of_bias = residuals
        above, gu, values = past.factors_vjp(flowed, cotangents[: graph.weights], cotangents[graph.weights :])
        gpred, gv = loss.pullback(of_bias, [gu])
        values.add(len(graph.nodes), gpred)
        gweights, gp = past.through(values, above)
        return gp, gv, *gweights

    return Block("chunk.gradients", forward, vjp if loss.hand_written else None)


def _fold(tokens: Tensor) -> Block:
    sizes = tokens.shape[:2]  # both sizes given, as with no tokens -1 would be ambiguous
    return linear_block("chunk.fold", lambda x: x.flatten(0, 1), lambda g: g.unflatten(0, sizes))


def _unfold(tokens: Tensor) -> Block:
    sizes = tokens.shape[:2]
    return linear_block("chunk.unfold", lambda x: x.unflatten(0, sizes), lambda g: g.flatten(0, 1))


def _spread_vjp(d: Tensor, h: Tensor, g: Tensor) -> Tensors:
    return (g @ h.unsqueeze(-1)).squeeze(-1), (d.unsqueeze(-2) @ g).squeeze(-2)


def _scale_vjp(p: Tensor, decay: Tensor, g: Tensor) -> Tensors:
    gdecay = g * p
    return times(decay, g), gdecay if decay.dim() == 3 else gdecay.sum(-1)


def _sum_vjp(_: Tensor, grads: Tensor, lr: Tensor, g: Tensor) -> Tensors:
    spread = g.unsqueeze(1)
    return g, expand_to(lr, grads) * spread, (grads * spread).flatten(2).sum(-1)


def _sum_outer_vjp(_: Tensor, d: Tensor, h: Tensor, lr: Tensor, g: Tensor) -> Tensors:
    pulled = torch.bmm(h, g.mT)
    return g, times(lr, pulled), torch.bmm(times(lr, d), g), along(d, pulled)


_SPREAD = formula_block("chunk.spread", lambda d, h: d.unsqueeze(-1) * h.unsqueeze(-2), _spread_vjp)
_SCALE = formula_block("chunk.decayed", lambda p, decay: times(decay, p), _scale_vjp)
_SUM = formula_block("chunk.sum", lambda total, grads, lr: total + (expand_to(lr, grads) * grads).sum(1), _sum_vjp)
_SUM_OUTER = formula_block(
    "chunk.sum", lambda total, d, h, lr: torch.baddbmm(total, times(lr, d).mT, h), _sum_outer_vjp
)
