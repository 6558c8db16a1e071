"""Kernels for memories made of linear layers: their graph, walked for one token after the other, the state in cache.

What `hecate.structure.graph` does for many memories these do for one token of one: evaluate, descend, and pull back
both, with a weight passed over as seldom as may be. A graph is a table of numbers, and so are gates; what bias,
activation and link bring, `learn`, `act` and `link` with their numbers, `learn_back` and `link_back`, is called by its
address. So one compilation per dtype serves every rule.

The columns of a node are those of `NODE`. The values of a token lie side by side in a row, that of a node at its `at`;
an activation keeps its two derivatives behind its value, a norm 1/s. Cotangents of values lie alike. Of the tokens
(`given`) an array of size 0 is "not given"; `parts` are `learn`, `act` and `link`, each with its numbers.

Names as in `wide`: M state, S momentum, G and H their cotangents. With a link A is what is carried, W = link(A), and M
the cotangent of W; without one W is A, and M is G. [ENG-LAYERS-D1]
"""

from __future__ import annotations

from typing import Any, NamedTuple

from hecate.engine.cpu.passes import (
    ACT, ADD, LINEAR, MULTIPLY, backs, bounded, bounded_back, centred, copy, decayed, dots, dots_more, fill, node,
    norm_pulled, normed, out_of_line, product, product_added, products_added, pulled_once, pulled_twice, regained,
    regained_back, scaled, summed, unwritten, unwritten_on, written, written_on,
)  # fmt: skip
from hecate.engine.cpu.vectors import first_token, helper, number

NODE = ("op", "weight", "o", "V", "P", "a", "b", "at", "size", "wide", "width")


class Plan(NamedTuple):
    """What steers a kernel; yes is 1.

    nodes: of the graph, one a row; eps: of norms; floor: above 0, a step is lr over it and the bound of `passes`;
    heads: memories whose tokens lie side by side; length: tokens; size: numbers of a state; row: of a token's values;
    P, V: widths of keys and values with padding; last: where the prediction lies in a row; width: V without padding;
    ones: where the constant 1 lies that biases meet; segment: tokens between kept states; linked: W is a link's;
    centres: steps go without their mean; ahead: the gradient sees the decayed memory; before: reads come first;
    anchored: what is forgotten gives way to the start.
    """

    nodes: Any
    eps: Any
    floor: Any
    heads: int
    length: int
    size: int
    row: int
    P: int
    V: int
    last: int
    width: int
    ones: int
    segment: int
    linked: int
    centres: int
    ahead: int
    before: int
    anchored: int


@helper
def _evaluated(plan, W, wo, x, xo, act, ac):
    """The value of every node, from that of the input."""
    out_of_line()
    for n in range(len(plan.nodes)):
        op, _, o, V, P, a, b, at, size, wide, _ = node(plan, n)
        if op == LINEAR:
            dots(W, wo + o, V, P, x, xo + a, x, xo + at)
        elif op == ACT:
            i, j = xo + a, xo + at
            act(x[i : i + wide], x[j : j + wide], x[j + wide : j + 2 * wide], x[j + 2 * wide : j + 3 * wide], size, ac)
        elif op == ADD:
            summed(x, xo + a, x, xo + b, x, xo + at, wide)
        elif op == MULTIPLY:
            product(x, xo + a, x, xo + b, x, xo + at, wide)
        else:
            normed(x, xo + a, size, plan.eps, x, xo + at, wide)


@helper
def _spread(node, x, xo, g, go, row):
    """Adds the cotangent of an operation's value to those of its inputs."""
    out_of_line()
    op, _, _, _, _, a, b, at, size, wide, _ = node
    if op == ACT:
        # f'(z) lies behind f(z), f'' behind it: no activation is evaluated twice.
        product_added(g, go + at, x, xo + at + wide, g, go + a, wide)
    elif op == ADD:
        summed(g, go + at, g, go + a, g, go + a, wide)
        summed(g, go + at, g, go + b, g, go + b, wide)
    elif op == MULTIPLY:
        product_added(g, go + at, x, xo + b, g, go + a, wide)
        product_added(g, go + at, x, xo + a, g, go + b, wide)
    else:
        norm_pulled(x, xo + at, x[xo + at + wide], size, g, go + at, row, at - at)
        for i in range(size):
            g[go + a + i] += row[i]


@helper
def _descended(plan, W, wo, x, xo, f, fo, row):
    """The cotangents of all values above the input from that of the last: d of every layer."""
    out_of_line()
    for n in range(len(plan.nodes) - 1, -1, -1):
        op, _, o, V, P, a, _, at, _, _, _ = node(plan, n)
        if op == LINEAR:
            # Neither the input nor the constant 1 behind biases has a layer below that asks for its d.
            if 0 < a < plan.ones:
                backs(W, wo + o, V, P, f, fo + at, f, fo + a)
        else:
            _spread(node(plan, n), x, xo, f, fo, row)


@helper
def _raised(plan, W, wo, x, xo, f, fo, up, g, row):
    """The reverse of `_descended`: from what arrives at d of every layer (in `up`) the cotangent of what it began with,
    and those of the values that it used, added to g."""
    out_of_line()
    for n in range(len(plan.nodes)):
        op, _, o, V, P, a, b, at, size, wide, _ = node(plan, n)
        if op == LINEAR:
            if 0 < a < plan.ones:
                dots_more(W, wo + o, V, P, up, a, up, at)
        elif op == ACT:
            # d_z = f'(z) d: what arrives at d_z goes to z by f''(z) d, and to d by f'(z).
            products_added(up, a, f, fo + at, x, xo + at + 2 * wide, g, a, wide)
            product_added(up, a, x, xo + at + wide, up, at, wide)
        elif op == ADD:
            summed(up, a, up, at, up, at, wide)
            summed(up, b, up, at, up, at, wide)
        elif op == MULTIPLY:
            # d_a = b d and d_b = a d: each has a cotangent for the other factor and one for d.
            product_added(up, b, f, fo + at, g, a, wide)
            product_added(up, a, f, fo + at, g, b, wide)
            product_added(up, a, x, xo + b, up, at, wide)
            product_added(up, b, x, xo + a, up, at, wide)
        else:
            s = x[xo + at + wide]
            norm_pulled(x, xo + at, s, size, f, fo + at, row, wide)
            norm_pulled(x, xo + at, s, size, up, a, row, at - at)
            # y = s x with 1/s the root mean square: its second derivative is three inner products.
            one, two, three = s - s, s - s, s - s
            for i in range(size):
                y = x[xo + at + i]
                one += up[a + i] * row[wide + i]
                two += f[fo + at + i] * y
                three += up[a + i] * y
            s /= number(s, size)
            for i in range(size):
                g[a + i] -= (one * x[xo + at + i] + two * row[i] + three * row[wide + i]) * s
                up[at + i] += row[i]


@helper
def _through(plan, W, wo, M, mo, x, xo, g, f, fo, up, row, both):
    """Backpropagation of the values' cotangents to those of the input and, added to M, of the weights; with `both`
    those of `_raised`, too."""
    out_of_line()
    for n in range(len(plan.nodes) - 1, -1, -1):
        op, _, o, V, P, a, _, at, _, _, _ = node(plan, n)
        if op != LINEAR:
            _spread(node(plan, n), x, xo, g, at - at, row)
        elif both > 0 and 0 < a < plan.ones:
            # In one pass over the weight: what comes through values, and what comes through d, f c^T.
            pulled_twice(W, wo + o, M, mo + o, V, P, g, at, x, xo + a, f, fo + at, up, a, g, a)
        else:
            pulled_once(W, wo + o, M, mo + o, V, P, g, at, x, xo + a, g, a)


@helper
def _links(plan, link, lc, spare, A, o, W, to):
    """W = link(A) of every weight, where there is a link."""
    out_of_line()
    for n in range(len(plan.nodes)):
        op, _, at, V, P, _, _, _, size, _, width = node(plan, n)
        if op == LINEAR and plan.linked:
            i, j, count = o + at, to + at, V * P
            link(A[i : i + count], W[j : j + count], V, P, size, width, spare, lc)


@helper
def _unlinks(plan, link_back, lc, spare, A, o, W, to, M, G, go):
    """G += the cotangent of A from that of W, and M = 0, where there is a link."""
    out_of_line()
    for n in range(len(plan.nodes)):
        op, _, at, V, P, _, _, _, size, _, width = node(plan, n)
        if op == LINEAR and plan.linked:
            i, j, k, count = o + at, to + at, go + at, V * P
            link_back(
                A[i : i + count], W[j : j + count], M[at : at + count], G[k : k + count], V, P, size, width, spare, lc
            )
            fill(M, at, count, 0.0)


@helper
def _learned(plan, W, wo, k, ko, v, vo, x, xo, f, fo, u, uo, parts, row):
    """A token's values, its u, and the cotangents of its values: h and d of every layer."""
    out_of_line()
    learn, bc, act, ac, _, _ = parts
    last, V = xo + plan.last, plan.V
    copy(k, ko, x, xo, plan.P)
    _evaluated(plan, W, wo, x, xo, act, ac)
    learn(x[last : last + V], v[vo : vo + V], u[uo : uo + V], plan.width, bc)
    fill(f, fo, plan.row, 0.0)
    for i in range(plan.width):
        f[fo + plan.last + i] = u[uo + i]
    _descended(plan, W, wo, x, xo, f, fo, row)


@helper
def _looked_at(x, at, width, P, centres, row):
    """The input that a weight is written with, centred or as it is, and the place where it starts."""
    if not centres:
        return x, at
    centred(x, at, width, row, at - at)
    # Padding is written with, too, and has to stay 0.
    for i in range(width, P):
        row[i] = 0
    return row, at - at


@helper
def _forgotten(plan, A, ao, X, xo, initial, io, r):
    """X = r A, and (1 - r) of the start where what is forgotten gives way to it."""
    out_of_line()
    scaled(A, ao, X, xo, plan.size, r)
    if plan.anchored:
        regained(X, xo, initial, io, plan.size, number(r, 1) - r)


@helper
def _shortened(plan, W, wo, x, xo, bv, bt, l):
    """An lr as a step takes it."""
    return l / (plan.floor + bounded(plan, W, wo, x, xo, bv, bt)) if plan.floor > 0 else l


@helper
def _stepped(plan, A, ao, S, so, B, R, bo, I, io, x, xo, f, fo, l, r, m, back, row):
    """The step on every weight, from (A, S) to (B, R), and `back` towards I where there is one."""
    out_of_line()
    for n in range(len(plan.nodes)):
        op, _, o, V, P, a, _, at, _, _, width = node(plan, n)
        if op == LINEAR:
            h, ho = _looked_at(x, xo + a, width, P, plan.centres, row)
            if S.size > 0:
                written_on(A, ao + o, S, so + o, B, R, bo + o, I, io + o, V, P, f, fo + at, h, ho, l, r, m, back)
            else:
                written(A, ao + o, B, bo + o, I, io + o, V, P, f, fo + at, h, ho, l, r, back)


@helper
def _transferred(plan, A, S, o, B, R, to):
    """A state, with its momentum if it has one, from one place to another."""
    copy(A, o, B, to, plan.size)
    if S.size > 0:
        copy(S, o, R, to, plan.size)


@helper
def _started(plan, link, lc, spare, initial, base, A, S, o, W, to):
    """Into a place what a memory is at its start."""
    copy(initial, base, A, o, plan.size)
    if S.size > 0:
        fill(S, o, plan.size, 0.0)
    _links(plan, link, lc, spare, A, o, W, to)


@helper
def _read(plan, W, wo, q, qo, x, act, ac):
    """A query's values."""
    copy(q, qo, x, qo - qo, plan.P)
    _evaluated(plan, W, wo, x, qo - qo, act, ac)


def forward(
    lo, hi, plan, k, q, v, lr, retain, momentum, write, reset, initial, A, S, y, kept, kept_S, W, x, f, u, row, spare,
    bv, bt, learn, bc, act, ac, link, lc,
):  # fmt: skip
    """Outputs y and, in place, the final A and S; with `kept` given, the states that `backward` begins its segments
    at."""
    parts, size, P, V = (learn, bc, act, ac, link, lc), plan.size, plan.P, plan.V
    segments, nil = (plan.length + plan.segment - 1) // plan.segment, lo - lo  # a literal would be compiled for
    x[plan.ones] = 1
    # Where the gradient sees the decayed memory, that has been moved towards its start ahead of the step.
    I = initial if plan.anchored and not plan.ahead else initial[:nil]
    for n in range(lo, hi):
        base, first = n * size, first_token(n, plan.heads, plan.length)
        # Z is what predicts and answers: link(A) in a place of its own, or A itself.
        Z, zo = (W, nil) if plan.linked else (A, base)
        _links(plan, link, lc, spare, A, base, W, nil)
        for t in range(plan.length):
            at = first + t * plan.heads
            if kept.size > 0 and t % plan.segment == 0:
                _transferred(plan, A, S, base, kept, kept_S, (n * segments + t // plan.segment) * size)
            if reset.size > 0 and reset[at]:
                _started(plan, link, lc, spare, initial, base, A, S, base, W, nil)
            if plan.before:
                _read(plan, Z, zo, q, at * P, x, act, ac)
                copy(x, plan.last, y, at * V, V)
            if write.size == 0 or write[at]:
                r, back = retain[at], number(retain[at], 1) - retain[at]
                # Retain first: the gradient is taken at r A, and the step keeps all of it.
                if plan.ahead:
                    _forgotten(plan, A, base, A, base, initial, base, r)
                    r = number(r, 1)
                _learned(plan, Z, zo, k, at * P, v, at * V, x, nil, f, nil, u, nil, parts, row)
                l = _shortened(plan, Z, zo, x, nil, bv, bt, lr[at])
                _stepped(
                    plan, A, base, S, base, A, S, base, I, base, x, nil, f, nil, l, r, momentum[at], back, row
                )  # fmt: skip
                _links(plan, link, lc, spare, A, base, W, nil)
            if not plan.before:
                _read(plan, Z, zo, q, at * P, x, act, ac)
                copy(x, plan.last, y, at * V, V)


@helper
def _replayed(
    plan, given, first, start, end, base, states, states_S, W, x, f, u, row, spare, X, bv, bt, parts
):  # fmt: skip
    """The states before and after every token of a segment, from the first, with what `_learned` found."""
    out_of_line()
    k, v, lr, retain, momentum, write, reset, initial, I = given
    _, _, _, _, link, lc = parts
    size, L, nil = plan.size, plan.row, first - first
    _links(plan, link, lc, spare, states, nil, W, nil)
    for t in range(start, end):
        at, i = first + t * plan.heads, t - start
        # A token that restarts goes on from the start, which lies in the slot behind the segment's.
        o, to = (plan.segment + 1 if reset.size > 0 and reset[at] else i) * size, (i + 1) * size
        if write.size == 0 or write[at]:
            r, Z, A, ao = retain[at], W if plan.linked else states, states, o
            zo, back = o, number(r, 1) - r
            if plan.ahead:
                _forgotten(plan, states, o, X, nil, initial, base, r)
                Z, zo, A, ao, r = X, nil, X, nil, number(r, 1)
            _learned(plan, Z, zo, k, at * plan.P, v, at * plan.V, x, i * L, f, i * L, u, i * plan.V, parts, row)
            l = _shortened(plan, Z, zo, x, i * L, bv, bt, lr[at])
            _stepped(
                plan, A, ao, states_S, o, states, states_S, to, I, base, x, i * L, f, i * L, l, r, momentum[at], back,
                row,
            )  # fmt: skip
            _links(plan, link, lc, spare, states, to, W, to)
        else:
            _transferred(plan, states, states_S, o, states, states_S, to)
            if plan.linked:
                copy(W, o, W, to, size)


@helper
def _read_back(plan, W, wo, M, mo, q, qo, gy, yo, x, g, gq, row, act, ac):
    """VJP of a token's read: the cotangent of its query and, added to M, those of the weights."""
    out_of_line()
    nil = qo - qo
    _read(plan, W, wo, q, qo, x, act, ac)
    fill(g, nil, plan.row, 0.0)
    copy(gy, yo, g, plan.last, plan.V)
    _through(plan, W, wo, M, mo, x, nil, g, g, nil, g, row, nil)
    copy(g, nil, gq, qo, plan.P)


@helper
def _step_back(plan, A, ao, S, so, I, T, G, H, go, x, xo, f, l, r, m, back, g, up, row):
    """The reverse of `_stepped`: cotangents of d (in `up`), of h (in g), of lr, retain and momentum; G and H of the
    token before, in place."""
    out_of_line()
    nil = go - go
    fill(g, nil, plan.row, 0.0)
    fill(up, nil, plan.row, 0.0)
    gl, gr, gm = l - l, l - l, l - l
    for n in range(len(plan.nodes)):
        op, _, o, V, P, a, _, at, size, _, width = node(plan, n)
        if op == LINEAR:
            h, ho = _looked_at(x, xo + a, width, P, plan.centres, row)
            if S.size > 0:
                e, c = unwritten_on(
                    G, H, go + o, A, S, ao + o, so + o, I, T, go + o, V, P, f, xo + at, h, ho, up, at, g, a, r, m, back
                )  # fmt: skip
                gm += c
            else:
                e = unwritten(G, go + o, A, ao + o, I, T, go + o, V, P, f, xo + at, h, ho, up, at, g, a, r, back)
            gr += e
            for i in range(size):
                gl -= f[xo + at + i] * up[at + i]
                up[at + i] *= -l
            if plan.centres:
                centred(g, a, width, row, at - at)
                for i in range(width):
                    g[a + i] = row[i]
    for i in range(plan.row):
        g[i] *= -l
    return gl, gr, gm


@helper
def _write_back(
    plan, l, r, m, initial, I, g_initial, G, H, go, Z, A, S, ao, Q, mo, gk, ko, v, gv, vo, x, f, xo, u, uo, row, g, up,
    X, bv, bt, gbv, gbt, learn_back, bc,
):  # fmt: skip
    """VJP of a token's write: cotangents of its key, value and gates (returned), of G and H of the token before, and,
    added to M, of the weights at which its gradient was taken."""
    out_of_line()
    Y, yo, B, bo, rest, nil = Z, ao, A, ao, r, ao - ao
    back, lost, V = number(r, 1) - r, number(r, 0), plan.V
    if plan.ahead:
        _forgotten(plan, A, ao, X, nil, initial, go, r)
        Y, yo, B, bo, rest = X, nil, X, nil, number(r, 1)
    # `short` is the step's share of lr, 1 / (floor + bound), and 1 without a floor.
    short = _shortened(plan, Y, yo, x, xo, bv, bt, number(l, 1))
    gl, gr, gm = _step_back(
        plan, B, bo, S, ao, I, g_initial, G, H, go, x, xo, f, l * short, rest, m, back, g, up, row
    )  # fmt: skip
    _raised(plan, Y, yo, x, xo, f, xo, up, g, row)
    pred, error, gu = x[xo + plan.last : xo + plan.last + V], u[uo : uo + V], up[plan.last : plan.last + V]
    learn_back(pred, v[vo : vo + V], error, gu, row, gv[vo : vo + V], plan.width, bc)
    for j in range(plan.width):
        g[plan.last + j] += row[j]
    if plan.floor > 0:
        # d(lr short) / d bound = -lr short^2.
        e = -short * short * l * gl
        bounded_back(plan, Y, yo, Q, mo, x, xo, bv, bt, e, gbv, gbt, g, row)
    _through(plan, Y, yo, Q, mo, x, xo, g, f, xo, up, row, nil + 1)
    copy(g, nil, gk, ko, plan.P)
    if plan.ahead:
        if plan.anchored:
            lost = regained_back(G, go, initial, go, g_initial, go, plan.size, back)
        gr = decayed(G, go, A, ao, plan.size, r)
    return gl * short, gr - lost, gm


def backward(
    lo, hi, plan, k, q, v, lr, retain, momentum, write, reset, initial, kept, kept_S, gy, G, H, g_initial, gk, gq, gv,
    glr, gr, gm, W, x, f, u, row, spare, states, states_S, M, z, g, up, X, bv, bt, gbv, gbt, learn, bc, act, ac, link,
    lc, learn_back, link_back,
):  # fmt: skip
    """Cotangents of all inputs from those of y (gy) and, in place, of the final A and S (G, H)."""
    size, L, P, V, segment = plan.size, plan.row, plan.P, plan.V, plan.segment
    segments, nil = (plan.length + segment - 1) // segment, lo - lo
    I = initial if plan.anchored and not plan.ahead else initial[:nil]
    parts, given = (learn, bc, act, ac, link, lc), (k, v, lr, retain, momentum, write, reset, initial, I)
    far = (segment + 1) * size
    z[plan.ones] = 1
    for i in range(segment):
        x[i * L + plan.ones] = 1
    # Reads and predictions pull to Q: to the cotangent of link(A), pulled back once a token, or to G at once.
    Z, Q = (W, M) if plan.linked else (states, G)
    for n in range(lo, hi):
        base, first = n * size, first_token(n, plan.heads, plan.length)
        mo = nil if plan.linked else base
        if plan.linked:
            fill(M, nil, size, 0.0)
        if reset.size > 0:
            _started(plan, link, lc, spare, initial, base, states, states_S, far, W, far)
        for index in range(segments - 1, -1, -1):
            start, end = index * segment, min(plan.length, (index + 1) * segment)
            copy(kept, (n * segments + index) * size, states, nil, size)
            if states_S.size > 0:
                copy(kept_S, (n * segments + index) * size, states_S, nil, size)
            _replayed(
                plan, given, first, start, end, base, states, states_S, W, x, f, u, row, spare, X, bv, bt, parts
            )  # fmt: skip
            for t in range(end - 1, start - 1, -1):
                at, i = first + t * plan.heads, t - start
                resets, writes = reset.size > 0 and reset[at], write.size == 0 or write[at]
                o, to = (far if resets else i * size), (i + 1) * size
                if not plan.before or not writes:
                    _read_back(plan, Z, to, Q, mo, q, at * P, gy, at * V, z, g, gq, row, act, ac)
                if writes:
                    _unlinks(plan, link_back, lc, spare, states, to, W, to, M, G, base)
                    glr[at], gr[at], gm[at] = _write_back(
                        plan, lr[at], retain[at], momentum[at], initial, I, g_initial, G, H, base, Z, states, states_S,
                        o, Q, mo, gk, at * P, v, gv, at * V, x, f, i * L, u, i * V, row, g, up, X, bv, bt, gbv, gbt,
                        learn_back, bc,
                    )  # fmt: skip
                    if plan.before:
                        _read_back(plan, Z, o, Q, mo, q, at * P, gy, at * V, z, g, gq, row, act, ac)
                if resets:  # the cotangents of a memory that starts anew go to those of its start
                    _unlinks(plan, link_back, lc, spare, states, o, W, o, M, G, base)
                    summed(G, base, g_initial, base, g_initial, base, size)
                    fill(G, base, size, 0.0)
                    if H.size > 0:
                        fill(H, base, size, 0.0)
        _unlinks(plan, link_back, lc, spare, states, nil, W, nil, M, G, base)
