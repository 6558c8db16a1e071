"""The length of a normalised step: one over a bound of the curvature that writes meet, with its derivative.

A write of lr G moves the predictions of all tokens that meet the same weights, that of token t by lr J_t J_j^T u_j for
the gradient of token j; J is the derivative of the prediction by the weights. In a stack of linear layers J J^T is the
sum over layers of B B^T |h|^2, h the layer's input and B the derivative of the prediction by its output. `spread` walks
down the graph with bounds of the squared columns of B, whose sum is the square of its Frobenius norm (1 at the
prediction, the spectral norm of the identity); a layer norm's slope is at most 1/s. With b the bound of |B|^2, the step
of a token that takes its gradient at the present memory is one over floor + sum b |h|^2. The tokens of a chunk, which
take theirs at one state, share it: the step of token t is

    c_t = 1 / (floor + sum over layers and over the last K + 1 tokens j <= t of sqrt(b_t b_j) |h_t . h_j|)

K + 1 the length of a chunk: a row sum of the Gram matrix, which bounds its largest eigenvalue. The sum goes back beyond
the chunk's start, as otherwise its first tokens would each take a whole step, and a key that is repeated would diverge.
A chunk longer than `BLOCK` tokens is normalised by rows of that many, times one over the number of its blocks: a matrix
that is positive semidefinite is at most that many times its diagonal blocks. [STR-BOUND-D1]

Shapes: values `[N, C, width]`, weights `[N, out, in]`, c `[N, C]`; keys `[N, K, P + 1]`, whose last column is 1 for
keys, 0 for empty places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import add
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from hecate.structure.graph import INPUT, Bounded, Cotangents, Graph, Linear, Trace, source, trace
from hecate.tape import Block, Tensors

BLOCK = 64  # tokens of a chunk whose writes are weighed against one another
FLOOR = 1e-2  # no step is longer than 100 lr, even if all slopes are 0
ROOT = 1e-6  # added to b under the root, whose derivative is infinite at 0


def unbounded(graph: Graph) -> str | None:
    """Reason why the curvature of a graph has no bound here; None if it has."""
    used: set[int] = set()
    for node in graph.nodes:
        sources = (node.source,) if isinstance(node, Linear) else node.sources
        if not isinstance(node, Linear) and not (hasattr(node.op, "bound") and hasattr(node.op, "bound_vjp")):
            return f"operation {node.op.name!r} gives no bound of its slope"
        for at in sources:
            if at > INPUT and at in used:
                return "a value that two nodes use, whose slopes would add up"
            used.add(at)
    return None


def spread(past: Trace, columns: dict[int, Tensor]) -> list[Tensor | None]:
    """Bounds of the squared columns of d prediction / d value, for every value: `[N, C, width]`, or their sum `[N, C,
    1]`, with C = 1 if all tokens have the same; None for p and for values that do not reach the prediction. It adds to
    `columns` the squared columns of each weight that it meets."""
    bounds: list[Tensor | None] = [None] * len(past.values)
    bounds[-1] = torch.ones_like(past.values[INPUT][:, :1, :1])
    for index in reversed(range(len(past.graph.nodes))):
        node, a = past.graph.nodes[index], bounds[index + 1]
        if a is None:
            continue
        if isinstance(node, Linear):
            if node.source > INPUT:
                if node.weight not in columns:
                    columns[node.weight] = past.weights[node.weight].square().sum(-2, keepdim=True)
                bounds[node.source] = a.sum(-1, keepdim=True) * columns[node.weight]
        else:
            shares = cast(Bounded, node.op).bound(past.slopes[index], a)
            for at, share in zip(node.sources, shares, strict=True):
                if at > INPUT:
                    bounds[at] = share
    return bounds


class _Rows(NamedTuple):
    """Rows sqrt(b + `ROOT`) h of every layer; where b is 1, rows are h, and their products have the factor `scales`."""

    past: Trace
    columns: dict[int, Tensor]
    bounds: list[Tensor | None]
    layers: list[tuple[int, int, int]]  # weight, value, source
    roots: list[Tensor | None]
    rows: list[Tensor]
    scales: list[float]

    @classmethod
    def of(cls, past: Trace, columns: dict[int, Tensor]) -> _Rows:
        bounds, nodes = spread(past, columns), enumerate(past.graph.nodes, 1)
        layers = [(n.weight, at, n.source) for at, n in nodes if isinstance(n, Linear) and bounds[at] is not None]
        slopes = [None if bounds[at] is bounds[-1] else bounds[at] for _, at, _ in layers]
        roots = [None if b is None else (b.sum(-1, keepdim=True) + ROOT).sqrt() for b in slopes]
        inputs = [source(past.values, of) for _, _, of in layers]
        rows = [h if root is None else root * h for root, h in zip(roots, inputs, strict=True)]
        scales = [1 + ROOT if root is None else 1.0 for root in roots]
        return cls(past, columns, bounds, layers, roots, rows, scales)

    def vjp(self, cotangents: Sequence[Tensor], values: Cotangents, gcolumns: dict[int, Tensor]) -> None:
        """Adds to the cotangents of the values and of the weights' columns, from cotangents of the rows."""
        of_bounds: dict[int, Tensor] = {}
        for (weight, _, of), root, g in zip(self.layers, self.roots, cotangents, strict=True):
            values.add(of, g if root is None else root * g)
            if root is not None:
                of_bounds[weight] = (g * source(self.past.values, of)).sum(-1, keepdim=True) / (2 * root)
        gbounds = Cotangents(self.past.values)
        for index, node in enumerate(self.past.graph.nodes):
            a = self.bounds[index + 1]
            if a is None:
                continue
            if isinstance(node, Linear):
                gbounds.add(index + 1, of_bounds.get(node.weight))
                above = gbounds[node.source] if node.source > INPUT else None
                if above is not None:
                    above = above.sum(1, keepdim=True) if a.shape[1] == 1 else above
                    gbounds.add(index + 1, (above * self.columns[node.weight]).sum(-1, keepdim=True))
                    into = (above * a.sum(-1, keepdim=True)).sum(1, keepdim=True)
                    gcolumns[node.weight] = gcolumns[node.weight] + into if node.weight in gcolumns else into
                continue
            shares = [gbounds[at] if at > INPUT else None for at in node.sources]
            if all(share is None for share in shares):
                continue
            filled = tuple(a.new_zeros(()) if share is None else share for share in shares)
            ginputs, ga = cast(Bounded, node.op).bound_vjp(self.past.slopes[index], a, filled)
            gbounds.add(index + 1, ga)
            for at, ginput in zip(node.sources, ginputs, strict=True):
                values.add(at, None if ginput is None else ginput.expand_as(source(self.past.values, at)))


class Lengths(NamedTuple):
    """The lengths c `[N, C]` of the steps of a chunk's tokens, and what their derivative needs: rows of the tokens and
    of the keys before them, products of the tokens' rows with both, and a function that selects the products that
    count."""

    c: Tensor
    blocks: int
    tokens: _Rows
    earlier: _Rows | None
    grams: list[tuple[Tensor, Tensor]]
    near: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, past: Trace, write: Tensor | None, keys: Tensor, blocks: int) -> Lengths:
        """Lengths from the tokens' trace; other arguments as in `lengths`."""
        columns: dict[int, Tensor] = {}
        tokens, earlier, grams, near = _Rows.of(past, columns), None, [], partial(_near, keys[..., -1] > 0, write)
        if keys.shape[1]:
            earlier = _Rows.of(trace(past.graph, past.weights, keys[..., :-1], whole=False), columns)
            both = list(zip(tokens.rows, earlier.rows, strict=True))
            grams = [(torch.bmm(row, row.mT), torch.bmm(other, row.mT)) for row, other in both]
            kinds = zip(*grams, strict=True)
            sizes = [reduce(add, map(_scale, map(torch.abs, kind), tokens.scales)) for kind in kinds]
            pairs, others = near(*sizes)
            total = pairs.sum(-1) + others.sum(-2)
        else:
            sums = [row.square().sum(-1) * scale for row, scale in zip(tokens.rows, tokens.scales, strict=True)]
            total = reduce(add, sums)
        return cls(1 / (blocks * (FLOOR + total)), blocks, tokens, earlier, grams, near)

    def vjp(
        self, g: Tensor, values: Cotangents | None = None, known: Sequence[Tensor | None] = ()
    ) -> tuple[list[Tensor], Tensor, Tensor | None]:
        """Cotangents of the weights, of p and of the keys (None without keys) from that of c and those of the trace's
        `values`; the weights' are added to `known` ones."""
        tokens, earlier, gcolumns = self.tokens, self.earlier, dict[int, Tensor]()
        values = values or Cotangents(tokens.past.values)
        gtotal = (-self.blocks * self.c.square() * g).unsqueeze(-1)
        if earlier is None:
            gkeys = None
            grows = [2 * scale * gtotal * row for row, scale in zip(tokens.rows, tokens.scales, strict=True)]
        else:
            (pairs, others), grows, gearlier = self.grams[0], [], []
            both = self.near(gtotal.expand_as(pairs), gtotal.mT.expand_as(others))
            for row, other, grams, scale in zip(tokens.rows, earlier.rows, self.grams, tokens.scales, strict=True):
                gown, gother = (gram.sign() * _scale(part, scale) for gram, part in zip(grams, both, strict=True))
                grows.append(torch.baddbmm(torch.bmm(gown + gown.mT, row), gother.mT, other))
                gearlier.append(torch.bmm(gother, row))
            of_keys = Cotangents(earlier.past.values)
            earlier.vjp(gearlier, of_keys, gcolumns)
            known, gp = earlier.past.through(of_keys, known)
            gkeys = torch.nn.functional.pad(gp, (0, 1))
        tokens.vjp(grows, values, gcolumns)
        sums, gp = tokens.past.through(values, known)
        for weight, into in gcolumns.items():
            sums[weight] = torch.addcmul(sums[weight], tokens.past.weights[weight], into, value=2)
        return sums, gp, gkeys


def lengths(graph: Graph, blocks: int) -> Block:
    """(p `[N, C, P]`, write, keys, *weights) -> c `[N, C]`.

    `keys` are the last ones written before; `write` `[N, C]` is True for tokens that are written, None if all are;
    `blocks` is the number of blocks in a chunk.
    """

    def forward(p: Tensor, write: Tensor | None, keys: Tensor, *weights: Tensor) -> tuple[Tensors, Any]:
        steps = Lengths.of(trace(graph, weights, p, whole=False), write, keys, blocks)
        return (steps.c,), steps

    def vjp(steps: Any, g: Tensor) -> Tensors:
        gweights, gp, gkeys = steps.vjp(g)
        return gp, None, gkeys, *gweights

    return Block("structure.lengths", forward, vjp)


def _scale(part: Tensor, scale: float) -> Tensor:
    return part if scale == 1 else part * scale


def _near(there: Tensor, write: Tensor | None, pairs: Tensor, earlier: Tensor) -> tuple[Tensor, Tensor]:
    """Products of the C tokens with each other `[N, C, C]` and of K keys with them `[N, K, C]`, with 0 for those that
    do not count: a token is weighed against itself and the last K written before it; `there` is False for empty places
    of keys."""
    (count, size), device = earlier.shape[1:], earlier.device
    others = torch.where(there.unsqueeze(2), earlier, 0.0)
    if write is None:
        return pairs.tril() if size <= count + 1 else pairs.tril().triu(-count), others.tril()
    number = torch.arange(size, device=device)
    before = (write.long().cumsum(1) - write.long()).unsqueeze(1)  # writes before each token
    itself, late = number[:, None] == number, number[:, None] > number
    near = late & write.unsqueeze(1) & (before.mT - before <= count)
    pairs = torch.where(near | itself, pairs, 0.0)
    return pairs, torch.where(before <= torch.arange(count, device=device)[:, None], others, 0.0)


def _last_keys(keys: Tensor, p: Tensor, write: Tensor | None) -> tuple[Tensors, Any]:
    count = keys.shape[1]
    if write is None and count <= p.shape[1]:
        return (torch.nn.functional.pad(p[:, p.shape[1] - count :], (0, 1), value=1.0),), (count, p.shape[1], None)
    every = torch.cat([keys, torch.nn.functional.pad(p, (0, 1), value=1.0)], 1)
    if write is None:
        return (every[:, every.shape[1] - count :],), (count, p.shape[1], None)
    there = torch.cat([torch.ones_like(every[:, :count, 0], dtype=torch.bool), write], 1)
    rank = there.long().flip(1).cumsum(1).flip(1)  # 1 for the last one written
    slot = torch.where(there & (rank <= count), count - rank, count)
    index = torch.arange(every.shape[1], device=every.device).expand_as(slot)
    index = slot.new_zeros(len(slot), count + 1).scatter(1, slot, index)[:, :count]
    return (every.gather(1, index.unsqueeze(-1).expand(-1, -1, every.shape[-1])),), (count, p.shape[1], index)


def _last_keys_vjp(residuals: Any, g: Tensor) -> Tensors:
    count, size, index = residuals
    if index is None and count <= size:
        return None, torch.nn.functional.pad(g[..., :-1], (0, 0, size - count, 0)), None
    if index is None:
        every = torch.cat([torch.zeros_like(g[:, :1]).expand(-1, size, -1), g], 1)
    else:
        every = g.new_zeros(len(g), count + size, g.shape[-1])
        every = every.scatter_add(1, index.unsqueeze(-1).expand_as(g), g)
    return every[:, :count], every[:, count:, :-1], None


KEYS = Block("structure.keys", _last_keys, _last_keys_vjp)
"""(keys `[N, K, P + 1]`, p `[N, C, P]`, write `[N, C]` or None) -> the last K keys that were written."""
