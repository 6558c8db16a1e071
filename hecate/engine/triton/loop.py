"""The loop kernels: a matrix memory token by token, for rules without a block form.

The carried state A and a momentum S stay in registers. W is the memory of A, and A itself without a link. Forward, one
program walks a memory, or a tile of its values if values are independent, and saves the state at every SEG-th token.
Backward, one program per memory recomputes a segment's states into its own scratch space, then walks the segment in
reverse: it recomputes a token's new state from the previous one; the cotangent of W accumulates until it reaches the
token that made W, and goes through the link once. No address has two writers. One token forward, in place and from a
caller's tensors, has a kernel of its own. [ENG-TRITON-D5]
"""

import triton
import triton.language as tl

from hecate.engine.triton.block import first_state, sequence_of, writes_at
from hecate.engine.triton.maps import COUNTS, featured
from hecate.engine.triton.steps import direction, direction_vjp, moved, moved_vjp, weights, weights_vjp


@triton.jit
def retain_at(retain, value, at, op, ov, P: tl.constexpr, V: tl.constexpr, RETAIN: tl.constexpr, VALUE: tl.constexpr):
    """A token's retain over phi channels, a number or `[P, 1]`, and over values, 1 or `[1, V]`."""
    rp, rv = 1.0, 1.0
    if RETAIN == "one":
        rp = tl.load(retain + at).to(tl.float32)
    if RETAIN == "channels":
        rp = tl.load(retain + at * P + op, mask=op < P, other=1.0).to(tl.float32)[:, None]
    if VALUE:
        rv = tl.load(value + at * V + ov, mask=ov < V, other=1.0).to(tl.float32)[None, :]
    return rp, rv


@triton.jit
def token_at(
    k, kw, v, lr, momentum, at, op, ov, P: tl.constexpr, V: tl.constexpr, SLOT: tl.constexpr, APART: tl.constexpr
):
    """A token's key and written key `[P, 1]`, value `[1, V]`, lr and momentum gate."""
    kt = tl.load(k + at * P + op, mask=op < P, other=0.0).to(tl.float32)[:, None]
    wt = kt
    if APART:
        wt = tl.load(kw + at * P + op, mask=op < P, other=0.0).to(tl.float32)[:, None]
    vt = tl.load(v + at * V + ov, mask=ov < V, other=0.0).to(tl.float32)[None, :]
    l, m = tl.load(lr + at).to(tl.float32), 0.0
    if SLOT:
        m = tl.load(momentum + at).to(tl.float32)
    return kt, wt, vt, l, m


@triton.jit
def written(
    A, S, W, kt, wt, vt, l, m, r, cu, ca, cs, cl, in_p, in_v, whole, P: tl.constexpr, V: tl.constexpr,
    PSI: tl.constexpr, MOVES: tl.constexpr, STEP: tl.constexpr, LINK: tl.constexpr, DUAL: tl.constexpr,
    ALGORITHM: tl.constexpr, DESCEND: tl.constexpr, DECAYED: tl.constexpr,
):  # fmt: skip
    """(state, slot) after a token's write; and the weights that predict, the prediction, u and the direction."""
    pred = vt
    if MOVES:
        if DECAYED:
            ahead = moved(A, A * 0.0, r, cs, whole, in_p, in_v, P, V, STEP)
            W = weights(ahead, cl, whole, in_p, in_v, P, V, LINK, DUAL)
        pred = tl.sum(kt * W, 0)[None, :]
    u = tl.where(in_v, PSI(in_v, V, pred, vt, cu), 0.0)
    D, S = direction(S, u, wt, l, m, ca, whole, in_p, in_v, P, V, DESCEND, ALGORITHM)
    return moved(A, D, r, cs, whole, in_p, in_v, P, V, STEP), S, W, pred, u, D


@triton.jit(do_not_specialize_on_alignment=COUNTS)
def forward(
    q, k, kw, v, lr, retain, momentum, write, reset, value, docs, M0, S0, Z0, y, kept, kept_S, M1, S1, T, H, SEG,
    cu, ca, cs, cl,
    P: tl.constexpr, V: tl.constexpr, BP: tl.constexpr, BV: tl.constexpr, PSI: tl.constexpr, MOVES: tl.constexpr,
    STEP: tl.constexpr, LINK: tl.constexpr, DUAL: tl.constexpr, ALGORITHM: tl.constexpr, DESCEND: tl.constexpr,
    SLOT: tl.constexpr,
    RETAIN: tl.constexpr, VALUE: tl.constexpr, MASK: tl.constexpr, RESET: tl.constexpr, APART: tl.constexpr,
    DECAYED: tl.constexpr, EARLY_READ: tl.constexpr, KEEPS: tl.constexpr, DOCS: tl.constexpr,
):  # fmt: skip
    """One program per memory (also per document if DOCS, from Z0) and tile of values: outputs, last states and, if it
    KEEPS them, the states at every SEG-th token."""
    n, iv = tl.program_id(0).to(tl.int64), tl.program_id(1)
    op, ov = tl.arange(0, BP), iv * BV + tl.arange(0, BV)
    in_p, in_v = (op < P)[:, None], (ov < V)[None, :]
    # The state is stored [V, P] and loaded transposed, [P, V], so that products with a key are sums down columns.
    cell, whole = op[:, None] + ov[None, :] * P, in_p & in_v
    first, length, slot, beside, own = sequence_of(docs, T, H, DOCS)
    A, S = first_state(M0, S0, Z0, n, own, cell, whole, V * P, SLOT, DOCS, False)
    W = weights(A, cl, whole, in_p, in_v, P, V, LINK, DUAL)
    for t in range(0, length):
        at = first + tl.cast(t, tl.int64) * H
        # Saved before the token's reset, which the backward pass repeats.
        if KEEPS and t % SEG == 0:
            place = ((slot + t // SEG) * beside + own) * V * P
            tl.store(kept + place + cell, A, mask=whole)
            if SLOT:
                tl.store(kept_S + place + cell, S, mask=whole)
        if RESET:
            if tl.load(reset + at) != 0:
                A, S = tl.load(Z0 + n * V * P + cell, mask=whole, other=0.0), tl.zeros_like(S)
                W = weights(A, cl, whole, in_p, in_v, P, V, LINK, DUAL)
        qt = tl.load(q + at * P + op, mask=op < P, other=0.0).to(tl.float32)[:, None]
        # The output of a read before the write, and of a masked token.
        out = tl.sum(qt * W, 0)
        w = True
        if MASK:
            w = tl.load(write + at) != 0
        if w:
            rp, rv = retain_at(retain, value, at, op, ov, P, V, RETAIN, VALUE)
            kt, wt, vt, l, m = token_at(k, kw, v, lr, momentum, at, op, ov, P, V, SLOT, APART)
            A, S, _, _, _, _ = written(
                A, S, W, kt, wt, vt, l, m, rp * rv, cu, ca, cs, cl, in_p, in_v, whole, P, V,
                PSI, MOVES, STEP, LINK, DUAL, ALGORITHM, DESCEND, DECAYED)  # fmt: skip
            W = weights(A, cl, whole, in_p, in_v, P, V, LINK, DUAL)
            if not EARLY_READ:
                out = tl.sum(qt * W, 0)
        tl.store(y + at * V + ov, out.to(y.dtype.element_ty), mask=ov < V)
    last = whole & (n + beside >= tl.num_programs(0))  # of documents, only the last one's state is returned
    tl.store(M1 + own * V * P + cell, A, mask=last)
    if SLOT:
        tl.store(S1 + own * V * P + cell, S, mask=last)


GIVEN = ("q", "k", "v", "lr", "retain", "momentum", "erase", "write", "value")  # inputs of `one_token`, in this order
PLACES = tuple(f"{name}_{axis}" for name in GIVEN for axis in "bhd")  # their strides over rows, heads and channels


@triton.jit(do_not_specialize=PLACES, do_not_specialize_on_alignment=GIVEN)
def one_token(
    q, k, v, lr, retain, momentum, erase, write, value, M, S0, y,
    q_b, q_h, q_d, k_b, k_h, k_d, v_b, v_h, v_d, lr_b, lr_h, lr_d, retain_b, retain_h, retain_d,
    momentum_b, momentum_h, momentum_d, erase_b, erase_h, erase_d, write_b, write_h, write_d, value_b, value_h, value_d,
    cu, ca, cs, cl,
    P: tl.constexpr, V: tl.constexpr, BP: tl.constexpr, BV: tl.constexpr, PHI: tl.constexpr, KEYS: tl.constexpr,
    PSI: tl.constexpr, MOVES: tl.constexpr, STEP: tl.constexpr, LINK: tl.constexpr, DUAL: tl.constexpr,
    ALGORITHM: tl.constexpr, DESCEND: tl.constexpr, SLOT: tl.constexpr, RETAIN: tl.constexpr, VALUE: tl.constexpr,
    DECAYED: tl.constexpr,
    EARLY_READ: tl.constexpr,
):  # fmt: skip
    """One program per memory and tile of values: y of one token, and the new state in place. Queries and keys are not
    features yet; KEYS: there are erase and write."""
    TILES: tl.constexpr = (V + BV - 1) // BV
    b, h = (tl.program_id(0) // TILES).to(tl.int64), tl.program_id(1).to(tl.int64)
    n = b * tl.num_programs(1) + h
    op, ov = tl.arange(0, BP), tl.program_id(0) % TILES * BV + tl.arange(0, BV)
    in_p, in_v = (op < P)[:, None], (ov < V)[None, :]
    cell, whole = n * V * P + op[:, None] + ov[None, :] * P, in_p & in_v
    A = tl.load(M + cell, mask=whole, other=0.0)
    S = A * 0.0
    if SLOT:
        S = tl.load(S0 + cell, mask=whole, other=0.0)
    qt = tl.load(q + b * q_b + h * q_h + op * q_d, mask=op < P, other=0.0).to(tl.float32)
    vt = tl.load(v + b * v_b + h * v_h + ov * v_d, mask=ov < V, other=0.0).to(tl.float32)[None, :]
    l, m, rp, rv = tl.load(lr + b * lr_b + h * lr_h).to(tl.float32), 0.0, 1.0, 1.0
    if SLOT:
        m = tl.load(momentum + b * momentum_b + h * momentum_h).to(tl.float32)
    if RETAIN == "one":
        rp = tl.load(retain + b * retain_b + h * retain_h).to(tl.float32)
    if RETAIN == "channels":
        kept = retain + b * retain_b + h * retain_h + op * retain_d
        rp = tl.load(kept, mask=op < P, other=1.0).to(tl.float32)[:, None]
    if VALUE:
        held = value + b * value_b + h * value_h + ov * value_d
        rv = tl.load(held, mask=ov < V, other=1.0).to(tl.float32)[None, :]
    if KEYS:
        ke = tl.load(erase + b * erase_b + h * erase_h + op * erase_d, mask=op < P, other=0.0).to(tl.float32)
        kw = tl.load(write + b * write_b + h * write_h + op * write_d, mask=op < P, other=0.0).to(tl.float32)
    tl.debug_barrier()  # keeps work on a key behind the other loads
    kt = tl.load(k + b * k_b + h * k_h + op * k_d, mask=op < P, other=0.0).to(tl.float32)
    kt, _ = featured(kt[None, :], (op < P)[None, :], PHI)
    qt, _ = featured(qt[None, :], (op < P)[None, :], PHI)
    wt = kt
    if KEYS:
        wt, kt = kt * kw[None, :], kt * ke[None, :]
    kt, wt, qt = tl.trans(kt), tl.trans(wt), tl.trans(qt) * PHI[3]
    W = weights(A, cl, whole, in_p, in_v, P, V, LINK, DUAL)
    out = tl.sum(qt * W, 0)
    A, S, _, _, _, _ = written(
        A, S, W, kt, wt, vt, l, m, rp * rv, cu, ca, cs, cl, in_p, in_v, whole, P, V, PSI, MOVES, STEP, LINK, DUAL,
        ALGORITHM, DESCEND, DECAYED)  # fmt: skip
    tl.store(M + cell, A, mask=whole)
    if SLOT:
        tl.store(S0 + cell, S, mask=whole)
    if not EARLY_READ:
        out = tl.sum(qt * weights(A, cl, whole, in_p, in_v, P, V, LINK, DUAL), 0)
    tl.store(y + n * V + ov, out.to(y.dtype.element_ty), mask=ov < V)


@triton.jit(do_not_specialize_on_alignment=COUNTS)
def backward(
    q, k, kw, v, lr, retain, momentum, write, reset, value, docs, Z0, kept, kept_S, gy, G1, Y1, states, states_S,
    gq, gk, gw, gv, glr, gr, gm, gvalue, G0, Y0, GZ, T, H, SEG, cu, cg, ca, ca_back, cs, cs_back, cl,
    cl_back,
    P: tl.constexpr, V: tl.constexpr, BP: tl.constexpr, BV: tl.constexpr, PSI: tl.constexpr, PULL: tl.constexpr,
    MOVES: tl.constexpr, STEP: tl.constexpr, STEP_BACK: tl.constexpr, LINK: tl.constexpr, LINK_BACK: tl.constexpr,
    DUAL: tl.constexpr, ALGORITHM: tl.constexpr, DESCEND: tl.constexpr, DESCEND_BACK: tl.constexpr,
    SLOT: tl.constexpr, RETAIN: tl.constexpr, VALUE: tl.constexpr, MASK: tl.constexpr,
    RESET: tl.constexpr, APART: tl.constexpr, DECAYED: tl.constexpr, EARLY_READ: tl.constexpr, DOCS: tl.constexpr,
):  # fmt: skip
    """One program per memory, and per document, from the last token to the first. The caller zeroes GZ, and the
    cotangents that masked tokens do not store."""
    n = tl.program_id(0).to(tl.int64)
    op, ov = tl.arange(0, BP), tl.arange(0, BV)
    in_p, in_v = (op < P)[:, None], (ov < V)[None, :]
    cell, whole = op[:, None] + ov[None, :] * P, in_p & in_v
    begin, length, slot, beside, mine = sequence_of(docs, T, H, DOCS)
    own, segments = n * SEG * V * P, tl.cdiv(length, SEG)
    last = whole & (n + beside >= tl.num_programs(0))
    G = tl.load(G1 + mine * V * P + cell, mask=last, other=0.0)
    Y, GW = G * 0.0, G * 0.0
    if SLOT:
        Y = tl.load(Y1 + mine * V * P + cell, mask=last, other=0.0)
    for back in range(0, segments):
        seg = segments - 1 - back
        place, first = ((slot + seg) * beside + mine) * V * P, begin + tl.cast(seg, tl.int64) * SEG * H
        count = tl.minimum(length - seg * SEG, SEG)
        A = tl.load(kept + place + cell, mask=whole, other=0.0)
        S = A * 0.0
        if SLOT:
            S = tl.load(kept_S + place + cell, mask=whole, other=0.0)
        for i in range(0, count):
            at = first + i * H
            if RESET:
                if tl.load(reset + at) != 0:
                    A, S = tl.load(Z0 + n * V * P + cell, mask=whole, other=0.0), tl.zeros_like(S)
            # A segment's states go to scratch memory: they do not fit in registers beside the cotangents.
            tl.store(states + own + i * V * P + cell, A, mask=whole)
            if SLOT:
                tl.store(states_S + own + i * V * P + cell, S, mask=whole)
            # Nothing uses the state after the segment's last token.
            if writes_at(write, at, i + 1 < count, MASK):
                rp, rv = retain_at(retain, value, at, op, ov, P, V, RETAIN, VALUE)
                W = weights(A, cl, whole, in_p, in_v, P, V, LINK, DUAL)
                kt, wt, vt, l, m = token_at(k, kw, v, lr, momentum, at, op, ov, P, V, SLOT, APART)
                A, S, _, _, _, _ = written(
                    A, S, W, kt, wt, vt, l, m, rp * rv, cu, ca, cs, cl, in_p, in_v, whole, P, V,
                    PSI, MOVES, STEP, LINK, DUAL, ALGORITHM, DESCEND, DECAYED)  # fmt: skip
        tl.debug_barrier()
        for later in range(0, count):
            i = count - 1 - later
            at = first + i * H
            A = tl.load(states + own + i * V * P + cell, mask=whole, other=0.0)
            S = A * 0.0
            if SLOT:
                S = tl.load(states_S + own + i * V * P + cell, mask=whole, other=0.0)
            W = weights(A, cl, whole, in_p, in_v, P, V, LINK, DUAL)
            qt = tl.load(q + at * P + op, mask=op < P, other=0.0).to(tl.float32)[:, None]
            g = tl.load(gy + at * V + ov, mask=ov < V, other=0.0).to(tl.float32)[None, :]
            read = tl.sum(W * g, 1)
            w = True
            if MASK:
                w = tl.load(write + at) != 0
            if w:
                rp, rv = retain_at(retain, value, at, op, ov, P, V, RETAIN, VALUE)
                r = rp * rv
                kt, wt, vt, l, m = token_at(k, kw, v, lr, momentum, at, op, ov, P, V, SLOT, APART)
                new, _, seen, pred, u, D = written(
                    A, S, W, kt, wt, vt, l, m, r, cu, ca, cs, cl, in_p, in_v, whole, P, V, PSI, MOVES, STEP, LINK,
                    DUAL, ALGORITHM, DESCEND, DECAYED)  # fmt: skip
                if not EARLY_READ:
                    read = tl.sum(weights(new, cl, whole, in_p, in_v, P, V, LINK, DUAL) * g, 1)
                    GW += qt * g
                if DUAL:
                    GW = weights_vjp(new, cl_back, whole, in_p, in_v, GW, P, V, LINK_BACK)
                # From here on the reverse of `written`: step, direction, u, prediction.
                G, X, R = moved_vjp(A, D, r, cs_back, whole, in_p, in_v, G + GW, P, V, STEP_BACK)
                Y, gu, gwt, gl, gmt = direction_vjp(
                    S, u, wt, l, m, ca_back, X, Y, whole, in_p, in_v, P, V, DESCEND_BACK, ALGORITHM)  # fmt: skip
                gp, gvt = PULL((ov < V)[None, :], V, pred, vt, gu, cg)
                GW = G * 0.0
                gkt = gwt * 0.0
                if MOVES:
                    gp = tl.where((ov < V)[None, :], gp, 0.0)
                    GW = kt * gp
                    gkt = tl.sum(seen * gp, 1)[:, None]
                    if DECAYED:
                        if DUAL:
                            ahead = moved(A, A * 0.0, r, cs, whole, in_p, in_v, P, V, STEP)
                            GW = weights_vjp(ahead, cl_back, whole, in_p, in_v, GW, P, V, LINK_BACK)
                        G_ahead, _, R_ahead = moved_vjp(A, A * 0.0, r, cs_back, whole, in_p, in_v, GW, P, V, STEP_BACK)
                        G, R, GW = G + G_ahead, R + R_ahead, G * 0.0
                if APART:
                    tl.store(gw + at * P + op[:, None], gwt, mask=in_p)
                else:
                    gkt += gwt
                tl.store(gk + at * P + op[:, None], gkt, mask=in_p)
                tl.store(gv + at * V + ov[None, :], gvt, mask=(ov < V)[None, :])
                tl.store(glr + at, gl)
                if SLOT:
                    tl.store(gm + at, gmt)
                if RETAIN == "one":
                    tl.store(gr + at, tl.sum(R * rv))
                if RETAIN == "channels":
                    tl.store(gr + at * P + op, tl.sum(R * rv, 1), mask=op < P)
                if VALUE:
                    tl.store(gvalue + at * V + ov, tl.sum(R * rp, 0), mask=ov < V)
                if EARLY_READ:
                    GW += qt * g
            else:
                GW += qt * g
            tl.store(gq + at * P + op, read, mask=op < P)
            if RESET:
                if tl.load(reset + at) != 0:
                    if DUAL:
                        GW = weights_vjp(A, cl_back, whole, in_p, in_v, GW, P, V, LINK_BACK)
                    to = GZ + n * V * P + cell
                    tl.store(to, tl.load(to, mask=whole, other=0.0) + G + GW, mask=whole)
                    G, Y, GW = tl.zeros_like(G), tl.zeros_like(Y), tl.zeros_like(GW)
        tl.debug_barrier()
    if DUAL:
        A = tl.load(kept + (slot * beside + mine) * V * P + cell, mask=whole, other=0.0)
        GW = weights_vjp(A, cl_back, whole, in_p, in_v, GW, P, V, LINK_BACK)
    tl.store(G0 + n * V * P + cell, G + GW, mask=whole)
    if SLOT:
        tl.store(Y0 + n * V * P + cell, Y, mask=whole)
