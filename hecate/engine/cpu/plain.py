"""A write r X + D of a matrix and the reads beside it, in as few passes as there can be.

For what the walk calls plain: D = m S - lr u w^T, r one number or one per phi channel, the memory no link's. Four rows
go together, so that what they share is loaded once; what rows add up to (for keys, queries and gates) lies in rows of
`x`. A decayed memory's prediction is that of a decayed key. Names as in `walk`. [ENG-NUM-D8]
"""

from __future__ import annotations

from hecate.engine.cpu.parts import inner, plus
from hecate.engine.cpu.passes import dots, dots_more, product
from hecate.engine.cpu.vectors import (
    FOUR, ONE, ROWS, add, call, copy, fill, filled, get, helper, inline, load, load_rows, mad, mul, out_of_line, part,
    per_vector, put, store, store_rows, sums, times, zeros,
)  # fmt: skip


@inline
def _seen(rule, k, rp, decayed):
    """The key that predicts, for a memory that has not been decayed."""
    if not rule.ahead:
        return k
    o = rule.width - rule.width  # a literal would be compiled for
    product(rp, o, k, o, decayed, o, rule.width)
    return decayed


@helper
def _predicted(X, V, P, k, p):
    """p = X k."""
    out_of_line()
    o = V - V
    dots(X, o, V, P, k, o, p, o)


@helper
def _written(X, S, O, D, V, P, u, l, w, rp, m, q, y, before):
    """O = r X + D with D = m S - l u w^T, and y = X q or O q where there is a y."""
    out_of_line()
    for c in range(0, V, ROWS):
        read, e, o = zeros(w), times(-l, get(u, c)), c * P
        for j in range(0, P, per_vector(w)):
            a, wj, rj = load_rows(X, o + j, P, ONE), load(w, j, ONE), load(rp, j, ONE)
            if y is not None and before:
                read = mad(a, load(q, j, ONE), read)
            if S is None:
                a = mad(e, wj, mul(rj, a))
            else:
                d = mad(e, wj, mul(m, load_rows(S, o + j, P, ONE)))
                store_rows(D, o + j, P, d)
                a = mad(rj, a, d)
            if y is not None and not before:
                read = mad(a, load(q, j, ONE), read)
            store_rows(O, o + j, P, a)
        if y is not None:
            put(y, c, sums(read))


@inline
def write(rule, do, given, at, v, X, S, C, rp, O, D, C2, record, g, x, y):
    """The `write_token` of the walk, with the read beside it."""
    keys, q, _, lr, _, momentum, _, _, others, _, _ = given
    V, P, m = rule.height, rule.width, momentum[at]
    k, w, u, p = part(keys, at, P), part(others, at, P), part(record, 0, V), part(record, 1, V)
    if rule.gains:
        call(do[10], (C, k, g, C2, P, rule.channels, x[P:], do[11]))
        w = g
    if y.size > 0:
        _predicted(X, V, P, _seen(rule, k, rp, part(x, 0, P)), p)
    call(do[0], (p, v, u, v.size, do[1]))
    q = part(q, at, P)
    if y.size > 0:
        if rule.moving:
            _written(X, S, O, D, V, P, u, lr[at], w, rp, m, q, y, rule.before)
        else:
            _written(X, None, O, None, V, P, u, lr[at], w, rp, m, q, y, rule.before)
    elif rule.moving:
        _written(X, S, O, D, V, P, u, lr[at], w, rp, m, q, None, rule.before)
    else:
        _written(X, None, O, None, V, P, u, lr[at], w, rp, m, q, None, rule.before)


@inline
def _gathered(x, at, w, rows):
    """x[at:] += the sum of four rows times a number, or a row, of their own."""
    (w0, w1, w2, w3), (a0, a1, a2, a3) = w, rows
    store(x, at, mad(w3, a3, mad(w2, a2, mad(w1, a1, mad(w0, a0, load(x, at, ONE))))))


@helper
def _pulled(A, S, G, H, V, P, f, g, e, rp, q, late, seen, m, x):
    """G = r G + g q^T + e seen^T and H = m D' with D' = G + H + g late^T; <G + H, S>; and added to rows of x the sums
    of g A, of G A cell by cell, of g S, of e A and of f (G + H)."""
    out_of_line()
    moved = zeros(rp)
    for c in range(0, V, ROWS):
        g4, f4, e4, o = get(g, c), get(f, c), get(e, c), c * P
        for j in range(0, P, per_vector(rp)):
            a, d = load_rows(A, o + j, P, ONE), load_rows(G, o + j, P, ONE)
            new = mad(e4, load(seen, j, ONE), mad(g4, load(q, j, ONE), mul(load(rp, j, ONE), d)))
            _gathered(x, j, g4, a)
            _gathered(x, P + j, d, a)
            _gathered(x, 3 * P + j, e4, a)
            if S is not None:
                d, b = add(load_rows(H, o + j, P, ONE), d), load_rows(S, o + j, P, ONE)
                _gathered(x, 2 * P + j, g4, b)
                moved = mad(d, b, moved)
                store_rows(H, o + j, P, mul(m, mad(g4, load(late, j, ONE), d)))
            _gathered(x, 4 * P + j, f4, d)
            store_rows(G, o + j, P, new)
    y0, y1, y2, y3 = sums(moved)
    return (y0 + y1) + (y2 + y3)


@inline
def _queries(rule, q, w, rp, asked, late):
    """Leaves the query as the state before a token meets it in `asked`, and as D' does in `late`; returns q . w. D'
    meets none if reads come first."""
    o = rule.width - rule.width
    if rule.before:
        copy(q, asked)
        fill(late, 0.0)
        return q[0] - q[0]
    copy(q, late)
    product(rp, o, q, o, asked, o, rule.width)
    return inner(q, w, rule.width)


@inline
def write_back(rule, do, undo, given, at, v, A, S, C, near, own, record, rows, to, x):
    """The reverse of `write`, its read with it."""
    keys, queries, _, lr, _, momentum, _, _, others, _, _ = given
    (_, rp, g, spare), (G, H, GC, _, _), (gu, gp, grv, gg, grp, out), (gk, gv, gw, gq, gy) = near, own, rows, to
    V, P, l, m, o = rule.height, rule.width, lr[at], momentum[at], at - at
    k, w, q, u, p = part(keys, at, P), part(others, at, P), part(queries, at, P), part(record, 0, V), part(record, 1, V)
    seen, found, asked, late, f = _seen(rule, k, rp, part(x, 0, P)), x[P:], part(x, 6, P), part(x, 7, P), x[8 * P :]
    if rule.gains:
        # The new matrix is not wanted: it goes where the next token's cotangents are cleared.
        call(do[10], (C, k, g, spare, P, rule.channels, found, do[11]))
        fill(gg, 0.0)
        w, gw = g, gg
    fill(found[: 5 * P], 0.0)
    # d = D' w for the cotangent D' = G' + H of D, with G' = G + gy q^T where reads see what is written.
    _predicted(G, V, P, w, gu)
    if rule.moving:
        dots_more(H, o, V, P, w, o, gu, o)  # four rows at a time: whole vectors would go on into what lies behind
    along = _queries(rule, q, w, rp, asked, late)
    none, gm = filled(load(u, 0, FOUR), 0.0), l - l
    by_l, by_read = none, none
    for r in range(0, V, ROWS):
        u4, g4 = load(u, r, FOUR), load(gy, r, FOUR)
        d = mad(along, g4, load(gu, r, FOUR))
        by_l, by_read = mad(u4, d, by_l), mad(u4, g4, by_read)
        store(gu, r, mul(-l, d))
        store(f, r, mul(-l, u4))
    gl, read, _, _ = times(-1, sums((by_l, mul(l, by_read), none, none)))
    call(undo[0], (p, v, u, gu, gp, gv, v.size, do[1]))
    if rule.moving:
        gm = _pulled(A, S, G, H, V, P, f, gy, gp, rp, asked, late, seen, m, found)
    else:
        _pulled(A, None, G, None, V, P, f, gy, gp, rp, asked, late, seen, m, found)
    zero = filled(k, 0.0)
    by_one, by_m = zero, zero
    for j in range(0, P, per_vector(k)):
        r, qj, by_q, by_r = load(rp, j, ONE), load(late, j, ONE), load(found, j, ONE), load(found, P + j, ONE)
        by_r, by_k = mad(qj, by_q, by_r), load(found, 3 * P + j, ONE)
        if rule.ahead:
            by_r, by_k = mad(load(k, j, ONE), by_k, by_r), mul(r, by_k)
        # A read behind the write met r A + m S - l u w^T.
        if not rule.before:
            by_q = mad(read, load(w, j, ONE), mul(r, by_q))
            if rule.moving:
                by_s = load(found, 2 * P + j, ONE)
                by_q, by_m = mad(m, by_s, by_q), mad(qj, by_s, by_m)
        plus(gq, j, by_q)
        store(grp, j, by_r)
        by_one = add(by_one, by_r)
        plus(gk, j, by_k)
        plus(gw, j, mad(read, qj, load(found, 4 * P + j, ONE)))
    by_r, by_momentum, _, _ = sums((by_one, by_m, zero, zero))
    out[0], out[1] = gl, gm + by_momentum
    if not rule.by_channel:
        grv[0] = by_r
    if rule.gains:
        call(undo[5], (C, k, GC, gg, gk, P, rule.channels, x, do[11]))
