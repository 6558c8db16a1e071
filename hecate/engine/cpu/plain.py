"""A write r X + D of a matrix and the reads beside it, in as few passes as there can be.

For what the walk calls plain: D = m S - lr u w^T, r one number or one per phi channel, the memory no link's. Where a
bias goes coordinate by coordinate, rows go in blocks that stay in the first cache from their prediction to their write,
else they are one block. Four rows go together, so that what they share is loaded once; what rows add up to (for keys,
queries and gates) lies in rows of `x`. A decayed memory's prediction is that of a decayed key. Names as in `walk`.
[ENG-NUM-D8]
"""

from __future__ import annotations

from hecate.engine.cpu.parts import plus
from hecate.engine.cpu.passes import dots
from hecate.engine.cpu.vectors import (
    ONE, ROWS, add, call, fill, filled, get, helper, inline, load, load_rows, mad, mul, out_of_line, part, per_vector,
    put, scores, store, store_rows, sums, times, total, zeros,
)  # fmt: skip


@inline
def _seen(rule, k, rp, decayed):
    """The key that predicts, for a memory that has not been decayed."""
    if not rule.ahead:
        return k
    for j in range(0, rule.width, per_vector(k)):
        store(decayed, j, mul(load(rp, j, ONE), load(k, j, ONE)))
    return decayed


@helper
def _predicted(X, lo, hi, P, k, p):
    """p = X k."""
    out_of_line()
    dots(X, lo * P, hi - lo, P, k, lo - lo, p, lo)


@helper
def _written(X, S, O, D, lo, hi, P, u, l, w, rp, m, q, y, before):
    """O = r X + D with D = m S - l u w^T, and y = X q or O q where there is a y."""
    out_of_line()
    for c in range(lo, hi, ROWS):
        read, e, o = zeros(w), times(-l, get(u, c)), c * P
        for j in range(0, P, per_vector(w)):
            a, wj, qj, rj = load_rows(X, o + j, P, ONE), load(w, j, ONE), load(q, j, ONE), load(rp, j, ONE)
            if before:
                read = mad(a, qj, read)
            if S is None:
                a = mad(e, wj, mul(rj, a))
            else:
                d = mad(e, wj, mul(m, load_rows(S, o + j, P, ONE)))
                store_rows(D, o + j, P, d)
                a = mad(rj, a, d)
            if not before:
                read = mad(a, qj, read)
            store_rows(O, o + j, P, a)
        if y.size > 0:
            put(y, c, sums(read))


@inline
def write(rule, do, given, at, X, S, C, rp, O, D, C2, record, g, x, y):
    """The `write_token` of the walk, with the read beside it."""
    keys, q, v, lr, _, momentum, _, _, others, _, _ = given
    V, P, block, m = rule.height, rule.width, rule.block, momentum[at]
    k, w, u, p = part(keys, at, P), part(others, at, P), part(record, 0, V), part(record, 1, V)
    v, q, seen = part(v, at, V), part(q, at, P), _seen(rule, k, rp, part(x, 0, P))
    if rule.gains:
        call(do[10], (C, k, g, C2, P, rule.channels, x[P:], do[11]))
        w = g
    for c in range(0, V, block):
        i, end = c // block, min(c + block, V)
        _predicted(X, c, end, P, seen, p)
        n = min(end, rule.values) - c
        call(do[0], (part(p, i, block), part(v, i, block), part(u, i, block), n, do[1]))
        if rule.moving:
            _written(X, S, O, D, c, end, P, u, lr[at], w, rp, m, q, y, rule.before)
        else:
            _written(X, None, O, None, c, end, P, u, lr[at], w, rp, m, q, y, rule.before)


@helper
def _collected(A, S, G, H, lo, hi, P, w, q, gy, d, x, before):
    """d = D' w for the cotangent D' = G' + H of D, G' = G + gy q^T where reads see what is written; <D', S>; and added
    to rows of x the sums of gy A, G' A and gy S."""
    out_of_line()
    moved = filled(w, 0.0)
    for c in range(lo, hi, ROWS):
        along, g, o = zeros(w), get(gy, c), c * P
        for j in range(0, P, per_vector(w)):
            e, a = load_rows(G, o + j, P, ONE), load_rows(A, o + j, P, ONE)
            if not before:
                e = mad(g, load(q, j, ONE), e)
            plus(x, j, total(g, a))
            plus(x, P + j, total(e, a))
            if S is not None:
                e, s = add(load_rows(H, o + j, P, ONE), e), load_rows(S, o + j, P, ONE)
                plus(x, 2 * P + j, total(g, s))
                moved = mad(e[0], s[0], mad(e[1], s[1], mad(e[2], s[2], mad(e[3], s[3], moved))))
            along = mad(e, load(w, j, ONE), along)
        put(d, c, sums(along))
    return sums((moved, moved, moved, moved))[0]


@helper
def _spread(A, G, H, lo, hi, P, u, l, seen, rp, m, e, q, gy, x, before):
    """G = r G' + e seen^T and H = m D', the cotangents ahead of the write, e that of its prediction; added to rows of x
    the sums of e A and -l u D'."""
    out_of_line()
    for c in range(lo, hi, ROWS):
        g, f, b, o = get(gy, c), times(-l, get(u, c)), get(e, c), c * P
        for j in range(0, P, per_vector(q)):
            d, qj = load_rows(G, o + j, P, ONE), load(q, j, ONE)
            if not before:
                d = mad(g, qj, d)
            a = mad(b, load(seen, j, ONE), mul(load(rp, j, ONE), d))
            if H is not None:
                d = add(load_rows(H, o + j, P, ONE), d)
                store_rows(H, o + j, P, mul(m, d))
            plus(x, 3 * P + j, total(b, load_rows(A, o + j, P, ONE)))
            plus(x, 4 * P + j, total(f, d))
            # A read ahead of the write met the state that is handed on.
            store_rows(G, o + j, P, mad(g, qj, a) if before else a)


@inline
def write_back(rule, do, undo, given, at, A, S, C, near, own, record, rows, to, x):
    """The reverse of `write`, its read with it."""
    keys, queries, values, lr, _, momentum, _, _, others, _, _ = given
    (_, rp, g, spare), (G, H, GC, _, _), (gu, gp, grv, gg, grp, out), (gk, gv, gw, gq, gy) = near, own, rows, to
    V, P, block, l, m = rule.height, rule.width, rule.block, lr[at], momentum[at]
    k, w, q, v = part(keys, at, P), part(others, at, P), part(queries, at, P), part(values, at, V)
    u, p, found, seen = part(record, 0, V), part(record, 1, V), x[P:], _seen(rule, k, rp, part(x, 0, P))
    if rule.gains:
        # The new matrix is not wanted: it goes where the next token's cotangents are cleared.
        call(do[10], (C, k, g, spare, P, rule.channels, found, do[11]))
        fill(gg, 0.0)
        w, gw = g, gg
    fill(out, 0.0)
    fill(found[: 5 * P], 0.0)
    read = l - l
    for c in range(0, V, block):
        i, end = c // block, min(c + block, V)
        if rule.moving:
            out[1] += _collected(A, S, G, H, c, end, P, w, q, gy, gu, found, rule.before)
        else:
            _collected(A, None, G, None, c, end, P, w, q, gy, gu, found, rule.before)
        for r in range(c, end, ROWS):
            d = get(gu, r)
            out[0] -= scores(get(u, r), d)
            read -= scores(get(u, r), get(gy, r))
            put(gu, r, times(-l, d))
        bias = part(p, i, block), part(v, i, block), part(u, i, block)
        n = min(end, rule.values) - c
        call(undo[0], (*bias, part(gu, i, block), part(gp, i, block), part(gv, i, block), n, do[1]))
        if rule.moving:
            _spread(A, G, H, c, end, P, u, l, seen, rp, m, gp, q, gy, found, rule.before)
        else:
            _spread(A, G, None, c, end, P, u, l, seen, rp, m, gp, q, gy, found, rule.before)
    by_one = filled(k, 0.0)
    for j in range(0, P, per_vector(k)):
        r, by_q = load(rp, j, ONE), load(found, j, ONE)
        by_r, by_k = load(found, P + j, ONE), load(found, 3 * P + j, ONE)
        if rule.ahead:
            by_r, by_k = mad(load(k, j, ONE), by_k, by_r), mul(r, by_k)
        # A read behind the write met r A + m S - l u w^T.
        if not rule.before:
            by_q = mad(l * read, load(w, j, ONE), mul(r, by_q))
            if rule.moving:
                by_q = mad(m, load(found, 2 * P + j, ONE), by_q)
        store(gq, j, by_q)
        store(grp, j, by_r)
        by_one = add(by_one, by_r)
        plus(gk, j, by_k)
        plus(gw, j, load(found, 4 * P + j, ONE))
    if not rule.by_channel:
        grv[0] = sums((by_one, by_one, by_one, by_one))[0]
    if rule.gains:
        call(undo[5], (C, k, GC, gg, gk, P, rule.channels, x, do[11]))
