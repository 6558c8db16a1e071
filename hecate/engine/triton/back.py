"""Backward kernels that process all segments in parallel. Cotangents: g of outputs, G and Y of the last M and S.

`pull` has walked backwards with G, Y and the cotangent of Z, using saved predictions or u, so no state is recomputed.
It stores u, E = -e (e_i is the cotangent of prediction i), the cotangent of v, and G and Y at the end of every segment.
The rest is a closed form in one segment, its first state and its last cotangent: `tokens` computes cotangents of rows,
and sums from which `gates` computes those of retain and momentum. No address has two writers. [ENG-TRITON-D2]
"""

import triton
import triton.language as tl

from hecate.engine.triton.block import between, decays, gates_at, in_halves, rows, segment_of, times, views, writes_at
from hecate.engine.triton.factors import keys_of
from hecate.engine.triton.maps import COUNTS, PLAIN, featured, featured_back


@triton.jit
def writes_of(us, v, at, inside, w, o, V, MOVES: tl.constexpr):
    """Rows of u; without predictions (not MOVES), the values, which are -u."""
    return rows(us, at, inside, o, V, PLAIN) if MOVES else rows(v, at, w, o, V, PLAIN)


@triton.jit
def cells_of(jv, op, V, P, BV: tl.constexpr):
    """(value indices of a tile, offsets of its cells in a state `[V, P]`, mask of these cells)."""
    ov = jv + tl.arange(0, BV)
    return ov, ov[:, None] * P + op[None, :], (ov < V)[:, None] & (op < P)[None, :]


@triton.jit
def met(to, by, x, state, rows, weights, DT: tl.constexpr, EXACT: tl.constexpr):
    """Adds to the cotangents of rows (to) and weights (by), from that of y = weights * (rows state^T), which is x."""
    x = in_halves(x, state, DT, EXACT)
    by += tl.sum(x * rows, 1)
    return to + weights[:, None] * x, by


@triton.jit
def queries_back(gq, g, q, at, inside, op, P: tl.constexpr, PHI: tl.constexpr):
    """Stores the cotangents of queries, given those of their features."""
    there = inside[:, None] & (op < P)[None, :]
    g = featured_back(g * PHI[3], rows(q, at, inside, op, P, PLAIN).to(tl.float32), there, PHI)
    tl.store(gq + at[:, None] * P + op[None, :], g, mask=there)


@triton.jit
def keys_back(
    gk, gw, glr, gbt, gpt, k, kw, lr, at, inside, w, op, P: tl.constexpr, APART: tl.constexpr, PHI: tl.constexpr
):
    """Stores the cotangents of keys, written keys and lr, from gbt of lr times written keys and gpt of featured
    keys."""
    tile, there = at[:, None] * P + op[None, :], inside[:, None] & (op < P)[None, :]
    l = tl.load(lr + at, mask=w, other=0.0).to(tl.float32)[:, None]
    own, cells = rows(k, at, w, op, P, PLAIN).to(tl.float32), w[:, None] & (op < P)[None, :]
    written, _ = featured(own, cells, PHI)
    if APART:
        written = rows(kw, at, w, op, P, PLAIN).to(tl.float32)
    gbt, gpt = tl.where(w[:, None], gbt, 0.0), tl.where(w[:, None], gpt, 0.0)
    tl.store(glr + at, tl.sum(gbt * written, 1), mask=inside)
    if APART:
        tl.store(gw + tile, l * gbt, mask=there)
    else:
        gpt += l * gbt
    tl.store(gk + tile, featured_back(gpt, own, cells, PHI), mask=there)


@triton.jit
def pairs_of(gy, us, es, v, at, inside, w, i, V, BV: tl.constexpr, C: tl.constexpr, MOVES: tl.constexpr,
             DT: tl.constexpr, EXACT: tl.constexpr):  # fmt: skip
    """Pair matrices of the rows of g and, with predictions, of the rows of e, each with the rows of -u."""
    gA, gL = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    for jv in range(0, V, BV):
        ov = jv + tl.arange(0, BV)
        u = tl.trans(writes_of(us, v, at, inside, w, ov, V, MOVES))
        gA += in_halves(rows(gy, at, inside, ov, V, PLAIN), u, DT, EXACT)
        if MOVES:
            gL += in_halves(rows(es, at, inside, ov, V, PLAIN), u, DT, EXACT)
    return -gA if MOVES else gA, gL


@triton.jit(do_not_specialize_on_alignment=COUNTS)
def tokens(
    q, k, kw, v, lr, retain, momentum, write, reset, spans, Z0, us, es, kept, kept_S, gy, kept_G, kept_Y,
    gq, gk, gw, glr, sums, ends, T, H, N, total,
    P: tl.constexpr, V: tl.constexpr, BP: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    MOVES: tl.constexpr, RETAIN: tl.constexpr, MOMENTUM: tl.constexpr, MASK: tl.constexpr, RESET: tl.constexpr,
    APART: tl.constexpr, DECAYED: tl.constexpr, EARLY_READ: tl.constexpr, DT: tl.constexpr, EXACT: tl.constexpr,
    FINE: tl.constexpr, MAP: tl.constexpr, SIZE: tl.constexpr, PHI: tl.constexpr, DOCS: tl.constexpr,
):  # fmt: skip
    """One program per segment of C tokens of a memory: cotangents of its rows, and the sums that `gates` needs. It
    handles queries, written keys and keys in turn, to hold few rows at a time.

    sums `[8, B, T, H]`: cotangents of aq, sq, zq; af, sf, zf; K and P at the segment's end. ends `[segments, N, 4]`: of
    a, s, e, z there."""
    SIGN: tl.constexpr = -1.0 if MOVES else 1.0  # without predictions u is -v
    EARLY: tl.constexpr = EARLY_READ or (MOVES and not DECAYED)
    i, op = tl.arange(0, C), tl.arange(0, BP)
    at, inside, _, place = segment_of(spans, T, H, N, C, C, DOCS)
    w, born, r, R, B, Pm, a, early, e = decays(
        retain, momentum, write, reset, at, H, i, inside, RETAIN, MOMENTUM, MASK, RESET, EARLY
    )
    K, _, _, Kq, aq, sq, zq, F, af, sf, zf = views(
        R, B, Pm, a, early, e, w, born, r, i, MOMENTUM, EARLY_READ, MOVES, DECAYED, DT, FINE
    )
    # The last rows of K and P are the weights of each write in the state at the segment's end.
    k_end = tl.sum(tl.where((i == C - 1)[:, None], K, 0.0), 0)
    p_end = tl.sum(tl.where((i == C - 1)[:, None], Pm, 0.0), 0)
    again = False
    if RESET:
        # Products with Z are needed only in segments that contain a reset.
        again = tl.max(born, 0) > 0
    gA, gL = pairs_of(gy, us, es, v, at, inside, w, i, V, BV, C, MOVES, DT, EXACT)
    # A pair's weight is how much a token's read, or its prediction, sees of the earlier write.
    gA, gL = gA * Kq, gL * F
    asked, own, written, of_q, of_k, step = keys_of(q, k, kw, lr, at, inside, w, op, P, APART, MAP, SIZE)
    sum, end = sums + at, ends + place * 4
    gqt = in_halves(gA * step[None, :], written, DT, EXACT)
    gaq, gsq, gzq, ga, gs, ge, gz = a * 0, a * 0, a * 0, 0.0, 0.0, 0.0, 0.0
    for jv in range(0, V, BV):
        ov, cell, whole = cells_of(jv, op, V, P, BV)
        state, g = place * V * P + cell, rows(gy, at, inside, ov, V, PLAIN)
        M, G = tl.load(kept + state, mask=whole, other=0.0), tl.load(kept_G + state, mask=whole, other=0.0)
        gqt, gaq = met(gqt, gaq, g, M, asked, aq, DT, EXACT)
        ga += tl.sum(G.to(tl.float32) * M)
        if again:
            Z = tl.load(Z0 + place % N * V * P + cell, mask=whole, other=0.0)
            gqt, gzq = met(gqt, gzq, g, Z, asked, zq, DT, EXACT)
            gz += tl.sum(G * Z)
        if MOMENTUM:
            S, Y = tl.load(kept_S + state, mask=whole, other=0.0), tl.load(kept_Y + state, mask=whole, other=0.0)
            gqt, gsq = met(gqt, gsq, g, S, asked, sq, DT, EXACT)
            gs += tl.sum(G.to(tl.float32) * S)
            ge += tl.sum(Y.to(tl.float32) * S)
    tl.store(sum, gaq * of_q, mask=inside)
    tl.store(sum + total, gsq * of_q, mask=inside)
    tl.store(sum + 2 * total, gzq * of_q, mask=inside)
    tl.store(end, ga)
    tl.store(end + 1, gs)
    tl.store(end + 2, ge)
    tl.store(end + 3, gz)
    queries_back(gq, gqt, q, at, inside, op, P, PHI)
    # Rows are transposed here, not pairs: a transposed accumulator is not a safe operand in every Triton version.
    gbt = in_halves(tl.trans(asked), gA * of_q[:, None], DT, EXACT)
    if MOVES:
        gbt += in_halves(tl.trans(own), gL * of_k[:, None], DT, EXACT)
    gbt, gk_end, gp_end = tl.trans(gbt), a * 0, a * 0
    for jv in range(0, V, BV):
        ov, cell, whole = cells_of(jv, op, V, P, BV)
        state, u = place * V * P + cell, writes_of(us, v, at, inside, w, ov, V, MOVES)
        G = tl.load(kept_G + state, mask=whole, other=0.0)
        gbt, gk_end = met(gbt, gk_end, u, G, written, k_end * SIGN, DT, EXACT)
        if MOMENTUM:
            Y = tl.load(kept_Y + state, mask=whole, other=0.0)
            gbt, gp_end = met(gbt, gp_end, u, Y, written, p_end * SIGN, DT, EXACT)
    tl.store(sum + 6 * total, gk_end * (SIGN * step), mask=inside)
    tl.store(sum + 7 * total, gp_end * (SIGN * step), mask=inside)
    # Predicting keys get cotangents through L and the first states, as queries do through A and the first states.
    gpt = gbt * 0.0
    if MOVES:
        gpt, gaf, gsf, gzf = in_halves(gL * step[None, :], written, DT, EXACT), a * 0, a * 0, a * 0
        for jv in range(0, V, BV):
            ov, cell, whole = cells_of(jv, op, V, P, BV)
            state, err = place * V * P + cell, -rows(es, at, inside, ov, V, PLAIN)
            gpt, gaf = met(gpt, gaf, err, tl.load(kept + state, mask=whole, other=0.0), own, af, DT, EXACT)
            if again:
                Z = tl.load(Z0 + place % N * V * P + cell, mask=whole, other=0.0)
                gpt, gzf = met(gpt, gzf, err, Z, own, zf, DT, EXACT)
            if MOMENTUM:
                gpt, gsf = met(gpt, gsf, err, tl.load(kept_S + state, mask=whole, other=0.0), own, sf, DT, EXACT)
        tl.store(sum + 3 * total, gaf * of_k, mask=inside)
        tl.store(sum + 4 * total, gsf * of_k, mask=inside)
        tl.store(sum + 5 * total, gzf * of_k, mask=inside)
    keys_back(gk, gw, glr, gbt, gpt, k, kw, lr, at, inside, w, op, P, APART, PHI)


@triton.jit
def seen_at(sums, row, total, at, inside):
    """Three rows of the sums of `tokens`: the cotangents of a view's coefficients of M, S and Z."""
    of = sums + row * total + at
    M, S = tl.load(of, mask=inside, other=0.0), tl.load(of + total, mask=inside, other=0.0)
    return M, S, tl.load(of + 2 * total, mask=inside, other=0.0)


@triton.jit
def pulled(spans, left, g, ga, first, DT: tl.constexpr, EXACT: tl.constexpr):
    """Cotangent of gates, from that of their products `spans` (g) and of their products from the tile's start (ga).
    `left` and `first` are the products before each gate. Nothing is divided, so a gate of 0 has a cotangent too."""
    return tl.sum(in_halves(tl.trans(spans), g, DT, EXACT) * left, 1) + tl.sum(spans * ga[:, None], 0) * first


@triton.jit(do_not_specialize_on_alignment=COUNTS)
def gates(
    q, k, kw, v, lr, retain, momentum, write, reset, spans, us, es, gy, sums, ends, gr, gm, T, H, N, total,
    P: tl.constexpr, V: tl.constexpr, BP: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    MOVES: tl.constexpr, RETAIN: tl.constexpr, MOMENTUM: tl.constexpr, MASK: tl.constexpr, RESET: tl.constexpr,
    APART: tl.constexpr, DECAYED: tl.constexpr, EARLY_READ: tl.constexpr, DT: tl.constexpr, EXACT: tl.constexpr,
    MAP: tl.constexpr, SIZE: tl.constexpr, DOCS: tl.constexpr,
):  # fmt: skip
    """One program per segment: cotangents of retain and momentum, from those of the coefficients made of them."""
    EARLY: tl.constexpr = EARLY_READ or (MOVES and not DECAYED)
    LEFT: tl.constexpr = MOVES and DECAYED
    i, op = tl.arange(0, C), tl.arange(0, BP)
    at, inside, _, place = segment_of(spans, T, H, N, C, C, DOCS)
    asked, own, written, of_q, of_k, step = keys_of(
        q, k, kw, lr, at, inside, writes_at(write, at, inside, MASK), op, P, APART, MAP, SIZE
    )
    # The cotangent of a product of gates is its cofactor: a dot product of rows, times the pair's cotangent.
    gK = times(asked, tl.trans(written), DT, EXACT) * of_q[:, None] * step[None, :]
    gF = gK
    if MOVES:
        gF = times(own, tl.trans(written), DT, EXACT) * of_k[:, None] * step[None, :]
    gA, gL = pairs_of(gy, us, es, v, at, inside, writes_at(write, at, inside, MASK), i, V, BV, C, MOVES, DT, EXACT)
    gK, gF = gK * gA, gF * gL
    w, born, r, R, B, Pm, _, _, e = decays(
        retain, momentum, write, reset, at, H, i, inside, RETAIN, MOMENTUM, MASK, RESET, EARLY
    )
    # own, o*: views after the write, and the segment's end; ls: after retain, before the write; ahead, h*: before both.
    strict, fin, at_end = i[:, None] > i[None, :], i == C - 1, (i == C - 1)[:, None]
    end = ends + place * 4
    own = tl.where(at_end, tl.load(sums + 6 * total + at, mask=inside, other=0.0)[None, :], 0.0)
    oa, os = tl.where(fin, tl.load(end), 0.0), tl.where(fin, tl.load(end + 1), 0.0)
    oz = tl.where(fin, tl.load(end + 3), 0.0)
    ahead, ha, hs, hz, ls = own, oa, os, oz, os
    # Reads before the write see products that exclude the token's own gates.
    if EARLY_READ:
        ahead = tl.where(strict, gK, 0.0)
        ha, hs, hz = seen_at(sums, 0, total, at, inside)
    else:
        own += tl.where(i[:, None] >= i[None, :], gK, 0.0)
        ga, gs, gz = seen_at(sums, 0, total, at, inside)
        oa, os, oz = oa + ga, os + gs, oz + gz
    if MOVES:
        gF = tl.where(strict, gF, 0.0)
        if DECAYED:
            ga, ls, gz = seen_at(sums, 3, total, at, inside)
            oa, oz = oa + ga, oz + gz
        elif EARLY_READ:
            ahead += gF
            ga, gs, gz = seen_at(sums, 3, total, at, inside)
            ha, hs, hz = ha + ga, hs + gs, hz + gz
        else:
            ahead = gF
            ha, hs, hz = seen_at(sums, 3, total, at, inside)
    if MOMENTUM:
        Rw = tl.where(w[None, :], R, 0.0)
        gP = in_halves(tl.trans(Rw), own, DT, EXACT)
        gE = tl.sum(Rw * os[:, None], 0) + tl.where(fin, tl.load(end + 2), 0.0)
        if LEFT:
            Rw = tl.where(strict, Rw, 0.0)
            gP += in_halves(tl.trans(Rw), gF, DT, EXACT)
            gE += tl.sum(Rw * ls[:, None], 0)
        if EARLY:
            Bw = tl.where(w[None, :], B, 0.0)
            gP += in_halves(tl.trans(Bw), ahead, DT, EXACT)
            gE += tl.sum(Bw * hs[:, None], 0)
        gP += tl.where(at_end, tl.load(sums + 7 * total + at, mask=inside, other=0.0)[None, :], 0.0)
        _, _, _, now = gates_at(retain, momentum, write, reset, at, inside, False, True, MASK, RESET)
        _, b, _, m = gates_at(retain, momentum, write, reset, at - H, inside & (i > 0), False, True, MASK, RESET)
        m = m * (1 - b)
        left, gP = between(m, now * (1 - born), i, inside), tl.where(i[:, None] >= i[None, :], gP, 0.0)
        x = (1 - born) * pulled(Pm, left, gP, gE, tl.cumprod(m, 0), DT, EXACT)
        tl.store(gm + at, tl.where(w, x, 0.0), mask=inside)
    if RETAIN:
        _, b, m, _ = gates_at(retain, momentum, write, reset, at - H, inside & (i > 0), True, False, MASK, RESET)
        m = m * (1 - b)
        left, first, x = between(m, r * (1 - born), i, inside), tl.cumprod(m, 0), r * 0.0
        if EARLY:
            if MOMENTUM:
                ahead = in_halves(ahead, tl.trans(Pm), DT, EXACT) + hs[:, None] * e[None, :]
                ahead = tl.where(w[None, :], ahead, 0.0)
            if RESET:
                ahead += hz[:, None] * (born * r)[None, :]
            x += pulled(B, left, ahead, ha, first, DT, EXACT)
        if MOMENTUM:
            own = in_halves(own, tl.trans(Pm), DT, EXACT) + os[:, None] * e[None, :]
            if LEFT:
                own += tl.where(strict, in_halves(gF, tl.trans(Pm), DT, EXACT) + ls[:, None] * e[None, :], 0.0)
            own = tl.where(w[None, :], own, 0.0)
        elif LEFT:
            own += gF
        if RESET:
            own += oz[:, None] * (born * r)[None, :]
        x += pulled(R, left, own, oa, first, DT, EXACT)
        if RESET:
            x = (1 - born) * x + born * tl.sum(R * oz[:, None], 0)
            if EARLY:
                x += born * tl.sum(B * hz[:, None], 0)
        tl.store(gr + at, tl.where(w, x, 0.0), mask=inside)
