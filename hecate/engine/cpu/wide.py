"""Kernels for rows wider than the registers: one memory after the other, its state in cache.

`registers` serves narrower rows, on the same arguments. Rows of a state go in fours and in vectors of 64 bytes; the
caller pads widths to multiples of both with zeros, which no rule moves. Each kernel runs the memories lo <= n < hi and
holds no lock, so that threads may share a batch: one thread computes a memory, and its numbers do not depend on how
many there are.

Names: M state, S momentum, G and H their cotangents, k, q, v as in `Tokens`; `o`, `to`, `go` are where four rows begin
and P is the width of one. An array of size 0 is "not given"; None compiles a kernel without it: S (gradient descent),
retain and errs, where u = -v (bias dot) in place of pred - v (l2). `shared`
is a worker's scratch space, seven rows: retain, the key that predicts, and the sums over a token's rows for predicting
key, step key, query, retain, query by momentum. [ENG-NUM-D1]
"""

from __future__ import annotations

from hecate.engine.cpu.vectors import (
    ONE, ROWS, add, copy, fill, filled, first_token, get, helper, inline, kernel, learned, load, load_rows, mad, mul,
    part, per_vector, put, scores, store, store_rows, sums, times, total, zeros,
)  # fmt: skip


@inline
def _accumulate(target, to, row):
    """target[to] += row."""
    store(target, to, add(load(target, to, ONE), row))


@inline
def _products(M, o, x, at, P):
    """Four rows times a vector."""
    y = zeros(x)
    for j in range(0, P, per_vector(x)):
        y = mad(load_rows(M, o + j, P, ONE), load(x, at + j, ONE), y)
    return sums(y)


@helper
def _gates(shared, k, ko, retain, at, P, channels, order):
    """Into the shared rows: retain per channel, and the key that predicts, decayed if the gradient sees it."""
    if retain is not None:
        if channels:
            copy(part(retain, at, P), part(shared, 0, P))
        else:
            fill(part(shared, 0, P), retain[at])
    # The gradient sees r M: its prediction is M (r k).
    if order:
        for j in range(0, P, per_vector(k)):
            store(shared, P + j, mul(load(shared, j, ONE), load(k, ko + j, ONE)))
    else:
        copy(part(k, at, P), part(shared, 1, P))


@inline
def _write(A, B, o, M, S, to, shared, k, ko, w, m, P, q, before):
    """Four rows of the write, from (A, B) at o to (M, S) at `to`; their products with q."""
    y = zeros(k)
    for j in range(0, P, per_vector(k)):
        kj, qj, rj = load(k, ko + j, ONE), load(q, ko + j, ONE), load(shared, j, ONE)
        a = load_rows(A, o + j, P, ONE)
        if before:
            y = mad(a, qj, y)
        if S is None:
            a = mad(w, kj, mul(rj, a))
        else:
            s = mad(w, kj, mul(m, load_rows(B, o + j, P, ONE)))
            store_rows(S, to + j, P, s)
            a = mad(rj, a, s)
        if not before:
            y = mad(a, qj, y)
        store_rows(M, to + j, P, a)
    return sums(y)


@kernel
def forward(
    lo, hi, heads, T, V, P, k, q, v, lr, retain, momentum, write, reset, initial, M, S, y, preds,
    kept, kept_S, segment, errs, channels, order, before, shared,
):  # fmt: skip
    """Outputs y and, in place, the final M and S; with preds given, what `backward` needs too."""
    size, records, segments = V * P, preds.size > 0, (T + segment - 1) // segment
    fill(part(shared, 0, P), 1.0)
    for n in range(lo, hi):
        base, first = n * size, first_token(n, heads, T)
        for t in range(T):
            at = first + t * heads
            ko, vo, l, m = at * P, at * V, lr[at], momentum[at]
            # What the backward goes through a segment again from.
            if records and t % segment == 0:
                place = n * segments + t // segment
                copy(part(M, n, size), part(kept, place, size))
                if S is not None:
                    copy(part(S, n, size), part(kept_S, place, size))
            if reset.size > 0 and reset[at]:
                copy(part(initial, n, size), part(M, n, size))
                if S is not None:
                    fill(part(S, n, size), 0.0)
            if write.size > 0 and not write[at]:
                for c in range(0, V, ROWS):
                    put(y, vo + c, _products(M, base + c * P, q, ko, P))
                continue
            _gates(shared, k, ko, retain, at, P, channels, order)
            for c in range(0, V, ROWS):
                o, pred = base + c * P, (l, l, l, l)  # unread where the prediction does not matter
                if errs is not None:
                    # In `shared` behind retain lies the key that predicts.
                    pred = _products(M, o, shared, P, P)
                if records:
                    put(preds, vo + c, pred)
                w = times(-l, learned(errs, pred, get(v, vo + c)))
                put(y, vo + c, _write(M, S, o, M, S, o, shared, k, ko, w, m, P, q, before))


@helper
def _learn(errs, preds, v, vo, V, learnt):
    """u of a token."""
    for c in range(0, V, ROWS):
        put(learnt, c, learned(errs, get(preds, vo + c), get(v, vo + c)))


@helper
def _replay(
    first, heads, start, end, V, P, k, q, v, lr, retain, momentum, write, reset, preds, states,
    states_S, segment, errs, channels, order, shared, learnt,
):  # fmt: skip
    """The states before every token of a segment, from the first of them and the predictions."""
    size = V * P
    # The last token's state after is the next segment's first, which is not asked for.
    for t in range(start, end - 1):
        at, to = first + t * heads, (t - start + 1) * size
        # A restart goes on from the initial weights, kept behind the segment's states.
        o = (segment + 1) * size if reset.size > 0 and reset[at] else to - size
        if write.size > 0 and not write[at]:
            copy(states[o:], states[to : to + size])
            if states_S is not None:
                copy(states_S[o:], states_S[to : to + size])
            continue
        ko, l, m = at * P, lr[at], momentum[at]
        _gates(shared, k, ko, retain, at, P, channels, order)
        _learn(errs, preds, v, at * V, V, learnt)
        for c in range(0, V, ROWS):
            w = times(-l, get(learnt, c))
            _write(states, states_S, o, states, states_S, to, shared, k, ko, w, m, P, q, False)
            o, to = o + ROWS * P, to + ROWS * P


@helper
def _unwritten(A, o, G, go, q, ko, g, P, shared):
    """Four rows of a token that writes nothing: what its read sends to q and G."""
    for j in range(0, P, per_vector(q)):
        _accumulate(shared, 4 * P + j, total(g, load_rows(A, o + j, P, ONE)))
        store_rows(G, go + j, P, mad(g, load(q, ko + j, ONE), load_rows(G, go + j, P, ONE)))


@inline
def _collect(A, B, o, G, H, go, k, q, ko, g, P, shared, before):
    """Four rows: sums over them for q and the gates; <g_step, k> of each, and for momentum."""
    d, gm = zeros(k), filled(k, 0.0)
    for j in range(0, P, per_vector(k)):
        x = load_rows(G, go + j, P, ONE)
        if not before:
            x = mad(g, load(q, ko + j, ONE), x)
        a = load_rows(A, o + j, P, ONE)
        _accumulate(shared, 4 * P + j, total(g, a))
        _accumulate(shared, 5 * P + j, total(x, a))
        if H is not None:
            x, s = add(load_rows(H, go + j, P, ONE), x), load_rows(B, o + j, P, ONE)
            _accumulate(shared, 6 * P + j, total(g, s))
            gm = mad(x[0], s[0], mad(x[1], s[1], mad(x[2], s[2], mad(x[3], s[3], gm))))
        d = mad(x, load(k, ko + j, ONE), d)
    return sums(d), gm


@inline
def _spread(A, o, G, H, go, q, ko, e, w, g, m, P, shared, before):
    """Four rows: what predictions and steps send to k; G and H of the token before."""
    for j in range(0, P, per_vector(q)):
        rj, kj, qj = load(shared, j, ONE), load(shared, P + j, ONE), load(q, ko + j, ONE)
        x = load_rows(G, go + j, P, ONE)
        if not before:
            x = mad(g, qj, x)
        _accumulate(shared, 2 * P + j, total(e, load_rows(A, o + j, P, ONE)))
        s = x
        if H is not None:
            s = add(load_rows(H, go + j, P, ONE), x)
            store_rows(H, go + j, P, mul(m, s))
        _accumulate(shared, 3 * P + j, total(w, s))
        x = mad(e, kj, mul(rj, x))
        if before:
            x = mad(g, qj, x)
        store_rows(G, go + j, P, x)


@helper
def _finish(k, ko, gk, gq, gr, sw, m, sm, P, moves, channels, order, seen, shared):
    """Cotangents of phi_k, phi_q and retain (returned, with momentum's) from the sums of rows; for phi_q these are over
    the state before the write, or else over the one `seen`."""
    moved = filled(k, 0.0)
    for j in range(0, P, per_vector(k)):
        rj, kj = load(shared, j, ONE), load(k, ko + j, ONE)
        gp, gd, ga = (load(shared, 2 * P + j, ONE), load(shared, 5 * P + j, ONE), load(shared, 4 * P + j, ONE))
        # r k predicted: its cotangent is r's by k, and k's by r.
        if order:
            gd = mad(kj, gp, gd)
            gp = mul(rj, gp)
        store(gk, ko + j, mad(filled(k, -1.0), load(shared, 3 * P + j, ONE), gp))
        if channels:
            store(gr, ko + j, gd)
        moved = add(moved, gd)
        if not seen:
            # The state after the write is r A - w k^T: what A gives, less what the write took.
            ga = mad(-sw, kj, mul(rj, ga))
            if moves:
                ga = mad(m, load(shared, 6 * P + j, ONE), ga)
        store(gq, ko + j, ga)
    # `sums` folds four vectors at once: two sums cost what one does.
    first, second, _, _ = sums((moved, sm, moved, moved))
    return first, second


@kernel
def _keep_initial(initial, n, states, states_S, slot, size):
    """The initial M, and S = 0, behind the states of a segment, where restarted tokens look."""
    copy(part(initial, n, size), part(states, slot, size))
    if states_S is not None:
        fill(part(states_S, slot, size), 0.0)


@kernel
def _to_initial(G, H, g_initial, base, size):
    """Hands the cotangent of a state before a restart to the initial weights."""
    for j in range(base, base + size, per_vector(G)):
        store(g_initial, j, add(load(g_initial, j, ONE), load(G, j, ONE)))
    fill(G[base : base + size], 0.0)
    if H is not None:
        fill(H[base : base + size], 0.0)


@kernel
def backward(
    lo, hi, heads, T, V, P, k, q, v, lr, retain, momentum, write, reset, initial, preds, kept,
    kept_S, gy, G, H, g_initial, gk, gq, gv, glr, gr, gm, segment, errs, channels, order,
    before, shared, learnt, states, states_S,
):  # fmt: skip
    """Cotangents of all inputs from those of y (gy) and, in place, of the final M and S (G, H)."""
    size, segments = V * P, (T + segment - 1) // segment
    fill(part(shared, 0, P), 1.0)
    for n in range(lo, hi):
        base, first = n * size, first_token(n, heads, T)
        if reset.size > 0:
            _keep_initial(initial, n, states, states_S, segment + 1, size)
        for index in range(segments - 1, -1, -1):
            start, end = index * segment, min(T, (index + 1) * segment)
            copy(part(kept, n * segments + index, size), part(states, 0, size))
            if H is not None:
                copy(part(kept_S, n * segments + index, size), part(states_S, 0, size))
            _replay(
                first, heads, start, end, V, P, k, q, v, lr, retain, momentum, write, reset, preds,
                states, states_S, segment, errs, channels, order, shared, learnt,
            )  # fmt: skip
            for t in range(end - 1, start - 1, -1):
                at = first + t * heads
                ko, vo, l, m = at * P, at * V, lr[at], momentum[at]
                resets, writes = reset.size > 0 and reset[at], write.size == 0 or write[at]
                o = (segment + 1) * size if resets else (t - start) * size
                if writes:
                    _gates(shared, k, ko, retain, at, P, channels, order)
                    _learn(errs, preds, v, vo, V, learnt)
                # Rows 2 to 6 of `shared` gather sums over all rows of the state.
                fill(shared[2 * P : 7 * P], 0.0)
                sm, sl, sw = filled(k, 0.0), l - l, l - l
                for c in range(0, V, ROWS):
                    r, g = c * P, get(gy, vo + c)
                    if not writes:
                        _unwritten(states, o + r, G, base + r, q, ko, g, P, shared)
                        continue
                    d, more = _collect(states, states_S, o + r, G, H, base + r, k, q, ko, g, P, shared, before)
                    u, e = get(learnt, c), times(l - l if errs is None else -l, d)
                    put(gv, vo + c, times(l, d))
                    sm, sl, sw = add(sm, more), sl - scores(u, d), sw + scores(u, g)
                    _spread(states, o + r, G, H, base + r, q, ko, e, times(l, u), g, m, P, shared, before)
                if writes:
                    glr[at] = sl
                    kept_share, gm[at] = _finish(
                        k, ko, gk, gq, gr, l * sw, m, sm, P, H is not None, channels, order,
                        before, shared,
                    )  # fmt: skip
                    if not channels:
                        gr[at] = kept_share
                else:
                    copy(part(shared, 4, P), part(gq, at, P))
                if resets:
                    _to_initial(G, H, g_initial, base, size)
