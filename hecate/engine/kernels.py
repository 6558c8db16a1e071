"""Kernels of the compiled engine: one memory after the other, its state in cache, token by token.

Rows of a state go in fours, so that what they share is loaded once, and in vectors of 64 bytes; the
caller pads widths to multiples of both with zeros, which no rule moves. Each kernel runs the
memories lo <= n < hi and holds no lock, so that threads may share a batch: a memory is computed by
one thread, and its numbers do not depend on how many there are.

Arrays are flat, C-contiguous and of one float type; nothing checks bounds. Names: M state, S
momentum, G and H their cotangents, k, q, v as in `Tokens`. An array of size 0 is "not given";
S = None compiles gradient descent. numba's disk cache watches this file alone: a change of
`lanes.py` needs one here. [ENG-NUM-D1]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit

from hecate.engine.lanes import add, lanes, load, mad, mul, splat, store, sums

ROWS = 4


def _kernel(function: Callable[..., Any]) -> Any:
    """Compiled when first called; kept on disk where there is a place for it."""
    options = {"nogil": True, "error_model": "numpy"}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # no folder to write to
        return njit(**options)(function)


_helper = njit(error_model="numpy", no_cfunc_wrapper=True, no_cpython_wrapper=True)
_inline = njit(
    error_model="numpy", forceinline=True, no_cfunc_wrapper=True, no_cpython_wrapper=True
)


@_helper
def psi(form, a, b, pred, target):
    """u = d loss / d pred of one coordinate; a and b are the form's parameters."""
    if form == 0:
        return -target
    e = pred - target
    if form == 1:
        return e
    if form == 2:
        return a if e > a else (-a if e < -a else e)
    if a == 3:
        return abs(e) * e
    if e == 0:
        return e
    if a >= 2:
        return abs(e) ** (a - 2) * e
    r = (e * e + b * b) ** (a * 0 + 0.5)
    return (e * e / (r + b)) ** (a - 1) / r * e


@_helper
def slope(form, a, b, pred, target):
    """d u / d pred of one coordinate."""
    e = pred - target
    size = abs(e)
    one = a * 0 + 1
    if form == 0:
        return one - one
    if form == 1:
        return one
    if form == 2:
        return one if size <= a else one - one
    if a == 3:
        return size + size
    if e == 0:
        return one if a == 2 else one - one
    if a >= 2:
        return (a - 1) * size ** (a - 2)
    r = (e * e + b * b) ** (one * 0.5)
    s = e * e / (r + b)
    return (a - 1) * s ** (a - 2) * (e / r) ** 2 + s ** (a - 1) * b * b / (r * r * r)


@_helper
def _copy(source, at, target, to, size):
    for j in range(0, size, lanes(source)):
        store(target, to + j, load(source, at + j))


@_helper
def _fill(target, to, size, value):
    wide = splat(target, value)
    for j in range(0, size, lanes(target)):
        store(target, to + j, wide)


@_inline
def _add(target, to, a, b):
    store(target, to, add(load(target, to), add(a, b)))


@_inline
def _put(target, to, P, a, b, c, d):
    store(target, to, a)
    store(target, to + P, b)
    store(target, to + 2 * P, c)
    store(target, to + 3 * P, d)


@_helper
def _gates(rows, k, ko, retain, at, P, decays, channels, order):
    """Into rows: retain per channel, and the key that predicts (decayed if the gradient sees it)."""
    if channels:
        _copy(retain, at * P, rows, 0, P)
    elif decays:
        _fill(rows, 0, P, retain[at])
    if order:
        for j in range(0, P, lanes(k)):
            store(rows, P + j, mul(load(rows, j), load(k, ko + j)))
    else:
        _copy(k, ko, rows, P, P)


@_inline
def _write(A, B, o, M, S, to, rows, k, ko, w0, w1, w2, w3, m, P, q, before):
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
            _put(S, to + j, P, s0, s1, s2, s3)
            a0, a1, a2, a3 = mad(rj, a0, s0), mad(rj, a1, s1), mad(rj, a2, s2), mad(rj, a3, s3)
        if not before:
            y0, y1, y2, y3 = mad(a0, qj, y0), mad(a1, qj, y1), mad(a2, qj, y2), mad(a3, qj, y3)
        _put(M, to + j, P, a0, a1, a2, a3)
    return sums(y0, y1, y2, y3)


@_inline
def _products(M, o, x, at, P):
    """Four rows times a vector."""
    y0 = splat(x, 0.0)
    y1, y2, y3 = y0, y0, y0
    for j in range(0, P, lanes(x)):
        xj = load(x, at + j)
        y0, y1 = mad(load(M, o + j), xj, y0), mad(load(M, o + P + j), xj, y1)
        y2, y3 = mad(load(M, o + 2 * P + j), xj, y2), mad(load(M, o + 3 * P + j), xj, y3)
    return sums(y0, y1, y2, y3)


@_kernel
def forward(
    lo,
    hi,
    T,
    V,
    P,
    k,
    q,
    v,
    lr,
    retain,
    momentum,
    write,
    reset,
    initial,
    M,
    S,
    y,
    preds,
    kept,
    kept_S,
    segment,
    form,
    a,
    b,
    decays,
    channels,
    order,
    before,
    rows,
):
    """Outputs y and, in place, the final M and S; with preds given, what `backward` needs too."""
    size, records, pieces = V * P, preds.size > 0, (T + segment - 1) // segment
    _fill(rows, 0, P, 1.0)
    for n in range(lo, hi):
        base = n * size
        for t in range(T):
            at = n * T + t
            ko, vo, l, m = at * P, at * V, lr[at], momentum[at]
            if records and t % segment == 0:
                place = (n * pieces + t // segment) * size
                _copy(M, base, kept, place, size)
                if S is not None:
                    _copy(S, base, kept_S, place, size)
            if reset.size > 0 and reset[at]:
                _copy(initial, base, M, base, size)
                if S is not None:
                    _fill(S, base, size, 0.0)
            if write.size > 0 and not write[at]:
                for c in range(vo, vo + V, ROWS):
                    o = base + (c - vo) * P
                    y[c], y[c + 1], y[c + 2], y[c + 3] = _products(M, o, q, ko, P)
                continue
            _gates(rows, k, ko, retain, at, P, decays, channels, order)
            for c in range(vo, vo + V, ROWS):
                o = base + (c - vo) * P
                p0, p1, p2, p3 = l, l, l, l  # unread where the prediction does not matter
                if form > 0:
                    p0, p1, p2, p3 = _products(M, o, rows, P, P)
                if records:
                    preds[c], preds[c + 1], preds[c + 2], preds[c + 3] = p0, p1, p2, p3
                w0, w1 = l * psi(form, a, b, p0, v[c]), l * psi(form, a, b, p1, v[c + 1])
                w2, w3 = l * psi(form, a, b, p2, v[c + 2]), l * psi(form, a, b, p3, v[c + 3])
                y[c], y[c + 1], y[c + 2], y[c + 3] = _write(
                    M, S, o, M, S, o, rows, k, ko, w0, w1, w2, w3, m, P, q, before
                )


@_helper
def _unwritten(A, o, G, go, q, ko, g0, g1, g2, g3, P, rows):
    """Four rows of a token that writes nothing: what its read sends to q and G."""
    read0, read1, read2, read3 = splat(q, g0), splat(q, g1), splat(q, g2), splat(q, g3)
    for j in range(0, P, lanes(q)):
        qj = load(q, ko + j)
        a0, a1 = mul(read0, load(A, o + j)), mul(read2, load(A, o + 2 * P + j))
        a0, a1 = mad(read1, load(A, o + P + j), a0), mad(read3, load(A, o + 3 * P + j), a1)
        _add(rows, 4 * P + j, a0, a1)
        x0, x1 = mad(read0, qj, load(G, go + j)), mad(read1, qj, load(G, go + P + j))
        x2 = mad(read2, qj, load(G, go + 2 * P + j))
        x3 = mad(read3, qj, load(G, go + 3 * P + j))
        _put(G, go + j, P, x0, x1, x2, x3)


@_inline
def _collect(A, B, o, G, H, go, k, q, ko, g0, g1, g2, g3, P, rows, before):
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
        _add(rows, 4 * P + j, mad(read1, a1, mul(read0, a0)), mad(read3, a3, mul(read2, a2)))
        _add(rows, 5 * P + j, mad(x1, a1, mul(x0, a0)), mad(x3, a3, mul(x2, a2)))
        if H is not None:
            x0, x1 = add(load(H, go + j), x0), add(load(H, go + P + j), x1)
            x2, x3 = add(load(H, go + 2 * P + j), x2), add(load(H, go + 3 * P + j), x3)
            b0, b1 = load(B, o + j), load(B, o + P + j)
            b2, b3 = load(B, o + 2 * P + j), load(B, o + 3 * P + j)
            _add(rows, 6 * P + j, mad(read1, b1, mul(read0, b0)), mad(read3, b3, mul(read2, b2)))
            gm = mad(x0, b0, mad(x1, b1, mad(x2, b2, mad(x3, b3, gm))))
        d0, d1, d2, d3 = mad(x0, kj, d0), mad(x1, kj, d1), mad(x2, kj, d2), mad(x3, kj, d3)
    d0, d1, d2, d3 = sums(d0, d1, d2, d3)
    return d0, d1, d2, d3, gm


@_inline
def _spread(
    A, o, G, H, go, q, ko, e0, e1, e2, e3, w0, w1, w2, w3, g0, g1, g2, g3, m, P, rows, before
):
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
        a0, a1 = mul(pred0, load(A, o + j)), mul(pred2, load(A, o + 2 * P + j))
        a0, a1 = mad(pred1, load(A, o + P + j), a0), mad(pred3, load(A, o + 3 * P + j), a1)
        _add(rows, 2 * P + j, a0, a1)
        s0, s1, s2, s3 = x0, x1, x2, x3
        if H is not None:
            s0, s1 = add(load(H, go + j), x0), add(load(H, go + P + j), x1)
            s2, s3 = add(load(H, go + 2 * P + j), x2), add(load(H, go + 3 * P + j), x3)
            _put(H, go + j, P, mul(keeps, s0), mul(keeps, s1), mul(keeps, s2), mul(keeps, s3))
        _add(rows, 3 * P + j, mad(step1, s1, mul(step0, s0)), mad(step3, s3, mul(step2, s2)))
        x0, x1 = mad(pred0, kj, mul(rj, x0)), mad(pred1, kj, mul(rj, x1))
        x2, x3 = mad(pred2, kj, mul(rj, x2)), mad(pred3, kj, mul(rj, x3))
        if before:
            x0, x1 = mad(read0, qj, x0), mad(read1, qj, x1)
            x2, x3 = mad(read2, qj, x2), mad(read3, qj, x3)
        _put(G, go + j, P, x0, x1, x2, x3)


@_helper
def _learn(form, a, b, preds, v, vo, V, cols):
    """u and its slope at every coordinate of a token, side by side."""
    for c in range(V):
        cols[c] = psi(form, a, b, preds[vo + c], v[vo + c])
        cols[V + c] = slope(form, a, b, preds[vo + c], v[vo + c])


@_helper
def _replay(
    n,
    start,
    end,
    T,
    V,
    P,
    k,
    q,
    v,
    lr,
    retain,
    momentum,
    write,
    reset,
    preds,
    states,
    states_S,
    segment,
    form,
    a,
    b,
    decays,
    channels,
    order,
    rows,
    cols,
):
    """The states before every token of a segment, from the first of them and the predictions."""
    size = V * P
    for t in range(start, end - 1):
        at, to = n * T + t, (t - start + 1) * size
        o = (segment + 1) * size if reset.size > 0 and reset[at] else to - size
        if write.size > 0 and not write[at]:
            _copy(states, o, states, to, size)
            if states_S is not None:
                _copy(states_S, o, states_S, to, size)
            continue
        ko, l, m = at * P, lr[at], momentum[at]
        _gates(rows, k, ko, retain, at, P, decays, channels, order)
        _learn(form, a, b, preds, v, at * V, V, cols)
        for c in range(0, V, ROWS):
            w0, w1, w2, w3 = l * cols[c], l * cols[c + 1], l * cols[c + 2], l * cols[c + 3]
            _write(
                states,
                states_S,
                o,
                states,
                states_S,
                to,
                rows,
                k,
                ko,
                w0,
                w1,
                w2,
                w3,
                m,
                P,
                q,
                False,
            )
            o, to = o + ROWS * P, to + ROWS * P


@_inline
def _pulled(form, gu, s):
    """Cotangents of pred and target from that of u: a slope of 0 lets nothing pass."""
    ge = gu * s if s != 0 else s
    return ge, (-gu if form == 0 else -ge)


@_helper
def _finish(k, ko, gk, gq, gr, sw, m, sm, P, moves, channels, order, before, rows):
    """Cotangents of phi_k, phi_q and retain (returned, with momentum's) from the sums of rows."""
    total, slow, wrote = splat(k, 0.0), splat(k, m), splat(k, -sw)
    for j in range(0, P, lanes(k)):
        rj, kj = load(rows, j), load(k, ko + j)
        gp, gd, ga = load(rows, 2 * P + j), load(rows, 5 * P + j), load(rows, 4 * P + j)
        if order:
            gd = mad(kj, gp, gd)
            gp = mul(rj, gp)
        store(gk, ko + j, mad(splat(k, -1.0), load(rows, 3 * P + j), gp))
        if channels:
            store(gr, ko + j, gd)
        total = add(total, gd)
        if not before:
            ga = mad(wrote, kj, mul(rj, ga))
            if moves:
                ga = mad(slow, load(rows, 6 * P + j), ga)
        store(gq, ko + j, ga)
    first, second, _, _ = sums(total, sm, total, total)
    return first, second


@_kernel
def backward(
    lo,
    hi,
    T,
    V,
    P,
    k,
    q,
    v,
    lr,
    retain,
    momentum,
    write,
    reset,
    initial,
    preds,
    kept,
    kept_S,
    gy,
    G,
    H,
    g_initial,
    gk,
    gq,
    gv,
    glr,
    gr,
    gm,
    segment,
    form,
    a,
    b,
    decays,
    channels,
    order,
    before,
    rows,
    cols,
    states,
    states_S,
):
    """Cotangents of all inputs from those of y (gy) and, in place, of the final M and S (G, H)."""
    size, pieces, last = V * P, (T + segment - 1) // segment, (segment + 1) * V * P
    _fill(rows, 0, P, 1.0)
    for n in range(lo, hi):
        base = n * size
        if reset.size > 0:
            _copy(initial, base, states, last, size)
            if H is not None:
                _fill(states_S, last, size, 0.0)
        for piece in range(pieces - 1, -1, -1):
            start, end = piece * segment, min(T, (piece + 1) * segment)
            _copy(kept, (n * pieces + piece) * size, states, 0, size)
            if H is not None:
                _copy(kept_S, (n * pieces + piece) * size, states_S, 0, size)
            _replay(
                n,
                start,
                end,
                T,
                V,
                P,
                k,
                q,
                v,
                lr,
                retain,
                momentum,
                write,
                reset,
                preds,
                states,
                states_S,
                segment,
                form,
                a,
                b,
                decays,
                channels,
                order,
                rows,
                cols,
            )
            for t in range(end - 1, start - 1, -1):
                at, ko, l, m = n * T + t, (n * T + t) * P, lr[n * T + t], momentum[n * T + t]
                resets = reset.size > 0 and reset[at]
                writes = write.size == 0 or write[at]
                o = (segment + 1) * size if resets else (t - start) * size
                if writes:
                    _gates(rows, k, ko, retain, at, P, decays, channels, order)
                    _learn(form, a, b, preds, v, at * V, V, cols)
                _fill(rows, 2 * P, 5 * P, 0.0)
                sm, sl, sw = splat(k, 0.0), l - l, l - l
                for c in range(at * V, at * V + V, ROWS):
                    r = (c - at * V) * P
                    g0, g1, g2, g3 = gy[c], gy[c + 1], gy[c + 2], gy[c + 3]
                    if not writes:
                        _unwritten(states, o + r, G, base + r, q, ko, g0, g1, g2, g3, P, rows)
                        continue
                    d0, d1, d2, d3, more = _collect(
                        states,
                        states_S,
                        o + r,
                        G,
                        H,
                        base + r,
                        k,
                        q,
                        ko,
                        g0,
                        g1,
                        g2,
                        g3,
                        P,
                        rows,
                        before,
                    )
                    sm = add(sm, more)
                    i = c - at * V
                    u0, u1, u2, u3 = cols[i], cols[i + 1], cols[i + 2], cols[i + 3]
                    e0, gv[c] = _pulled(form, -l * d0, cols[V + i])
                    e1, gv[c + 1] = _pulled(form, -l * d1, cols[V + i + 1])
                    e2, gv[c + 2] = _pulled(form, -l * d2, cols[V + i + 2])
                    e3, gv[c + 3] = _pulled(form, -l * d3, cols[V + i + 3])
                    sl -= u0 * d0 + u1 * d1 + u2 * d2 + u3 * d3
                    sw += u0 * g0 + u1 * g1 + u2 * g2 + u3 * g3
                    _spread(
                        states,
                        o + r,
                        G,
                        H,
                        base + r,
                        q,
                        ko,
                        e0,
                        e1,
                        e2,
                        e3,
                        l * u0,
                        l * u1,
                        l * u2,
                        l * u3,
                        g0,
                        g1,
                        g2,
                        g3,
                        m,
                        P,
                        rows,
                        before,
                    )
                if writes:
                    glr[at] = sl
                    total, gm[at] = _finish(
                        k,
                        ko,
                        gk,
                        gq,
                        gr,
                        l * sw,
                        m,
                        sm,
                        P,
                        H is not None,
                        channels,
                        order,
                        before,
                        rows,
                    )
                    if not channels:
                        gr[at] = total
                else:
                    _copy(rows, 4 * P, gq, ko, P)
                if resets:
                    for j in range(base, base + size, lanes(k)):
                        store(g_initial, j, add(load(g_initial, j), load(G, j)))
                    _fill(G, base, size, 0.0)
                    if H is not None:
                        _fill(H, base, size, 0.0)
