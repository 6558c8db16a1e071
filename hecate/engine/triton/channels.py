"""Kernels of chunks where retain is one of each phi channel: what their tokens do to one another, and the rows' part of
the backward pass.

A write's part of the memory, X_i[t, p] = b_i[p] prod of retain_l[p] over i < l <= t, is no matrix of coefficients times
b_i. But a chunk falls into pieces of 1, 2, 4 .. tokens, and between any two tokens lies one border of pieces that are
halves of one: the product from i to that border is a row's, that from there to t is another row's, and pairs on its two
sides are a product of matrices. Back, each level gives cotangents of its rows, and of these two products; those of the
products of a piece become those of its halves', from the whole chunk down to single tokens, where they are retain's. No
product is divided by another: a gate of 0 has its own cotangent. [ENG-TRITON-D2]
"""

import triton
import triton.language as tl

from hecate.engine.triton.back import keys_back, queries_back, state_at, values_at
from hecate.engine.triton.block import channels_at, gates_at, keys_at, product, row_of, rows_at, segment_of, writes_at
from hecate.engine.triton.factors import at_level, inverse, put
from hecate.engine.triton.maps import COUNTS, featured, sized


@triton.jit
def left_at(retain, write, reset, at, there, o, P: tl.constexpr, MASK: tl.constexpr, RESET: tl.constexpr):
    """Rows `[C, P]` of what a token leaves of what was before it: its retain, none where it starts anew."""
    w, born, _, _ = gates_at(retain, retain, write, reset, at, there, False, False, MASK, RESET)
    return channels_at(retain, at, w, o, P) * (1 - born)[:, None]


@triton.jit
def chunk_at(
    q, k, kw, lr, retain, write, reset, at, inside, behind, H, i, op, P: tl.constexpr, C: tl.constexpr,
    MASK: tl.constexpr, RESET: tl.constexpr, APART: tl.constexpr, PHI: tl.constexpr,
):  # fmt: skip
    """(w, born, queries, keys, lr times written keys, retain) of a chunk's tokens, and what the tokens before and after
    each leave."""
    w, born, _, _ = gates_at(retain, retain, write, reset, at, inside, False, False, MASK, RESET)
    qt, pt, bt = keys_at(q, k, kw, lr, at, inside, w, op, P, APART, PHI)
    before = left_at(retain, write, reset, at - H, inside & (i > 0), op, P, MASK, RESET)
    after = left_at(retain, write, reset, at + H, behind & (i < C - 1), op, P, MASK, RESET)
    return w, born, qt, pt, bt, channels_at(retain, at, w, op, P), before, after


@triton.jit
def starts(rt, born, i, C: tl.constexpr):
    """The share of a new start's weights that is seen ahead of each token's retain and after it."""
    ahead, after, row = rt * 0.0, rt * 0.0, tl.sum(rt * 0.0, 0)[None, :]
    for t in range(C):
        x, now = tl.sum(tl.where(i == t, born, 0.0), 0), (i == t)[:, None]
        row = row * (1 - x) + x
        ahead = tl.where(now, row, ahead)
        row = row * row_of(rt, i, t)
        after = tl.where(now, row, after)
    return ahead, after


@triton.jit
def running(x, i, h: tl.constexpr, BACK: tl.constexpr, C: tl.constexpr, BP: tl.constexpr):
    """Products of rows from the start of a piece of h rows on or (BACK) from its end back, that row's left out."""
    edge = i % h == (h - 1 if BACK else 0)
    pieces = tl.reshape(tl.where(edge[:, None], 1.0, x), [C // h, h, BP])
    return tl.reshape(tl.cumprod(pieces, 1, reverse=BACK), [C, BP])


@triton.jit
def sizes(x, at, inside, o, P: tl.constexpr, PHI: tl.constexpr, NORM: tl.constexpr):
    """The sizes of the features of rows, `[C, 1]`."""
    found = inside.to(tl.float32) * 0.0 + 1.0
    if NORM != "none":
        rows, _ = featured(rows_at(x, at, inside, o, P), inside[:, None] & (o < P)[None, :], PHI)
        _, found = sized(rows, NORM)
    return found[:, None]


@triton.jit(do_not_specialize_on_alignment=COUNTS)
def channel_factors(
    q, k, kw, lr, retain, write, reset, spans, lower, attend, kq, kp, ke, zq, zp, ends, T, H, N,
    P: tl.constexpr, BP: tl.constexpr, C: tl.constexpr, SEG: tl.constexpr, LOG: tl.constexpr, FORM: tl.constexpr,
    MASK: tl.constexpr, RESET: tl.constexpr, APART: tl.constexpr, DECAYED: tl.constexpr, EARLY_READ: tl.constexpr,
    DT: tl.constexpr, EXACT: tl.constexpr, FINE: tl.constexpr, HALVES: tl.constexpr, BARE: tl.constexpr,
    NORM: tl.constexpr, DOCS: tl.constexpr,
):  # fmt: skip
    """`factors` where retain is one of each phi channel. The product of retain between two tokens is parted at the one
    border of dyadic pieces that lies between them, so that pairs are log2 C products of matrices, without a quotient.

    BARE and NORM are a map and the norm that follows it. kq, kp, ke `[B, T, H, P]`: queries and keys as the chunk's
    first memory sees them, what is written as its end sees it; zq, zp those of a new start; ends `[chunks, 2, P]`: what
    is left of both at the end."""
    MOVES: tl.constexpr = FORM != "target"
    TILE: tl.constexpr = BP if BP < 32 else 32
    i, whole = tl.arange(0, C), tl.arange(0, BP)
    at, inside, behind, place = segment_of(spans, T, H, N, C, SEG, DOCS)
    of_q = sizes(q, at, inside, whole, P, BARE, NORM)
    of_k = sizes(k, at, writes_at(write, at, inside, MASK), whole, P, BARE, NORM)
    A, L = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    for jp in range(0, P, TILE):
        op = jp + tl.arange(0, TILE)
        _, born, qt, pt, bt, rt, before, after = chunk_at(
            q, k, kw, lr, retain, write, reset, at, inside, behind, H, i, op, P, C, MASK, RESET, APART, BARE
        )
        qt, pt = qt / of_q, pt / of_k
        if not APART:
            bt = bt / of_k
        alive = (1 - born)[:, None]
        here = rt * alive
        asked, told = qt * (alive if EARLY_READ else here), pt * (here if DECAYED else alive)
        if not EARLY_READ:
            A += tl.where(i[:, None] == i[None, :], tl.sum(qt * bt, 1)[:, None], 0.0)
        for n in tl.static_range(0, LOG):
            to = running(before, i, 1 << n, False, C, TILE)
            on = tl.trans(bt * running(after, i, 1 << n, True, C, TILE))
            A += at_level(product(asked * to, on, FINE), i, 1 << n)
            if MOVES:
                L += at_level(product(told * to, on, FINE), i, 1 << n)
        to, left = running(before, i, C, False, C, TILE), running(after, i, C, True, C, TILE)
        tile, there = at[:, None] * P + op[None, :], inside[:, None] & (op < P)[None, :]
        tl.store(kq + tile, (asked * to).to(kq.dtype.element_ty), mask=there)
        tl.store(kp + tile, (told * to).to(kp.dtype.element_ty), mask=there)
        tl.store(ke + tile, (bt * left).to(ke.dtype.element_ty), mask=there)
        end = ends + place * 2 * P + op
        tl.store(end, tl.sum(tl.where((i == 0)[:, None], left * here, 0.0), 0), mask=op < P)
        if RESET:
            ahead, left = starts(rt, born, i, C)
            tl.store(zq + tile, (qt * (ahead if EARLY_READ else left)).to(zq.dtype.element_ty), mask=there)
            tl.store(zp + tile, (pt * (left if DECAYED else ahead)).to(zp.dtype.element_ty), mask=there)
            tl.store(end + P, tl.sum(tl.where((i == C - 1)[:, None], left, 0.0), 0), mask=op < P)
    if FORM == "error":
        L = inverse(L, i, LOG, HALVES, DT if HALVES else tl.float32, EXACT)
    put(attend, place, i, A, C, HALVES)
    if MOVES:
        put(lower, place, i, L, C, HALVES)


@triton.jit
def spread(x, h: tl.constexpr, C: tl.constexpr, BP: tl.constexpr):
    """The sum over each piece of h rows, in all of its rows."""
    pieces = tl.reshape(x, [C // h, h, BP])
    return tl.reshape(tl.broadcast_to(tl.sum(pieces, 1)[:, None, :], [C // h, h, BP]), [C, BP])


@triton.jit
def halves(x, g_to, g_on, g_whole, to, on, i, h: tl.constexpr, C: tl.constexpr, BP: tl.constexpr):
    """Cotangents of what two pieces of h rows leave of a channel, from those of the piece of 2 h that they make: of
    their products from the start (to) and to the end (on), and of each whole one, in all of its rows. x is what rows
    leave."""
    second, left = ((i // h) % 2 == 1)[:, None], on * x
    ahead = spread(tl.where((i % (2 * h) == 0)[:, None], left, 0.0), 2 * h, C, BP)
    behind = spread(tl.where((i % (2 * h) == h)[:, None], left, 0.0), 2 * h, C, BP)
    by_to = spread(tl.where(second, g_to * to, 0.0), 2 * h, C, BP)
    by_on = spread(tl.where(second, 0.0, g_on * on), 2 * h, C, BP)
    g_whole = tl.where(second, g_whole * ahead + by_on, g_whole * behind + by_to)
    return tl.where(second, g_to * ahead, g_to), tl.where(second, g_on, g_on * behind), g_whole


@triton.jit
def starts_back(rt, born, qt, pt, zq, zp, j, i, C: tl.constexpr, DECAYED: tl.constexpr, EARLY_READ: tl.constexpr):
    """Cotangents of queries, keys and retain by a new start's weights: zq, zp those of their answers, j that of the
    weights at the end."""
    ahead, after = starts(rt, born, i, C)
    by_q, by_p, found = qt * zq, pt * zp, rt * 0.0
    late, early = by_q * 0.0, by_q * 0.0
    if EARLY_READ:
        early += by_q
    else:
        late += by_q
    if DECAYED:
        late += by_p
    else:
        early += by_p
    for back in range(C):
        t = C - 1 - back
        j += row_of(late, i, t)
        found = tl.where((i == t)[:, None], j * ahead, found)
        j = (j * row_of(rt, i, t) + row_of(early, i, t)) * (1 - tl.sum(tl.where(i == t, born, 0.0), 0))
    return (ahead if EARLY_READ else after) * zq, (after if DECAYED else ahead) * zp, found


@triton.jit
def moved(
    X, Z, q, k, kw, v, lr, retain, write, reset, us, es, gy, spans, skip, T, H, N, i, op, ov, P: tl.constexpr,
    V: tl.constexpr, BP: tl.constexpr, C: tl.constexpr, SEG: tl.constexpr, MOVES: tl.constexpr, MASK: tl.constexpr,
    RESET: tl.constexpr, APART: tl.constexpr, DECAYED: tl.constexpr, EARLY_READ: tl.constexpr, EXACT: tl.constexpr,
    PHI: tl.constexpr, DOCS: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """A tile X of the memory after the C tokens that are `skip` chunks from the program's own; or (BACK) of its
    cotangent, ahead of them."""
    at, inside, behind, _ = segment_of(spans, T, H, N, C, SEG, DOCS, skip)
    w, born, qt, pt, bt, rt, before, after = chunk_at(
        q, k, kw, lr, retain, write, reset, at, inside, behind, H, i, op, P, C, MASK, RESET, APART, PHI
    )
    g, u, err = values_at(gy, us, es, v, at, inside, w, ov, V, MOVES)
    alive, on = (1 - born)[:, None], running(after, i, C, True, C, BP)
    x = rt * alive
    X = X * tl.sum(tl.where((i == 0)[:, None], on * x, 0.0), 0)[None, :]
    if BACK:
        to = running(before, i, C, False, C, BP)
        X += product(tl.trans(g), qt * to * (alive if EARLY_READ else x), EXACT)
        if MOVES:
            X += product(tl.trans(err), pt * to * (x if DECAYED else alive), EXACT)
    else:
        X -= product(tl.trans(u), bt * on, EXACT)
        if RESET:
            _, left = starts(rt, born, i, C)
            X += Z * tl.sum(tl.where((i == C - 1)[:, None], left, 0.0), 0)[None, :]
    return X


@triton.jit(do_not_specialize_on_alignment=COUNTS)
def channel_tokens(
    q, k, kw, v, lr, retain, momentum, write, reset, spans, Z0, us, es, kept, gy, kept_G, gq, gk, gw, glr, gr, T, H, N,
    P: tl.constexpr, V: tl.constexpr, BP: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, SEG: tl.constexpr,
    LOG: tl.constexpr, MOVES: tl.constexpr, MASK: tl.constexpr, RESET: tl.constexpr, APART: tl.constexpr,
    DECAYED: tl.constexpr, EARLY_READ: tl.constexpr, EXACT: tl.constexpr, PHI: tl.constexpr, DOCS: tl.constexpr,
):  # fmt: skip
    """One program for each C tokens of a segment of a memory: cotangents of queries, keys, lr and retain. The states
    are those at the segment's ends, moved on by the tokens ahead of its own and back by those behind."""
    R: tl.constexpr = SEG // C
    i, op = tl.arange(0, C), tl.arange(0, BP)
    at, inside, behind, place = segment_of(spans, T, H, N, C, SEG, DOCS)
    part, segment = (place // N % R).to(tl.int32), place // N // R * N + place % N
    w, born, qt, pt, bt, rt, before, after = chunk_at(
        q, k, kw, lr, retain, write, reset, at, inside, behind, H, i, op, P, C, MASK, RESET, APART, PHI
    )
    alive = (1 - born)[:, None]
    x = rt * alive
    gA, gL = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    xq, xp, xb, zq, zp = bt * 0.0, bt * 0.0, bt * 0.0, bt * 0.0, bt * 0.0
    g_end, j = tl.sum(bt * 0.0, 0), tl.sum(bt * 0.0, 0)
    for jv in range(0, V, BV):
        ov = jv + tl.arange(0, BV)
        own, whole = ov[:, None] * P + op[None, :], (ov < V)[:, None] & (op < P)[None, :]
        M, G = state_at(kept, segment * V * P + own, whole), state_at(kept_G, segment * V * P + own, whole)
        Z = M
        if RESET:
            Z = tl.load(Z0 + place % N * V * P + own, mask=whole, other=0.0)
        for ahead in range(part, 0, -1):
            M = moved(
                M, Z, q, k, kw, v, lr, retain, write, reset, us, es, gy, spans, -ahead, T, H, N, i, op, ov, P, V, BP,
                C, SEG, MOVES, MASK, RESET, APART, DECAYED, EARLY_READ, EXACT, PHI, DOCS, False)  # fmt: skip
        for later in range(R - 1 - part, 0, -1):
            G = moved(
                G, Z, q, k, kw, v, lr, retain, write, reset, us, es, gy, spans, later, T, H, N, i, op, ov, P, V, BP,
                C, SEG, MOVES, MASK, RESET, APART, DECAYED, EARLY_READ, EXACT, PHI, DOCS, True)  # fmt: skip
        g, u, err = values_at(gy, us, es, v, at, inside, w, ov, V, MOVES)
        gA -= product(g, tl.trans(u), EXACT)
        xq += product(g, M, EXACT)
        xb -= product(u, G, EXACT)
        g_end += tl.sum(G * M, 0)
        if MOVES:
            gL -= product(err, tl.trans(u), EXACT)
            xp += product(err, M, EXACT)
        if RESET:
            zq += product(g, Z, EXACT)
            j += tl.sum(G * Z, 0)
            if MOVES:
                zp += product(err, Z, EXACT)
    seen, told = alive if EARLY_READ else x, x if DECAYED else alive
    asked, keyed = qt * seen, pt * told
    to, on = running(before, i, C, False, C, BP), running(after, i, C, True, C, BP)
    gqt, gpt, gbt = to * xq, to * xp, on * xb
    g_to, g_on, g_whole = asked * xq + keyed * xp, bt * xb, bt * 0.0 + g_end[None, :]
    for n in tl.static_range(LOG - 1, -1, -1):
        to, on = running(before, i, 1 << n, False, C, BP), running(after, i, 1 << n, True, C, BP)
        g_to, g_on, g_whole = halves(x, g_to, g_on, g_whole, to, on, i, 1 << n, C, BP)
        pairs, written = at_level(gA, i, 1 << n), bt * on
        xq, xb = product(pairs, written, EXACT), product(tl.trans(pairs), asked * to, EXACT)
        g_to += asked * xq
        gqt += to * xq
        if MOVES:
            pairs = at_level(gL, i, 1 << n)
            xp = product(pairs, written, EXACT)
            xb += product(tl.trans(pairs), keyed * to, EXACT)
            g_to += keyed * xp
            gpt += to * xp
        g_on += bt * xb
        gbt += on * xb
    if not EARLY_READ:
        g_whole += gqt * qt
    if DECAYED:
        g_whole += gpt * pt
    grt, gqt, gpt = g_whole * alive, gqt * seen, gpt * told
    if not EARLY_READ:  # a token's read of its own write
        own_pair = tl.sum(tl.where(i[:, None] == i[None, :], gA, 0.0), 1)[:, None]
        gqt += own_pair * bt
        gbt += own_pair * qt
    if RESET:
        zq, zp, by_start = starts_back(rt, born, qt, pt, zq, zp, j[None, :], i, C, DECAYED, EARLY_READ)
        grt += by_start
        gqt += zq
        if MOVES:
            gpt += zp
    queries_back(gq, gqt, q, at, inside, op, P, PHI)
    tile, there = at[:, None] * P + op[None, :], inside[:, None] & (op < P)[None, :]
    tl.store(gr + tile, tl.where(w[:, None], grt, 0.0), mask=there)
    keys_back(gk, gw, glr, gbt, gpt, k, kw, lr, at, inside, w, op, P, APART, PHI)
