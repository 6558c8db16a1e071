"""Kernels of the compiled engine for rows that fit into registers: a row is one vector.

The rows of a matrix memory meet only in what its tokens share: keys, queries and gates. So four
rows of a state stay in registers for a whole segment of tokens, then come the next four, and what
the tokens' cotangents collect from them is summed up in memory. The arithmetic, the names and the
arguments are those of `kernels`, which serves wider rows; `width` is a tuple as long as a row has
vectors. Rows after a segment's last token are never needed: reads are pulled back on the way there.
[ENG-NUM-D1]
"""

from __future__ import annotations

from hecate.engine.lanes import (
    add,
    along,
    helper,
    inline,
    kernel,
    lanes,
    load,
    load_row,
    mad,
    mul,
    splat,
    splat_row,
    store,
    sums,
)
from hecate.engine.rows import ROWS, psi, pulled, put, slope


@inline
def four(A, o, P, width):
    """Four rows of an array."""
    return (
        load_row(A, o, width),
        load_row(A, o + P, width),
        load_row(A, o + 2 * P, width),
        load_row(A, o + 3 * P, width),
    )


@inline
def inner(a, x):
    """Four rows times one."""
    a0, a1, a2, a3 = a
    return sums(along(a0, x), along(a1, x), along(a2, x), along(a3, x))


@inline
def plus(a, w, x):
    """Four rows, each plus a number times x."""
    (a0, a1, a2, a3), (w0, w1, w2, w3) = a, w
    return (
        mad(splat_row(x, w0), x, a0),
        mad(splat_row(x, w1), x, a1),
        mad(splat_row(x, w2), x, a2),
        mad(splat_row(x, w3), x, a3),
    )


@inline
def scaled(a, x):
    """Four rows times one, number by number."""
    a0, a1, a2, a3 = a
    return mul(a0, x), mul(a1, x), mul(a2, x), mul(a3, x)


@inline
def added(a, b):
    """Four rows plus four."""
    (a0, a1, a2, a3), (b0, b1, b2, b3) = a, b
    return add(a0, b0), add(a1, b1), add(a2, b2), add(a3, b3)


@inline
def combined(w, a):
    """The sum of four rows, each times a number."""
    (w0, w1, w2, w3), (a0, a1, a2, a3) = w, a
    total = mad(splat_row(a1, w1), a1, mul(splat_row(a0, w0), a0))
    return mad(splat_row(a3, w3), a3, mad(splat_row(a2, w2), a2, total))


@inline
def meeting(a, b):
    """Four rows times four, number by number, summed over the four."""
    (a0, a1, a2, a3), (b0, b1, b2, b3) = a, b
    return mad(a3, b3, mad(a2, b2, mad(a1, b1, mul(a0, b0))))


@inline
def zeros(like):
    """Four rows of zeros."""
    zero = splat_row(like[0], 0.0)
    return zero, zero, zero, zero


@inline
def minus(u):
    """Four numbers, negated."""
    u0, u1, u2, u3 = u
    return -u0, -u1, -u2, -u3


@inline
def keep(A, o, P, a):
    """Four rows into an array."""
    a0, a1, a2, a3 = a
    put(A, o, P, a0, a1, a2, a3)


@inline
def gate(retain, at, P, channels, like, width):
    """Retain of a token, in every place of a row."""
    return load_row(retain, at * P, width) if channels is not None else splat_row(like, retain[at])


@inline
def quartet(x, at):
    """Four numbers."""
    return x[at], x[at + 1], x[at + 2], x[at + 3]


@inline
def learned(form, a, b, preds, v):
    """u of four coordinates."""
    (p0, p1, p2, p3), (v0, v1, v2, v3) = preds, v
    return (
        psi(form, a, b, p0, v0), psi(form, a, b, p1, v1),
        psi(form, a, b, p2, v2), psi(form, a, b, p3, v3),
    )  # fmt: skip


@inline
def times(w, u):
    """Four numbers times one."""
    u0, u1, u2, u3 = u
    return w * u0, w * u1, w * u2, w * u3


@inline
def note(x, at, u):
    """Four numbers into an array."""
    x[at], x[at + 1], x[at + 2], x[at + 3] = u


@inline
def accumulate(x, at, row, width):
    """Adds a row to an array."""
    store(x, at, add(load_row(x, at, width), row))


@inline
def tally(x, at, a, b):
    """Adds the products of four rows with four to a vector of sums."""
    (a0, a1, a2, a3), (b0, b1, b2, b3) = a, b
    first = add(along(a0, b0), along(a1, b1))
    store(x, at, add(load(x, at), add(first, add(along(a2, b2), along(a3, b3)))))


@kernel
def forward(
    lo, hi, T, V, P, k, q, v, lr, retain, momentum, write, reset, initial, M, S, y, preds, kept,
    kept_S, segment, form, a, b, channels, order, before, width,
):  # fmt: skip
    """Outputs y and, in place, the final M and S; with preds given, what `backward` needs too."""
    pieces = (T + segment - 1) // segment
    for job in range(lo * pieces, hi * pieces):
        n, piece = job // pieces, job % pieces
        for c in range(0, V, ROWS):
            o = (n * V + c) * P
            M4 = four(M, o, P, width)
            if S is not None:
                S4 = four(S, o, P, width)
            if kept.size > 0:
                keep(kept, (job * V + c) * P, P, M4)
                if S is not None:
                    keep(kept_S, (job * V + c) * P, P, S4)
            for at in range(n * T + piece * segment, n * T + min(T, (piece + 1) * segment)):
                if reset.size > 0 and reset[at]:
                    M4 = four(initial, o, P, width)
                    if S is not None:
                        S4 = zeros(S4)
                qt = load_row(q, at * P, width)
                writes = write.size == 0 or write[at]
                if before or not writes:
                    note(y, at * V + c, inner(M4, qt))
                if not writes:
                    continue
                kt, u = load_row(k, at * P, width), quartet(v, at * V + c)
                if form is not None:
                    seen = kt
                    if retain is not None and order:
                        seen = mul(gate(retain, at, P, channels, kt, width), kt)
                    pred = inner(M4, seen)
                    if preds.size > 0:
                        note(preds, at * V + c, pred)
                    u = learned(form, a, b, pred, u)
                    u = times(-lr[at], u)
                else:
                    u = times(lr[at], u)
                if retain is not None:
                    M4 = scaled(M4, gate(retain, at, P, channels, kt, width))
                if S is not None:
                    S4 = plus(scaled(S4, splat_row(kt, momentum[at])), u, kt)
                    M4 = added(M4, S4)
                else:
                    M4 = plus(M4, u, kt)
                if not before:
                    note(y, at * V + c, inner(M4, qt))
            keep(M, o, P, M4)
            if S is not None:
                keep(S, o, P, S4)


@helper
def _replay(
    n, start, end, c, T, V, P, k, q, v, lr, retain, momentum, write, reset, initial, preds, kept,
    kept_S, place, gy, gq, form, a, b, channels, order, before, width, states, states_S, us,
):  # fmt: skip
    """Four rows once more: their state and u at every token of a segment; what reads send to q."""
    M4 = four(kept, place, P, width)
    if kept_S is not None:
        S4 = four(kept_S, place, P, width)
    for at in range(start, end):
        i = (at - start) * ROWS
        if reset.size > 0 and reset[at]:
            M4 = four(initial, (n * V + c) * P, P, width)
            if kept_S is not None:
                S4 = zeros(S4)
        if form is not None or retain is not None:
            keep(states, i * P, P, M4)
        if kept_S is not None:
            keep(states_S, i * P, P, S4)
        g, writes = quartet(gy, at * V + c), write.size == 0 or write[at]
        if before or not writes:
            accumulate(gq, at * P, combined(g, M4), width)
        if not writes:
            continue
        kt, u = load_row(k, at * P, width), quartet(v, at * V + c)
        u = learned(form, a, b, quartet(preds, at * V + c), u) if form is not None else minus(u)
        note(us, i, u)
        if retain is not None:
            M4 = scaled(M4, gate(retain, at, P, channels, kt, width))
        if kept_S is not None:
            S4 = plus(scaled(S4, splat_row(kt, momentum[at])), times(-lr[at], u), kt)
            M4 = added(M4, S4)
        else:
            M4 = plus(M4, times(-lr[at], u), kt)
        if not before:
            accumulate(gq, at * P, combined(g, M4), width)


@inline
def _pull(form, a, b, l, d, preds, v, u):
    """Cotangents of four predictions, and of v, from those of the steps."""
    (d0, d1, d2, d3), (p0, p1, p2, p3), (v0, v1, v2, v3), (u0, u1, u2, u3) = d, preds, v, u
    e0, t0 = pulled(form, -l * d0, slope(form, a, b, p0, v0, u0))
    e1, t1 = pulled(form, -l * d1, slope(form, a, b, p1, v1, u1))
    e2, t2 = pulled(form, -l * d2, slope(form, a, b, p2, v2, u2))
    e3, t3 = pulled(form, -l * d3, slope(form, a, b, p3, v3, u3))
    return (e0, e1, e2, e3), (t0, t1, t2, t3)


@helper
def _walk(
    n, start, end, c, T, V, P, k, q, v, lr, retain, momentum, write, reset, preds, gy, G, H,
    g_initial, gk, gv, glr, gr, gm, form, a, b, channels, order, before, width, states, states_S,
    us, sums_r, sums_m,
):  # fmt: skip
    """Four rows backwards through a segment, their cotangents in registers."""
    o = (n * V + c) * P
    G4 = four(G, o, P, width)
    if H is not None:
        H4 = four(H, o, P, width)
    for at in range(end - 1, start - 1, -1):
        i, qt, g = (at - start) * ROWS, load_row(q, at * P, width), quartet(gy, at * V + c)
        writes = write.size == 0 or write[at]
        if not before or not writes:
            G4 = plus(G4, g, qt)
        if writes:
            kt, l, u = load_row(k, at * P, width), lr[at], quartet(us, i)
            if retain is not None:
                rt, M4 = gate(retain, at, P, channels, kt, width), four(states, i * P, P, width)
                if channels is not None:
                    accumulate(gr, at * P, meeting(G4, M4), width)
                else:
                    tally(sums_r, (at - start) * lanes(k), G4, M4)
            if H is not None:
                H4 = added(H4, G4)
                tally(sums_m, (at - start) * lanes(k), H4, four(states_S, i * P, P, width))
                X4 = H4
            else:
                X4 = G4
            d = inner(X4, kt)
            glr[at] -= u[0] * d[0] + u[1] * d[1] + u[2] * d[2] + u[3] * d[3]
            gkt = combined(times(-l, u), X4)
            if retain is not None:
                G4 = scaled(G4, rt)
            if form is None:
                note(gv, at * V + c, times(l, d))
            else:
                place = at * V + c
                e, gvs = _pull(form, a, b, l, d, quartet(preds, place), quartet(v, place), u)
                note(gv, place, gvs)
                gp, seen = combined(e, four(states, i * P, P, width)), kt
                if retain is not None and order:
                    seen = mul(rt, kt)
                    if channels is not None:
                        accumulate(gr, at * P, mul(gp, kt), width)
                    else:
                        store(
                            sums_r, (at - start) * lanes(k),
                            add(load(sums_r, (at - start) * lanes(k)), along(gp, kt)),
                        )  # fmt: skip
                    gp = mul(rt, gp)
                gkt = add(gkt, gp)
                G4 = plus(G4, e, seen)
            accumulate(gk, at * P, gkt, width)
            if H is not None:
                H4 = scaled(H4, splat_row(kt, momentum[at]))
        if before and writes:
            G4 = plus(G4, g, qt)
        if reset.size > 0 and reset[at]:
            keep(g_initial, o, P, added(four(g_initial, o, P, width), G4))
            G4 = zeros(G4)
            if H is not None:
                H4 = zeros(H4)
    keep(G, o, P, G4)
    if H is not None:
        keep(H, o, P, H4)


@kernel
def backward(
    lo, hi, T, V, P, k, q, v, lr, retain, momentum, write, reset, initial, preds, kept, kept_S, gy,
    G, H, g_initial, gk, gq, gv, glr, gr, gm, segment, form, a, b, channels, order, before, width,
    states, states_S, us, sums_r, sums_m,
):  # fmt: skip
    """Cotangents of all inputs, added to zeros, from those of y (gy) and, in place, of the final M
    and S (G, H)."""
    pieces, none = (T + segment - 1) // segment, splat(k, 0.0)
    for n in range(lo, hi):
        for piece in range(pieces - 1, -1, -1):
            start, end = n * T + piece * segment, n * T + min(T, (piece + 1) * segment)
            sums_r[:] = 0
            sums_m[:] = 0
            for c in range(0, V, ROWS):
                place = ((n * pieces + piece) * V + c) * P
                _replay(
                    n, start, end, c, T, V, P, k, q, v, lr, retain, momentum, write, reset, initial,
                    preds, kept, kept_S, place, gy, gq, form, a, b, channels, order, before, width,
                    states, states_S, us,
                )  # fmt: skip
                _walk(
                    n, start, end, c, T, V, P, k, q, v, lr, retain, momentum, write, reset, preds,
                    gy, G, H, g_initial, gk, gv, glr, gr, gm, form, a, b, channels, order, before,
                    width, states, states_S, us, sums_r, sums_m,
                )  # fmt: skip
            for at in range(start, end):
                i = (at - start) * lanes(k)
                first, second, _, _ = sums(load(sums_r, i), load(sums_m, i), none, none)
                if channels is None:
                    gr[at] = first
                gm[at] = second
