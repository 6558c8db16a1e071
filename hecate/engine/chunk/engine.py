"""The chunk engine: exact evaluation of gradients frozen at a chunk's start, and of chunk commits.

All gradients of a chunk are taken at one state, so predictions, bias gradients and backpropagation are batched products
over its C tokens. For structures made of linear layers every gradient is rank one per layer, and where retention and
algorithm are linear the state after token t is read without being built, layer by layer (the dual form):

    W_t h = a_t W_0 h + s_t S_0 h - sum_{i <= t} K[t, i] lr_i d_i (h_i . h)

with the coefficients of `hecate.engine.coefficients`. Any other retention or algorithm steps from token to token, on
gradients that are known beforehand, and all its states are read at once. `commit="chunk"` reads one state throughout
and takes one step per chunk, whatever algorithm and retention. Masks and resets lay each memory's tokens into spans of
its own (`hecate.engine.chunk.spans`). [ENG-CHUNK-D1]
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from hecate.engine.call import Call
from hecate.engine.chunk.batched import shared_graph
from hecate.engine.chunk.commits import commit_built, commit_chunk, commit_dual
from hecate.engine.chunk.spans import Layout, Span, coefficient_rows, kept_rows, layout_of, spans_of, steps_of
from hecate.engine.engine import TokenEngine
from hecate.engine.loop import select
from hecate.engine.tokens import CONCAT, SELECT, Carry, Tokens, cut, fold_mask, in_folds, restart
from hecate.rule import MemoryConfig
from hecate.rule.rule import one, several
from hecate.structure import Memory
from hecate.tape import Run, Tensors, checkpoint

DUAL = 64  # tokens whose pairs are held at once in the dual form
BUILT = 16  # tokens whose states are built at once
KEPT = 2**26  # bytes of tokens and carries that are taped as they run, without segments


class Chunk(TokenEngine):
    """All gradients of a chunk at one state, for every structure, bias and retention."""

    name = "chunk"

    def refuses(self, config: MemoryConfig) -> str | None:
        """What has no chunks, or chooses gradients token by token."""
        if config.chunk == 1:
            return "chunk=1 takes each gradient at the state before its token, not at a chunk's start"
        if not config.algorithm.takes_any_gradient():
            return f"algorithm {config.algorithm.kind!r} chooses its gradient token by token"
        return None

    def cost(self, call: Call) -> float:
        """A step has to take two tokens on average to beat as many of the token loop."""
        return math.inf if call.config.chunk == 1 else 200.0 * max(1, _steps(call))

    def about(self, call: Call) -> str:
        """How many steps, if that is too many."""
        steps = _steps(call)
        if 2 * steps > call.length:
            return f"{steps} chunks for {call.length} tokens: resets leave too little in each"
        return "gradients of a chunk at one state: exact in chunks"

    def scan(self, call: Call, tokens: Tokens, carry: Carry, initial: Memory, *, run: Run) -> tuple[Tensor, Carry]:
        """Chunk by chunk, from the place in the first."""
        return in_folds(partial(chunked, position=call.place), call.config, tokens, carry, initial, run=run)


def _steps(call: Call) -> int:
    """How many steps a call takes; 0 without tokens."""
    if call.steps is not None:
        return call.steps
    config, (_, _, _, lr, retain, _, write, reset, _) = call.config, call.inputs
    if lr.numel() == 0:
        return 0
    length, heads = lr.shape[1:]
    size = min(span_size(config, channelwise=retain.dim() == 4), length)
    write, reset = (None if mask is None else fold_mask(mask, heads) for mask in (write, reset))
    if aligned(config, write, reset, call.place):
        return len(spans_of(call.place or 0, length, config.chunk, size))
    position = call.memories[0][1].position
    return steps_of(write, reset, position, length, config.chunk, size)


def aligned(config: MemoryConfig, write: Tensor | None, reset: Tensor | None, position: int | None) -> bool:
    """Whether all memories stand at one known place of their chunk and stay together."""
    return write is None and reset is None and position is not None and position < config.chunk


Step = Callable[[MemoryConfig, Carry, Tensors, Span, Run, str], tuple[Tensor, Carry]]


def span_size(config: MemoryConfig, *, channelwise: bool) -> int:
    """The most tokens that one step takes."""
    if config.commit == "chunk" and config.decay_order == "with_step":
        return config.chunk
    return min(config.chunk, DUAL if _dual(config, channelwise) else BUILT)


def _dual(config: MemoryConfig, channelwise: bool) -> bool:
    """Whether states are read without being built."""
    # Per channel too, but there the coefficients of all pairs cost more than the states (measured).
    linear = config.retention.linear and config.algorithm.kernel_form() is not None
    graph = shared_graph(config, decayed=config.decay_order == "before_gradient")
    return linear and graph is not None and not channelwise


def chunked(
    config: MemoryConfig, tokens: Tokens, carry: Carry, initial: Memory, *, run: Run, position: int | None = 0
) -> tuple[Tensor, Carry]:
    """Runs a sequence chunk by chunk: outputs `[N, T, V]` and the final carry.

    `position` is that of every memory in its chunk at the start, None if it is not known or not one number; the carried
    chunk is finished first, the last one may stay unfinished. A tape keeps one carry per segment of about sqrt(steps)
    steps, which is taped again when its turn comes, and everything where tokens and carries of all steps are small.
    """
    length, channelwise = tokens.v.shape[1], tokens.retain.dim() == 3
    size = min(span_size(config, channelwise=channelwise), length)
    layout: Layout | None = None
    moved = (carry.position + length) % config.chunk
    if aligned(config, tokens.write, tokens.reset, position):
        spans = spans_of(position or 0, length, config.chunk, size)
    else:
        start = carry.position
        layout = layout_of(tokens.write, tokens.reset, start, length, config.chunk, size)
        tokens, moved = _laid(layout, tokens, run), layout.position
        spans = [Span(size, True, True)] * layout.spans
    step, columns = _columns(config, tokens, [span.size for span in spans], run)
    rows = [_borders(layout, at) + column for at, column in enumerate(columns)]
    y, carry = _loop(config, step, rows, spans, carry, initial, run)
    if layout is not None:
        y = one(run(layout.collect(), y, label="outputs"))
    return y, carry._replace(position=moved)


def _loop(
    config: MemoryConfig, step: Step, rows: list[Tensors], spans: list[Span], carry: Carry, initial: Memory, run: Run
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
            span = spans[index]
            if opens is not None:
                span = span._replace(opens=opens, closes=closes)
            y, own = step(config, own, tuple(row), span, run, label)
            outputs.append(y)
        return one(run(CONCAT, *outputs, label="outputs")), *own.flat

    small = len(spans) * _bytes(carry.flat) + sum(_bytes(row) for row in rows) <= KEPT
    size = len(spans) if small else math.isqrt(len(spans) - 1) + 1
    outputs: list[Tensor] = []
    flat = carry.flat
    for first in range(0, len(spans), size):
        given = (tensor for row in rows[first : first + size] for tensor in row)
        block = checkpoint("segment", partial(loop, first=first), keep=small)
        y, *left = several(run(block, *flat, *initial, *given, label=f"segment {first // size}"))
        outputs.append(y)
        flat = tuple(left)
    return one(run(CONCAT, *outputs, label="outputs")), carry.rebuilt(flat)


def _bytes(tensors: Tensors) -> int:
    return sum(item.numel() * item.element_size() for item in tensors if item is not None)


def _laid(layout: Layout, tokens: Tokens, run: Run) -> Tokens:
    """The tokens in their spans."""
    lay = layout.lay()
    phi_k, phi_q, v, lr, retain, momentum = (one(run(lay, tensor, label="cells")) for tensor in tokens[:6])
    kept = one(run(SELECT, layout.write, retain, torch.ones_like(retain), label="cells"))
    return Tokens(phi_k, phi_q, v, lr, kept, momentum, layout.write)


def _borders(layout: Layout | None, at: int) -> Tensors:
    if layout is None:
        return None, None, None
    resets = None if layout.resets is None else layout.resets[:, at]
    return layout.opens[:, at], layout.closes[:, at], resets


def _columns(config: MemoryConfig, tokens: Tokens, sizes: list[int], run: Run) -> tuple[Step, list[Tensors]]:
    """The step to take, and what each needs of its tokens."""
    rows = kept_rows(config, tokens.retain, sizes, run)
    if config.commit == "chunk":
        return commit_chunk, _joined(cut(tokens[:6], sizes, run), rows)
    if not _dual(config, tokens.retain.dim() == 3):
        return commit_built, _joined(cut(tokens[:7], sizes, run), rows)
    rows = _joined(rows, coefficient_rows(config, tokens, sizes, run))
    return commit_dual, _joined(cut(tokens[:3], sizes, run), rows)


def _joined(rows: list[Tensors], more: list[Tensors]) -> list[Tensors]:
    return [(*own, *others) for own, others in zip(rows, more, strict=True)]
