"""The pieces of a sequence that the chunk engine takes in one step, and what each needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from hecate.engine.coefficients import coefficients, running_products
from hecate.engine.tokens import UNBIND, Tokens, split_time
from hecate.rule import MemoryConfig
from hecate.rule.rule import several
from hecate.tape import Block, Run, Tensors


class Piece(NamedTuple):
    """Tokens of one chunk, taken in one step.

    Whether they hold the token that opens and the one that closes the chunk: known for all memories, or told by a mask
    `[N]`.
    """

    size: int
    opens: bool | Tensor
    closes: bool | Tensor


def pieces_of(position: int, length: int, chunk: int, size: int) -> list[Piece]:
    """The pieces of at most `size` tokens where all memories stand at `position`."""
    pieces: list[Piece] = []
    at = 0
    while at < length:
        place = (position + at) % chunk
        end = min(at + size, at + chunk - place, length)
        pieces.append(Piece(end - at, place == 0, (position + end) % chunk == 0))
        at = end
    return pieces


def cut(tensors: Tensors, sizes: list[int], run: Run) -> list[Tensors]:
    """Pieces of each tensor `[N, T, ...]`, piece by piece."""
    block = split_time(sizes)
    cut = [(None,) * len(sizes) if tensor is None else several(run(block, tensor, label="split")) for tensor in tensors]
    return list(zip(*cut, strict=True))


def coefficient_rows(config: MemoryConfig, tokens: Tokens, sizes: list[int], run: Run) -> list[Tensors]:
    """`Reads` and `Leaves` of every step."""
    return _of_steps(lambda size: _coefficients(config, size), tokens[3:7], sizes, run)


def kept_rows(config: MemoryConfig, retain: Tensor, sizes: list[int], run: Run) -> list[Tensors]:
    """The product of retain from the first token of every step to each of its own, `[N, C]` or
    `[N, C, P]`: what is left of a state whose decay the gradients see; None where they do not."""
    if config.decay_order == "with_step":
        return [(None,)] * len(sizes)
    return _of_steps(_products, (retain,), sizes, run)


def _of_steps(block_of: Callable[[int], Block], tensors: Tensors, sizes: list[int], run: Run) -> list[Tensors]:
    """What a block makes of the gates of every step; steps of equal size share one call."""
    groups: list[list[int]] = []
    for size in sizes:
        if groups and groups[-1][-1] == size:
            groups[-1].append(size)
        else:
            groups.append([size])
    spans = cut(tensors, [sum(group) for group in groups], run)
    rows: list[Tensors] = []
    for group, span in zip(groups, spans, strict=True):
        outputs = run(block_of(group[0]), *span, label="coefficients")
        each = [
            [None] * len(group) if out is None else several(run(UNBIND, out, label="coefficients")) for out in outputs
        ]
        rows += zip(*each, strict=True)
    return rows


def _products(size: int) -> Block:
    """Gates `[N, c C]` or `[N, c C, P]` -> their running products, with the steps on axis 1."""

    def forward(gates: Tensor) -> tuple[Tensors, None]:
        gates = gates.unflatten(1, (-1, size))
        if gates.dim() == 3:
            return (running_products(gates),), None
        return (running_products(gates.mT).mT,), None

    return Block("chunk.kept", forward)


def _coefficients(config: MemoryConfig, size: int) -> Block:
    """Gates and the write mask `[N, c C]` -> `Reads` and `Leaves`, with the steps on axis 1."""

    def forward(*given: Tensor | None) -> tuple[Tensors, None]:
        lr, retain, momentum, write = (None if item is None else item.unflatten(1, (-1, size)) for item in given)
        lr, retain, momentum = several((lr, retain, momentum))
        after, before, slot = coefficients(config, retain, momentum, write)
        seen = after if config.read == "after" else before
        decays = config.retention.uses_retain
        a, end = (seen.bases[0], after.bases[0][..., -1]) if decays else (None, None)
        weights, into = seen.writes * lr.unsqueeze(-2), after.last * lr
        if slot is None:
            return (weights, a, None, into, end, None, None, None), None
        slots = (after.bases[1][..., -1], slot.last * lr, slot.bases[0][..., -1])
        return (weights, a, seen.bases[1], into, end, *slots), None

    return Block("chunk.coefficients", forward)
