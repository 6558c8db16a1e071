"""The spans of tokens that the chunk engine takes in one step, where each memory's tokens lie, and what a step needs.

A span is at most S tokens of one chunk. A masked token does not move its memory's place in the chunk, and a reset
starts a chunk anew, so with masks every memory lays its own tokens into spans: one begins where a chunk opens, where a
reset is, and after S tokens. Spans are filled from the right, so the token that closes a chunk is the last of its span;
empty places write nothing, and are not read. [ENG-CHUNK-D4]
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from hecate.engine.call import Call
from hecate.engine.coefficients import coefficients, running_products
from hecate.engine.tokens import NUMBERS, UNBIND, VECTORS, Tokens, cut, expand_to, fold_mask, linear_block
from hecate.rule import MemoryConfig
from hecate.tape import Block, Run, Tensors, can_inspect


class Span(NamedTuple):
    """Tokens of one chunk, taken in one step.

    Its fields say whether they include the token that opens the chunk and the one that closes it, known for all
    memories or as a mask `[N]`; and with masks, whether the chunk begins here, even if with unwritten tokens, and which
    tokens are written, `[N, size]`.
    """

    size: int
    opens: bool | Tensor
    closes: bool | Tensor
    starts: Tensor | None = None
    write: Tensor | None = None


def spans_of(position: int, length: int, chunk: int, size: int) -> list[Span]:
    """The spans of at most `size` tokens where all memories stand at `position`."""
    spans: list[Span] = []
    at = 0
    while at < length:
        place = (position + at) % chunk
        end = min(at + size, at + chunk - place, length)
        spans.append(Span(end - at, place == 0, (position + end) % chunk == 0))
        at = end
    return spans


def coefficient_rows(config: MemoryConfig, tokens: Tokens, sizes: list[int], run: Run) -> list[Tensors]:
    """The coefficients of what the tokens of every step read and leave: those of `read`, then those of `write`."""

    def formula(lr: Tensor, retain: Tensor, momentum: Tensor, write: Tensor | None) -> Tensors:
        after, before, slot = coefficients(config, retain, momentum, write)
        states = after if config.read == "after" else before
        decays = config.retention.uses_retain
        a, end = (states.bases[0], after.bases[0][..., -1]) if decays else (None, None)
        # [N, c, C, C] what each token's state has of each write, [N, c, C] what the end has.
        weights, into = states.writes * lr.unsqueeze(-2), after.last * lr
        if slot is None:
            return weights, a, None, into, end, None, None, None
        return weights, a, states.bases[1], into, end, after.bases[1][..., -1], slot.last * lr, slot.bases[0][..., -1]

    return _of_steps("chunk.coefficients", formula, (*tokens[VECTORS:NUMBERS], tokens.write), sizes, run)


def kept_rows(config: MemoryConfig, retain: Tensor, sizes: list[int], run: Run) -> list[Tensors]:
    """The product of retain from the first token of every step to each of its own, `[N, C]` or
    `[N, C, P]`: what is left of a state whose decay the gradients or the reads see; None where they do not."""
    if config.decay_order == "with_step" and config.retention.links != "linear":
        return [(None,)] * len(sizes)

    def formula(gates: Tensor) -> Tensors:
        return (running_products(gates) if gates.dim() == 3 else running_products(gates.mT).mT,)

    return _of_steps("chunk.kept", formula, (retain,), sizes, run)


def _of_steps(
    name: str, formula: Callable[..., Tensors], tensors: Tensors, sizes: list[int], run: Run
) -> list[Tensors]:
    """Results of a formula on the gates of every step `[N, c, C, ...]`; steps of equal size share one call."""
    groups = [list(equal) for _, equal in groupby(sizes)]
    rows: list[Tensors] = []
    for group, part in zip(groups, cut(tensors, [sum(group) for group in groups], run), strict=True):
        block = Block(name, partial(_by_step, formula, group[0]))
        columns: list[Tensors] = []
        for out in run(block, *part, label="coefficients"):
            columns.append((None,) * len(group) if out is None else run(UNBIND, out, label="coefficients"))
        rows += zip(*columns, strict=True)
    return rows


def _by_step(formula: Callable[..., Tensors], size: int, *gates: Tensor | None) -> tuple[Tensors, None]:
    return formula(*[None if item is None else item.unflatten(1, (-1, size)) for item in gates]), None


class Layout(NamedTuple):
    """The spans of N memories, K each, and the maps between tokens and places.

    `places` `[N, T]` names the place of a token in `[N, K S]`, `tokens` the token at a place, T for none. Masks are
    `[N, K]`: whether a span holds the token that opens or that closes a chunk, whether it begins one, and whether the
    memory restarts before it. `write` is `[N, K S]`; `position` that after the last token.
    """

    spans: int
    places: Tensor
    tokens: Tensor
    write: Tensor
    opens: Tensor
    closes: Tensor
    starts: Tensor
    resets: Tensor | None
    position: Tensor

    def lay(self) -> Block:
        """`[N, T, ...]` -> `[N, K S, ...]`, empty places 0."""
        return linear_block("chunk.lay", lambda x: _take(_padded(x), self.tokens), lambda g: _take(g, self.places))

    def collect(self) -> Block:
        """`[N, K S, ...]` -> `[N, T, ...]`."""
        return linear_block("chunk.collect", lambda x: _take(x, self.places), lambda g: _take(_padded(g), self.tokens))


def layout_of(
    write: Tensor | None, reset: Tensor | None, position: Tensor, length: int, chunk: int, size: int
) -> Layout:
    """The spans of a sequence from its masks `[N, T]` and the positions `[N]` at its start."""
    written, place, carried, span, offset, spans = places_of(write, reset, position, length, chunk, size)
    filled = span.new_zeros(len(span), spans).scatter_add(1, span, torch.ones_like(span))
    # From the right: the last token of a span stands at its end.
    places = span * size + (size - filled.gather(1, span)) + offset
    steps = torch.arange(length, device=span.device).expand_as(span)
    tokens = span.new_full((len(span), spans * size), length).scatter(1, places, steps)

    def laid(mask: Tensor) -> Tensor:
        return _take(_padded(mask), tokens)

    def within(mask: Tensor) -> Tensor:
        return laid(mask).unflatten(1, (spans, size)).any(-1)

    first, last = (place == 0) & ~carried, place == chunk - 1
    opens, closes, starts = within(written & first), within(written & last), within(first)
    resets, moved = None if reset is None else within(reset), (place[:, -1] + written[:, -1]) % chunk
    return Layout(spans, places, tokens, laid(written), opens, closes, starts, resets, moved)


def places_of(
    write: Tensor | None, reset: Tensor | None, position: Tensor, length: int, chunk: int, size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int]:
    """Per token `[N, T]`: whether it is written, its place in the chunk, whether only the carried state lies before it,
    its span and its place in the span; and the number of spans of the longest memory, what that can be at most where
    values may not be seen.
    """
    written = position.new_ones(len(position), length, dtype=torch.bool) if write is None else write
    count = written.long().cumsum(1) - written.long()
    # The count at the chunk's first write: below 0 where that lies in an earlier call.
    base = (-position).unsqueeze(1).expand_as(count)
    if reset is not None:
        base = torch.where(reset, count, base).cummax(1).values
    writes = count - base
    number = writes.div(chunk, rounding_mode="floor")
    first = torch.ones_like(written[:, :1])
    new = torch.cat([first, number[:, 1:] != number[:, :-1]], 1)
    if reset is not None:
        new = new | reset
    steps = torch.arange(length, device=written.device).expand_as(count)
    # A chunk longer than a span is cut: offsets start anew in each.
    offset = (steps - torch.where(new, steps, 0).cummax(1).values) % size
    span = (new | (offset == 0)).long().cumsum(1) - 1
    if can_inspect(span):
        spans = int(span[:, -1].max()) + 1 if span.numel() else 1
    else:
        spans = length if reset is not None else min(length, length // chunk + 2 + length // size)
    return written, writes % chunk, (base < 0) & (count == 0), span, offset, spans


def most_spans(call: Call, size: int) -> int:
    """The spans of the memory that has most; 0 without memories."""
    position, heads, inputs = call.memories[0][1].position, call.inputs.lr.shape[2], call.inputs
    write, reset = (None if mask is None else fold_mask(mask, heads) for mask in (inputs.write, inputs.reset))
    return places_of(write, reset, position, call.length, call.config.chunk, size)[-1] if len(position) else 0


def _padded(x: Tensor) -> Tensor:
    return torch.cat([x, torch.zeros_like(x[:, :1])], 1)


def _take(x: Tensor, index: Tensor) -> Tensor:
    """`x[n, index[n, i]]`."""
    return x.gather(1, expand_to(index, x).expand(*index.shape, *x.shape[2:]))
