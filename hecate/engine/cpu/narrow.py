"""Kernels of the compiled engine for rows that fit into registers: a row is one vector.

The rows of a matrix memory meet only in what its tokens share: keys, queries and gates. So four rows of a state stay in
registers for a whole segment of tokens, then come the next four, and what the tokens' cotangents collect from them is
summed up in memory. The arithmetic, the names and the arguments are those of `kernels`, which serves wider rows;
`width` is a tuple as long as a row has vectors. Where u does not look at the memory (bias dot), columns do not meet
either, and wide rows go in tiles of that width.

The backward runs a segment forward once more, which pulls the reads back and keeps, for its four rows, what the walk in
reverse needs: nothing for a hebbian memory. A threshold lets cotangents pass where the memory after it is not 0. Heads
that lie side by side take turns, so that what one leaves of a page or a row of the cache is there for the next.
[ENG-NUM-D1, ENG-NUM-V1]
"""

from __future__ import annotations

from hecate.engine.cpu.fours import (
    accumulate,
    added,
    combined,
    four,
    gate,
    inner,
    keep,
    learned,
    living,
    meeting,
    minus,
    note,
    plus,
    pull,
    quartet,
    scaled,
    shrunken,
    tally,
    tally_row,
    times,
    zeros,
)  # fmt: skip
from hecate.engine.cpu.lanes import (
    add,
    helper,
    kernel,
    lanes,
    load,
    load_row,
    mul,
    splat,
    splat_row,
    sums,
)  # fmt: skip
from hecate.engine.cpu.rows import ROWS, first_token, turn


@helper
def _write(
    n, start, count, heads, c, j, V, P, k, q, v, lr, retain, momentum, write, reset, initial, M, S,
    y, preds, kept, kept_S, place, form, a, b, cut, channels, order, before, width,
):  # fmt: skip
    """Four rows, from column j, through a segment of tokens."""
    o = (n * V + c) * P + j
    M4 = four(M, o, P, width)
    if S is not None:
        S4 = four(S, o, P, width)
    if kept.size > 0:
        keep(kept, place, P, M4)
        if S is not None:
            keep(kept_S, place, P, S4)
    for i in range(count):
        at = start + i * heads
        if reset.size > 0 and reset[at]:
            M4 = four(initial, o, P, width)
            if S is not None:
                S4 = zeros(S4)
        row, to, writes = at * P + j, at * V + c, write.size == 0 or write[at]
        qt = load_row(q, row, width)
        if before or not writes:
            note(y, to, inner(M4, qt), j)
        if not writes:
            continue
        kt, u = load_row(k, row, width), quartet(v, to)
        if form is not None:
            seen = kt
            if retain is not None and order:
                seen = mul(gate(retain, at, row, channels, kt, width), kt)
            pred = inner(M4, seen)
            if preds.size > 0:
                note(preds, to, pred, 0)
            u = times(-lr[at], learned(form, a, b, pred, u))
        else:
            u = times(lr[at], u)
        if retain is not None:
            M4 = scaled(M4, gate(retain, at, row, channels, kt, width))
        if S is not None:
            S4 = plus(scaled(S4, splat_row(kt, momentum[at])), u, kt)
            M4 = added(M4, S4)
        else:
            M4 = plus(M4, u, kt)
        if cut is not None:
            M4 = shrunken(M4, cut)
        if not before:
            note(y, to, inner(M4, qt), j)
    keep(M, o, P, M4)
    if S is not None:
        keep(S, o, P, S4)


@kernel
def forward(
    lo, hi, heads, T, V, P, k, q, v, lr, retain, momentum, write, reset, initial, M, S, y, preds,
    kept, kept_S, segment, form, a, b, cut, channels, order, before, width,
):  # fmt: skip
    """Outputs y and, in place, the final M and S; with preds given, what `backward` needs too."""
    pieces = (T + segment - 1) // segment
    for job in range(lo * pieces, hi * pieces):
        n, piece = turn(job, lo, hi, heads, pieces)
        start = first_token(n, heads, T) + piece * segment * heads
        count = min(T - piece * segment, segment)
        for c in range(0, V, ROWS):
            for j in range(0, P, len(width) * lanes(k)):
                place = ((n * pieces + piece) * V + c) * P + j
                _write(
                    n, start, count, heads, c, j, V, P, k, q, v, lr, retain, momentum, write, reset,
                    initial, M, S, y, preds, kept, kept_S, place, form, a, b, cut, channels, order,
                    before, width,
                )  # fmt: skip


@helper
def _replay(
    n, start, count, heads, c, j, V, P, k, q, v, lr, retain, momentum, write, reset, initial, preds,
    kept, kept_S, place, gy, gq, form, a, b, cut, channels, order, before, width, states, states_S,
    after, us,
):  # fmt: skip
    """Four rows once more: their state and u at every token of a segment; what reads send to q."""
    M4, W = four(kept, place, P, width), len(width) * lanes(k)
    if kept_S is not None:
        S4 = four(kept_S, place, P, width)
    for step in range(count):
        at = start + step * heads
        i, row, to = step * ROWS, at * P + j, at * V + c
        if reset.size > 0 and reset[at]:
            M4 = four(initial, (n * V + c) * P + j, P, width)
            if kept_S is not None:
                S4 = zeros(S4)
        if form is not None or retain is not None:
            keep(states, i * W, W, M4)
        if kept_S is not None:
            keep(states_S, i * W, W, S4)
        g, writes = quartet(gy, to), write.size == 0 or write[at]
        if before or not writes:
            accumulate(gq, row, combined(g, M4), c)
        if not writes:
            continue
        kt, u = load_row(k, row, width), quartet(v, to)
        u = learned(form, a, b, quartet(preds, to), u) if form is not None else minus(u)
        note(us, i, u, 0)
        if retain is not None:
            M4 = scaled(M4, gate(retain, at, row, channels, kt, width))
        if kept_S is not None:
            S4 = plus(scaled(S4, splat_row(kt, momentum[at])), times(-lr[at], u), kt)
            M4 = added(M4, S4)
        else:
            M4 = plus(M4, times(-lr[at], u), kt)
        if cut is not None:
            M4 = shrunken(M4, cut)
            keep(after, i * W, W, M4)
        if not before:
            accumulate(gq, row, combined(g, M4), c)


@helper
def _walk(
    n, start, count, heads, c, j, V, P, k, q, v, lr, retain, momentum, write, reset, preds, gy, G,
    H, g_initial, gk, gv, glr, gr, gm, form, a, b, cut, channels, order, before, width, states,
    states_S, after, us, sums_r, sums_m,
):  # fmt: skip
    """Four rows backwards through a segment, their cotangents in registers."""
    o, W = (n * V + c) * P + j, len(width) * lanes(k)
    G4 = four(G, o, P, width)
    if H is not None:
        H4 = four(H, o, P, width)
    for i in range(count - 1, -1, -1):
        at = start + i * heads
        row, to = at * P + j, at * V + c
        qt, g = load_row(q, row, width), quartet(gy, to)
        writes = write.size == 0 or write[at]
        if not before or not writes:
            G4 = plus(G4, g, qt)
        if writes:
            if cut is not None:
                G4 = living(G4, four(after, i * ROWS * W, W, width))
            kt, l, u = load_row(k, row, width), lr[at], quartet(us, i * ROWS)
            if retain is not None:
                rt = gate(retain, at, row, channels, kt, width)
                if channels is not None:
                    accumulate(gr, row, meeting(G4, four(states, i * ROWS * W, W, width)), c)
                else:
                    tally(sums_r, i, G4, four(states, i * ROWS * W, W, width))
            if H is not None:
                H4 = added(H4, G4)
                tally(sums_m, i, H4, four(states_S, i * ROWS * W, W, width))
                X4 = H4
            else:
                X4 = G4
            d = inner(X4, kt)
            glr[at] -= u[0] * d[0] + u[1] * d[1] + u[2] * d[2] + u[3] * d[3]
            gkt = combined(times(-l, u), X4)
            if retain is not None:
                G4 = scaled(G4, rt)
            if form is None:
                note(gv, to, times(l, d), j)
            else:
                e, gvs = pull(form, a, b, l, d, quartet(preds, to), quartet(v, to), u)
                note(gv, to, gvs, 0)
                # From memory again: there is no room for it beside the cotangents.
                gp, seen = combined(e, four(states, i * ROWS * W, W, width)), kt
                if retain is not None and order:
                    if channels is not None:
                        accumulate(gr, row, mul(gp, kt), ROWS)
                    else:
                        tally_row(sums_r, i, gp, kt)
                    gp, seen = mul(rt, gp), mul(rt, kt)
                gkt = add(gkt, gp)
                G4 = plus(G4, e, seen)
            accumulate(gk, row, gkt, c)
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
    lo, hi, heads, T, V, P, k, q, v, lr, retain, momentum, write, reset, initial, preds, kept,
    kept_S, gy, G, H, g_initial, gk, gq, gv, glr, gr, gm, segment, form, a, b, cut, channels, order,
    before, width, states, states_S, after, us, sums_r, sums_m,
):  # fmt: skip
    """Cotangents of all inputs, added to zeros, from those of y (gy) and, in place, of the final M and S (G, H)."""
    pieces, none = (T + segment - 1) // segment, splat(k, 0.0)
    for job in range(hi * pieces - 1, lo * pieces - 1, -1):
        n, piece = turn(job, lo, hi, heads, pieces)
        start = first_token(n, heads, T) + piece * segment * heads
        count = min(T - piece * segment, segment)
        sums_r[:] = 0
        sums_m[:] = 0
        for c in range(0, V, ROWS):
            for j in range(0, P, len(width) * lanes(k)):
                place = ((n * pieces + piece) * V + c) * P + j
                _replay(
                    n, start, count, heads, c, j, V, P, k, q, v, lr, retain, momentum, write, reset,
                    initial, preds, kept, kept_S, place, gy, gq, form, a, b, cut, channels, order,
                    before, width, states, states_S, after, us,
                )  # fmt: skip
                _walk(
                    n, start, count, heads, c, j, V, P, k, q, v, lr, retain, momentum, write, reset,
                    preds, gy, G, H, g_initial, gk, gv, glr, gr, gm, form, a, b, cut, channels,
                    order, before, width, states, states_S, after, us, sums_r, sums_m,
                )  # fmt: skip
        for i in range(count):
            at, to = start + i * heads, i * lanes(k)
            total, gm[at], _, _ = sums(load(sums_r, to), load(sums_m, to), none, none)
            if channels is None:
                gr[at] = total
