"""Kernels for memories made of linear layers: their graph, walked for one token after the other, the state in cache.

What `hecate.structure.graph` does for many memories these do for one token of one: evaluate, descend, and pull back
both, with a weight passed over as seldom as may be. A graph is a table of numbers, and so are gates; what bias,
activation and link bring, `learn`, `act` and `link` with their numbers, `learn_back` and `link_back`, is called by its
address. So one compilation per dtype serves every rule.

The columns of a node are those of `NODE`. The values of a token lie side by side in a row, that of a node at its `at`;
an activation keeps its two derivatives behind its value, a norm 1/s. Cotangents of values lie alike.

Names as in `wide`: M state, S momentum, G and H their cotangents. With a link A is what is carried, W = link(A), and M
the cotangent of W; without one W is A, and M is G. With `anchor` what is forgotten gives way to the start, and with a
`floor` above 0 a step is lr over floor + the bound of `hecate.engine.cpu.passes`. [ENG-LAYERS-D1]
"""

from __future__ import annotations

from hecate.engine.cpu.passes import (
    added, backs, bounded, bounded_back, centred, copy, decayed, dots, dots_more, fill, moved, norm_pulled, normed,
    out_of_line, product, product_added, products_added, pulled_once, pulled_twice, regained, regained_back, scaled,
    summed, unwritten, unwritten_on, written, written_on,
)  # fmt: skip
from hecate.engine.cpu.vectors import first_token, helper, number

NODE = ("op", "weight", "o", "V", "P", "a", "b", "at", "size", "wide", "width")
COLUMNS = len(NODE)
LINEAR, ACT, ADD, MULTIPLY, NORM = range(5)


@helper
def _node(plan, n):
    """The columns of a node."""
    c = plan[n]
    return c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7], c[8], c[9], c[10]


@helper
def _evaluated(plan, eps, nodes, W, wo, x, xo, act, ac):
    """The value of every node, from that of the input."""
    out_of_line()
    for n in range(nodes):
        op, _, o, V, P, a, b, at, size, wide, _ = _node(plan, n)
        if op == 0:
            dots(W, wo + o, V, P, x, xo + a, x, xo + at)
        elif op == 1:
            i, j = xo + a, xo + at
            act(x[i : i + wide], x[j : j + wide], x[j + wide : j + 2 * wide], x[j + 2 * wide : j + 3 * wide], size, ac)
        elif op == 2:
            summed(x, xo + a, x, xo + b, x, xo + at, wide)
        elif op == 3:
            product(x, xo + a, x, xo + b, x, xo + at, wide)
        else:
            normed(x, xo + a, size, eps, x, xo + at, wide)


@helper
def _spread(node, x, xo, g, go, row):
    """Adds the cotangent of an operation's value to those of its inputs."""
    out_of_line()
    op, _, _, _, _, a, b, at, size, wide, _ = node
    if op == 1:
        # f'(z) lies behind f(z), f'' behind it: no activation is evaluated twice.
        product_added(g, go + at, x, xo + at + wide, g, go + a, wide)
    elif op == 2:
        added(g, go + at, g, go + a, wide)
        added(g, go + at, g, go + b, wide)
    elif op == 3:
        product_added(g, go + at, x, xo + b, g, go + a, wide)
        product_added(g, go + at, x, xo + a, g, go + b, wide)
    else:
        norm_pulled(x, xo + at, x[xo + at + wide], size, g, go + at, row, at - at)
        for i in range(size):
            g[go + a + i] += row[i]


@helper
def _descended(plan, nodes, W, wo, x, xo, f, fo, row, hidden):
    """The cotangents of all values above the input from that of the last: d of every layer."""
    out_of_line()
    for n in range(nodes - 1, -1, -1):
        op, _, o, V, P, a, _, at, _, _, _ = _node(plan, n)
        if op == 0:
            # Neither the input nor the constant 1 behind biases has a layer below that asks for its d.
            if 0 < a < hidden:
                backs(W, wo + o, V, P, f, fo + at, f, fo + a)
        else:
            _spread(_node(plan, n), x, xo, f, fo, row)


@helper
def _raised(plan, nodes, W, wo, x, xo, f, fo, up, g, row, hidden):
    """The reverse of `_descended`: from what arrives at d of every layer (in `up`) the cotangent of what it began with,
    and those of the values that it used, added to g."""
    out_of_line()
    for n in range(nodes):
        op, _, o, V, P, a, b, at, size, wide, _ = _node(plan, n)
        if op == 0:
            if 0 < a < hidden:
                dots_more(W, wo + o, V, P, up, a, up, at)
        elif op == 1:
            # d_z = f'(z) d: what arrives at d_z goes to z by f''(z) d, and to d by f'(z).
            products_added(up, a, f, fo + at, x, xo + at + 2 * wide, g, a, wide)
            product_added(up, a, x, xo + at + wide, up, at, wide)
        elif op == 2:
            added(up, a, up, at, wide)
            added(up, b, up, at, wide)
        elif op == 3:
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
def _through(plan, nodes, W, wo, M, mo, x, xo, g, f, fo, up, row, hidden, both):
    """Backpropagation of the values' cotangents to those of the input and, added to M, of the weights; with `both`
    those of `_raised`, too."""
    out_of_line()
    for n in range(nodes - 1, -1, -1):
        op, _, o, V, P, a, _, at, _, _, _ = _node(plan, n)
        if op != 0:
            _spread(_node(plan, n), x, xo, g, at - at, row)
        elif both > 0 and 0 < a < hidden:
            # In one pass over the weight: what comes through values, and what comes through d, f c^T.
            pulled_twice(W, wo + o, M, mo + o, V, P, g, at, x, xo + a, f, fo + at, up, a, g, a)
        else:
            pulled_once(W, wo + o, M, mo + o, V, P, g, at, x, xo + a, g, a)


@helper
def _links(plan, nodes, link, lc, spare, A, o, W, to):
    """W = link(A) of every weight."""
    out_of_line()
    for n in range(nodes):
        op, _, at, V, P, _, _, _, size, _, width = _node(plan, n)
        if op == 0:
            i, j, count = o + at, to + at, V * P
            link(A[i : i + count], W[j : j + count], V, P, size, width, spare, lc)


@helper
def _unlinks(plan, nodes, link_back, lc, spare, A, o, W, to, M, G, go):
    """G += the cotangent of A from that of W, and M = 0."""
    out_of_line()
    for n in range(nodes):
        op, _, at, V, P, _, _, _, size, _, width = _node(plan, n)
        if op == 0:
            i, j, k, count = o + at, to + at, go + at, V * P
            link_back(
                A[i : i + count], W[j : j + count], M[at : at + count], G[k : k + count], V, P, size, width, spare, lc
            )
            fill(M, at, count, 0.0)


@helper
def _learned(
    plan, eps, nodes, W, wo, k, ko, v, vo, size, x, xo, f, fo, u, uo, learn, bc, act, ac, P, V, L, last, row, hidden,
):  # fmt: skip
    """A token's values, its u, and the cotangents of its values: h and d of every layer."""
    out_of_line()
    copy(k, ko, x, xo, P)
    _evaluated(plan, eps, nodes, W, wo, x, xo, act, ac)
    learn(x[xo + last : xo + last + V], v[vo : vo + V], u[uo : uo + V], size, bc)
    fill(f, fo, L, 0.0)
    for i in range(size):
        f[fo + last + i] = u[uo + i]
    _descended(plan, nodes, W, wo, x, xo, f, fo, row, hidden)


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
def _stepped(plan, nodes, A, ao, S, so, B, R, bo, I, io, x, xo, f, fo, l, r, m, back, centre, row):
    """The step on every weight, from (A, S) to (B, R), and `back` towards I where there is one."""
    out_of_line()
    for n in range(nodes):
        op, _, o, V, P, a, _, at, _, _, width = _node(plan, n)
        if op == 0:
            h, ho = _looked_at(x, xo + a, width, P, centre, row)
            if S.size > 0:
                written_on(A, ao + o, S, so + o, B, R, bo + o, I, io + o, V, P, f, fo + at, h, ho, l, r, m, back)
            else:
                written(A, ao + o, B, bo + o, I, io + o, V, P, f, fo + at, h, ho, l, r, back)


def forward(
    lo, hi, heads, T, plan, eps, nodes, size, L, P, V, last, width, hidden, k, q, v, lr, retain, momentum,
    write, reset, initial, A, S, y, kept, kept_S, segment, linked, centre, order, before, anchor, floor, W, x, f,
    u, row, spare, bv, bt, learn, bc, act, ac, link, lc,
):  # fmt: skip
    """Outputs y and, in place, the final A and S; with `kept` given, the states that `backward` begins its segments
    at."""
    segments, nil = (T + segment - 1) // segment, lo - lo  # a literal would be compiled for
    # Biases are columns that meet this 1.
    x[hidden] = 1
    # Where the gradient sees the decayed memory, that has been moved towards its start ahead of the step.
    I = initial if anchor and not order else initial[:nil]
    for n in range(lo, hi):
        base, first = n * size, first_token(n, heads, T)
        # Z is what predicts and answers: link(A) in a place of its own, or A itself.
        Z, zo = (W, nil) if linked else (A, base)
        if linked:
            _links(plan, nodes, link, lc, spare, A, base, W, nil)
        for t in range(T):
            at = first + t * heads
            if kept.size > 0 and t % segment == 0:
                place = (n * segments + t // segment) * size
                copy(A, base, kept, place, size)
                if S.size > 0:
                    copy(S, base, kept_S, place, size)
            if reset.size > 0 and reset[at]:
                copy(initial, base, A, base, size)
                if S.size > 0:
                    fill(S, base, size, 0.0)
                if linked:
                    _links(plan, nodes, link, lc, spare, A, base, W, nil)
            writes = write.size == 0 or write[at]
            if before:
                copy(q, at * P, x, nil, P)
                _evaluated(plan, eps, nodes, Z, zo, x, nil, act, ac)
                copy(x, last, y, at * V, V)
            if writes:
                r, l = retain[at], lr[at]
                back = number(r, 1) - r
                # Retain first: the gradient is taken at r A, and the step keeps all of it.
                if order:
                    scaled(A, base, A, base, size, r)
                    if anchor:
                        regained(A, base, initial, base, size, back)
                    r = number(r, 1)
                _learned(
                    plan, eps, nodes, Z, zo, k, at * P, v, at * V, width, x, nil, f, nil, u, nil, learn, bc, act, ac,
                    P, V, L, last, row, hidden,
                )  # fmt: skip
                if floor > 0:
                    l /= floor + bounded(plan, nodes, Z, zo, x, nil, bv, bt, L, hidden)
                _stepped(
                    plan, nodes, A, base, S, base, A, S, base, I, base, x, nil, f, nil, l, r, momentum[at], back,
                    centre, row,
                )  # fmt: skip
                if linked:
                    _links(plan, nodes, link, lc, spare, A, base, W, nil)
            if not before:
                copy(q, at * P, x, nil, P)
                _evaluated(plan, eps, nodes, Z, zo, x, nil, act, ac)
                copy(x, last, y, at * V, V)


@helper
def _replayed(
    first, heads, start, end, plan, eps, nodes, size, L, P, V, last, width, hidden, k, v, lr, retain,
    momentum, write, reset, initial, base, segment, linked, centre, order, anchor, floor, states, states_S, W, x,
    f, u, row, spare, X, bv, bt, learn, bc, act, ac, link,
    lc,
):  # fmt: skip
    """The states before and after every token of a segment, from the first, with what `_learned` found."""
    out_of_line()
    nil = first - first
    I = initial if anchor and not order else initial[:nil]
    if linked:
        _links(plan, nodes, link, lc, spare, states, nil, W, nil)
    for t in range(start, end):
        at, i = first + t * heads, t - start
        # A token that restarts goes on from the start, which lies in the slot behind the segment's.
        o = segment + 1 if reset.size > 0 and reset[at] else i
        to = (i + 1) * size
        if write.size == 0 or write[at]:
            r, l, Z, zo, A, ao = retain[at], lr[at], states, o * size, states, o * size
            back = number(r, 1) - r
            if linked:
                Z = W
            if order:
                scaled(states, o * size, X, nil, size, r)
                if anchor:
                    regained(X, nil, initial, base, size, back)
                Z, zo, A, ao, r = X, nil, X, nil, number(r, 1)
            _learned(
                plan, eps, nodes, Z, zo, k, at * P, v, at * V, width, x, i * L, f, i * L, u, i * V, learn, bc, act, ac,
                P, V, L, last, row, hidden,
            )  # fmt: skip
            if floor > 0:
                l /= floor + bounded(plan, nodes, Z, zo, x, i * L, bv, bt, L, hidden)
            _stepped(
                plan, nodes, A, ao, states_S, o * size, states, states_S, to, I, base, x, i * L, f, i * L, l, r,
                momentum[at], back, centre, row,
            )  # fmt: skip
            if linked:
                _links(plan, nodes, link, lc, spare, states, to, W, to)
        else:
            copy(states, o * size, states, to, size)
            if states_S.size > 0:
                copy(states_S, o * size, states_S, to, size)
            if linked:
                copy(W, o * size, W, to, size)


@helper
def _read_back(plan, eps, nodes, W, wo, M, mo, q, qo, gy, yo, x, g, gq, P, V, L, last, row, hidden, act, ac):
    """VJP of a token's read: the cotangent of its query and, added to M, those of the weights."""
    out_of_line()
    nil = P - P
    copy(q, qo, x, nil, P)
    _evaluated(plan, eps, nodes, W, wo, x, nil, act, ac)
    fill(g, nil, L, 0.0)
    copy(gy, yo, g, last, V)
    _through(plan, nodes, W, wo, M, mo, x, nil, g, g, nil, g, row, hidden, nil)
    copy(g, nil, gq, qo, P)


@helper
def _step_back(
    plan, nodes, A, ao, S, so, I, T, G, H, go, x, xo, f, fo, l, r, m, back, g, up, L, centre, row, hidden,
):  # fmt: skip
    """The reverse of `_stepped`: cotangents of d (in `up`), of h (in g), of lr, retain and momentum; G and H of the
    token before, in place."""
    out_of_line()
    nil = go - go
    fill(g, nil, L, 0.0)
    fill(up, nil, L, 0.0)
    gl, gr, gm = l - l, l - l, l - l
    for n in range(nodes):
        op, _, o, V, P, a, _, at, size, _, width = _node(plan, n)
        if op == 0:
            h, ho = _looked_at(x, xo + a, width, P, centre, row)
            if S.size > 0:
                e, c = unwritten_on(
                    G, H, go + o, A, S, ao + o, so + o, I, T, go + o, V, P, f, fo + at, h, ho, up, at, g, a, r, m, back
                )  # fmt: skip
                gm += c
            else:
                e = unwritten(G, go + o, A, ao + o, I, T, go + o, V, P, f, fo + at, h, ho, up, at, g, a, r, back)
            gr += e
            for i in range(size):
                gl -= f[fo + at + i] * up[at + i]
                up[at + i] *= -l
            if centre:
                centred(g, a, width, row, at - at)
                for i in range(width):
                    g[a + i] = row[i]
    for i in range(L):
        g[i] *= -l
    return gl, gr, gm


@helper
def _write_back(
    plan, nodes, size, L, P, V, last, width, hidden, l, r, m, initial, g_initial, G, H, go, Z, A, S, ao, Q, mo, gk, ko,
    v, gv, vo, centre, order, anchor, floor, x, f, xo, u, uo, row, g, up, X, bv, bt, gbv, gbt, learn_back, bc,
):  # fmt: skip
    """VJP of a token's write: cotangents of its key, value and gates (returned), of G and H of the token before, and,
    added to M, of the weights at which its gradient was taken."""
    out_of_line()
    Y, yo, B, bo, kept, nil = Z, ao, A, ao, r, ao - ao
    # `short` is the step's share of lr, 1 / (floor + bound), and 1 without a floor.
    short, back, lost = number(l, 1), number(r, 1) - r, number(r, 0)
    I = initial if anchor and not order else initial[:nil]
    if order:
        scaled(A, ao, X, nil, size, r)
        if anchor:
            regained(X, nil, initial, go, size, back)
        Y, yo, B, bo, kept = X, nil, X, nil, number(r, 1)
    if floor > 0:
        short /= floor + bounded(plan, nodes, Y, yo, x, xo, bv, bt, L, hidden)
    gl, gr, gm = _step_back(
        plan, nodes, B, bo, S, ao, I, g_initial, G, H, go, x, xo, f, xo, l * short, kept, m, back, g, up, L, centre,
        row, hidden,
    )  # fmt: skip
    _raised(plan, nodes, Y, yo, x, xo, f, xo, up, g, row, hidden)
    p, own, gu = x[xo + last : xo + last + V], u[uo : uo + V], up[last : last + V]
    learn_back(p, v[vo : vo + V], own, gu, row, gv[vo : vo + V], width, bc)
    for j in range(width):
        g[last + j] += row[j]
    if floor > 0:
        # d(lr short) / d bound = -lr short^2.
        e = -short * short * l * gl
        bounded_back(plan, nodes, Y, yo, Q, mo, x, xo, bv, bt, e, gbv, gbt, g, row, L, hidden)
    _through(plan, nodes, Y, yo, Q, mo, x, xo, g, f, xo, up, row, hidden, nil + 1)
    copy(g, nil, gk, ko, P)
    if order:
        if anchor:
            lost = regained_back(G, go, initial, go, g_initial, go, size, back)
        gr = decayed(G, go, A, ao, size, r)
    return gl * short, gr - lost, gm


@helper
def _started(plan, nodes, linked, link, lc, spare, initial, base, states, states_S, slot, size, W):
    """Into a slot what a memory is at its start."""
    copy(initial, base, states, slot * size, size)
    if states_S.size > 0:
        fill(states_S, slot * size, size, 0.0)
    if linked:
        _links(plan, nodes, link, lc, spare, states, slot * size, W, slot * size)


@helper
def _restart_back(plan, nodes, linked, link_back, lc, spare, A, o, W, M, G, H, base, g_initial, size):
    """The cotangents of a memory that starts anew, to those of its start."""
    if linked:
        _unlinks(plan, nodes, link_back, lc, spare, A, o, W, o, M, G, base)
    moved(G, base, size, g_initial, base)
    if H.size > 0:
        fill(H, base, size, 0.0)


def backward(
    lo, hi, heads, T, plan, eps, nodes, size, L, P, V, last, width, hidden, k, q, v, lr, retain, momentum,
    write, reset, initial, kept, kept_S, gy, G, H, g_initial, gk, gq, gv, glr, gr, gm, segment, linked, centre,
    order, before, anchor, floor, W, x, f, u, row, spare, states, states_S, M, z, g, up, X, bv, bt, gbv, gbt, learn,
    bc, act, ac, link, lc, learn_back, link_back,
):  # fmt: skip
    """Cotangents of all inputs from those of y (gy) and, in place, of the final A and S (G, H)."""
    segments, far, nil = (T + segment - 1) // segment, segment + 1, lo - lo
    z[hidden] = 1
    for i in range(segment):
        x[i * L + hidden] = 1
    # Reads and predictions pull to Q: to the cotangent of link(A), pulled back once a token, or to G at once.
    Z, Q = (W, M) if linked else (states, G)
    for n in range(lo, hi):
        base, first = n * size, first_token(n, heads, T)
        mo = nil if linked else base
        if linked:
            fill(M, nil, size, 0.0)
        if reset.size > 0:
            _started(plan, nodes, linked, link, lc, spare, initial, base, states, states_S, far, size, W)
        for index in range(segments - 1, -1, -1):
            start, end = index * segment, min(T, (index + 1) * segment)
            copy(kept, (n * segments + index) * size, states, nil, size)
            if states_S.size > 0:
                copy(kept_S, (n * segments + index) * size, states_S, nil, size)
            _replayed(
                first, heads, start, end, plan, eps, nodes, size, L, P, V, last, width, hidden, k, v, lr,
                retain, momentum, write, reset, initial, base, segment, linked, centre, order, anchor, floor,
                states, states_S, W, x, f, u, row, spare, X, bv, bt, learn, bc, act, ac,
                link, lc,
            )  # fmt: skip
            for t in range(end - 1, start - 1, -1):
                at, i = first + t * heads, t - start
                resets, writes = reset.size > 0 and reset[at], write.size == 0 or write[at]
                o, to = (far if resets else i), i + 1
                if not before or not writes:
                    _read_back(
                        plan, eps, nodes, Z, to * size, Q, mo, q, at * P, gy, at * V, z, g, gq, P, V, L, last, row,
                        hidden, act, ac,
                    )  # fmt: skip
                if writes:
                    if linked:
                        _unlinks(plan, nodes, link_back, lc, spare, states, to * size, W, to * size, M, G, base)
                    glr[at], gr[at], gm[at] = _write_back(
                        plan, nodes, size, L, P, V, last, width, hidden, lr[at], retain[at], momentum[at], initial,
                        g_initial, G, H, base, Z, states, states_S, o * size, Q, mo, gk, at * P, v, gv, at * V,
                        centre, order, anchor, floor, x, f, i * L, u, i * V, row, g, up, X, bv, bt, gbv, gbt,
                        learn_back, bc,
                    )  # fmt: skip
                    if before:
                        _read_back(
                            plan, eps, nodes, Z, o * size, Q, mo, q, at * P, gy, at * V, z, g, gq, P, V, L, last, row,
                            hidden, act, ac,
                        )  # fmt: skip
                if resets:
                    _restart_back(
                        plan, nodes, linked, link_back, lc, spare, states, o * size, W, M, G, H, base, g_initial, size,
                    )  # fmt: skip
        if linked:
            _unlinks(plan, nodes, link_back, lc, spare, states, nil, W, nil, M, G, base)
