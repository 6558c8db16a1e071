"""The walks: `scan` goes from chunk to chunk, or over all chunks in parallel for outputs alone; `pull` is its reverse.

They use the results of `factors`. V, D and g have values, writes (-u) and cotangents of outputs as rows. States are
stored transposed, `[V, P]`, so that products find them in registers:

    X^T = af o (M^T K^T) + sf o (S^T K^T)         D^T = (V - X)^T T^T
    Y^T = aq o (M^T Q^T) + sq o (S^T Q^T) + D^T A^T
    M^T <- a M^T + s S^T + (ck o D^T) W           S^T <- e S^T + (cp o D^T) W

and back, with G and H the cotangents of the last M and S,

    X^T = g^T A + ck o (G^T W^T) + cp o (H^T W^T)     E^T = X^T T, the cotangent of V
    G^T <- a G^T + (aq o g^T) Q - (af o E^T) K        H^T <- s G^T + e H^T + (sq o g^T) Q - (sf o E^T) K.

If u is not an error, rows are solved one after another, with L in place of T: a row's final prediction updates the rows
below it, and backwards its final cotangent updates those above. [ENG-TRITON-D10]
"""

import triton
import triton.language as tl

from hecate.engine.triton.block import first_state, in_halves, narrowed, rows, segment_of, sequence_of, writes_at
from hecate.engine.triton.maps import COUNTS, PLAIN


@triton.jit
def weighed(x, numbers, row: tl.constexpr, place, i, C: tl.constexpr, CHANNELS: tl.constexpr):
    """Columns of a transposed tile times coefficients of their tokens; rows include these if retain is per channel."""
    if not CHANNELS:
        x = x * tl.load(numbers + (place * 8 + row) * C + i)[None, :]
    return x


@triton.jit
def at_end(ends, number: tl.constexpr, place, op, P: tl.constexpr, CHANNELS: tl.constexpr):
    """A coefficient of the end of a chunk: a, s, e, z; or a, z per channel."""
    if CHANNELS:
        x = tl.load(ends + (place * 2 + number // 2) * P + op, mask=op < P, other=0.0)[None, :]
    else:
        x = tl.load(ends + place * 4 + number)
    return x


@triton.jit
def by_pairs(
    acc, x, m, place, i, TURN: tl.constexpr, C: tl.constexpr, DT: tl.constexpr, EXACT: tl.constexpr,
    HALVES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """acc + x m, or acc + x m^T (TURN), with a chunk's matrix of pairs m, in halves if HALVES, and so is x if WIDE."""
    N: tl.constexpr = 2 if HALVES else 1
    pair = m + place * N * C * C + i[:, None] * C + i[None, :]
    # With HALVES a matrix is stored as two of DT, whose sum has twice its bits.
    high = tl.load(pair)
    if TURN:
        high = tl.trans(high)
    if not HALVES:
        acc += in_halves(x, high, DT, EXACT)
    else:
        near = narrowed(x, DT)
        acc = tl.dot(near, high.to(DT), acc, input_precision=EXACT)
        low = tl.load(pair + C * C)
        if TURN:
            low = tl.trans(low)
        acc = tl.dot(near, low.to(DT), acc, input_precision=EXACT)
        # x is split too: three of the four products count, the last is below rounding.
        if WIDE:
            acc = tl.dot(narrowed(x - near.to(tl.float32), DT), high.to(DT), acc, input_precision=EXACT)
    return acc


@triton.jit
def answers(
    M, S, Z, x, fresh, at, there, op, numbers, row: tl.constexpr, place, i, P: tl.constexpr, C: tl.constexpr,
    MOMENTUM: tl.constexpr, RESET: tl.constexpr, CHANNELS: tl.constexpr, MAP: tl.constexpr, DT: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Transposed products of rows x, queries or keys, with a chunk's first states: M, S and, with resets, the weights Z
    (by rows `fresh` instead of x if retain is per channel), scaled by three rows of numbers."""
    found = weighed(in_halves(M, tl.trans(x), DT, EXACT), numbers, row, place, i, C, CHANNELS)
    if MOMENTUM:
        found += weighed(in_halves(S, tl.trans(x), DT, EXACT), numbers, row + 1, place, i, C, CHANNELS)
    if RESET:
        z = rows(fresh, at, there, op, P, MAP) if CHANNELS else x
        found += weighed(in_halves(Z, tl.trans(z), DT, EXACT), numbers, row + 2, place, i, C, CHANNELS)
    return found


@triton.jit
def from_rows(x, y, DT: tl.constexpr, EXACT: tl.constexpr, HALVES: tl.constexpr):
    """Product of a transposed tile x and rows y, added to a state; x is rounded where states are saved so (HALVES)."""
    if HALVES:
        x = narrowed(x, DT)
    return in_halves(x, y, DT, EXACT)


@triton.jit
def column(x, i, j):
    """Column j of a tile, `[., 1]`."""
    return tl.sum(tl.where((i == j)[None, :], x, 0.0), 1)[:, None]


@triton.jit
def keep(kept, kept_S, place, cell, M, S, whole, MOMENTUM: tl.constexpr):
    """Stores a state."""
    DT: tl.constexpr = kept.dtype.element_ty
    tl.store(kept + place + cell, narrowed(M, DT).to(DT), mask=whole)
    if MOMENTUM:
        tl.store(kept_S + place + cell, narrowed(S, DT).to(DT), mask=whole)


@triton.jit
def ending(n, own, beside, PARTS: tl.constexpr):
    """(index of a program's last state, whether it is stored): the last document's, or that of each of PARTS of a
    row."""
    at, last = own, n + beside >= tl.num_programs(0)
    if PARTS:
        at, last = n, n >= 0
    return at, last


@triton.jit(do_not_specialize_on_alignment=COUNTS)
def scan(
    q, k, kw, zq, zp, v, write, docs, lower, attend, numbers, ends, M0, S0, Z0, y, us, kept, kept_S, M1, S1, T, H, N,
    cu,
    P: tl.constexpr, V: tl.constexpr, BP: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, SEG: tl.constexpr,
    FORM: tl.constexpr, MOMENTUM: tl.constexpr, MASK: tl.constexpr, RESET: tl.constexpr, APART: tl.constexpr,
    KEEPS: tl.constexpr, PART: tl.constexpr, DT: tl.constexpr, EXACT: tl.constexpr, HALVES: tl.constexpr,
    MAP: tl.constexpr, DOCS: tl.constexpr, CHANNELS: tl.constexpr, STAGES: tl.constexpr, PSI: tl.constexpr,
    PARTS: tl.constexpr, HOLLOW: tl.constexpr,
):  # fmt: skip
    """PART "all": one program per memory (also per document if DOCS, from Z0) and tile of values: outputs, last states
    and, if it KEEPS them, u (predictions if u is not an error) and the states at every SEG-th token; "states": the same
    without outputs; "ends": only the last states, for values of 0 if HOLLOW; "outputs": one program per chunk and tile,
    from saved states. PARTS: documents are parts of a row, with states of their own."""
    # Chunks per saved state.
    R: tl.constexpr = SEG // C
    MOVES: tl.constexpr = FORM != "target"
    STATES: tl.constexpr = KEEPS or PART == "states"  # `outputs` starts from them
    n, iv = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i, op, ov = tl.arange(0, C), tl.arange(0, BP), iv * BV + tl.arange(0, BV)
    in_v = (ov < V)[:, None]
    cell, whole = ov[:, None] * P + op[None, :], in_v & (op < P)[None, :]
    # One program per chunk: its index says which, and the loop below has one step.
    if PART == "outputs":
        own, first, length, slot, beside = n % N, n * 0, C, n // N, N
        placed, there, _, _ = segment_of(docs, T, H, N, C, SEG, DOCS)
        M = tl.load(kept + n * V * P + cell, mask=whole, other=0.0)
        S = M
        if MOMENTUM:
            S = tl.load(kept_S + n * V * P + cell, mask=whole, other=0.0)
    else:
        first, length, slot, beside, own = sequence_of(docs, T, H, DOCS)
        M, S = first_state(M0, S0, Z0, n, own, cell, whole, V * P, MOMENTUM, DOCS, PARTS)
    for step in tl.range(0, tl.cdiv(length, C), num_stages=STAGES):
        place = (slot * R + step) * beside + own
        if PART != "outputs":
            if STATES:
                if step % R == 0:
                    keep(kept, kept_S, ((slot + step // R) * beside + own) * V * P, cell, M, S, whole, MOMENTUM)
            placed, there = first + (step * C + i) * H, step * C + i < length
        at, inside = placed, there
        w = writes_at(write, at, inside, MASK)
        side, cells = at[None, :] * V + ov[:, None], inside[None, :] & in_v
        # Keys [C, P], values transposed, [V, C].
        kt, vt = rows(k, at, w, op, P, MAP), tl.zeros([BV, C], tl.float32)
        if not HOLLOW:
            vt = tl.load(v + side, mask=w[None, :] & in_v, other=0.0).to(tl.float32)
        written = kt
        if APART:
            written = rows(kw, at, w, op, P, PLAIN)
        Mn, Sn, Z = M, S, M
        # Rounded once for all products; M itself stays in float32.
        if HALVES:
            Mn, Sn = narrowed(M, DT), narrowed(S, DT)
        if RESET:
            Z = tl.load(Z0 + own * V * P + cell, mask=whole, other=0.0)
        D = vt
        if MOVES:
            X = answers(
                Mn, Sn, Z, kt, zp, at, w, op, numbers, 3, place, i, P, C, MOMENTUM, RESET, CHANNELS, MAP, DT,
                EXACT)  # fmt: skip
            if FORM == "error":
                D = by_pairs(tl.zeros([BV, C], tl.float32), vt - X, lower, place, i, True, C, DT, EXACT, HALVES, True)
                if KEEPS and PART != "outputs":
                    tl.store(us + side, -D, mask=cells)
            else:
                D = X * 0.0
                for j in range(C):  # column j is final, and updates later tokens
                    wrote = in_v & writes_at(write, first + (step * C + j) * H, step * C + j < length, MASK)
                    uj = tl.where(wrote, PSI(in_v, V, column(X, i, j), column(vt, i, j), cu), 0.0)
                    D = tl.where((i == j)[None, :], -uj, D)
                    X -= tl.load(lower + place * C * C + i * C + j)[None, :] * uj
                if KEEPS:
                    tl.store(us + side, X, mask=cells)
        if PART == "all" or PART == "outputs":
            qt = rows(q, at, inside, op, P, MAP)
            out = answers(
                Mn, Sn, Z, qt, zq, at, inside, op, numbers, 0, place, i, P, C, MOMENTUM, RESET, CHANNELS, MAP, DT,
                EXACT)  # fmt: skip
            out = by_pairs(out, D, attend, place, i, True, C, DT, EXACT, HALVES, MOVES)
            tl.store(y + side, out.to(y.dtype.element_ty), mask=cells)
        if PART != "outputs":
            # The chunk's end: the decayed states, plus the writes of its tokens.
            M = M * at_end(ends, 0, place, op, P, CHANNELS)
            if MOMENTUM:
                M += S * at_end(ends, 1, place, op, P, CHANNELS)
                S = S * at_end(ends, 2, place, op, P, CHANNELS)
                S += from_rows(weighed(D, numbers, 7, place, i, C, CHANNELS), written, DT, EXACT, HALVES)
            if RESET:
                M += Z * at_end(ends, 3, place, op, P, CHANNELS)
            M += from_rows(weighed(D, numbers, 6, place, i, C, CHANNELS), written, DT, EXACT, HALVES)
    if PART != "outputs":
        at, last = ending(n, own, beside, PARTS)
        tl.store(M1 + at * V * P + cell, M, mask=whole & last)
        if MOMENTUM:
            tl.store(S1 + at * V * P + cell, S, mask=whole & last)


@triton.jit(do_not_specialize_on_alignment=COUNTS)
def pull(
    q, k, kw, zq, zp, v, write, docs, lower, attend, numbers, ends, preds, gy, G1, Y1, us, es, gv, kept_G, kept_Y, G0,
    Y0, GZ, T, H, cu, cg,
    P: tl.constexpr, V: tl.constexpr, BP: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, SEG: tl.constexpr,
    FORM: tl.constexpr, MOMENTUM: tl.constexpr, MASK: tl.constexpr, RESET: tl.constexpr, APART: tl.constexpr,
    DT: tl.constexpr, EXACT: tl.constexpr, HALVES: tl.constexpr, MAP: tl.constexpr, DOCS: tl.constexpr,
    CHANNELS: tl.constexpr, STAGES: tl.constexpr, PSI: tl.constexpr, PULL: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One program per memory, per document, and tile of values, from the last chunk to the first: E, the cotangents of
    values (E itself for an error or a target), u of other biases, and the cotangents of the states after every SEG-th
    token and of the first ones."""
    R: tl.constexpr = SEG // C
    n, iv = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i, op, ov = tl.arange(0, C), tl.arange(0, BP), iv * BV + tl.arange(0, BV)
    in_v = (ov < V)[:, None]
    cell, whole = ov[:, None] * P + op[None, :], in_v & (op < P)[None, :]
    first, length, slot, beside, own = sequence_of(docs, T, H, DOCS)
    end, last = ending(n, own, beside, PARTS)
    G = tl.load(G1 + end * V * P + cell, mask=whole & last, other=0.0)
    Y, to_Z = G * 0.0, G * 0.0
    if MOMENTUM:
        Y = tl.load(Y1 + end * V * P + cell, mask=whole & last, other=0.0)
    chunks = tl.cdiv(length, C)
    for back in tl.range(0, chunks, num_stages=STAGES):
        step = chunks - 1 - back
        place = (slot * R + step) * beside + own
        # The cotangent after a segment's last chunk; the sequence may end within a segment.
        if step % R == R - 1 or back == 0:
            keep(kept_G, kept_Y, ((slot + step // R) * beside + own) * V * P, cell, G, Y, whole, MOMENTUM)
        at, inside = first + (step * C + i) * H, step * C + i < length
        w = writes_at(write, at, inside, MASK)
        qt, kt = rows(q, at, inside, op, P, MAP), rows(k, at, w, op, P, MAP)
        g = tl.trans(rows(gy, at, inside, ov, V, PLAIN))
        written = kt
        if APART:
            written = rows(kw, at, w, op, P, PLAIN)
        X = weighed(from_rows(G, tl.trans(written), DT, EXACT, HALVES), numbers, 6, place, i, C, CHANNELS)
        if MOMENTUM:
            X += weighed(from_rows(Y, tl.trans(written), DT, EXACT, HALVES), numbers, 7, place, i, C, CHANNELS)
        # Later tokens of the chunk read each write, too, on top of the chunk's end.
        X = by_pairs(X, g, attend, place, i, False, C, DT, EXACT, HALVES, False)
        g = g.to(tl.float32)
        if RESET:
            zt = rows(zq, at, inside, op, P, MAP) if CHANNELS else qt
            to_Z += at_end(ends, 3, place, op, P, CHANNELS) * G
            to_Z += from_rows(weighed(g, numbers, 2, place, i, C, CHANNELS), zt, DT, EXACT, HALVES)
        if MOMENTUM:
            Y = at_end(ends, 1, place, op, P, CHANNELS) * G + at_end(ends, 2, place, op, P, CHANNELS) * Y
            Y += from_rows(weighed(g, numbers, 1, place, i, C, CHANNELS), qt, DT, EXACT, HALVES)
        G = at_end(ends, 0, place, op, P, CHANNELS) * G
        G += from_rows(weighed(g, numbers, 0, place, i, C, CHANNELS), qt, DT, EXACT, HALVES)
        side, cells = at[None, :] * V + ov[:, None], inside[None, :] & in_v
        E = X
        if FORM == "error":
            E = by_pairs(tl.zeros([BV, C], tl.float32), X, lower, place, i, False, C, DT, EXACT, HALVES, True)
        elif FORM == "rows":
            pred, vt = tl.load(preds + side, mask=cells, other=0.0), tl.trans(rows(v, at, w, ov, V, PLAIN))
            vt, E, gvt = vt.to(tl.float32), X * 0.0, X * 0.0
            for settled in range(C):
                j = C - 1 - settled
                here, token = (i == j)[None, :], step * C + j
                wrote = in_v & writes_at(write, first + token * H, token < length, MASK)
                ej, gj = PULL(in_v, V, column(pred, i, j), column(vt, i, j), -column(X, i, j), cg)
                ej, gj = tl.where(wrote, ej, 0.0), tl.where(wrote, gj, 0.0)
                E, gvt = tl.where(here, -ej, E), tl.where(here, gj, gvt)
                X += tl.load(lower + place * C * C + j * C + i)[None, :] * ej
            tl.store(us + side, tl.where(w[None, :] & in_v, PSI(in_v, V, pred, vt, cu), 0.0), mask=cells)
            tl.store(es + side, E, mask=cells)
            tl.store(gv + side, gvt.to(gv.dtype.element_ty), mask=cells)
        if FORM != "rows":
            tl.store(gv + side, tl.where(w[None, :], E, 0.0).to(gv.dtype.element_ty), mask=cells)
        if FORM != "target":
            if RESET:
                zt = rows(zp, at, w, op, P, MAP) if CHANNELS else kt
                to_Z -= from_rows(weighed(E, numbers, 5, place, i, C, CHANNELS), zt, DT, EXACT, HALVES)
            if MOMENTUM:
                Y -= from_rows(weighed(E, numbers, 4, place, i, C, CHANNELS), kt, DT, EXACT, HALVES)
            G -= from_rows(weighed(E, numbers, 3, place, i, C, CHANNELS), kt, DT, EXACT, HALVES)
    tl.store(G0 + n * V * P + cell, G, mask=whole)
    if MOMENTUM:
        tl.store(Y0 + n * V * P + cell, Y, mask=whole)
    if RESET:
        tl.store(GZ + n * V * P + cell, to_Z, mask=whole)
