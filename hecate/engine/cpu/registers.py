"""Kernels for rows that fit into registers: a row is one vector.

The rows of a matrix memory meet only in what its tokens share: keys, queries and gates. So four rows of a state stay in
registers for a whole segment of tokens, then come the next four, and what the tokens' cotangents collect from them is
summed up in memory. `width` is a tuple as long as a row has vectors. Where u does not look at the memory (bias dot),
columns do not meet either, and wide rows go in tiles of that width; other wide rows go through `walk`.

Names: M state, S momentum, G and H their cotangents, k, q, v as in `Tokens`; `o`, `to` are where four rows begin and P
is the width of one. An array of size 0 is "not given"; None compiles a kernel without it: S (gradient descent), retain
and errs, where u = -v (bias dot) in place of pred - v (l2).

The backward runs a segment forward once more, which pulls the reads back and keeps, for its four rows, what the way
back needs: nothing for a hebbian memory. Heads that lie side by side take turns, so that what one leaves of a page or a
row of the cache is there for the next. [ENG-NUM-D1, ENG-NUM-V1]
"""

from __future__ import annotations

from hecate.engine.cpu.vectors import (
    ONE, ROWS, add, along, filled, first_token, get, helper, inline, kernel, learned, load, load_rows, mad,
    mul, per_vector, put, scores, store, store_rows, sums, times, zeros,
)  # fmt: skip


@inline
def _turn(job, lo, hi, heads, segments):
    """Memory and segment of a job: heads that lie side by side take turns, segment by segment."""
    row = job // segments // heads * heads
    first, last = max(lo, row), min(hi, row + heads)
    job -= first * segments
    return first + job % (last - first), job // (last - first)


@inline
def _retain(retain, at, row, channels, like, width):
    """Retain of a token, in every place of a row; nothing that is read without."""
    if retain is None:
        return like
    return load(retain, row, width) if channels is not None else filled(like, retain[at])


@inline
def _plus(rows, w, x):
    """Four rows, each plus a number times x."""
    return mad(w, x, rows)


@inline
def _inner(rows, x):
    """Four rows times one."""
    return sums(along(rows, x))


@inline
def _stepped(M, S, retain, rt, m, kt, w):
    """Four rows of M and S after the step w k^T."""
    if retain is not None:
        M = mul(M, rt)
    if S is not None:
        S = _plus(mul(S, m), w, kt)
        M = add(M, S)
    else:
        M = _plus(M, w, kt)
    return M, S


@inline
def _combined(w, a):
    """The sum of four rows, each times a number or number by number times a row of its own."""
    (w0, w1, w2, w3), (a0, a1, a2, a3) = w, a
    return mad(w3, a3, mad(w2, a2, mad(w1, a1, mul(w0, a0))))


@inline
def _note(x, at, u, j):
    """Four numbers into an array, added to those of the columns before j."""
    if j > 0:
        (x0, x1, x2, x3), (u0, u1, u2, u3) = get(x, at), u
        u = x0 + u0, x1 + u1, x2 + u2, x3 + u3
    put(x, at, u)


@inline
def _accumulate(x, at, row, c):
    """A row into an array, added to those of the rows before c."""
    if c > 0:
        row = add(load(x, at, row), row)
    store(x, at, row)


@inline
def _tally(x, i, a, b):
    """Adds the products of four rows with four to the vector of sums of a token."""
    at, (p, q, r, s) = i * per_vector(x), along(a, b)
    store(x, at, add(load(x, at, ONE), add(add(p, q), add(r, s))))


@inline
def _tally_row(x, i, a, b):
    """The same for one row with one."""
    at = i * per_vector(x)
    store(x, at, add(load(x, at, ONE), along(a, b)))


@helper
def _write(
    n, start, count, heads, c, j, V, P, k, q, v, lr, retain, momentum, write, reset, initial, M, S,
    y, preds, kept, kept_S, place, errs, channels, order, before, width,
):  # fmt: skip
    """Four rows, from column j, through a segment of tokens."""
    o = (n * V + c) * P + j
    M4, S4 = load_rows(M, o, P, width), load_rows(S, o, P, width)
    if kept.size > 0:
        store_rows(kept, place, P, M4)
        if S is not None:
            store_rows(kept_S, place, P, S4)
    # Four rows of the state stay in registers from the segment's first token to its last.
    for i in range(count):
        at = start + i * heads
        if reset.size > 0 and reset[at]:
            M4 = load_rows(initial, o, P, width)
            if S is not None:
                S4 = zeros(S4[0])
        row, to, writes = at * P + j, at * V + c, write.size == 0 or write[at]
        qt = load(q, row, width)
        if before or not writes:
            _note(y, to, _inner(M4, qt), j)
        if not writes:
            continue
        kt, u = load(k, row, width), get(v, to)
        if errs is not None:
            seen = kt
            # M (r k), as the gradient sees the decayed memory.
            if retain is not None and order:
                seen = mul(_retain(retain, at, row, channels, kt, width), kt)
            pred = _inner(M4, seen)
            if preds.size > 0:
                put(preds, to, pred)
            w = times(-lr[at], learned(errs, pred, u))
        else:
            w = times(lr[at], u)
        rt = _retain(retain, at, row, channels, kt, width)
        M4, S4 = _stepped(M4, S4, retain, rt, momentum[at], kt, w)
        if not before:
            _note(y, to, _inner(M4, qt), j)
    store_rows(M, o, P, M4)
    if S is not None:
        store_rows(S, o, P, S4)


@kernel
def forward(
    lo, hi, heads, T, V, P, k, q, v, lr, retain, momentum, write, reset, initial, M, S, y, preds,
    kept, kept_S, segment, errs, channels, order, before, width,
):  # fmt: skip
    """Outputs y and, in place, the final M and S; with preds given, what `backward` needs too."""
    segments = (T + segment - 1) // segment
    for job in range(lo * segments, hi * segments):
        n, index = _turn(job, lo, hi, heads, segments)
        start = first_token(n, heads, T) + index * segment * heads
        count = min(T - index * segment, segment)
        # Rows outside, tokens inside: the opposite of the token loop, which is sound as rows never meet.
        for c in range(0, V, ROWS):
            for j in range(0, P, len(width) * per_vector(k)):
                place = ((n * segments + index) * V + c) * P + j
                _write(
                    n, start, count, heads, c, j, V, P, k, q, v, lr, retain, momentum, write, reset,
                    initial, M, S, y, preds, kept, kept_S, place, errs, channels, order,
                    before, width,
                )  # fmt: skip


@helper
def _replay(
    n, start, count, heads, c, j, V, P, k, q, v, lr, retain, momentum, write, reset, initial, preds,
    kept, kept_S, place, gy, gq, errs, channels, order, before, width, states, states_S,
    us,
):  # fmt: skip
    """Four rows once more: their state and u at every token of a segment; what reads send to q."""
    M4, S4 = load_rows(kept, place, P, width), load_rows(kept_S, place, P, width)
    W = len(width) * per_vector(k)
    for step in range(count):
        at = start + step * heads
        i, row, to = step * ROWS, at * P + j, at * V + c
        if reset.size > 0 and reset[at]:
            M4 = load_rows(initial, (n * V + c) * P + j, P, width)
            if kept_S is not None:
                S4 = zeros(S4[0])
        # A hebbian memory's state is in no derivative but the reads', pulled back on the way.
        if errs is not None or retain is not None:
            store_rows(states, i * W, W, M4)
        if kept_S is not None:
            store_rows(states_S, i * W, W, S4)
        g, writes = get(gy, to), write.size == 0 or write[at]
        # Reads are pulled back on the way forward, where the state is in registers.
        if before or not writes:
            _accumulate(gq, row, _combined(g, M4), c)
        if not writes:
            continue
        kt, u = load(k, row, width), get(v, to)
        u = learned(errs, get(preds, to) if errs is not None else u, u)
        put(us, i, u)
        rt = _retain(retain, at, row, channels, kt, width)
        M4, S4 = _stepped(M4, S4, retain, rt, momentum[at], kt, times(-lr[at], u))
        if not before:
            _accumulate(gq, row, _combined(g, M4), c)


@inline
def _retain_back(gr, row, c, sums, i, channels, G4, M4):
    """Adds to the cotangent of retain the share of four rows that it has scaled."""
    if channels is not None:
        _accumulate(gr, row, _combined(G4, M4), c)
    else:
        _tally(sums, i, G4, M4)


@helper
def _walk(
    n, start, count, heads, c, j, V, P, k, q, v, lr, retain, momentum, write, reset, preds, gy, G,
    H, g_initial, gk, gv, glr, gr, gm, errs, channels, order, before, width, states,
    states_S, us, sums_r, sums_m,
):  # fmt: skip
    """Four rows backwards through a segment, their cotangents in registers."""
    o, W = (n * V + c) * P + j, len(width) * per_vector(k)
    G4, H4 = load_rows(G, o, P, width), load_rows(H, o, P, width)
    for i in range(count - 1, -1, -1):
        at, place = start + i * heads, i * ROWS * W
        row, to = at * P + j, at * V + c
        qt, g = load(q, row, width), get(gy, to)
        writes = write.size == 0 or write[at]
        # The read after the write comes first on the way back.
        if not before or not writes:
            G4 = _plus(G4, g, qt)
        if writes:
            kt, l, u = load(k, row, width), lr[at], get(us, i * ROWS)
            if retain is not None:
                rt = _retain(retain, at, row, channels, kt, width)
                _retain_back(gr, row, c, sums_r, i, channels, G4, load_rows(states, place, W, width))
            if H is not None:
                # M' = r M + S': what reaches M' reaches S', too.
                H4 = add(H4, G4)
                _tally(sums_m, i, H4, load_rows(states_S, place, W, width))
                X4 = H4
            else:
                X4 = G4
            d = _inner(X4, kt)
            glr[at] -= scores(u, d)
            gkt = _combined(times(-l, u), X4)
            if retain is not None:
                G4 = mul(G4, rt)
            _note(gv, to, times(l, d), j)
            if errs is not None:
                e = times(-l, d)
                # From memory again: there is no room for it beside the cotangents.
                gp, seen = _combined(e, load_rows(states, place, W, width)), kt
                if retain is not None and order:
                    if channels is not None:
                        _accumulate(gr, row, mul(gp, kt), ROWS)
                    else:
                        _tally_row(sums_r, i, gp, kt)
                    gp, seen = mul(rt, gp), mul(rt, kt)
                gkt = add(gkt, gp)
                G4 = _plus(G4, e, seen)
            _accumulate(gk, row, gkt, c)
            if H is not None:
                H4 = mul(H4, momentum[at])
        if before and writes:
            G4 = _plus(G4, g, qt)
        if reset.size > 0 and reset[at]:
            store_rows(g_initial, o, P, add(load_rows(g_initial, o, P, width), G4))
            G4 = zeros(G4[0])
            if H is not None:
                H4 = zeros(H4[0])
    store_rows(G, o, P, G4)
    if H is not None:
        store_rows(H, o, P, H4)


@kernel
def backward(
    lo, hi, heads, T, V, P, k, q, v, lr, retain, momentum, write, reset, initial, preds, kept,
    kept_S, gy, G, H, g_initial, gk, gq, gv, glr, gr, gm, segment, errs, channels, order,
    before, width, states, states_S, us, sums_r, sums_m,
):  # fmt: skip
    """Cotangents of all inputs, added to zeros, from those of y (gy) and, in place, of the final M and S (G, H)."""
    segments, none = (T + segment - 1) // segment, filled(k, 0.0)
    # From the last segment to the first, as G and H have to come.
    for job in range(hi * segments - 1, lo * segments - 1, -1):
        n, index = _turn(job, lo, hi, heads, segments)
        start = first_token(n, heads, T) + index * segment * heads
        count = min(T - index * segment, segment)
        # A vector a token, folded to one number when all rows have been through.
        sums_r[:] = 0
        sums_m[:] = 0
        for c in range(0, V, ROWS):
            for j in range(0, P, len(width) * per_vector(k)):
                place = ((n * segments + index) * V + c) * P + j
                _replay(
                    n, start, count, heads, c, j, V, P, k, q, v, lr, retain, momentum, write, reset,
                    initial, preds, kept, kept_S, place, gy, gq, errs, channels, order,
                    before, width, states, states_S, us,
                )  # fmt: skip
                _walk(
                    n, start, count, heads, c, j, V, P, k, q, v, lr, retain, momentum, write, reset,
                    preds, gy, G, H, g_initial, gk, gv, glr, gr, gm, errs, channels,
                    order, before, width, states, states_S, us, sums_r, sums_m,
                )  # fmt: skip
        for i in range(count):
            at, to = start + i * heads, i * per_vector(k)
            total, gm[at], _, _ = sums((load(sums_r, to, ONE), load(sums_m, to, ONE), none, none))
            if channels is None:
                gr[at] = total
