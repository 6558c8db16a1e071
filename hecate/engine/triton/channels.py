"""The backward kernel of rows where retain is one of each phi channel.

A write's part of the memory, X_i[t, p] = b_i[p] prod of retain_l[p] over i < l <= t, is no matrix of coefficients times
b_i, so that the tokens of a block are taken one after another, from the last: H holds the cotangent of every X_i, h and
j those of what is left of the block's first memory M and of the weights Z of a new start. At a token they take what was
read and predicted through it, then retain's cotangent is <H, X> there, and its product with retain goes on. X is made
anew at every token, by products: a gate of 0 has its own cotangent. [ENG-TRITON-D2]
"""

import triton
import triton.language as tl

from hecate.engine.triton.back import keys_back, queries_back, state_at, values_at
from hecate.engine.triton.block import channels_at, gates_at, keys_at, product, row_of, segment_of
from hecate.engine.triton.factors import at_level, inverse, put, times
from hecate.engine.triton.maps import COUNTS


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


@triton.jit(do_not_specialize_on_alignment=COUNTS)
def channel_factors(
    q, k, kw, lr, retain, write, reset, spans, lower, attend, kq, kp, ke, zq, zp, ends, T, H, N,
    P: tl.constexpr, BP: tl.constexpr, C: tl.constexpr, SEG: tl.constexpr, LOG: tl.constexpr, FORM: tl.constexpr,
    MASK: tl.constexpr, RESET: tl.constexpr, APART: tl.constexpr, DECAYED: tl.constexpr, EARLY_READ: tl.constexpr,
    DT: tl.constexpr, EXACT: tl.constexpr, HALVES: tl.constexpr, PHI: tl.constexpr, DOCS: tl.constexpr,
):  # fmt: skip
    """`factors` where retain is one of each phi channel. The product of retain between two tokens is parted at the one
    border of dyadic pieces that lies between them, so that pairs are log2 C products of matrices, without a quotient.

    kq, kp, ke `[B, T, H, P]`: queries and keys as the chunk's first memory sees them, what is written as its end sees
    it; zq, zp those of a new start; ends `[chunks, 2, P]`: what is left of both at the end."""
    MOVES: tl.constexpr = FORM != "target"
    i, op = tl.arange(0, C), tl.arange(0, BP)
    at, inside, behind, place = segment_of(spans, T, H, N, C, SEG, DOCS)
    _, born, qt, pt, bt, rt, before, after = chunk_at(
        q, k, kw, lr, retain, write, reset, at, inside, behind, H, i, op, P, C, MASK, RESET, APART, PHI
    )
    here = rt * (1 - born)[:, None]
    A, L = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    if not EARLY_READ:
        A = tl.where(i[:, None] == i[None, :], tl.sum(qt * bt, 1)[:, None], A)
    for n in tl.static_range(0, LOG + 1):
        left, to = running(after, i, 1 << n, True, C, BP), running(before, i, 1 << n, False, C, BP)
        on = bt * left
        asked = qt * to * ((1 - born)[:, None] if EARLY_READ else here)
        told = pt * to * (here if DECAYED else (1 - born)[:, None])
        if n < LOG:
            A += at_level(times(asked, tl.trans(on), DT, EXACT), i, 1 << n)
            if MOVES:
                L += at_level(times(told, tl.trans(on), DT, EXACT), i, 1 << n)
        else:
            tile, there = at[:, None] * P + op[None, :], inside[:, None] & (op < P)[None, :]
            tl.store(kq + tile, asked.to(kq.dtype.element_ty), mask=there)
            tl.store(kp + tile, told.to(kp.dtype.element_ty), mask=there)
            tl.store(ke + tile, on.to(ke.dtype.element_ty), mask=there)
            tl.store(ends + place * 2 * P + op, tl.sum(tl.where((i == 0)[:, None], left * here, 0.0), 0), mask=op < P)
    if FORM == "error":
        L = inverse(L, i, LOG, HALVES, DT, EXACT)
    put(attend, place, i, A, C, HALVES)
    if MOVES:
        put(lower, place, i, L, C, HALVES)
    if RESET:
        ahead, left = starts(rt, born, i, C)
        tile, there = at[:, None] * P + op[None, :], inside[:, None] & (op < P)[None, :]
        tl.store(zq + tile, (qt * (ahead if EARLY_READ else left)).to(zq.dtype.element_ty), mask=there)
        tl.store(zp + tile, (pt * (left if DECAYED else ahead)).to(zp.dtype.element_ty), mask=there)
        tl.store(ends + (place * 2 + 1) * P + op, tl.sum(tl.where((i == C - 1)[:, None], left, 0.0), 0), mask=op < P)


@triton.jit(do_not_specialize_on_alignment=COUNTS)
def channel_tokens(
    q, k, kw, v, lr, retain, momentum, write, reset, spans, Z0, us, es, kept, gy, kept_G, gq, gk, gw, glr, gr, T, H, N,
    P: tl.constexpr, V: tl.constexpr, BP: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    MOVES: tl.constexpr, RETAIN: tl.constexpr, MOMENTUM: tl.constexpr, MASK: tl.constexpr, RESET: tl.constexpr,
    APART: tl.constexpr, DECAYED: tl.constexpr, EARLY_READ: tl.constexpr, EXACT: tl.constexpr, PHI: tl.constexpr,
    DOCS: tl.constexpr,
):  # fmt: skip
    """One program for each block of C tokens of a memory: cotangents of queries, keys, lr and retain."""
    i, op = tl.arange(0, C), tl.arange(0, BP)
    at, inside, behind, place = segment_of(spans, T, H, N, C, C, DOCS)
    w, born, qt, pt, bt, rt, before, after = chunk_at(
        q, k, kw, lr, retain, write, reset, at, inside, behind, H, i, op, P, C, MASK, RESET, APART, PHI
    )
    a = tl.cumprod(before, 0) * (1 - born)[:, None]  # what is left of M, ahead of retain
    z = a * 0.0
    if RESET:
        z, _ = starts(rt, born, i, C)
    gA, gL = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    xq, xp, H_, zq, zp = bt * 0.0, bt * 0.0, bt * 0.0, bt * 0.0, bt * 0.0
    h, j = tl.sum(bt * 0.0, 0), tl.sum(bt * 0.0, 0)
    for jv in range(0, V, BV):
        ov = jv + tl.arange(0, BV)
        own, whole = ov[:, None] * P + op[None, :], (ov < V)[:, None] & (op < P)[None, :]
        state = place * V * P + own
        g, u, err = values_at(gy, us, es, v, at, inside, w, ov, V, MOVES)
        M, G = state_at(kept, state, whole), state_at(kept_G, state, whole)
        gA -= product(g, tl.trans(u), EXACT)
        xq += product(g, M, EXACT)
        H_ -= product(u, G, EXACT)
        h += tl.sum(G * M, 0)
        if MOVES:
            gL -= product(err, tl.trans(u), EXACT)
            xp += product(err, M, EXACT)
        if RESET:
            Z = tl.load(Z0 + place % N * V * P + own, mask=whole, other=0.0)
            zq += product(g, Z, EXACT)
            zp += product(err, Z, EXACT)
            j += tl.sum(G * Z, 0)
    h, j = h[None, :], j[None, :]
    # Rows of what is seen of M and Z, by reads and by predictions.
    aq, zs, ap, zt = a, z, a, z
    if not EARLY_READ:
        aq, zs = a * rt, z * rt
    if DECAYED:
        ap, zt = a * rt, z * rt
    gqt, gpt, gbt, grt = aq * xq + zs * zq, bt * 0.0, bt * 0.0, bt * 0.0
    if MOVES:
        gpt = ap * xp + zt * zp
    for back in range(C):
        t = C - 1 - back
        now = (i == t)[:, None]
        qr, pr, r = row_of(qt, i, t), row_of(pt, i, t), row_of(rt, i, t)
        cA = tl.where(i <= t, tl.sum(tl.where(now, gA, 0.0), 0), 0.0)[:, None]
        cL = tl.where(i < t, tl.sum(tl.where(now, gL, 0.0), 0), 0.0)[:, None]
        n_t = 1 - tl.sum(tl.where(i == t, born, 0.0), 0)
        left = tl.cumprod(tl.where((i + 1 < t)[:, None], after, 1.0), 0, reverse=True)
        X = tl.where((i < t)[:, None], bt * left, 0.0) * n_t
        if not EARLY_READ:
            H_ += cA * qr
            h, j = h + qr * row_of(xq, i, t), j + qr * row_of(zq, i, t)
            gqt += tl.where(now, tl.sum(cA * tl.where(now, bt, X * r), 0)[None, :], 0.0)
        gbt = tl.where(now, H_, gbt)
        if MOVES and DECAYED:
            H_ += cL * pr
            h, j = h + pr * row_of(xp, i, t), j + pr * row_of(zp, i, t)
            gpt += tl.where(now, tl.sum(cL * (X * r), 0)[None, :], 0.0)
        gr_t = tl.sum(H_ * X, 0)[None, :] + h * row_of(a, i, t) + j * row_of(z, i, t)
        grt = tl.where(now, gr_t, grt)
        H_, h, j = H_ * r, h * r, j * r
        if EARLY_READ:
            cA = tl.where((i < t)[:, None], cA, 0.0)
            H_ += cA * qr
            h, j = h + qr * row_of(xq, i, t), j + qr * row_of(zq, i, t)
            gqt += tl.where(now, tl.sum(cA * X, 0)[None, :], 0.0)
        if MOVES and not DECAYED:
            H_ += cL * pr
            h, j = h + pr * row_of(xp, i, t), j + pr * row_of(zp, i, t)
            gpt += tl.where(now, tl.sum(cL * X, 0)[None, :], 0.0)
        H_, h, j = H_ * n_t, h * n_t, j * n_t
    tile, there = at[:, None] * P + op[None, :], inside[:, None] & (op < P)[None, :]
    queries_back(gq, gqt, q, at, inside, op, P, PHI)
    tl.store(gr + tile, tl.where(w[:, None], grt, 0.0), mask=there)
    keys_back(gk, gw, glr, gbt, gpt, k, kw, lr, at, inside, w, op, P, APART, PHI)
