"""Chunk kernels for retain per phi channel: coefficients of token pairs, and the rows' part of the backward pass.

A write's share of the memory, X_i[t, p] = b_i[p] prod of retain_l[p] over i < l <= t, is not a coefficient matrix times
b_i. So a chunk is split into dyadic pieces of 1, 2, 4 .. tokens. Between any two tokens lies exactly one border between
the halves of a piece. The product from i to that border belongs to row i, the product from there to t to row t, and the
pairs across the border form a matrix product. Backwards, each level yields cotangents of its rows and of these two
products; those of a piece's products become those of its halves, from a segment down to pieces of 16 tokens. Within
these, a thread handles one channel token by token; the cotangents of pairs, which channels share, are computed
beforehand. No product is divided by another, so a gate of 0 has a cotangent too. [ENG-TRITON-D2]
"""

import triton
import triton.language as tl

from hecate.engine.triton.back import cells_of, keys_back, pairs_of, queries_back, writes_of
from hecate.engine.triton.block import (
    channels_at,
    gates_at,
    narrowed,
    origin_of,
    row_of,
    rows,
    segment_of,
    times,
    writes_at,
)
from hecate.engine.triton.factors import at_level, inverse, put
from hecate.engine.triton.maps import COUNTS, PLAIN, featured


@triton.jit
def left_at(retain, write, reset, at, there, o, P: tl.constexpr, MASK: tl.constexpr, RESET: tl.constexpr):
    """Factors `[C, P]` by which tokens scale the earlier state: their retain, or 0 at a reset."""
    w, born, _, _ = gates_at(retain, retain, write, reset, at, there, False, False, MASK, RESET)
    return channels_at(retain, at, w, o, P) * (1 - born)[:, None]


@triton.jit
def chunk_at(
    q, k, kw, lr, retain, write, reset, at, inside, behind, H, i, op, P: tl.constexpr, C: tl.constexpr,
    MASK: tl.constexpr, RESET: tl.constexpr, APART: tl.constexpr, PHI: tl.constexpr,
):  # fmt: skip
    """(w, born, queries, keys, lr times written keys, retain) of a chunk's tokens, and `left_at` of the tokens before
    and after each."""
    w, born, _, _ = gates_at(retain, retain, write, reset, at, inside, False, False, MASK, RESET)
    qt = rows(q, at, inside, op, P, PHI).to(tl.float32) * PHI[3]
    pt = rows(k, at, w, op, P, PHI).to(tl.float32)
    bt = pt
    if APART:
        bt = rows(kw, at, w, op, P, PLAIN).to(tl.float32)
    bt = bt * tl.load(lr + at, mask=w, other=0.0).to(tl.float32)[:, None]
    before = left_at(retain, write, reset, at - H, inside & (i > 0), op, P, MASK, RESET)
    after = left_at(retain, write, reset, at + H, behind & (i < C - 1), op, P, MASK, RESET)
    return w, born, qt, pt, bt, channels_at(retain, at, w, op, P), before, after


@triton.jit
def starts(rt, born, i, C: tl.constexpr):
    """Share of the last reset's weights that each token sees before its retain, and after it."""
    ahead, after, row = rt * 0.0, rt * 0.0, tl.sum(rt * 0.0, 0)[None, :]
    for t in range(C):
        # A sequential product of retain since the last reset, 0 before the first reset.
        x, now = tl.sum(tl.where(i == t, born, 0.0), 0), (i == t)[:, None]
        row = row * (1 - x) + x
        ahead = tl.where(now, row, ahead)
        row = row * row_of(rt, i, t)
        after = tl.where(now, row, after)
    return ahead, after


@triton.jit
def running(x, i, h: tl.constexpr, BACK: tl.constexpr, C: tl.constexpr, BP: tl.constexpr):
    """Cumulative products of rows in pieces of h rows from the start, or the end (BACK), which counts as 1."""
    # The first row of a piece, or the last (BACK), starts the product at 1.
    edge = i % h == (h - 1 if BACK else 0)
    pieces = tl.reshape(tl.where(edge[:, None], 1.0, x), [C // h, h, BP])
    return tl.reshape(tl.cumprod(pieces, 1, reverse=BACK), [C, BP])


@triton.jit
def sizes(x, at, inside, o, P: tl.constexpr, PHI: tl.constexpr):
    """The sizes of the features of rows, `[C, 1]`; 1 without a norm."""
    found = inside.to(tl.float32) * 0.0 + 1.0
    if PHI[2] != "none":
        y, there = rows(x, at, inside, o, P, PLAIN).to(tl.float32), inside[:, None] & (o < P)[None, :]
        _, found = featured(y, there, PHI)
    return found[:, None]


@triton.jit
def joined(found, others):
    """A tuple and the items of another, which Triton cannot unpack."""
    return found + others


@triton.jit
def beside(x, h: tl.constexpr, C: tl.constexpr, BP: tl.constexpr):
    """For each row, the sum over the sibling of its piece of h rows: the other half of the piece of 2 h rows."""
    half = tl.arange(0, 2)[None, :, None]
    sums = tl.sum(tl.reshape(x, [C // (2 * h), 2, h, BP]), 2)
    first, second = tl.sum(tl.where(half == 0, sums, 0.0), 1), tl.sum(tl.where(half == 1, sums, 0.0), 1)
    turned = tl.where(half == 0, second[:, None, :], first[:, None, :])
    return tl.reshape(tl.broadcast_to(turned[:, :, None, :], [C // (2 * h), 2, h, BP]), [C, BP])


@triton.jit
def doubled(to, on, left, i, h: tl.constexpr, C: tl.constexpr, BP: tl.constexpr):
    """Products from the start of a piece of 2 h rows, to its end, and over all of it (in its first row), from those of
    its halves."""
    second = ((i // h) % 2 == 1)[:, None]
    other = beside(tl.where((i % h == 0)[:, None], left, 0.0), h, C, BP)
    return tl.where(second, to * other, to), tl.where(second, on, on * other), left * other


@triton.jit(do_not_specialize_on_alignment=COUNTS)
def channel_factors(
    q, k, kw, lr, retain, write, reset, spans, lower, attend, kq, kp, ke, zq, zp, ends, T, H, N,
    P: tl.constexpr, BP: tl.constexpr, C: tl.constexpr, SEG: tl.constexpr, LOG: tl.constexpr, FORM: tl.constexpr,
    MASK: tl.constexpr, RESET: tl.constexpr, APART: tl.constexpr, DECAYED: tl.constexpr, EARLY_READ: tl.constexpr,
    DT: tl.constexpr, EXACT: tl.constexpr, FINE: tl.constexpr, HALVES: tl.constexpr, PHI: tl.constexpr,
    BARE: tl.constexpr, DOCS: tl.constexpr,
):  # fmt: skip
    """`factors` for retain per phi channel. The product of retain between two tokens is split at the one dyadic border
    between them, so that pairs take log2 C matrix products and no division.

    BARE is the map of PHI without its norm. kq, kp, ke `[B, T, H, P]`: queries and keys scaled from the chunk's start,
    written keys scaled to its end; zq, zp: the same of queries and keys from the last reset; ends `[chunks, 2, P]`: the
    share of the first memory and of the reset's weights left at the end."""
    MOVES: tl.constexpr = FORM != "target"
    # Channels interact only through sums over them, so they are tiled to what registers hold.
    TILE: tl.constexpr = BP if BP < 32 else 32
    i, whole = tl.arange(0, C), tl.arange(0, BP)
    at, inside, behind, place = segment_of(spans, T, H, N, C, SEG, DOCS)
    of_q = sizes(q, at, inside, whole, P, PHI)
    of_k = sizes(k, at, writes_at(write, at, inside, MASK), whole, P, PHI)
    A, L = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    for jp in range(0, P, TILE):
        op = jp + tl.arange(0, TILE)
        _, born, qt, pt, bt, rt, _, _ = chunk_at(
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
        # A piece of one token: product 1 from its start, 1 to its end, and its own retain over it.
        to, on, left = here * 0.0 + 1.0, here * 0.0 + 1.0, here
        for n in tl.static_range(0, LOG):
            written = tl.trans(bt * on)
            A += at_level(tl.dot(asked * to, written, input_precision=FINE), i, 1 << n)
            if MOVES:
                # A level covers the pairs of second halves with first halves of the same piece of 2 h tokens.
                L += at_level(tl.dot(told * to, written, input_precision=FINE), i, 1 << n)
            to, on, left = doubled(to, on, left, i, 1 << n, C, TILE)
        tile, there = at[:, None] * P + op[None, :], inside[:, None] & (op < P)[None, :]
        tl.store(kq + tile, (asked * to).to(kq.dtype.element_ty), mask=there)
        tl.store(kp + tile, (told * to).to(kp.dtype.element_ty), mask=there)
        tl.store(ke + tile, (bt * on).to(ke.dtype.element_ty), mask=there)
        end = ends + place * 2 * P + op
        tl.store(end, tl.sum(tl.where((i == 0)[:, None], left, 0.0), 0), mask=op < P)
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
def across(
    acc, m, x, place, i, h: tl.constexpr, TURN: tl.constexpr, C: tl.constexpr, DT: tl.constexpr, EXACT: tl.constexpr,
    HALVES: tl.constexpr,
):  # fmt: skip
    """acc + m x, or acc + m^T x (TURN), for a segment's pairs m of siblings of h rows; in two halves if HALVES."""
    N: tl.constexpr = 2 if HALVES else 1
    row, column = i[:, None], i[None, :]
    if TURN:
        row, column = column, row
    pair, here = m + place * N * C * C + row * C + column, row // (2 * h) == column // (2 * h)
    here = here & (row % (2 * h) >= h) & (column % (2 * h) < h)
    high, near = tl.load(pair, mask=here, other=0.0).to(DT), narrowed(x, DT)
    acc = tl.dot(high, near, acc, input_precision=EXACT)
    if HALVES:
        acc = tl.dot(tl.load(pair + C * C, mask=here, other=0.0).to(DT), near, acc, input_precision=EXACT)
        acc = tl.dot(high, narrowed(x - near.to(tl.float32), DT), acc, input_precision=EXACT)
    return acc


@triton.jit
def halves(
    xq, xp, xb, g_whole, reads, tells, place, asked, keyed, bt, to, on, other, i, h: tl.constexpr, C: tl.constexpr,
    BP: tl.constexpr, MOVES: tl.constexpr, DT: tl.constexpr, EXACT: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Cotangents that enter pieces of h rows from outside, from those that enter the enclosing pieces of 2 h rows: of
    queries and keys scaled from a piece's start (xq, xp), of written keys scaled to its end (xb), and of the product
    over a piece, in all of its rows. to, on, other: products from a piece's start, to its end, and over its sibling."""
    # A first half starts where the whole does, a second half ends where it does: only the other two are scaled.
    second = ((i // h) % 2 == 1)[:, None]
    g_whole = g_whole * other + beside(tl.where(second, (asked * xq + keyed * xp) * to, bt * xb * on), h, C, BP)
    xq, xb = tl.where(second, xq * other, xq), tl.where(second, xb, xb * other)
    xq = across(xq, reads, bt * on, place, i, h, False, C, DT, EXACT, HALVES)
    xb = across(xb, reads, asked * to, place, i, h, True, C, DT, EXACT, HALVES)
    if MOVES:
        xp = across(tl.where(second, xp * other, xp), tells, bt * on, place, i, h, False, C, DT, EXACT, HALVES)
        xb = across(xb, tells, keyed * to, place, i, h, True, C, DT, EXACT, HALVES)
    return xq, xp, xb, g_whole


@triton.jit(do_not_specialize_on_alignment=COUNTS)
def channel_pairs(
    q, k, v, write, spans, us, es, gy, reads, tells, pairs, overs, T, H, N, total,
    P: tl.constexpr, V: tl.constexpr, BP: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, PIECE: tl.constexpr,
    MOVES: tl.constexpr, MASK: tl.constexpr, DT: tl.constexpr, EXACT: tl.constexpr, HALVES: tl.constexpr,
    PHI: tl.constexpr, DOCS: tl.constexpr,
):  # fmt: skip
    """One program per segment of C tokens: cotangents of its pairs for reads and predictions (reads, tells), and in
    float32 of those within pieces of 2^PIECE tokens, `[2, segments, N, C, 2^PIECE]`; overs `[2, B, T, H]`: reciprocal
    sizes of queries and keys."""
    SMALL: tl.constexpr = 1 << PIECE
    i, op = tl.arange(0, C), tl.arange(0, BP)
    at, inside, _, place = segment_of(spans, T, H, N, C, C, DOCS)
    w = writes_at(write, at, inside, MASK)
    tl.store(overs + at[:, None], 1 / sizes(q, at, inside, op, P, PHI), mask=inside[:, None])
    tl.store(overs + total + at[:, None], 1 / sizes(k, at, w, op, P, PHI), mask=inside[:, None])
    gA, gL = pairs_of(gy, us, es, v, at, inside, w, i, V, BV, C, MOVES, DT, EXACT)
    pair = pairs + (place * C + i[:, None]) * SMALL + i[None, :] % SMALL
    near = i[:, None] // SMALL == i[None, :] // SMALL
    put(reads, place, i, gA, C, HALVES)
    tl.store(pair, gA, mask=near)
    if MOVES:
        put(tells, place, i, gL, C, HALVES)
        tl.store(pair + tl.num_programs(0).to(tl.int64) * C * SMALL, gL, mask=near)


@triton.jit
def starts_back(rt, born, qt, pt, zq, zp, j, i, C: tl.constexpr, DECAYED: tl.constexpr, EARLY_READ: tl.constexpr):
    """Cotangents of queries, keys and retain through the weights of resets. zq, zp: those of scaled queries and keys;
    j: that of the share at the segment's end."""
    ahead, after = starts(rt, born, i, C)
    by_q, by_p, found = qt * zq, pt * zp, rt * 0.0
    late = (found if EARLY_READ else by_q) + (by_p if DECAYED else found)
    early = (by_q if EARLY_READ else found) + (found if DECAYED else by_p)
    for back in range(C):
        t = C - 1 - back
        # From the last token back: j is the cotangent of what is seen of the start's weights.
        j += row_of(late, i, t)
        found = tl.where((i == t)[:, None], j * ahead, found)
        j = (j * row_of(rt, i, t) + row_of(early, i, t)) * (1 - tl.sum(tl.where(i == t, born, 0.0), 0))
    return (ahead if EARLY_READ else after) * zq, (after if DECAYED else ahead) * zp, found


@triton.jit(do_not_specialize_on_alignment=COUNTS)
def channel_borders(
    q, k, kw, v, lr, retain, write, reset, spans, Z0, us, es, kept, gy, kept_G, reads, tells, overs, sums, fresh, ends,
    T, H, N, total,
    P: tl.constexpr, V: tl.constexpr, BP: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, LOG: tl.constexpr,
    PIECE: tl.constexpr, TILE: tl.constexpr, MOVES: tl.constexpr, MASK: tl.constexpr, RESET: tl.constexpr,
    APART: tl.constexpr, DECAYED: tl.constexpr, EARLY_READ: tl.constexpr, DT: tl.constexpr, EXACT: tl.constexpr,
    HALVES: tl.constexpr, BARE: tl.constexpr, DOCS: tl.constexpr,
):  # fmt: skip
    """One program per TILE of the channels of a segment of C tokens: cotangents that enter pieces of 2^PIECE tokens
    from outside.

    sums `[3, B, T, H, P]`: of queries and keys scaled from their piece's start, of written keys scaled to its end;
    fresh, of the same shape: what resets add to those of queries, keys and retain; ends `[segments, N, pieces, P]`: of
    the product over a piece."""
    TILES: tl.constexpr = (P + TILE - 1) // TILE
    SMALL: tl.constexpr = 1 << PIECE
    i, own = tl.arange(0, C), tl.program_id(0) % TILES
    op = own * TILE + tl.arange(0, TILE)
    in_p = (op < P)[None, :]
    at, inside, behind, place = segment_of(spans, T, H, N, C, C, DOCS, TILES)
    w = writes_at(write, at, inside, MASK)
    xq, xp, xb = tl.zeros([C, TILE], tl.float32), tl.zeros([C, TILE], tl.float32), tl.zeros([C, TILE], tl.float32)
    zq, zp, g_end, j = xq, xp, tl.sum(xq, 0), tl.sum(xq, 0)
    for jv in range(0, V, BV):
        ov, cell, whole = cells_of(jv, op, V, P, BV)
        state, g, err = place * V * P + cell, rows(gy, at, inside, ov, V, PLAIN), rows(es, at, inside, ov, V, PLAIN)
        M, G = tl.load(kept + state, mask=whole, other=0.0), tl.load(kept_G + state, mask=whole, other=0.0)
        xq += times(g, M, DT, EXACT)
        D = writes_of(us, v, at, inside, w, ov, V, MOVES)  # u, or -u
        xb += times(-D if MOVES else D, G, DT, EXACT)
        g_end += tl.sum(G.to(tl.float32) * M, 0)
        if MOVES:
            xp += times(err, M, DT, EXACT)
        if RESET:
            Z = tl.load(Z0 + place % N * V * P + cell, mask=whole, other=0.0)
            zq += times(g, Z, DT, EXACT)
            j += tl.sum(G * Z, 0)
            if MOVES:
                zp += times(err, Z, DT, EXACT)
    if MOVES:  # es is -e; negating here and not in the loop spills fewer registers
        xp, zp = -xp, -zp
    w, born, qt, pt, bt, rt, before, after = chunk_at(
        q, k, kw, lr, retain, write, reset, at, inside, behind, H, i, op, P, C, MASK, RESET, APART, BARE
    )
    of_k = tl.load(overs + total + at, mask=inside, other=1.0)[:, None]
    qt, pt = qt * tl.load(overs + at, mask=inside, other=1.0)[:, None], pt * of_k
    if not APART:
        bt = bt * of_k
    alive = (1 - born)[:, None]
    x = rt * alive
    asked, keyed = qt * (alive if EARLY_READ else x), pt * (x if DECAYED else alive)
    to, on = running(before, i, SMALL, False, C, TILE), running(after, i, SMALL, True, C, TILE)
    # Products over pieces go through memory to the rows of their siblings.
    pieces, first = ends + place * (C // SMALL) * P + op[None, :], (i % SMALL == 0)[:, None] & in_p
    tl.store(pieces + i[:, None] // SMALL * P, on * x, mask=first)
    tl.debug_barrier()
    tos, ons, others = (), (), ()
    for n in tl.static_range(PIECE, LOG):
        tos, ons, other, second = joined(tos, (to,)), joined(ons, (on,)), qt * 0.0 + 1.0, ((i >> n) % 2 == 1)[:, None]
        for piece in tl.static_range(1 << (n - PIECE)):
            sibling = (((i >> n) ^ 1) << (n - PIECE)) + piece
            other *= tl.load(pieces + sibling[:, None] * P, mask=in_p, other=0.0)
        to, on, others = tl.where(second, to * other, to), tl.where(second, on, on * other), joined(others, (other,))
    tl.debug_barrier()
    g_whole = bt * 0.0 + g_end[None, :]
    for n in tl.static_range(LOG - 1, PIECE - 1, -1):
        xq, xp, xb, g_whole = halves(
            xq, xp, xb, g_whole, reads, tells, place, asked, keyed, bt, tos[n - PIECE], ons[n - PIECE],
            others[n - PIECE], i, 1 << n, C, TILE, MOVES, DT, EXACT, HALVES
        )  # fmt: skip
    apart = (place * 0 + total) * P
    tile, there = at[:, None] * P + op[None, :], inside[:, None] & in_p
    tl.store(sums + tile, xq, mask=there)
    if MOVES:
        tl.store(sums + apart + tile, xp, mask=there)
    tl.store(sums + 2 * apart + tile, xb, mask=there)
    tl.store(pieces + i[:, None] // SMALL * P, g_whole, mask=first)
    if RESET:
        zq, zp, by_start = starts_back(rt, born, qt, pt, zq, zp, j[None, :], i, C, DECAYED, EARLY_READ)
        tl.store(fresh + tile, zq, mask=there)
        tl.store(fresh + apart + tile, zp, mask=there)
        tl.store(fresh + 2 * apart + tile, by_start, mask=there)


@triton.jit
def token_at(
    q, k, retain, write, reset, overs, total, at, inside, op, P: tl.constexpr, MASK: tl.constexpr, RESET: tl.constexpr,
    BARE: tl.constexpr,
):  # fmt: skip
    """(`left_at`, query, key) of one token as rows `[1, P]`, and 0 at a reset, else 1."""
    w, born, _, _ = gates_at(retain, retain, write, reset, at, inside, False, False, MASK, RESET)
    in_p = (op < P)[None, :]
    asked, wrote, own = inside & in_p, w & in_p, at * P + op[None, :]
    qt, _ = featured(tl.load(q + own, mask=asked, other=0.0).to(tl.float32), asked, BARE)
    pt, _ = featured(tl.load(k + own, mask=wrote, other=0.0).to(tl.float32), wrote, BARE)
    qt = qt * (tl.load(overs + at, mask=inside, other=0.0) * BARE[3])
    pt = pt * tl.load(overs + total + at, mask=w, other=0.0)
    return tl.load(retain + own, mask=wrote, other=1.0).to(tl.float32) * (1 - born), qt, pt, 1 - born


@triton.jit(do_not_specialize_on_alignment=COUNTS)
def channel_tokens(
    q, k, kw, lr, retain, write, reset, spans, pairs, sums, fresh, overs, ends, gq, gk, gw, glr, gr, T, H, N, total,
    P: tl.constexpr, BP: tl.constexpr, C: tl.constexpr, SEG: tl.constexpr, MOVES: tl.constexpr, MASK: tl.constexpr,
    RESET: tl.constexpr, APART: tl.constexpr, DECAYED: tl.constexpr, EARLY_READ: tl.constexpr, PHI: tl.constexpr,
    BARE: tl.constexpr, DOCS: tl.constexpr,
):  # fmt: skip
    """One program per piece of C tokens: cotangents of queries, keys, lr and retain, from those of `channel_borders`. A
    thread handles one channel and holds its tokens in registers, so no thread waits for another.

    x_l is `left_at` of token l. For each later token t, U_l(t) sums its cotangents over the piece's tokens before l:
    U_l+1 = x_l U_l + pair(t, l) b_l. Sums over t of products of x from l to t run backwards: s <- x_t s + ., where what
    comes ahead of retain has been multiplied by x_t."""
    op = tl.arange(0, BP)
    first, start, end, place = origin_of(spans, T, H, N, C, SEG, DOCS, 1)
    in_p, rows = (op < P)[None, :], (place * 0 + total) * P
    piece = (place // N // (SEG // C) * N + place % N) * (SEG // C) + place // N % (SEG // C)
    mine, apart = pairs + piece * C * C, tl.num_programs(0).to(tl.int64) * C * C
    # Tuples of rows, for registers cannot be indexed by a variable.
    xs, reads, learns, of_A, of_L = (), (), (), (), ()
    for t in tl.static_range(C):
        at, inside = first + (start + t) * H, start + t < end
        own = sums + at * P + op[None, :]
        x, qt, pt, alive = token_at(q, k, retain, write, reset, overs, total, at, inside, op, P, MASK, RESET, BARE)
        xs, of_A = joined(xs, (x,)), joined(of_A, (tl.load(own, mask=inside & in_p, other=0.0),))
        qt, pt = qt * (alive if EARLY_READ else x), pt * (x if DECAYED else alive)
        reads, learns = joined(reads, (qt,)), joined(learns, (pt,))
        if MOVES:
            of_L = joined(of_L, (tl.load(own + rows, mask=inside & in_p, other=0.0),))
    left = tl.load(ends + piece * P + op[None, :], mask=in_p, other=0.0)
    # A loop, for what is unrolled in full compiles for long; in two parts, for the second has half the later tokens.
    for part in tl.static_range(0, C, C // 2):
        for l in range(part, part + C // 2):
            at, inside = first + (start + l) * H, start + l < end
            cell, there = at * P + op[None, :], inside & in_p
            w = writes_at(write, at, inside, MASK)
            x, qt, pt, alive = token_at(q, k, retain, write, reset, overs, total, at, inside, op, P, MASK, RESET, BARE)
            bt = pt
            if APART:
                bt = tl.load(kw + cell, mask=w & in_p, other=0.0).to(tl.float32)
            bt = bt * tl.load(lr + at, mask=w, other=0.0).to(tl.float32)
            gbt, grt = tl.load(sums + 2 * rows + cell, mask=there, other=0.0), left
            left = x * left + bt * gbt
            pairs_A, pairs_L, moved_A, moved_L = (), (), (), ()
            for t in tl.static_range(part, C):
                pairs_A = joined(pairs_A, (tl.load(mine + t * C + l),))
                if MOVES:
                    pairs_L = joined(pairs_L, (tl.load(mine + apart + t * C + l),))
            gqt, gpt = bt * 0.0, bt * 0.0
            for t in tl.static_range(C - 1, part - 1, -1):
                of_q = of_A[t]
                if MOVES:
                    of_p = of_L[t]
                if t > l:
                    gbt, grt = xs[t] * gbt + pairs_A[t - part] * reads[t], xs[t] * grt + of_q * reads[t]
                    of_q = x * of_q + pairs_A[t - part] * bt
                    if MOVES:
                        gbt, grt = gbt + pairs_L[t - part] * learns[t], grt + of_p * learns[t]
                        of_p = x * of_p + pairs_L[t - part] * bt
                elif t == l:
                    gqt = of_q
                    if MOVES:
                        gpt = of_p
                moved_A = joined((of_q,), moved_A)
                if MOVES:
                    moved_L = joined((of_p,), moved_L)
            of_A, of_L = joined(of_A[:part], moved_A), joined(of_L[:part], moved_L)
            if DECAYED:
                grt += gpt * pt
                gpt = gpt * x
            else:
                gpt = gpt * alive
            if EARLY_READ:
                gqt = gqt * alive
            else:  # a read after the write includes the token's own
                pair = tl.load(mine + l * C + l)
                grt += gqt * qt
                gqt = gqt * x + pair * bt
                gbt += pair * qt
            grt = grt * alive
            if RESET:
                gqt += tl.load(fresh + cell, mask=there, other=0.0)
                if MOVES:
                    gpt += tl.load(fresh + rows + cell, mask=there, other=0.0)
                grt += tl.load(fresh + 2 * rows + cell, mask=there, other=0.0)
            tl.store(gr + cell, tl.where(w, grt, 0.0), mask=there)
            tl.store(sums + cell, gqt, mask=there)
            tl.store(sums + rows + cell, gpt, mask=there)
            tl.store(sums + 2 * rows + cell, gbt, mask=there)
    tl.debug_barrier()  # from here on other threads use these rows
    i = tl.arange(0, C)
    at, inside = first + (start + i) * H, start + i < end
    cell, there = at[:, None] * P + op[None, :], inside[:, None] & in_p
    w = writes_at(write, at, inside, MASK)
    queries_back(gq, tl.load(sums + cell, mask=there, other=0.0), q, at, inside, op, P, PHI)
    gpt = tl.load(sums + rows + cell, mask=there, other=0.0)
    gbt = tl.load(sums + 2 * rows + cell, mask=there, other=0.0)
    keys_back(gk, gw, glr, gbt, gpt, k, kw, lr, at, inside, w, op, P, APART, PHI)
