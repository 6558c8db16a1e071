"""Walks over memories made of linear layers: their graph, gone through for one token.

What `hecate.structure.graph` does for many memories these do for one token of one: evaluate, descend, and pull back
both, with a weight passed over as seldom as may be. A graph is a table of numbers, and so are gates; what bias,
activation and link bring, `learn`, `act` and `link` with their numbers, `learn_back` and `link_back`, is called by its
address. So one compilation per dtype serves every rule.

The columns of a node are those of `hecate.engine.cpu.passes.node`. The values of a token lie side by side in a row,
that of a node at its `at`; an activation keeps its two derivatives behind its value, a norm 1/s. Cotangents of values
lie alike.

Names as in `walk`: X is what is carried, W what predicts, itself or its link, S the momentum, and G, GW and H are their
cotangents; x has a token's values, f d of every layer. What is forgotten gives way to the start I, whose cotangent is
T, where these are given; with a floor above 0 a step is lr over floor + the bound of `passes`. [ENG-LAYERS-D1]
"""

from __future__ import annotations

from typing import Any, NamedTuple

from hecate.engine.cpu.passes import (
    added, backs, below, bounded, bounded_back, centred, decayed, dots, dots_more, node, norm_pulled, normed, product,
    product_added, products_added, pulled_once, pulled_twice, regained, regained_back, scaled, summed, unwritten,
    written,
)  # fmt: skip
from hecate.engine.cpu.vectors import call, copy, fill, helper, number, out_of_line, part, per_vector


class Graph(NamedTuple):
    """A graph as kernels have it.

    Fields:
        nodes: a row of numbers each.
        numbers: eps of its norms; the floor of its steps, 0 without; the distance from 1 to the next number.
        scratch: seven rows of values, and three of the longest value.
    """

    nodes: Any
    numbers: Any
    scratch: Any


@helper
def _evaluated(graph, act, ac, W, k, x):
    """The value of every node, from that of the input."""
    out_of_line()
    copy(k, x[: k.size])
    # Biases are columns that meet this 1.
    x[x.size - per_vector(x)] = 1
    for n in range(len(graph.nodes)):
        op, o, V, P, a, b, at, size, wide, _ = node(graph.nodes, n)
        if op == 0:
            dots(W, o, V, P, x, a, x, at)
        elif op == 1:
            end = at + wide
            call(act, (x[a : a + wide], x[at:end], x[end : end + wide], x[end + wide : end + 2 * wide], size, ac))
        elif op == 2:
            summed(x, a, x, b, x, at, wide)
        elif op == 3:
            product(x, a, x, b, x, at, wide)
        else:
            normed(x, a, size, graph.numbers[0], graph.numbers[2], x, at, wide)


@helper
def _spread(nodes, n, x, g, row):
    """Adds the cotangent of an operation's value to those of its inputs."""
    out_of_line()
    op, _, _, _, a, b, at, size, wide, _ = node(nodes, n)
    if op == 1:
        # f'(z) lies behind f(z), f'' behind it: no activation is evaluated twice.
        product_added(g, at, x, at + wide, g, a, wide)
    elif op == 2:
        added(g, at, g, a, wide)
        added(g, at, g, b, wide)
    elif op == 3:
        product_added(g, at, x, b, g, a, wide)
        product_added(g, at, x, a, g, b, wide)
    else:
        norm_pulled(x, at, x[at + wide], size, g, at, row, at - at)
        for i in range(size):
            g[a + i] += row[i]


@helper
def _descended(nodes, W, x, f, row):
    """The cotangents of all values above the input from that of the last: d of every layer."""
    out_of_line()
    for n in range(len(nodes) - 1, -1, -1):
        op, o, V, P, a, _, at, _, _, _ = node(nodes, n)
        if op != 0:
            _spread(nodes, n, x, f, row)
        elif below(a, x):
            backs(W, o, V, P, f, at, f, a)


@helper
def _raised(nodes, W, x, f, up, g, row):
    """The reverse of `_descended`: from what arrives at d of every layer (in `up`) the cotangent of what it began with,
    and those of the values that it used, added to g."""
    out_of_line()
    for n in range(len(nodes)):
        op, o, V, P, a, b, at, size, wide, _ = node(nodes, n)
        if op == 0:
            if below(a, x):
                dots_more(W, o, V, P, up, a, up, at)
        elif op == 1:
            # d_z = f'(z) d: what arrives at d_z goes to z by f''(z) d, and to d by f'(z).
            products_added(up, a, f, at, x, at + 2 * wide, g, a, wide)
            product_added(up, a, x, at + wide, up, at, wide)
        elif op == 2:
            added(up, a, up, at, wide)
            added(up, b, up, at, wide)
        elif op == 3:
            # d_a = b d and d_b = a d: each has a cotangent for the other factor and one for d.
            product_added(up, b, f, at, g, a, wide)
            product_added(up, a, f, at, g, b, wide)
            product_added(up, a, x, b, up, at, wide)
            product_added(up, b, x, a, up, at, wide)
        else:
            s = x[at + wide]
            norm_pulled(x, at, s, size, f, at, row, wide)
            norm_pulled(x, at, s, size, up, a, row, at - at)
            # y = s x with 1/s the root mean square: its second derivative is three inner products.
            one, two, three = s - s, s - s, s - s
            for i in range(size):
                y = x[at + i]
                one += up[a + i] * row[wide + i]
                two += f[at + i] * y
                three += up[a + i] * y
            s /= number(s, size)
            for i in range(size):
                up[at + i] += row[i]
                row[i] = (one * x[at + i] + two * row[i] + three * row[wide + i]) * s
            centred(row, at - at, size, row, at - at)
            for i in range(size):
                g[a + i] -= row[i]


@helper
def _through(nodes, W, GW, x, g, f, up, row, both):
    """Backpropagation of the values' cotangents to those of the input and, added to GW, of the weights; with `both`
    those of `_raised`, too."""
    out_of_line()
    for n in range(len(nodes) - 1, -1, -1):
        op, o, V, P, a, _, at, _, _, _ = node(nodes, n)
        if op != 0:
            _spread(nodes, n, x, g, row)
        elif both > 0 and below(a, x):
            # In one pass over the weight: what comes through values, and what comes through d, f c^T.
            pulled_twice(W, o, GW, V, P, g, at, x, a, f, at, up, a, g, a)
        else:
            pulled_once(W, o, GW, V, P, g, at, x, a, g, a)


@helper
def _looked_at(x, at, width, P, centre, row):
    """The input that a weight is written with, centred or as it is, and the place where it starts."""
    if not centre:
        return x, at
    centred(x, at, width, row, at - at)
    # Padding is written with, too, and has to stay 0.
    for i in range(width, P):
        row[i] = 0
    return row, at - at


@helper
def _rows(graph, rule):
    """The scratch space of a graph: its rows of values, and what lies behind them."""
    z, L = graph.scratch, rule.row
    return (
        part(z, 0, L), part(z, 1, L), part(z, 2, L), part(z, 3, L), part(z, 4, L), part(z, 5, L), part(z, 6, L),
        z[7 * L :],
    )  # fmt: skip


@helper
def _record(rule, record):
    """The record of a token for its reverse: values, d of every layer, and u."""
    L = rule.row
    return part(record, 0, L), part(record, 1, L), record[2 * L :]


# What the walk calls.


@helper
def weigh(rule, graph, do, X, W, x):
    """W = link(X) of every weight."""
    link, lc = do[8], do[9]
    for n in range(len(graph.nodes)):
        op, o, V, P, _, _, _, size, _, width = node(graph.nodes, n)
        if op == 0:
            call(link, (X[o : o + V * P], W[o : o + V * P], V, P, size, width, x, lc))


@helper
def unweigh(rule, graph, do, undo, X, W, GW, G, x):
    """Hands the cotangent GW of the weights to G, that of X, and clears it."""
    link_back, lc = undo[4], do[9]
    for n in range(len(graph.nodes)):
        op, o, V, P, _, _, _, size, _, width = node(graph.nodes, n)
        if op == 0:
            end = o + V * P
            call(link_back, (X[o:end], W[o:end], GW[o:end], G[o:end], V, P, size, width, x, lc))
    fill(GW, 0.0)


@helper
def decay(rule, graph, do, X, I, zero, rv, rp, Y, x):
    """Y = r X + (1 - r) I."""
    scaled(X, Y, rp[0])
    if rule.anchored:
        regained(Y, I, number(rp[0], 1) - rp[0])


@helper
def read(rule, graph, do, W, q, y, x):
    """The prediction y at q."""
    values, _, _, _, _, _, _, _ = _rows(graph, rule)
    _evaluated(graph, do[2], do[3], W, q, values)
    last = graph.nodes[len(graph.nodes) - 1, 6]
    copy(values[last : last + y.size], y)


@helper
def read_back(rule, graph, do, undo, W, q, gy, GW, gq, x):
    """VJP of `read`: the cotangent of its query and, added to GW, those of the weights."""
    values, g, _, _, _, _, _, row = _rows(graph, rule)
    last = graph.nodes[len(graph.nodes) - 1, 6]
    _evaluated(graph, do[2], do[3], W, q, values)
    fill(g, 0.0)
    copy(gy, g[last : last + gy.size])
    _through(graph.nodes, W, GW, values, g, g, g, row, last - last)
    copy(g[: gq.size], gq)


@helper
def write(rule, graph, do, given, at, v, X, W, S, C, I, rv, rp, O, D, C2, record, g, z, y):
    """The state O, D after X, S, the gradient taken at W."""
    learn, bc, act, ac, _, _, _, _, _, _, _, _ = do
    keys, _, _, lr, _, momentum, _, _, _, _, _ = given
    k, l, r, m = part(keys, at, rule.width), lr[at], rp[0], momentum[at]
    nodes, floor = graph.nodes, graph.numbers[1]
    _, _, bv, bt, _, _, _, row = _rows(graph, rule)
    x, f, u = _record(rule, record)
    last = nodes[len(nodes) - 1, 6]
    _evaluated(graph, act, ac, W, k, x)
    call(learn, (x[last : last + v.size], v, u, rule.values, bc))
    fill(f, 0.0)
    for i in range(rule.values):
        f[last + i] = u[i]
    _descended(nodes, W, x, f, row)
    if floor > 0:
        l /= floor + bounded(nodes, W, x, bv, bt)
    for n in range(len(nodes)):
        op, o, V, P, a, _, at, _, _, width = node(nodes, n)
        if op == 0:
            h, ho = _looked_at(x, a, width, P, rule.centred, row)
            if rule.moving:
                written(X, S, O, D, I, o, V, P, f, at, h, ho, l, r, m)
            else:
                written(X, None, O, None, I, o, V, P, f, at, h, ho, l, r, m)


@helper
def _step_back(rule, nodes, X, S, I, T, G, H, x, f, l, r, m, g, up, row):
    """The reverse of a step: cotangents of d (in `up`), of h (in g), of lr, retain and momentum; G and H of the token
    before, in place."""
    out_of_line()
    fill(g, 0.0)
    fill(up, 0.0)
    gl, gr, gm = l - l, l - l, l - l
    for n in range(len(nodes)):
        op, o, V, P, a, _, at, size, _, width = node(nodes, n)
        if op == 0:
            h, ho = _looked_at(x, a, width, P, rule.centred, row)
            if rule.moving:
                e, c = unwritten(G, H, X, S, I, T, o, V, P, f, at, h, ho, up, at, g, a, r, m)
            else:
                e, c = unwritten(G, None, X, None, I, T, o, V, P, f, at, h, ho, up, at, g, a, r, m)
            gr, gm = gr + e, gm + c
            for i in range(size):
                gl -= f[at + i] * up[at + i]
                up[at + i] *= -l
            if rule.centred:
                centred(g, a, width, row, at - at)
                for i in range(width):
                    g[a + i] = row[i]
    for i in range(g.size):
        g[i] *= -l
    return gl, gr, gm


@helper
def write_back(rule, graph, do, undo, given, at, v, X, W, S, direction, C, near, own, more, GA, record, rows, to, z):
    """VJP of `write`: cotangents of its key, value and gates, of G and H of the token before, and, added to GA, of the
    weights at which its gradient was taken."""
    (_, _, _, lr, _, momentum, _, _, _, _, _), learn_back, bc = given, undo[0], do[1]
    (_, rp, _, _), (G, H, _, I, T), (_, _, grv, _, _, out), (gk, gv, _, _, _) = near, own, rows, to
    l, r, m = lr[at], rp[0], momentum[at]
    nodes, floor = graph.nodes, graph.numbers[1]
    _, g, bv, bt, up, gbv, gbt, row = _rows(graph, rule)
    x, f, u = _record(rule, record)
    last = nodes[len(nodes) - 1, 6]
    # `short` is the step's share of lr, 1 / (floor + bound), and 1 without a floor.
    short, none = number(l, 1), I[:0]
    if floor > 0:
        short /= floor + bounded(nodes, W, x, bv, bt)
    # Of a decayed memory, which the gradient met, the step keeps all.
    if rule.ahead:
        gl, gr, gm = _step_back(rule, nodes, W, S, none, none, G, H, x, f, l * short, number(r, 1), m, g, up, row)
    else:
        gl, gr, gm = _step_back(rule, nodes, X, S, I, T, G, H, x, f, l * short, r, m, g, up, row)
    _raised(nodes, W, x, f, up, g, row)
    call(learn_back, (x[last : last + v.size], v, u, up[last : last + v.size], row, gv, rule.values, bc))
    for j in range(rule.values):
        g[last + j] += row[j]
    if floor > 0:
        # d(lr short) / d bound = -lr short^2.
        bounded_back(nodes, W, GA, x, bv, bt, -short * short * l * gl, gbv, gbt, g, row)
    _through(nodes, W, GA, x, g, f, up, row, last - last + 1)
    copy(g[: gk.size], gk)
    if rule.ahead:
        lost = regained_back(G, I, T, number(r, 1) - r) if rule.anchored else r - r
        gr = decayed(G, X, r) - lost
    out[0], grv[0], out[1] = gl * short, gr, gm
