"""The chunk engine: exact evaluation of gradients frozen at a chunk's start, and of chunk commits; and the same with
compiled steps.

All gradients of a chunk are taken at one state, so predictions, bias gradients and backpropagation are batched products
over its C tokens. For structures made of linear layers every gradient is rank one per layer, and where retention and
algorithm are linear the state after token t is read without being built, layer by layer (the dual form):

    W_t h = a_t W_0 h + s_t S_0 h - sum_{i <= t} K[t, i] lr_i d_i (h_i . h)

with the coefficients of `hecate.engine.coefficients`. Any other retention or algorithm steps from token to token, on
gradients that are known beforehand, and all its states are read at once. `commit="chunk"` reads one state throughout
and takes one step per chunk, whatever algorithm and retention. Masks and resets lay each memory's tokens into spans of
its own (`hecate.engine.chunk.spans`). [ENG-CHUNK-D1]

On a GPU a step is few launches if compiled, where one by one its elementwise parts between the products are most of
them. `torch.compile` is given one step, and every chunk of the same size runs what comes of it, forward and backward:
it compiles once for a config, shapes and dtypes, some twenty seconds, not once for every chunk as where a whole model
is compiled. Where torch has to see every operation the step is the chunk engine's. [ENG-CHUNK-D8]
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from importlib.util import find_spec
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from hecate.engine.call import RATES, Call, Plan
from hecate.engine.chunk.blocks import Dual, predict, predict_block, predict_each, shared_graph, summed, token_gradients
from hecate.engine.chunk.spans import Layout, Span, coefficient_rows, kept_rows, layout_of, most_spans, spans_of
from hecate.engine.engine import TokenEngine, with_graph
from hecate.engine.loop import MULTIPLY, committed_chunk, in_segments, labelled, per_weight, regained, restarted, select
from hecate.engine.tokens import CONCAT, NUMBERS, SELECT, UNBIND, VECTORS, Carry, Tokens, cut, in_folds, linear_block
from hecate.errors import install_line
from hecate.rule import MemoryConfig, TokenGates
from hecate.structure import Memory
from hecate.structure.bound import BLOCK, KEYS, lengths
from hecate.structure.graph import Graph
from hecate.tape import Block, Run, Tensors, bridge, execute, formula_block, is_traced, one, several, waits

DUAL, DEVICE_DUAL = 64, 128  # tokens whose pairs are held at once in the dual form, on a device in fewer launches
BUILT = 16  # tokens whose states are built at once
KEPT = 2**27  # bytes of tokens and carries that are taped as they run, without segments
BACKEND = "inductor"
Look = tuple[torch.Size, torch.dtype, torch.device]
Step = Callable[[Carry, Tensors, Span, Memory, Run], tuple[Tensor, Carry]]  # with the start that memories go back to


class Chunk(TokenEngine):
    """All gradients of a chunk at one state, for every structure, bias and retention."""

    name = "chunk"
    anchors = bounds = True
    takes = ("floor", RATES)

    def refuses(self, config: MemoryConfig) -> str | None:
        """Refuses configs without chunks, or whose gradients are chosen token by token."""
        if config.chunk == 1:
            return "chunk=1 takes each gradient at the state before its token, not at a chunk's start"
        if not config.algorithm.takes_any_gradient():
            return f"algorithm {config.algorithm.kind!r} chooses its gradient token by token"
        retention, form = config.retention, config.forms.algorithm
        if retention.links != "token":
            setting = f"retention.link_at={retention.links!r}"
            if form is None or not (config.structure.factored and retention.additive):
                return f"{setting} needs structures of linear layers and steps that are linear in their gradients"
            if form.momentum and retention.centring:
                return f"{setting} takes steps without their mean, which with momentum are no sums of gradients"
        return None

    def unfit(self, plan: Plan) -> str | None:
        """A retain per channel where the link is taken at the chunk's start."""
        links = plan.config.retention.links
        if links != "token" and plan.channels:
            return f"retention.link_at={links!r} with a retain per phi channel"
        return None

    def steps(self, plan: Plan | Call) -> int:
        """The steps in chunks."""
        return steps_of(plan)

    def cost(self, plan: Plan) -> float:
        """A step costs as much as two tokens of the token loop, so it has to take two on average."""
        return math.inf if plan.config.chunk == 1 else 200.0 * max(1, steps_of(plan))

    def about(self, plan: Plan) -> str:
        """The number of steps, if there are too many."""
        steps = steps_of(plan)
        if 2 * steps > plan.length:
            return f"{steps} chunks for {plan.length} tokens: resets leave too little in each"
        return "gradients of a chunk at one state: exact in chunks"

    def scan(self, call: Call, tokens: Tokens, carry: Carry, initial: Memory, *, run: Run) -> tuple[Tensor, Carry]:
        """Chunk by chunk, from the place in the first."""
        return in_folds(partial(chunked, position=call.place), call.config, tokens, carry, initial, run=run)


def steps_of(plan: Plan | Call, longest: int | None = None) -> int:
    """Number of steps of a call, of `longest` tokens at most where that is given; 0 without tokens."""
    config, length = plan.config, plan.length
    if plan.steps is not None or not length:
        return plan.steps or 0
    late = plan.device not in bridge.AT_ONCE
    size = min(longest or span_size(config, channelwise=plan.channels, late=late), config.chunk, length)
    if not plan.masks and plan.place is not None and plan.place < config.chunk:
        return len(spans_of(plan.place, length, config.chunk, size))
    return most_spans(plan.tensors, size)  # which depends on the masks, and on each memory's place in its chunk


def span_size(config: MemoryConfig, *, channelwise: bool, late: bool = False) -> int:
    """The most tokens in one step; `late`: on a device, where each launch costs time."""
    if config.blocks:
        return min(config.chunk, BLOCK)
    if config.commit == "chunk" and config.decay_order == "with_step":
        return config.chunk
    return min(config.chunk, BUILT if dual_graph(config, channelwise) is None else DEVICE_DUAL if late else DUAL)


def dual_graph(config: MemoryConfig, channelwise: bool) -> Graph | None:
    """The layers through which states are read without being built, if they are."""
    # Per channel too, but there the coefficients of all pairs cost more than the states (measured).
    along = config.retention.linear or config.retention.links != "token"
    if channelwise or not along or config.forms.algorithm is None:
        return None
    return shared_graph(config, decayed=config.decay_order == "before_gradient")


def summed_graph(config: MemoryConfig, retain: Tensor, lr: Tensor) -> Graph | None:
    """The layers whose gradients a commit sums up without building them, if its step is linear in that sum."""
    form, simple = config.forms.algorithm, retain.dim() == 2 and lr.dim() == 2 and config.retention.linear
    return shared_graph(config) if simple and form is not None and form.plain and not form.nesterov else None


def chunked(
    config: MemoryConfig, tokens: Tokens, carry: Carry, initial: Memory, *, run: Run, position: int | None = 0,
    steps: Callable[..., tuple[Step, list[Tensors]]] | None = None, size: int | None = None,
) -> tuple[Tensor, Carry]:  # fmt: skip
    """Runs a sequence chunk by chunk: outputs `[N, T, V]` and the final carry.

    Another engine gives `steps`, as `steps_and_rows`, of `size` tokens at most.
    `position` is that of every memory in its chunk at the start, None if it is not known or not one number; the carried
    chunk is finished first, the last one may stay unfinished. A tape keeps one carry per segment of about sqrt(steps)
    steps, which is taped again when its turn comes, and everything where tokens and carries of all steps are small.
    """
    length = tokens.v.shape[1]
    channelwise, late = tokens.retain.dim() == 3, waits(tokens.v)
    size = min(size or span_size(config, channelwise=channelwise, late=late), config.chunk, length)
    layout: Layout | None = None
    # After a commit, the closing token's query is answered by the next chunk's product, together with that chunk's.
    after = config.commit == "chunk" and config.read == "after"
    queries, ahead = tokens.phi_q, after and steps is None and tokens.reset is None
    if ahead:
        tokens = tokens._replace(phi_q=one(run(_LATER, queries)))
    moved = (carry.position + length) % config.chunk
    # All memories stand at one known place of their chunk and stay together.
    if tokens.write is tokens.reset is None and position is not None and position < config.chunk:
        spans = spans_of(position, length, config.chunk, size)
    else:
        layout = layout_of(tokens.write, tokens.reset, carry.position, length, config.chunk, size)
        tokens, moved = _lay_out(layout, tokens, run), layout.position
        spans = [Span(size, True, True)] * layout.spans
    make = steps or partial(steps_and_rows, ahead=ahead)
    step, rows = make(config, tokens, [span.size for span in spans], run)

    def segment(rows: list[Tensors], carry: Carry, initial: Memory, run: Run, first: int) -> tuple[Tensor, Carry]:
        outputs: list[Tensor] = []
        for index, row in enumerate(rows, first):
            chunk_run, span = labelled(run, f"chunk {index}"), spans[index]
            if layout is not None:
                at = (layout.opens[:, index], layout.closes[:, index], layout.starts[:, index])
                span = Span(size, *at, layout.write[:, index * size : (index + 1) * size])
                if layout.resets is not None:
                    carry = restarted(config, layout.resets[:, index], initial, carry, chunk_run)
            y, carry = step(carry, row, span, initial if config.retention.anchored else (), chunk_run)
            outputs.append(y)
        return one(run(CONCAT, *outputs, label="outputs")), carry

    small = len(spans) * _bytes(carry.flat) + sum(_bytes(row) for row in rows) <= KEPT
    each = len(spans) if small else math.isqrt(len(spans) - 1) + 1
    y, carry = in_segments(segment, rows, carry, initial, run, each=each, keep=small)
    if layout is not None:
        y = one(run(layout.collect(), y, label="outputs"))
    if ahead:
        (_, answers), (_, query) = cut((y,), [1, length - 1], run), cut((queries,), [length - 1, 1], run)
        last = predict(config, config.rule.weights(carry.memory, run=run), one(query), labelled(run, "outputs"))
        y = one(run(CONCAT, one(answers), last, label="outputs"))
    return y, carry._replace(position=moved)


def _bytes(tensors: Tensors) -> int:
    return sum(item.numel() * item.element_size() for item in tensors if item is not None)


def _normalised(
    config: MemoryConfig, p: Tensor, lr: Tensor, at: Memory, carry: Carry, write: Tensor | None, run: Run
) -> tuple[Tensor, Carry]:
    """lr times the length of every token's step, where steps are normalised, and the carry with the last keys."""
    (keys, _), carry = _remembered(config, p, carry, write, run)
    if config.blocks:
        c = one(run(lengths(config.structure.graph(), config.blocks), p, write, keys, *at))
        lr = one(run(MULTIPLY, lr, c))
    return lr, carry


def _remembered(
    config: MemoryConfig, p: Tensor, carry: Carry, write: Tensor | None, run: Run
) -> tuple[tuple[Any, Tensor | None], Carry]:
    """The keys and the mask that steps are normalised by, None where they are not; and the carry with the last keys."""
    if not config.blocks:
        return (None, None), carry
    (keys,) = carry.keys
    return (keys, write), carry._replace(keys=several(run(KEYS, keys, p, write)))


def _lay_out(layout: Layout, tokens: Tokens, run: Run) -> Tokens:
    """The tokens in their spans."""
    lay = layout.lay()
    laid = Tokens(*(one(run(lay, tensor, label="cells")) for tensor in tokens[:NUMBERS]), layout.write)  # type: ignore[call-arg]
    retain = one(run(SELECT, layout.write, laid.retain, torch.ones_like(laid.retain), label="cells"))
    return laid._replace(retain=retain)


def steps_and_rows(
    config: MemoryConfig, tokens: Tokens, sizes: list[int], run: Run, *, ahead: bool = False
) -> tuple[Step, list[Tensors]]:
    """The step to take, of (carry, row, span, start, run) to outputs `[N, C, V]` and the new carry, and all rows."""
    graph = dual_graph(config, tokens.retain.dim() == 3)
    rows = kept_rows(config, tokens.retain, sizes, run)
    if config.commit == "chunk":
        columns = [cut(tokens[:NUMBERS], sizes, run)]
    elif graph is None:
        columns = [cut((*tokens[:NUMBERS], tokens.write), sizes, run)]
    else:
        columns = [cut(tokens[:VECTORS], sizes, run), coefficient_rows(config, tokens, sizes, run)]
    return step_of(config, graph, ahead=ahead), [
        tuple(chain.from_iterable(row)) for row in zip(rows, *columns, strict=True)
    ]


def step_of(config: MemoryConfig, graph: Graph | None, *, ahead: bool = False) -> Step:
    """The step of a config, through the layers of its `dual_graph`, with queries `ahead` or not."""
    if config.commit == "chunk":
        return partial(_commit_chunk, config, ahead)
    return partial(_commit_built, config) if graph is None else partial(_commit_dual, config, graph)


def _commit_dual(
    config: MemoryConfig, graph: Graph, carry: Carry, row: Tensors, span: Span, start: Memory, run: Run
) -> tuple[Tensor, Carry]:
    """A step at each token, read in the dual form: decay, phi_k, phi_q, v and the coefficients."""
    anchor, decay = anchor_of(carry, span, run), since_of(carry, row[0], run)
    met: Memory = ()
    answers: tuple[Tensor, ...] = ()
    scale, at = decay, () if span.opens is True else anchor
    if not config.retention.linear:
        opened = anchor
        if span.starts is not None:
            opened = per_weight(run, SELECT, (span.starts,) * len(anchor), carry.memory, anchor)
        at, scale = config.rule.weights(opened, run=run), None
        if decay is None:
            answers = several(run(predict_block(graph), one(row[2:3]), *at))
        else:
            met = config.rule.moved(carry.memory, opened, at, carry.pending_retain[0], run=run)
    states = carry.memory, carry.slots, met, at, start
    step = Dual(config, graph, tuple(map(len, states)), reads=not answers).block()
    weighed, carry = _remembered(config, one(row[1:2]), carry, span.write, run)
    answers += several(run(step, *row[1:4], scale, *row[4:], *weighed, *chain.from_iterable(states)))
    count = len(carry.memory)
    y, new, slots = answers[0], answers[1 : 1 + count], answers[1 + count :]
    return y, closed(carry._replace(memory=new, slots=slots, anchor=anchor), decay, span, run)


def _commit_built(
    config: MemoryConfig, carry: Carry, row: Tensors, span: Span, start: Memory, run: Run
) -> tuple[Tensor, Carry]:
    """A step at each token, built one after the other: decay, phi_k, phi_q, v, the gates and the mask."""
    phi_k, phi_q, v, lr, retain, momentum = several(row[1:-1])
    anchor, decay = anchor_of(carry, span, run), since_of(carry, row[0], run)
    at = config.rule.weights(anchor, run=run) if decay is None else anchor
    lr, carry = _normalised(config, phi_k, lr, at, carry, span.write, run)
    built = token_gradients(config, at, (phi_k, v, decay), run, start)
    columns = [several(run(UNBIND, item)) for item in (lr, retain, momentum, *built)]
    masks = [None] * span.size if row[-1] is None else row[-1].unbind(1)
    states: list[Memory] = []
    for mask, *each in zip(masks, *columns, strict=True):
        before, gates = carry.memory, TokenGates(*each[:3])
        memory, slots = config.rule.apply(carry.memory, carry.slots, tuple(each[3:]), gates, run=run)
        memory = regained(config, memory, start, gates.retain, run)
        stepped = carry._replace(memory=memory, slots=slots)
        carry = stepped if mask is None else select(mask, stepped, carry, run)
        states.append(carry.memory if config.read == "after" else before)
    y = predict_each(config, states, phi_q, run)
    return y, closed(carry._replace(anchor=anchor), decay, span, run)


def since_of(carry: Carry, decay: Tensor | None, run: Run) -> Tensor | None:
    """Products of retain since the chunk's start, from those since the span's."""
    return None if decay is None else one(run(_SINCE, carry.pending_retain[0], decay))


def closed(carry: Carry, decay: Tensor | None, span: Span, run: Run) -> Carry:
    """The carry with the product of retain up to the span's end, or 1 where the chunk closes."""
    if decay is None:
        return carry
    last = one(run(LAST, decay))
    if isinstance(span.closes, Tensor):
        last = one(run(SELECT, span.closes, torch.ones_like(last), last))
    elif span.closes:
        last = torch.ones_like(last)
    return carry._replace(pending_retain=(last,))


def anchor_of(carry: Carry, span: Span, run: Run) -> Memory:
    """Weights that gradients are taken at: the memory where a chunk opens, else as before."""
    if isinstance(span.opens, bool):
        return carry.memory if span.opens else carry.anchor
    return per_weight(run, SELECT, (span.opens,) * len(carry.memory), carry.memory, carry.anchor)


def _commit_chunk(
    config: MemoryConfig, ahead: bool, carry: Carry, row: Tensors, span: Span, start: Memory, run: Run
) -> tuple[Tensor, Carry]:
    """One step where a chunk closes: decay, phi_k, phi_q, v and the gates; `ahead` if queries are those of the tokens
    before."""
    phi_k, phi_q, v, lr, retain, momentum = several(row[1:])
    since, weights = since_of(carry, row[0], run), config.rule.weights(carry.memory, run=run)
    graph = summed_graph(config, retain, lr) if since is None else None
    product = one(run(PRODUCT, carry.pending_retain[0], retain))
    last = one(run(LAST, momentum))
    states: tuple[Memory, ...]
    if graph is not None and span.opens is True and span.closes is True:
        end, slots = product if config.retention.uses_retain else None, carry.slots
        gates = (lr, end, last, lr, last) if slots else (lr, end, None, None, None)
        states = carry.memory, slots, (), (), start
        y, new, carry = _through_layers(config, graph, carry, (phi_k, phi_q, v), gates, states, span.write, run)
        carry = carry._replace(memory=new[: len(weights)], slots=new[len(weights) :])
    else:
        if graph is not None:
            gates = (one(run(_MINUS, lr)), None, None, None, None)
            states = carry.pending, (), (), weights, ()
            y, new, carry = _through_layers(config, graph, carry, (phi_k, phi_q, v), gates, states, span.write, run)
        else:
            y, at = predict(config, weights, phi_q, run), weights if since is None else carry.memory
            lr, carry = _normalised(config, phi_k, lr, at, carry, span.write, run)
            new = summed(config, at, carry.pending, (phi_k, v, since), lr, run, start)
        waiting = carry._replace(pending=new, pending_retain=(product,))
        carry = waiting if span.closes is False else committed_chunk(config, waiting, start, last, run)
        if isinstance(span.closes, Tensor):
            carry = select(span.closes, carry, waiting, run)
    if ahead or span.closes is False or config.read == "before":
        return y, carry
    # Only the closing token sees the commit.
    early, (_, query) = cut((y,), [span.size - 1, 1], run), cut((phi_q,), [span.size - 1, 1], run)
    after = predict(config, config.rule.weights(carry.memory, run=run), one(query), run)
    return one(run(CONCAT, one(early[0]), after)), carry


def _through_layers(
    config: MemoryConfig, graph: Graph, carry: Carry, tokens: Tensors, gates: Tensors, states: tuple[Memory, ...],
    write: Tensor | None, run: Run,
) -> tuple[Tensor, Memory, Carry]:  # fmt: skip
    """Outputs at the weights of gradients, the states with these added to them, and the carry with the last keys."""
    weighed, carry = _remembered(config, one(tokens[:1]), carry, write, run)
    step = Dual(config, graph, tuple(map(len, states))).block()
    inputs = *tokens, None, None, None, None, *gates, *weighed
    y, *new = several(run(step, *inputs, *chain.from_iterable(states)))
    return y, tuple(new), carry


def _product_vjp(total: Tensor, gates: Tensor, g: Tensor) -> Tensors:
    # Products of all gates but one, without division: a gate of 0 has its true gradient.
    ones = torch.ones_like(gates[:, :1])
    earlier = torch.cat([ones, gates[:, :-1]], 1).cumprod(1)
    later = torch.cat([ones, gates[:, 1:].flip(1)], 1).cumprod(1).flip(1)
    return g * gates.prod(1), (g * total).unsqueeze(1) * earlier * later


def _last_vjp(gates: Tensor, g: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(gates[:, :-1]), g.unsqueeze(1)], 1)


_SINCE = formula_block(
    "chunk.since",
    lambda total, decay: total.unsqueeze(1) * decay,
    lambda total, decay, g: ((g * decay).sum(1), total.unsqueeze(1) * g),
)
_LATER = linear_block(  # no token takes the first answer
    "chunk.later",
    lambda x: torch.cat([x[:, :1].detach(), x[:, :-1]], 1),
    lambda g: torch.nn.functional.pad(g[:, 1:], (0, 0, 0, 1)),
)
_MINUS = linear_block("chunk.minus", torch.neg, torch.neg)

PRODUCT = formula_block("chunk.product", lambda total, gates: total * gates.prod(1), _product_vjp)
LAST = formula_block("chunk.last", lambda gates: gates[:, -1], _last_vjp)


class Fused(Chunk):
    """Chunks with steps compiled by `torch.compile`."""

    name = "fused"
    automatic = False  # compiling takes too long for a default

    def unfit(self, plan: Plan) -> str | None:
        """A CPU, or a GPU for which torch cannot compile; and what the chunk engine says."""
        if plan.device in (*bridge.AT_ONCE, "meta"):
            return "it compiles steps for a GPU; on a CPU they take as long as engine='chunk'"
        if plan.device == "cuda" and find_spec("triton") is None:
            return f"torch compiles for a GPU by triton, which is not here: {install_line('gpu')}"
        return super().unfit(plan)

    def about(self, plan: Plan) -> str:
        """A word on how often it runs the step that it compiles."""
        return f"runs one compiled step {steps_of(plan)} times, if asked for"

    def scan(self, call: Call, tokens: Tokens, carry: Carry, initial: Memory, *, run: Run) -> tuple[Tensor, Carry]:
        """As the chunk engine."""
        walk = partial(chunked, position=call.place, steps=_compiled_steps)
        return in_folds(walk, call.config, tokens, carry, initial, run=run)


def _compiled_steps(config: MemoryConfig, tokens: Tokens, sizes: list[int], run: Run) -> tuple[Step, list[Tensors]]:
    plain, rows = steps_and_rows(config, tokens, sizes, run)
    if is_traced(*tokens):
        return plain, rows

    def step(carry: Carry, row: Tensors, span: Span, start: Memory, run: Run) -> tuple[Tensor, Carry]:
        flat = (*carry.flat, *row, *start, *[item if isinstance(item, Tensor) else None for item in span[1:]])
        known = Span(span.size, *[None if isinstance(item, Tensor) else item for item in span[1:]])  # type: ignore[arg-type]
        looks = tuple([None if item is None else (item.shape, item.dtype, item.device) for item in flat])
        block = _compiled_block(config, tokens.retain.dim() == 3, tuple(map(len, carry[:-1])), known, looks)
        y, *new = several(run(block, *flat, label="step"))
        return y, carry.rebuilt((*new, carry.position))

    return step, rows


@lru_cache(256)
def _compiled_block(
    config: MemoryConfig, channelwise: bool, counts: tuple[int, ...], known: Span, looks: tuple[Look | None, ...]
) -> Block:
    """(*carry, *row, *masks of the span) -> outputs and the new carry but for its position."""
    first, step = sum(counts) + 1, step_of(config, dual_graph(config, channelwise))
    last = len(looks) - len(known) + 1 - (counts[0] if config.retention.anchored else 0)

    def plain(*flat: Tensor | None) -> Tensors:
        row, start, given = flat[first:last], flat[last : -len(known) + 1], flat[-len(known) + 1 :]
        masks = [fixed if mask is None else mask for fixed, mask in zip(known[1:], given, strict=True)]
        y, carry = step(Carry.of(counts, flat), row, Span(known.size, *masks), several(start), execute)  # type: ignore[arg-type]
        return y, *carry.flat[:-1]

    # Dynamo counts what it compiles by code object, beyond eight of which it gives up.
    plain.__code__ = plain.__code__.replace()
    program = torch.compile(plain, backend=BACKEND, fullgraph=True, dynamic=False)
    return with_graph("chunk.step", program, plain).block()
