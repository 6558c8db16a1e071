"""Parts of a block of tokens that no state is needed for: the rows of keys that its writes move, and their kernels.

A block's rows are the c keys of the context, oldest first, then its own n keys. Write (t, a) of token t moves the row
of the token a writes before t; with masks each memory has rows of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hecate.algorithm import WindowForm
from hecate.engine.tokens import constants
from hecate.phi.base import PowerForm
from hecate.rule import MemoryConfig


class Leaves(NamedTuple):
    """Inputs of a block: products of features with states, keys and queries `[N, n, d]`, values, the context's values
    or None, gates `[N, n]`."""

    products: Tensor
    x_k: Tensor
    x_q: Tensor
    v: Tensor
    values: Tensor | None
    lr: Tensor
    retain: Tensor
    momentum: Tensor


class Settings(NamedTuple):
    """Settings of a config's run in blocks.

    Fields:
        config: the memory's.
        form: the window of its algorithm.
        lift: features, and the kernel by which tokens meet.
        normed: whether the features are to be brought to length 1.
        query: what phi(q) is multiplied by.
        shape: (V, P) of the memory.
    """

    config: MemoryConfig
    form: WindowForm
    lift: PowerForm
    normed: bool
    query: float
    shape: tuple[int, ...]

    @property
    def kept(self) -> int:
        """Tokens in the context."""
        return len(self.form.weights) if self.form.remembers else 0


class Rows(NamedTuple):
    """`places` `[1 or N, n W]`: the row of every write, its token's own first; `live` `[N, n, W]`: the write's weight,
    0 where there is no such token; `left` `[1 or N, c, c + n]`: which rows are the context afterwards, as ones in
    zeros; `filled` `[N, c]`: the context's marks then."""

    places: Tensor
    live: Tensor
    left: Tensor
    filled: Tensor

    def picked(self, x: Tensor) -> Tensor:
        """`[N, c + n, *]` -> `[N, n W, *]`: the row of every write."""
        if len(self.places) == 1:
            return x.index_select(1, self.places[0])
        return x.gather(1, self.places.unsqueeze(-1).expand(-1, -1, x.shape[-1]))

    def summed(self, x: Tensor, count: int) -> Tensor:
        """`[N, n W, V]` -> `[N, count, V]`: writes added up on their rows."""
        total = x.new_zeros(len(x), count, x.shape[-1])
        if len(self.places) == 1:
            return total.index_add(1, self.places[0], x)
        return total.scatter_add(1, self.places.unsqueeze(-1).expand_as(x), x)


@torch.no_grad()
def rows_of(settings: Settings, filled: Tensor, count: int, write: Tensor | None, reset: Tensor | None) -> Rows:
    """The rows of a block of `count` tokens; filled `[N, c]`, masks `[N, count]` or None."""
    kept, device = settings.kept, filled.device
    weights = constants(tuple(settings.form.weights), filled.dtype, device)
    ages = torch.arange(len(weights), device=device)
    if write is None:
        own = torch.arange(count, device=device).unsqueeze(0) + kept
        index = (own.unsqueeze(-1) - ages).clamp(min=0)
        last = torch.arange(count, count + kept, device=device).unsqueeze(0)
    else:
        ordinal = write.cumsum(1)
        written = torch.argsort((~write).to(torch.int8), dim=1, stable=True) + kept
        context = torch.arange(kept, device=device).expand(len(write), kept)
        order = torch.cat((context, written), 1)
        at = (ordinal.unsqueeze(-1) - 1 + kept - ages).clamp(min=0)
        index = order.gather(1, at.flatten(1)).view_as(at)
        last = order.gather(1, ordinal[:, -1:] + torch.arange(kept, device=device))
    marks = torch.cat((filled, filled.new_ones(len(filled), count)), 1)
    live = _at(marks, index.flatten(1)).unflatten(1, (count, -1)) * weights
    left = (last.unsqueeze(-1) == torch.arange(kept + count, device=device)).to(filled.dtype)
    still = _at(marks, last)
    if reset is not None:
        document = reset.cumsum(1)
        segment = torch.cat((document.new_zeros(len(filled), kept), document), 1)
        live = live * (_at(segment, index.flatten(1)).view_as(live) == document.unsqueeze(-1))
        same = _at(segment, last) == document[:, -1:]
        still, left = still * same, left * same.unsqueeze(-1)
    if write is not None:
        live = live * write.unsqueeze(-1)
    return Rows(index.flatten(1), live, left, still)


def _at(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(1, index.expand(len(x), -1))


class Kernels(NamedTuple):
    """Products of the rows and queries of a block with one another and with its base states (first M, first S, initial
    M, where they exist), all of unit length where the features are to be."""

    pairs: Tensor  # [N, L, L]: rows with rows
    asked: Tensor  # [N, n, L]: queries with rows
    facing: list[Tensor]  # [N, L, V] each: base states at the rows
    read: list[Tensor]  # [N, n, V] each: base states at the queries
    lengths: Tensor | None  # [N, L, 1]: by what the rows' features are to be multiplied


def kernels_of(settings: Settings, products: Tensor, x_k: Tensor, x_q: Tensor, width: int) -> Kernels:
    """From the products `[N, L + n, bases V + c]` of the features of rows and queries with base states and context, and
    from the keys and queries themselves."""
    kept, count, kernel = settings.kept, x_k.shape[1], settings.lift.kernel
    rows, queries = products.split((kept + count, count), 1)
    states = products.shape[-1] - kept
    facing, old = rows.split((states, kept), -1)
    read, old_q = queries.split((states, kept), -1)
    pairs = torch.cat((old, torch.cat((old[:, kept:].mT, kernel(x_k @ x_k.mT)), 1)), 2)
    asked = torch.cat((old_q, kernel(x_q @ x_k.mT)), 2)
    lengths = None
    if settings.normed:
        lengths = torch.cat((torch.ones_like(x_k[:, :1, :1]).expand(-1, kept, 1), inverse_length(settings, x_k)), 1)
        own = inverse_length(settings, x_q) * settings.query
        pairs, asked = lengths * pairs * lengths.mT, own * asked * lengths.mT
        facing, read = lengths * facing, own * read
    elif settings.query != 1:
        asked, read = settings.query * asked, settings.query * read
    return Kernels(pairs, asked, list(facing.split(width, -1)), list(read.split(width, -1)), lengths)


def inverse_length(settings: Settings, x: Tensor) -> Tensor:
    """1 / |phi(x)| `[..., 1]`, 1 of a zero."""
    square = settings.lift.kernel(x.square().sum(-1, keepdim=True))
    return torch.where(square > 0, square, 1.0).rsqrt()


class Outcome(NamedTuple):
    """Results of a block: outputs, and the states after it as combinations.

    Fields:
        y: `[N, n, V]`.
        memory, slot, keys: `[N, V or c, *]`: the next memory, momentum and context keys as combinations of the rows'
            features, then of the first S where there are more; None where there is no such state.
        bases: `[N, b]`: how much of each base state the memory keeps besides.
        slot_base: `[N]`: how much of the first S the next one keeps.
        values: `[N, c, V]`: those of the context.
    """

    y: Tensor
    memory: Tensor
    slot: Tensor | None
    keys: Tensor | None
    bases: Tensor
    slot_base: Tensor | None
    values: Tensor | None


def left_behind(rows: Rows, lengths: Tensor | None, values: Tensor | None, v: Tensor) -> tuple[Tensor | None, ...]:
    """The context's keys, as combinations of the rows' features, and its values after a block."""
    if values is None:
        return None, None
    left = rows.left.expand(len(v), -1, -1)
    return left if lengths is None else left * lengths.mT, left @ torch.cat((values, v), 1)
