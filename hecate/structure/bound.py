"""The length of a normalised step: one over a bound of the curvature that writes meet, with its derivative.

A write of lr G moves the predictions of all tokens that meet the same weights, that of token t by lr J_t J_j^T u_j for
the gradient of token j; J is the derivative of the prediction by the weights. In a stack of linear layers J J^T is the
sum over layers of B B^T |h|^2, h the layer's input and B the derivative of the prediction by its output. `spread` walks
down the graph with bounds of squares of the columns of B, which its Frobenius norm adds up (1 at the prediction, the
spectral norm of the identity); a layer norm's slope is at most 1/s. With b the bound of |B|^2, the step of a token that
takes its gradient at the present memory is one over floor + sum b |h|^2. The tokens of a chunk, which take theirs at
one state, share it: the step of token t is

    c_t = 1 / (floor + sum over layers and over the last K + 1 tokens j <= t of sqrt(b_t b_j) |h_t . h_j|)

K + 1 the length of a chunk: a row sum of the Gram matrix, which bounds its largest eigenvalue. The sum goes back beyond
the chunk's start, lest its first tokens take whole steps each and a key that comes again and again diverge. A chunk
longer than `BLOCK` tokens is normalised by rows of that many, times one over the number of its blocks: a matrix that is
positive semidefinite is at most that many times its diagonal blocks. [STR-BOUND-D1]

Shapes: values `[N, C, width]`, weights `[N, out, in]`, c `[N, C]`; keys `[N, K, P + 1]`, the last column 1 for keys
that there were.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from hecate.structure.graph import INPUT, Bounded, Cotangents, Graph, Linear, Trace, source, trace
from hecate.tape import Block, Tensors

BLOCK = 64  # tokens of a chunk whose writes are weighed against one another
FLOOR = 1e-2  # a key that meets nothing makes no step of more than 100 lr
ROOT = 1e-6  # beside b under the root, whose derivative is infinite at 0


def unbounded(graph: Graph) -> str | None:
    """Why the curvature of a graph has no bound here; None if it has."""
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


def spread(past: Trace) -> list[Tensor | None]:
    """Of every value, bounds of the squared columns of d prediction / d value: `[N, C, width]`, or `[N, C, 1]` of all
    together, with C = 1 where all tokens have the same; None of p and of what no prediction hears of."""
    bounds: list[Tensor | None] = [None] * len(past.values)
    bounds[-1] = torch.ones_like(past.values[INPUT][:, :1, :1])
    for index in reversed(range(len(past.graph.nodes))):
        node, a = past.graph.nodes[index], bounds[index + 1]
        if a is None:
            continue
        if isinstance(node, Linear):
            if node.source > INPUT:
                columns = past.weights[node.weight].square().sum(-2, keepdim=True)
                bounds[node.source] = a.sum(-1, keepdim=True) * columns
        else:
            shares = cast(Bounded, node.op).bound(past.slopes[index], a)
            for at, share in zip(node.sources, shares, strict=True):
                if at > INPUT:
                    bounds[at] = share
    return bounds


def spread_vjp(
    past: Trace, bounds: Sequence[Tensor | None], layers: Sequence[Tensor | None], values: Cotangents
) -> list[Tensor | None]:
    """The reverse of `spread`: cotangents of the weights, and, added to `values`, of the values, from those of the
    bounds b `[N, C, 1]` of every layer."""
    gbounds = Cotangents(past.values)
    gweights: list[Tensor | None] = [None] * len(past.weights)
    for index, node in enumerate(past.graph.nodes):
        a = bounds[index + 1]
        if a is None:
            continue
        if isinstance(node, Linear):
            g = layers[node.weight]
            above = gbounds[node.source] if node.source > INPUT else None
            if above is not None:
                weight = past.weights[node.weight]
                above = above.sum(1, keepdim=True) if a.shape[1] == 1 else above
                columns = weight.square().sum(-2, keepdim=True)
                more = (above * columns).sum(-1, keepdim=True)
                g = more if g is None else g + more
                into = (above * a.sum(-1, keepdim=True)).sum(1, keepdim=True)
                gweights[node.weight] = 2 * weight * into
            gbounds.add(index + 1, g)
            continue
        shares = [gbounds[at] if at > INPUT else None for at in node.sources]
        if all(share is None for share in shares):
            continue
        known = tuple(a.new_zeros(()) if share is None else share for share in shares)
        ginputs, ga = cast(Bounded, node.op).bound_vjp(past.slopes[index], a, known)
        gbounds.add(index + 1, ga)
        for at, g in zip(node.sources, ginputs, strict=True):
            values.add(at, None if g is None else g.expand_as(source(past.values, at)))
    return gweights


class _Rows(NamedTuple):
    """sqrt(b + `ROOT`) h of every layer, where b is 1 over the root of `scales`, and what their derivative needs."""

    past: Trace
    bounds: list[Tensor | None]
    layers: list[tuple[int, int, int]]  # weight, value, source
    roots: list[Tensor | None]
    rows: list[Tensor]
    scales: list[float]

    @classmethod
    def of(cls, graph: Graph, weights: Sequence[Tensor], p: Tensor) -> _Rows:
        past = trace(graph, weights, p, whole=False)
        bounds, nodes = spread(past), enumerate(graph.nodes, 1)
        layers = [(n.weight, at, n.source) for at, n in nodes if isinstance(n, Linear) and bounds[at] is not None]
        found = [None if bounds[at] is bounds[-1] else bounds[at] for _, at, _ in layers]
        roots = [None if b is None else (b.sum(-1, keepdim=True) + ROOT).sqrt() for b in found]
        inputs = [source(past.values, of) for _, _, of in layers]
        rows = [h if root is None else root * h for root, h in zip(roots, inputs, strict=True)]
        return cls(past, bounds, layers, roots, rows, [1 + ROOT if root is None else 1.0 for root in roots])

    def vjp(self, cotangents: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
        """Cotangents of the weights and of p from those of the rows."""
        values = Cotangents(self.past.values)
        of_bounds: list[Tensor | None] = [None] * len(self.past.weights)
        for (weight, _, of), root, g in zip(self.layers, self.roots, cotangents, strict=True):
            values.add(of, g if root is None else root * g)
            if root is not None:
                of_bounds[weight] = (g * source(self.past.values, of)).sum(-1, keepdim=True) / (2 * root)
        known = spread_vjp(self.past, self.bounds, of_bounds, values)
        return self.past.through(values, known)


def lengths(graph: Graph, blocks: int) -> Block:
    """(p `[N, C, P]`, write, keys, *weights) -> c `[N, C]`.

    `keys` are the last that were written before; `write` `[N, C]` says which of the C are written, None all of them;
    `blocks` is how many a chunk has.
    """

    def forward(p: Tensor, write: Tensor | None, keys: Tensor, *weights: Tensor) -> tuple[Tensors, Any]:
        size, earlier = p.shape[1], keys.shape[1]
        every = _Rows.of(graph, weights, torch.cat([keys[..., :-1], p], 1) if earlier else p)
        if not earlier:
            grams: list[Tensor] = []
            sums = [row.square().sum(-1) for row in every.rows]
        else:
            seen = _seen(keys[..., -1] > 0, write, size)
            grams = [torch.where(seen, torch.bmm(row[:, earlier:], row.mT), 0.0) for row in every.rows]
            sums = [torch.linalg.vector_norm(gram, 1, -1) for gram in grams]
        total = reduce(add, [item * scale for item, scale in zip(sums, every.scales, strict=True)])
        c = 1 / (blocks * (FLOOR + total))
        return (c,), (every, grams, c, earlier)

    def vjp(residuals: Any, g: Tensor) -> Tensors:
        every, grams, c, earlier = residuals
        gtotal = (-blocks * c.square() * g).unsqueeze(-1)
        gsums = [gtotal * scale for scale in every.scales]
        grows = [] if grams else [2 * gsum * row for row, gsum in zip(every.rows, gsums, strict=True)]
        for row, gram, gsum in zip(every.rows, grams, gsums, strict=False):
            pairs, own = gram.sign() * gsum, row[:, earlier:]
            grow = torch.bmm(pairs.mT, own)
            grows.append(torch.cat([grow[:, :earlier], torch.baddbmm(grow[:, earlier:], pairs, row)], 1))
        gweights, gp = every.vjp(grows)
        gkeys = torch.nn.functional.pad(gp[:, :earlier], (0, 1)) if earlier else gp[:, :0]
        return gp[:, earlier:], None, gkeys, *gweights

    return Block("structure.lengths", forward, vjp)


def _seen(there: Tensor, write: Tensor | None, size: int) -> Tensor:
    """Mask `[N, C, K + C]` of the keys that each of the C tokens is weighed against, among the K that are `there` and
    the C tokens: the last K that were written, and itself."""
    (count, earlier), device = there.shape, there.device
    number = torch.arange(-earlier, size, device=device)
    late = number[earlier:, None] >= number
    if write is None:
        near = late & (number[earlier:, None] - number <= earlier)
        return near & torch.cat([there, there.new_ones(count, size)], 1).unsqueeze(1)
    before = write.long().cumsum(1) - write.long()
    ranks = torch.cat([number[:earlier].expand(count, earlier), before], 1)
    near = late & (before.unsqueeze(2) - ranks.unsqueeze(1) <= earlier)
    itself = number[earlier:, None] == number
    return near & (torch.cat([there, write], 1).unsqueeze(1) | itself)


def _kept(keys: Tensor, p: Tensor, write: Tensor | None) -> tuple[Tensors, Any]:
    every, count = torch.cat([keys, torch.nn.functional.pad(p, (0, 1), value=1.0)], 1), keys.shape[1]
    if write is None:
        return (every[:, every.shape[1] - count :],), (count, p.shape[1], None)
    there = torch.cat([torch.ones_like(every[:, :count, 0], dtype=torch.bool), write], 1)
    rank = there.long().flip(1).cumsum(1).flip(1)  # 1 for the last that is written
    slot = torch.where(there & (rank <= count), count - rank, count)
    index = torch.arange(every.shape[1], device=every.device).expand_as(slot)
    index = slot.new_zeros(len(slot), count + 1).scatter(1, slot, index)[:, :count]
    return (every.gather(1, index.unsqueeze(-1).expand(-1, -1, every.shape[-1])),), (count, p.shape[1], index)


def _kept_vjp(residuals: Any, g: Tensor) -> Tensors:
    count, size, index = residuals
    if index is None:
        every = torch.cat([torch.zeros_like(g[:, :1]).expand(-1, size, -1), g], 1)
    else:
        every = g.new_zeros(len(g), count + size, g.shape[-1])
        every = every.scatter_add(1, index.unsqueeze(-1).expand_as(g), g)
    return every[:, :count], every[:, count:, :-1], None


KEYS = Block("structure.keys", _kept, _kept_vjp)
"""(keys `[N, K, P + 1]`, p `[N, C, P]`, write `[N, C]` or None) -> the last K keys that were written."""
