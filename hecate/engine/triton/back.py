"""The backward kernels of all segments side by side, of cotangents g of outputs, and G and Y of the last M and S.

`pull` went back with G, Y and that of Z, by the predictions or u that were kept: no state is made again. It left
u, E = -e, e_i the cotangent of a prediction, the cotangent of v, and G and Y at every segment's end. With them all else
is a closed form of one segment, its first state and its last cotangent: `tokens` has rows, and the sums that `gates`
turns into the cotangents of retain and momentum. No number is added to by two programs. [ENG-TRITON-D2]
"""

import triton
import triton.language as tl

from hecate.engine.triton.block import between, decays, gates_at, keys_at, product, rows_at, segment_of, views
from hecate.engine.triton.maps import COUNTS, featured, featured_back


@triton.jit
def values_at(gy, us, es, v, at, inside, w, o, V, MOVES: tl.constexpr):
    """(g, u, e) of a tile of values; u is -v and e unused where no prediction is asked for."""
    g = rows_at(gy, at, inside, o, V)
    if MOVES:
        u, err = rows_at(us, at, inside, o, V), -rows_at(es, at, inside, o, V)
    else:
        u = -rows_at(v, at, w, o, V)
        err = u
    return g, u, err


@triton.jit
def state_at(kept, cells, whole):
    """A kept state."""
    return tl.load(kept + cells, mask=whole, other=0.0).to(tl.float32)


@triton.jit
def queries_back(gq, g, q, at, inside, op, P: tl.constexpr, PHI: tl.constexpr):
    """Stores the cotangents of queries by those of their features."""
    there = inside[:, None] & (op < P)[None, :]
    g = featured_back(g * PHI[3], rows_at(q, at, inside, op, P), there, PHI)
    tl.store(gq + at[:, None] * P + op[None, :], g, mask=there)


@triton.jit
def keys_back(
    gk, gw, glr, gbt, gpt, k, kw, lr, at, inside, w, op, P: tl.constexpr, APART: tl.constexpr, PHI: tl.constexpr
):
    """Stores the cotangents of keys, of written keys and of lr, by gbt of lr times written keys and gpt of keys."""
    tile, there = at[:, None] * P + op[None, :], inside[:, None] & (op < P)[None, :]
    l = tl.load(lr + at, mask=w, other=0.0).to(tl.float32)[:, None]
    own, cells = rows_at(k, at, w, op, P), w[:, None] & (op < P)[None, :]
    written, _ = featured(own, cells, PHI)
    if APART:
        written = rows_at(kw, at, w, op, P)
    gbt, gpt = tl.where(w[:, None], gbt, 0.0), tl.where(w[:, None], gpt, 0.0)
    tl.store(glr + at, tl.sum(gbt * written, 1), mask=inside)
    if APART:
        tl.store(gw + tile, l * gbt, mask=there)
    else:
        gpt += l * gbt
    tl.store(gk + tile, featured_back(gpt, own, cells, PHI), mask=there)


@triton.jit(do_not_specialize_on_alignment=COUNTS)
def tokens(
    q, k, kw, v, lr, retain, momentum, write, reset, spans, Z0, us, es, kept, kept_S, gy, kept_G, kept_Y,
    gq, gk, gw, glr, sums, ends, T, H, N, total,
    P: tl.constexpr, V: tl.constexpr, BP: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    MOVES: tl.constexpr, RETAIN: tl.constexpr, MOMENTUM: tl.constexpr, MASK: tl.constexpr, RESET: tl.constexpr,
    APART: tl.constexpr, DECAYED: tl.constexpr, EARLY_READ: tl.constexpr, OF: tl.constexpr, EXACT: tl.constexpr,
    PHI: tl.constexpr, DOCS: tl.constexpr,
):  # fmt: skip
    """One program for each segment of C tokens of a memory: cotangents of its rows, of queries or of keys (OF), and
    what its gates are asked for. Pairs of rows come ahead of states, so that few are held at once.

    sums `[9, B, T, H]`: of aq, sq, zq; af, sf, zf; K and P at the segment's end; and room for a part of retain's. ends
    `[segments, N, 4]`: of a, s, e, z there."""
    ASKS: tl.constexpr = OF != "keys"
    WRITES: tl.constexpr = OF != "queries"
    EARLY: tl.constexpr = EARLY_READ or (MOVES and not DECAYED)
    i, op = tl.arange(0, C), tl.arange(0, BP)
    at, inside, _, place = segment_of(spans, T, H, N, C, C, DOCS)
    w, born, r, R, B, Pm, a, early, e = decays(
        retain, momentum, write, reset, at, H, i, inside, RETAIN, MOMENTUM, MASK, RESET, EARLY
    )
    K, _, _, Kq, aq, sq, zq, F, af, sf, zf = views(
        R, B, Pm, a, early, e, w, born, r, i, MOMENTUM, EARLY_READ, MOVES and WRITES, DECAYED, EXACT
    )
    k_end = tl.sum(tl.where((i == C - 1)[:, None], K, 0.0), 0)
    p_end = tl.sum(tl.where((i == C - 1)[:, None], Pm, 0.0), 0)
    again = False
    if RESET:
        again = tl.max(born, 0) > 0
    gA, gL = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    for jv in range(0, V, BV):
        g, u, err = values_at(gy, us, es, v, at, inside, w, jv + tl.arange(0, BV), V, MOVES)
        gA -= product(g, tl.trans(u), EXACT)
        if MOVES and WRITES:
            gL -= product(err, tl.trans(u), EXACT)
    gA = gA * Kq
    gqt, gbt, gpt = tl.zeros([C, BP], tl.float32), tl.zeros([C, BP], tl.float32), tl.zeros([C, BP], tl.float32)
    qt, pt, bt = keys_at(q, k, kw, lr, at, inside, w, op, P, APART, PHI)
    if ASKS:
        gqt = product(gA, bt, EXACT)
    if WRITES:
        gbt = product(tl.trans(gA), qt, EXACT)
        if MOVES:
            gL = gL * F
            gpt = product(gL, bt, EXACT)
            gbt += product(tl.trans(gL), pt, EXACT)
    gaq, gsq, gzq, gaf, gsf, gzf, gk_end, gp_end = a * 0, a * 0, a * 0, a * 0, a * 0, a * 0, a * 0, a * 0
    ga, gs, ge, gz = 0.0, 0.0, 0.0, 0.0
    for jv in range(0, V, BV):
        ov = jv + tl.arange(0, BV)
        own, whole = ov[:, None] * P + op[None, :], (ov < V)[:, None] & (op < P)[None, :]  # [V, P], as it lies
        state = place * V * P + own
        g, u, err = values_at(gy, us, es, v, at, inside, w, ov, V, MOVES)
        M, G = state_at(kept, state, whole), state_at(kept_G, state, whole)
        if ASKS:
            x = product(g, M, EXACT)
            gaq += tl.sum(x * qt, 1)
            gqt += aq[:, None] * x
            ga += tl.sum(G * M)
        if WRITES:
            x = product(u, G, EXACT)
            gk_end -= tl.sum(x * bt, 1)
            gbt -= k_end[:, None] * x
            if MOVES:
                x = product(err, M, EXACT)
                gaf += tl.sum(x * pt, 1)
                gpt += af[:, None] * x
        if again:
            Z = tl.load(Z0 + place % N * V * P + own, mask=whole, other=0.0)
            if ASKS:
                x = product(g, Z, EXACT)
                gzq += tl.sum(x * qt, 1)
                gqt += zq[:, None] * x
                gz += tl.sum(G * Z)
            if MOVES and WRITES:
                x = product(err, Z, EXACT)
                gzf += tl.sum(x * pt, 1)
                gpt += zf[:, None] * x
    if MOMENTUM:
        for jv in range(0, V, BV):
            ov = jv + tl.arange(0, BV)
            whole = (ov < V)[:, None] & (op < P)[None, :]
            state = place * V * P + ov[:, None] * P + op[None, :]
            g, u, err = values_at(gy, us, es, v, at, inside, w, ov, V, MOVES)
            S, Y = state_at(kept_S, state, whole), state_at(kept_Y, state, whole)
            if ASKS:
                x = product(g, S, EXACT)
                gsq += tl.sum(x * qt, 1)
                gqt += sq[:, None] * x
                gs += tl.sum(state_at(kept_G, state, whole) * S)
                ge += tl.sum(Y * S)
            if WRITES:
                x = product(u, Y, EXACT)
                gp_end -= tl.sum(x * bt, 1)
                gbt -= p_end[:, None] * x
                if MOVES:
                    x = product(err, S, EXACT)
                    gsf += tl.sum(x * pt, 1)
                    gpt += sf[:, None] * x
    if ASKS:
        queries_back(gq, gqt, q, at, inside, op, P, PHI)
        tl.store(sums + at, gaq, mask=inside)
        tl.store(sums + total + at, gsq, mask=inside)
        tl.store(sums + 2 * total + at, gzq, mask=inside)
        end = ends + place * 4
        tl.store(end, ga)
        tl.store(end + 1, gs)
        tl.store(end + 2, ge)
        tl.store(end + 3, gz)
    if WRITES:
        tl.store(sums + 3 * total + at, gaf, mask=inside)
        tl.store(sums + 4 * total + at, gsf, mask=inside)
        tl.store(sums + 5 * total + at, gzf, mask=inside)
        tl.store(sums + 6 * total + at, gk_end, mask=inside)
        tl.store(sums + 7 * total + at, gp_end, mask=inside)
        keys_back(gk, gw, glr, gbt, gpt, k, kw, lr, at, inside, w, op, P, APART, PHI)


@triton.jit
def number_at(sums, row, total, at, inside):
    """A row of the sums of `tokens`."""
    return tl.load(sums + row * total + at, mask=inside, other=0.0)


@triton.jit
def pulled(spans, left, g, ga, first, EXACT: tl.constexpr):
    """Cotangent of gates from that g of their products `spans` and that ga of those from the tile's start, whose
    numbers ahead of each gate are `left` and `first`. No division: a gate of 0 has its own."""
    return tl.sum(product(tl.trans(spans), g, EXACT) * left, 1) + tl.sum(spans * ga[:, None], 0) * first


@triton.jit(do_not_specialize_on_alignment=COUNTS)
def gates(
    q, k, kw, v, lr, retain, momentum, write, reset, spans, us, es, gy, sums, ends, out, T, H, N, total,
    P: tl.constexpr, V: tl.constexpr, BP: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    MOVES: tl.constexpr, RETAIN: tl.constexpr, MOMENTUM: tl.constexpr, MASK: tl.constexpr, RESET: tl.constexpr,
    APART: tl.constexpr, DECAYED: tl.constexpr, EARLY_READ: tl.constexpr, OF: tl.constexpr, EXACT: tl.constexpr,
    PHI: tl.constexpr, DOCS: tl.constexpr,
):  # fmt: skip
    """The cotangent of retain or of momentum (OF) in one segment, by those of the coefficients that they make. That of
    retain is found at once, or by what is "ahead" of retain and then, added to it, by "after"."""
    EARLY: tl.constexpr = EARLY_READ or (MOVES and not DECAYED)
    LEFT: tl.constexpr = MOVES and DECAYED
    BY_K: tl.constexpr = OF != "ahead" or EARLY_READ
    BY_F: tl.constexpr = MOVES and (OF != "after" or DECAYED)
    i, op = tl.arange(0, C), tl.arange(0, BP)
    at, inside, _, place = segment_of(spans, T, H, N, C, C, DOCS)
    gK, gF = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    w, _, _, _ = gates_at(retain, momentum, write, reset, at, inside, False, False, MASK, False)
    for jv in range(0, V, BV):
        g, u, err = values_at(gy, us, es, v, at, inside, w, jv + tl.arange(0, BV), V, MOVES)
        if BY_K:
            gK -= product(g, tl.trans(u), EXACT)
        if BY_F:
            gF -= product(err, tl.trans(u), EXACT)
    qt, pt, bt = keys_at(q, k, kw, lr, at, inside, w, op, P, APART, PHI)
    if BY_K:
        gK = gK * product(qt, tl.trans(bt), EXACT)
    if BY_F:
        gF = gF * product(pt, tl.trans(bt), EXACT)
    w, born, r, R, B, Pm, _, _, e = decays(
        retain, momentum, write, reset, at, H, i, inside, RETAIN, MOMENTUM, MASK, RESET, EARLY
    )
    # Of what is seen after the write, at the segment's end too; as retain leaves it (left); and ahead of it (ahead).
    strict, fin, at_end = i[:, None] > i[None, :], i == C - 1, (i == C - 1)[:, None]
    end = ends + place * 4
    own = tl.where(at_end, number_at(sums, 6, total, at, inside)[None, :], 0.0)
    oa, os = tl.where(fin, tl.load(end), 0.0), tl.where(fin, tl.load(end + 1), 0.0)
    oz = tl.where(fin, tl.load(end + 3), 0.0)
    ahead, ha, hs, hz, ls = own, oa, os, oz, os
    if EARLY_READ:
        ahead, ha = tl.where(strict, gK, 0.0), number_at(sums, 0, total, at, inside)
        hs, hz = number_at(sums, 1, total, at, inside), number_at(sums, 2, total, at, inside)
    else:
        own += tl.where(i[:, None] >= i[None, :], gK, 0.0)
        oa += number_at(sums, 0, total, at, inside)
        os += number_at(sums, 1, total, at, inside)
        oz += number_at(sums, 2, total, at, inside)
    if MOVES:
        gF = tl.where(strict, gF, 0.0)
        if DECAYED:
            oa += number_at(sums, 3, total, at, inside)
            oz += number_at(sums, 5, total, at, inside)
            ls = number_at(sums, 4, total, at, inside)
        elif EARLY_READ:
            ahead += gF
            ha += number_at(sums, 3, total, at, inside)
            hs += number_at(sums, 4, total, at, inside)
            hz += number_at(sums, 5, total, at, inside)
        else:
            ahead, ha = gF, number_at(sums, 3, total, at, inside)
            hs, hz = number_at(sums, 4, total, at, inside), number_at(sums, 5, total, at, inside)
    if OF == "momentum":
        Rw = tl.where(w[None, :], R, 0.0)
        gP, ge = product(tl.trans(Rw), own, EXACT), tl.sum(Rw * os[:, None], 0) + tl.where(fin, tl.load(end + 2), 0.0)
        if LEFT:
            Rw = tl.where(strict, Rw, 0.0)
            gP += product(tl.trans(Rw), gF, EXACT)
            ge += tl.sum(Rw * ls[:, None], 0)
        if EARLY:
            Bw = tl.where(w[None, :], B, 0.0)
            gP += product(tl.trans(Bw), ahead, EXACT)
            ge += tl.sum(Bw * hs[:, None], 0)
        gP += tl.where(at_end, number_at(sums, 7, total, at, inside)[None, :], 0.0)
        _, b, _, m = gates_at(retain, momentum, write, reset, at - H, inside & (i > 0), False, True, MASK, RESET)
        m = m * (1 - b)
        x = (1 - born) * pulled(
            Pm, between(m, i), tl.where(i[:, None] >= i[None, :], gP, 0.0), ge, tl.cumprod(m, 0), EXACT
        )
    else:
        _, b, m, _ = gates_at(retain, momentum, write, reset, at - H, inside & (i > 0), True, False, MASK, RESET)
        m = m * (1 - b)
        x = r * 0.0
        if EARLY and OF != "after":
            if MOMENTUM:
                ahead = tl.where(w[None, :], product(ahead, tl.trans(Pm), EXACT) + hs[:, None] * e[None, :], 0.0)
            if RESET:
                ahead += hz[:, None] * (born * r)[None, :]
            x += pulled(B, between(m, i), ahead, ha, tl.cumprod(m, 0), EXACT)
        if OF != "ahead":
            if MOMENTUM:
                own = product(own, tl.trans(Pm), EXACT) + os[:, None] * e[None, :]
                if LEFT:
                    own += tl.where(strict, product(gF, tl.trans(Pm), EXACT) + ls[:, None] * e[None, :], 0.0)
                own = tl.where(w[None, :], own, 0.0)
            elif LEFT:
                own += gF
            if RESET:
                own += oz[:, None] * (born * r)[None, :]
            x += pulled(R, between(m, i), own, oa, tl.cumprod(m, 0), EXACT)
        if RESET:
            x = (1 - born) * x
            if EARLY and OF != "after":
                x += born * tl.sum(B * hz[:, None], 0)
            if OF != "ahead":
                x += born * tl.sum(R * oz[:, None], 0)
        if OF == "after":
            x += number_at(sums, 8, total, at, inside)
    if OF == "ahead":
        tl.store(sums + 8 * total + at, x, mask=inside)
    else:
        tl.store(out + at, tl.where(w, x, 0.0), mask=inside)
