"""Kernels of the compiled engine for wide rows: one memory after the other, its state in cache.

`narrow` serves the rows that fit into registers, on the same arguments. Rows of a state go in fours and in vectors of
64 bytes; the caller pads widths to multiples of both with zeros, which no rule moves. Each kernel runs the memories lo
<= n < hi and holds no lock, so that threads may share a batch: one thread computes a memory, and its numbers do not
depend on how many there are.

Arrays are flat, C-contiguous and of one float type; nothing checks bounds. Names: M state, S momentum, G and H their
cotangents, k, q, v as in `Tokens`. An array of size 0 is "not given";
None compiles a kernel without it: S (gradient descent), retain, cut (the threshold in which a step ends) and form where
u = -v (bias dot).
[ENG-NUM-D1]
"""

from __future__ import annotations

from hecate.engine.cpu.lanes import add, helper, kernel, lanes, load, mad, mul, splat, store, sums
from hecate.engine.cpu.rows import (
    ROWS,
    collect,
    copy,
    fill,
    first_token,
    products,
    psi,
    pulled,
    slope,
    spread,
    unwritten,
    write_rows,
)


@helper
def _gates(rows, k, ko, retain, at, P, channels, order):
    """Into rows: retain per channel, and the key that predicts, decayed if the gradient sees it."""
    if retain is not None:
        if channels:
            copy(retain, at * P, rows, 0, P)
        else:
            fill(rows, 0, P, retain[at])
    if order:
        for j in range(0, P, lanes(k)):
            store(rows, P + j, mul(load(rows, j), load(k, ko + j)))
    else:
        copy(k, ko, rows, P, P)


@kernel
def forward(
    lo, hi, heads, T, V, P, k, q, v, lr, retain, momentum, write, reset, initial, M, S, y, preds,
    kept, kept_S, segment, form, a, b, cut, channels, order, before, rows,
):  # fmt: skip
    """Outputs y and, in place, the final M and S; with preds given, what `backward` needs too."""
    size, records, pieces = V * P, preds.size > 0, (T + segment - 1) // segment
    fill(rows, 0, P, 1.0)
    for n in range(lo, hi):
        base, first = n * size, first_token(n, heads, T)
        for t in range(T):
            at = first + t * heads
            ko, vo, l, m = at * P, at * V, lr[at], momentum[at]
            if records and t % segment == 0:
                place = (n * pieces + t // segment) * size
                copy(M, base, kept, place, size)
                if S is not None:
                    copy(S, base, kept_S, place, size)
            if reset.size > 0 and reset[at]:
                copy(initial, base, M, base, size)
                if S is not None:
                    fill(S, base, size, 0.0)
            if write.size > 0 and not write[at]:
                for c in range(vo, vo + V, ROWS):
                    o = base + (c - vo) * P
                    y[c], y[c + 1], y[c + 2], y[c + 3] = products(M, o, q, ko, P)
                continue
            _gates(rows, k, ko, retain, at, P, channels, order)
            for c in range(vo, vo + V, ROWS):
                o = base + (c - vo) * P
                p0, p1, p2, p3 = l, l, l, l  # unread where the prediction does not matter
                if form is not None:
                    p0, p1, p2, p3 = products(M, o, rows, P, P)
                if records:
                    preds[c], preds[c + 1], preds[c + 2], preds[c + 3] = p0, p1, p2, p3
                w0, w1 = l * psi(form, a, b, p0, v[c]), l * psi(form, a, b, p1, v[c + 1])
                w2, w3 = l * psi(form, a, b, p2, v[c + 2]), l * psi(form, a, b, p3, v[c + 3])
                y[c], y[c + 1], y[c + 2], y[c + 3] = write_rows(
                    M, S, o, M, S, o, rows, k, ko, w0, w1, w2, w3, m, P, q, cut, before
                )


@helper
def _learn(form, a, b, preds, v, vo, V, cols):
    """u and its slope at every coordinate of a token, side by side."""
    for c in range(V):
        cols[c] = psi(form, a, b, preds[vo + c], v[vo + c])
        cols[V + c] = slope(form, a, b, preds[vo + c], v[vo + c], cols[c])


@helper
def _replay(
    first, heads, start, end, V, P, k, q, v, lr, retain, momentum, write, reset, preds, states,
    states_S, segment, form, a, b, cut, channels, order, rows, cols,
):  # fmt: skip
    """The states before every token of a segment, from the first of them and the predictions."""
    size = V * P
    for t in range(start, end if cut is not None else end - 1):  # its mask is in the state after it
        at, to = first + t * heads, (t - start + 1) * size
        o = (segment + 1) * size if reset.size > 0 and reset[at] else to - size
        if write.size > 0 and not write[at]:
            copy(states, o, states, to, size)
            if states_S is not None:
                copy(states_S, o, states_S, to, size)
            continue
        ko, l, m = at * P, lr[at], momentum[at]
        _gates(rows, k, ko, retain, at, P, channels, order)
        _learn(form, a, b, preds, v, at * V, V, cols)
        for c in range(0, V, ROWS):
            w0, w1, w2, w3 = l * cols[c], l * cols[c + 1], l * cols[c + 2], l * cols[c + 3]
            write_rows(
                states, states_S, o, states, states_S, to, rows, k, ko, w0, w1, w2, w3, m, P, q,
                cut, False,
            )  # fmt: skip
            o, to = o + ROWS * P, to + ROWS * P


@helper
def _finish(k, ko, gk, gq, gr, sw, m, sm, P, moves, channels, order, seen, rows):
    """Cotangents of phi_k, phi_q and retain (returned, with momentum's) from the sums of rows; for phi_q these are over
    the state before the write, or else over the one `seen`."""
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
        if not seen:
            ga = mad(wrote, kj, mul(rj, ga))
            if moves:
                ga = mad(slow, load(rows, 6 * P + j), ga)
        store(gq, ko + j, ga)
    first, second, _, _ = sums(total, sm, total, total)
    return first, second


@kernel
def _keep_initial(initial, base, states, states_S, last, size):
    """The initial M, and S = 0, behind the states of a segment, where restarted tokens look."""
    copy(initial, base, states, last, size)
    if states_S is not None:
        fill(states_S, last, size, 0.0)


@kernel
def _to_initial(G, H, g_initial, base, size):
    """Hands the cotangent of a state before a restart to the initial weights."""
    for j in range(base, base + size, lanes(G)):
        store(g_initial, j, add(load(g_initial, j), load(G, j)))
    fill(G, base, size, 0.0)
    if H is not None:
        fill(H, base, size, 0.0)


@kernel
def backward(
    lo, hi, heads, T, V, P, k, q, v, lr, retain, momentum, write, reset, initial, preds, kept,
    kept_S, gy, G, H, g_initial, gk, gq, gv, glr, gr, gm, segment, form, a, b, cut, channels, order,
    before, rows, cols, states, states_S,
):  # fmt: skip
    """Cotangents of all inputs from those of y (gy) and, in place, of the final M and S (G, H)."""
    size, pieces, last = V * P, (T + segment - 1) // segment, (segment + 1) * V * P
    fill(rows, 0, P, 1.0)
    for n in range(lo, hi):
        base, first = n * size, first_token(n, heads, T)
        if reset.size > 0:
            _keep_initial(initial, base, states, states_S, last, size)
        for piece in range(pieces - 1, -1, -1):
            start, end = piece * segment, min(T, (piece + 1) * segment)
            copy(kept, (n * pieces + piece) * size, states, 0, size)
            if H is not None:
                copy(kept_S, (n * pieces + piece) * size, states_S, 0, size)
            _replay(
                first, heads, start, end, V, P, k, q, v, lr, retain, momentum, write, reset, preds,
                states, states_S, segment, form, a, b, cut, channels, order, rows, cols,
            )  # fmt: skip
            for t in range(end - 1, start - 1, -1):
                at = first + t * heads
                ko, l, m = at * P, lr[at], momentum[at]
                resets, writes = reset.size > 0 and reset[at], write.size == 0 or write[at]
                o = (segment + 1) * size if resets else (t - start) * size
                if writes:
                    _gates(rows, k, ko, retain, at, P, channels, order)
                    _learn(form, a, b, preds, v, at * V, V, cols)
                fill(rows, 2 * P, 5 * P, 0.0)
                sm, sl, sw = splat(k, 0.0), l - l, l - l
                for c in range(at * V, at * V + V, ROWS):
                    i, r = c - at * V, (c - at * V) * P
                    after = (t - start + 1) * size + r
                    g0, g1, g2, g3 = gy[c], gy[c + 1], gy[c + 2], gy[c + 3]
                    if not writes:
                        unwritten(states, o + r, G, base + r, q, ko, g0, g1, g2, g3, P, rows)
                        continue
                    d0, d1, d2, d3, more = collect(
                        states, states_S, o + r, after, G, H, base + r, k, q, ko, g0, g1, g2, g3, P,
                        rows, cut, before,
                    )  # fmt: skip
                    sm = add(sm, more)
                    u0, u1, u2, u3 = cols[i], cols[i + 1], cols[i + 2], cols[i + 3]
                    e0, gv[c] = pulled(form, -l * d0, cols[V + i])
                    e1, gv[c + 1] = pulled(form, -l * d1, cols[V + i + 1])
                    e2, gv[c + 2] = pulled(form, -l * d2, cols[V + i + 2])
                    e3, gv[c + 3] = pulled(form, -l * d3, cols[V + i + 3])
                    sl -= u0 * d0 + u1 * d1 + u2 * d2 + u3 * d3
                    sw += u0 * g0 + u1 * g1 + u2 * g2 + u3 * g3
                    spread(
                        states, o + r, after, G, H, base + r, q, ko, e0, e1, e2, e3, l * u0, l * u1,
                        l * u2, l * u3, g0, g1, g2, g3, m, P, rows, cut, before,
                    )  # fmt: skip
                if writes:
                    glr[at] = sl
                    total, gm[at] = _finish(
                        k, ko, gk, gq, gr, l * sw, m, sm, P, H is not None, channels, order,
                        before or cut is not None, rows,
                    )  # fmt: skip
                    if not channels:
                        gr[at] = total
                else:
                    copy(rows, 4 * P, gq, ko, P)
                if resets:
                    _to_initial(G, H, g_initial, base, size)
