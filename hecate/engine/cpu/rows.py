"""Four rows of a state at a time: what the kernels of the compiled engine are made of.

What the four share is loaded once. Arrays are flat; `o`, `to`, `go` are where the four begin and P is the width of a
row. `rows` is a worker's scratch space, seven rows of sums and gates: retain, the key that predicts, and the sums for
predicting key, step key, query, retain, query by momentum.
"""

from __future__ import annotations

import math

from hecate.engine.cpu.lanes import (
    add,
    alive,
    helper,
    inline,
    lanes,
    load,
    mad,
    mul,
    number,
    shrunk,
    splat,
    store,
    sums,
)

ROWS = 4


@helper
def power(a, size):
    """size^a of a positive number."""
    if a == 0.5:
        return math.sqrt(size)
    return size if a == 1 else size**a


@helper
def psi(form, a, b, pred, target):
    """u = d loss / d pred of one coordinate; a and b are the form's parameters."""
    if form is None:
        return -target
    e = pred - target
    if form == 1:
        return e
    if form == 2:
        return a if e > a else (-a if e < -a else e)
    if form == 4:
        return e / math.sqrt(e * e + b * b)
    if e == 0:
        return e
    if a >= 2:
        return power(a - number(a, 2), abs(e)) * e
    r = math.sqrt(e * e + b * b)
    return power(a - number(a, 1), e * e / (r + b)) / r * e


@helper
def slope(form, a, b, pred, target, u):
    """d u / d pred of one coordinate; what u is spares a second power."""
    one, zero = number(a, 1), number(a, 0)
    if form is None:
        return zero
    e = pred - target
    if form == 1:
        return one
    if form == 2:
        return one if abs(e) <= a else zero
    r = math.sqrt(e * e + b * b)
    if form == 4:
        return b / r * (b / r) / r
    if e == 0:
        return one if a == 2 else zero
    if a >= 2:
        return (a - one) * (u / e)
    s = e * e / (r + b)
    return u / e * ((a - one) * e * e / (s * r) + b * b / (r * r)) if s > 0 else zero


@inline
def first_token(n, heads, T):
    """Where the tokens of a memory begin in `[B, T, heads]`: they are `heads` apart."""
    return n // heads * heads * T + n % heads


@inline
def turn(job, lo, hi, heads, pieces):
    """Memory and segment of a job: heads that lie side by side take turns, segment by segment."""
    row = job // pieces // heads * heads
    first, last = max(lo, row), min(hi, row + heads)
    job -= first * pieces
    return first + job % (last - first), job // (last - first)


@helper
def copy(source, at, target, to, size):
    """target[to:] = source[at:]."""
    for j in range(0, size, lanes(source)):
        store(target, to + j, load(source, at + j))


@helper
def fill(target, to, size, value):
    """target[to:] = value."""
    wide = splat(target, value)
    for j in range(0, size, lanes(target)):
        store(target, to + j, wide)


@inline
def accumulate(target, to, a, b):
    """target[to] += a + b."""
    store(target, to, add(load(target, to), add(a, b)))


@inline
def put(target, to, P, a, b, c, d):
    """The same place of four rows."""
    store(target, to, a)
    store(target, to + P, b)
    store(target, to + 2 * P, c)
    store(target, to + 3 * P, d)


@inline
def products(M, o, x, at, P):
    """Four rows times a vector."""
    y0 = splat(x, 0.0)
    y1, y2, y3 = y0, y0, y0
    for j in range(0, P, lanes(x)):
        xj = load(x, at + j)
        y0, y1 = mad(load(M, o + j), xj, y0), mad(load(M, o + P + j), xj, y1)
        y2, y3 = mad(load(M, o + 2 * P + j), xj, y2), mad(load(M, o + 3 * P + j), xj, y3)
    return sums(y0, y1, y2, y3)


@inline
def write_rows(A, B, o, M, S, to, rows, k, ko, w0, w1, w2, w3, m, P, q, cut, before):
    """Four rows of the write, from (A, B) at o to (M, S) at `to`; their products with q."""
    y0 = splat(k, 0.0)
    y1, y2, y3 = y0, y0, y0
    wide0, wide1, wide2, wide3 = splat(k, -w0), splat(k, -w1), splat(k, -w2), splat(k, -w3)
    keeps = splat(k, m)
    for j in range(0, P, lanes(k)):
        kj, qj, rj = load(k, ko + j), load(q, ko + j), load(rows, j)
        a0, a1 = load(A, o + j), load(A, o + P + j)
        a2, a3 = load(A, o + 2 * P + j), load(A, o + 3 * P + j)
        if before:
            y0, y1, y2, y3 = mad(a0, qj, y0), mad(a1, qj, y1), mad(a2, qj, y2), mad(a3, qj, y3)
        if S is None:
            a0, a1 = mad(wide0, kj, mul(rj, a0)), mad(wide1, kj, mul(rj, a1))
            a2, a3 = mad(wide2, kj, mul(rj, a2)), mad(wide3, kj, mul(rj, a3))
        else:
            s0 = mad(wide0, kj, mul(keeps, load(B, o + j)))
            s1 = mad(wide1, kj, mul(keeps, load(B, o + P + j)))
            s2 = mad(wide2, kj, mul(keeps, load(B, o + 2 * P + j)))
            s3 = mad(wide3, kj, mul(keeps, load(B, o + 3 * P + j)))
            put(S, to + j, P, s0, s1, s2, s3)
            a0, a1, a2, a3 = mad(rj, a0, s0), mad(rj, a1, s1), mad(rj, a2, s2), mad(rj, a3, s3)
        if cut is not None:
            a0, a1, a2, a3 = shrunk(a0, cut), shrunk(a1, cut), shrunk(a2, cut), shrunk(a3, cut)
        if not before:
            y0, y1, y2, y3 = mad(a0, qj, y0), mad(a1, qj, y1), mad(a2, qj, y2), mad(a3, qj, y3)
        put(M, to + j, P, a0, a1, a2, a3)
    return sums(y0, y1, y2, y3)


@helper
def unwritten(A, o, G, go, q, ko, g0, g1, g2, g3, P, rows):
    """Four rows of a token that writes nothing: what its read sends to q and G."""
    read0, read1, read2, read3 = splat(q, g0), splat(q, g1), splat(q, g2), splat(q, g3)
    for j in range(0, P, lanes(q)):
        qj = load(q, ko + j)
        a0, a1 = mul(read0, load(A, o + j)), mul(read2, load(A, o + 2 * P + j))
        a0, a1 = mad(read1, load(A, o + P + j), a0), mad(read3, load(A, o + 3 * P + j), a1)
        accumulate(rows, 4 * P + j, a0, a1)
        x0, x1 = mad(read0, qj, load(G, go + j)), mad(read1, qj, load(G, go + P + j))
        x2 = mad(read2, qj, load(G, go + 2 * P + j))
        x3 = mad(read3, qj, load(G, go + 3 * P + j))
        put(G, go + j, P, x0, x1, x2, x3)


@inline
def passing(A, after, x0, x1, x2, x3, P):
    """Cotangents of four rows where a threshold has left something of them."""
    x0, x1 = alive(x0, load(A, after)), alive(x1, load(A, after + P))
    return x0, x1, alive(x2, load(A, after + 2 * P)), alive(x3, load(A, after + 3 * P))


@inline
def collect(A, B, o, after, G, H, go, k, q, ko, g0, g1, g2, g3, P, rows, cut, before):
    """Four rows: sums over them for q and the gates; <g_step, k> of each, and for momentum."""
    d0 = splat(k, 0.0)
    d1, d2, d3, gm = d0, d0, d0, d0
    read0, read1, read2, read3 = splat(k, g0), splat(k, g1), splat(k, g2), splat(k, g3)
    for j in range(0, P, lanes(k)):
        kj = load(k, ko + j)
        x0, x1 = load(G, go + j), load(G, go + P + j)
        x2, x3 = load(G, go + 2 * P + j), load(G, go + 3 * P + j)
        if not before:
            qj = load(q, ko + j)
            x0, x1 = mad(read0, qj, x0), mad(read1, qj, x1)
            x2, x3 = mad(read2, qj, x2), mad(read3, qj, x3)
        a0, a1 = load(A, o + j), load(A, o + P + j)
        a2, a3 = load(A, o + 2 * P + j), load(A, o + 3 * P + j)
        n0, n1, n2, n3 = a0, a1, a2, a3
        if cut is not None:
            x0, x1, x2, x3 = passing(A, after + j, x0, x1, x2, x3, P)
            if not before:
                n0, n1 = load(A, after + j), load(A, after + P + j)
                n2, n3 = load(A, after + 2 * P + j), load(A, after + 3 * P + j)
        accumulate(rows, 4 * P + j, mad(read1, n1, mul(read0, n0)), mad(read3, n3, mul(read2, n2)))
        accumulate(rows, 5 * P + j, mad(x1, a1, mul(x0, a0)), mad(x3, a3, mul(x2, a2)))
        if H is not None:
            x0, x1 = add(load(H, go + j), x0), add(load(H, go + P + j), x1)
            x2, x3 = add(load(H, go + 2 * P + j), x2), add(load(H, go + 3 * P + j), x3)
            b0, b1 = load(B, o + j), load(B, o + P + j)
            b2, b3 = load(B, o + 2 * P + j), load(B, o + 3 * P + j)
            accumulate(rows, 6 * P + j, mad(read1, b1, mul(read0, b0)), mad(read3, b3, mul(read2, b2)))
            gm = mad(x0, b0, mad(x1, b1, mad(x2, b2, mad(x3, b3, gm))))
        d0, d1, d2, d3 = mad(x0, kj, d0), mad(x1, kj, d1), mad(x2, kj, d2), mad(x3, kj, d3)
    d0, d1, d2, d3 = sums(d0, d1, d2, d3)
    return d0, d1, d2, d3, gm


@inline
def spread(
    A, o, after, G, H, go, q, ko, e0, e1, e2, e3, w0, w1, w2, w3, g0, g1, g2, g3, m, P, rows, cut,
    before,
):  # fmt: skip
    """Four rows: what predictions and steps send to k; G and H of the token before."""
    pred0, pred1, pred2, pred3 = splat(q, e0), splat(q, e1), splat(q, e2), splat(q, e3)
    step0, step1, step2, step3 = splat(q, w0), splat(q, w1), splat(q, w2), splat(q, w3)
    read0, read1, read2, read3 = splat(q, g0), splat(q, g1), splat(q, g2), splat(q, g3)
    keeps = splat(q, m)
    for j in range(0, P, lanes(q)):
        rj, kj, qj = load(rows, j), load(rows, P + j), load(q, ko + j)
        x0, x1 = load(G, go + j), load(G, go + P + j)
        x2, x3 = load(G, go + 2 * P + j), load(G, go + 3 * P + j)
        if not before:
            x0, x1 = mad(read0, qj, x0), mad(read1, qj, x1)
            x2, x3 = mad(read2, qj, x2), mad(read3, qj, x3)
        if cut is not None:
            x0, x1, x2, x3 = passing(A, after + j, x0, x1, x2, x3, P)
        a0, a1 = mul(pred0, load(A, o + j)), mul(pred2, load(A, o + 2 * P + j))
        a0, a1 = mad(pred1, load(A, o + P + j), a0), mad(pred3, load(A, o + 3 * P + j), a1)
        accumulate(rows, 2 * P + j, a0, a1)
        s0, s1, s2, s3 = x0, x1, x2, x3
        if H is not None:
            s0, s1 = add(load(H, go + j), x0), add(load(H, go + P + j), x1)
            s2, s3 = add(load(H, go + 2 * P + j), x2), add(load(H, go + 3 * P + j), x3)
            put(H, go + j, P, mul(keeps, s0), mul(keeps, s1), mul(keeps, s2), mul(keeps, s3))
        accumulate(rows, 3 * P + j, mad(step1, s1, mul(step0, s0)), mad(step3, s3, mul(step2, s2)))
        x0, x1 = mad(pred0, kj, mul(rj, x0)), mad(pred1, kj, mul(rj, x1))
        x2, x3 = mad(pred2, kj, mul(rj, x2)), mad(pred3, kj, mul(rj, x3))
        if before:
            x0, x1 = mad(read0, qj, x0), mad(read1, qj, x1)
            x2, x3 = mad(read2, qj, x2), mad(read3, qj, x3)
        put(G, go + j, P, x0, x1, x2, x3)


@inline
def pulled(form, gu, s):
    """Cotangents of pred and target from that of u: a slope of 0 lets nothing pass."""
    ge = gu * s if s != 0 else s
    return ge, (-gu if form is None else -ge)
