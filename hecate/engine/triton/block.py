"""Coefficients of a chunk, which depend on its gates alone, and loads of rows.

Token i predicts with p_i = phi_k, writes with b_i = lr phi_w and reads with q_i. At a reset, retain and momentum are 0
for the earlier state, and the new state is retain times the weights Z. M, S and Z are the states at a chunk's start.
R[t, j] is the product of retain over j < l <= t, P[t, j] that of momentum, and w_j says whether j writes:

    M_t = a_t M + s_t S + z_t Z - sum_i K[t, i] u_i b_i^T,   K = (R o w) P,  a_t = R[t, start],  s = (R o w) e
    S_t = e_t S - sum_i P[t, i] u_i b_i^T,                   e_t = P[t, start],  z_t = sum_j R[t, j] retain_j reset_j

A view of the memory after retain but before the token's own write uses the rows of R below the diagonal. A view before
retain uses the products over j < l < t. Predictions are

    u_t = psi(pred_t, v_t),   pred_t = (a_t M + s_t S + z_t Z) p_t - sum_{i < t} F[t, i] (p_t . b_i) u_i.

Products of gates are computed from sums of logarithms, with care for zeros: see `logs`. [ENG-TRITON-D1]
"""

import triton
import triton.language as tl

from hecate.engine.triton.maps import featured


@triton.jit
def narrowed(x, DT: tl.constexpr):
    """x as an operand of a matrix product, in dtype DT."""
    return x.to(DT)


@triton.jit
def times(x, y, DT: tl.constexpr, EXACT: tl.constexpr):
    """Matrix product of operands in DT, accumulated in float32; EXACT is "tf32" or "tf32x3"."""
    return tl.dot(narrowed(x, DT), narrowed(y, DT), input_precision=EXACT)


@triton.jit
def in_halves(x, y, DT: tl.constexpr, EXACT: tl.constexpr):
    """`times` to about sixteen bits: an operand with more digits than DT is split into two halves."""
    if DT == tl.float32:
        found = tl.dot(x.to(tl.float32), y.to(tl.float32), input_precision=EXACT)
    else:
        near, close = narrowed(x, DT), narrowed(y, DT)
        found = tl.dot(near, close)
        if x.dtype != DT:
            found = tl.dot(narrowed(x - near.to(tl.float32), DT), close, found)
        if y.dtype != DT:
            found = tl.dot(near, narrowed(y - close.to(tl.float32), DT), found)
    return found


@triton.jit
def sequence_of(docs, T, H, DOCS: tl.constexpr):
    """(position of the first token, number of tokens, index of the first saved state, number of memories whose states
    are saved side by side, this memory's index among them) for a program that handles a memory, or a memory in one
    document. docs `[documents, 3]`: first token, number of tokens, first saved state."""
    n = tl.program_id(0).to(tl.int64)
    first, length, slot, beside, own = n // H * T * H + n % H, T, n * 0, tl.num_programs(0), n
    if DOCS:
        row, own = docs + n // H * 3, n % H
        first, length = tl.load(row) * H + own, tl.load(row + 1)
        slot, beside = tl.load(row + 2), H
    return first, length, slot, beside, own


@triton.jit
def first_state(
    M0, S0, Z0, n, own, cell, whole, size: tl.constexpr, MOMENTUM: tl.constexpr, DOCS: tl.constexpr, PARTS: tl.constexpr
):
    """A program's first memory and momentum. Documents start from Z0 and momentum 0, unless they are PARTS of a row."""
    if DOCS and not PARTS:
        M = tl.load(Z0 + own * size + cell, mask=whole, other=0.0)
    else:
        M = tl.load(M0 + n * size + cell, mask=whole, other=0.0)
    S = M * 0.0
    if MOMENTUM and (PARTS or not DOCS):
        S = tl.load(S0 + n * size + cell, mask=whole, other=0.0)
    return M, S


@triton.jit
def origin_of(spans, T, H, N, C: tl.constexpr, SEG: tl.constexpr, DOCS: tl.constexpr, EACH: tl.constexpr):
    """(position of the sequence's first token, index of the chunk's first token, end of the sequence, index of the
    chunk) for a program that handles a chunk of C tokens of one of N memories; EACH programs share a chunk, one per
    tile of its channels. spans `[segments, 2]`: the first token of each segment of SEG tokens, and the end of its
    document."""
    place = tl.program_id(0) // EACH
    here, n = place // N, (place % N).to(tl.int64)
    first, start, end = n // H * T * H + n % H, here * C, T
    if DOCS:
        span = spans + here // (SEG // C) * 2
        first, start, end = n, tl.load(span) + here % (SEG // C) * C, tl.load(span + 1)
    return first, start, end, place.to(tl.int64)


@triton.jit
def segment_of(spans, T, H, N, C: tl.constexpr, SEG: tl.constexpr, DOCS: tl.constexpr, EACH: tl.constexpr = 1):
    """(positions of a chunk's tokens, their mask, mask of those that have a successor, index of the chunk), as in
    `origin_of`."""
    first, start, end, place = origin_of(spans, T, H, N, C, SEG, DOCS, EACH)
    i = tl.arange(0, C)
    return first + (start + i) * H, start + i < end, start + i + 1 < end, place


@triton.jit
def row_of(x, i, t):
    """Row t of a tile, `[1, .]`."""
    return tl.sum(tl.where((i == t)[:, None], x, 0.0), 0)[None, :]


@triton.jit
def end_of(x, i, C: tl.constexpr):
    """The last element of a vector."""
    return tl.sum(tl.where(i == C - 1, x, 0.0), 0)


@triton.jit
def rows(x, at, there, o, width, MAP: tl.constexpr):
    """Rows `[C, width]` as stored, or mapped by MAP; 0 where the mask is false."""
    cells = there[:, None] & (o < width)[None, :]
    found = tl.load(x + at[:, None] * width + o[None, :], mask=cells, other=0.0)
    if MAP[0] is not None or MAP[2] != "none":
        found, _ = featured(found.to(tl.float32), cells, MAP)
    return found


@triton.jit
def writes_at(write, at, inside, MASK: tl.constexpr):
    """Mask of the tokens that write. A bias is not used on the others: it may be NaN at 0."""
    w = inside
    if MASK:
        w = inside & (tl.load(write + at, mask=inside, other=0) != 0)
    return w


@triton.jit
def gates_at(
    retain, momentum, write, reset, at, inside,
    RETAIN: tl.constexpr, MOMENTUM: tl.constexpr, MASK: tl.constexpr, RESET: tl.constexpr,
):  # fmt: skip
    """(mask of writes, 1 at resets, retain, momentum); gates are 1 where nothing is written."""
    w = writes_at(write, at, inside, MASK)
    born = tl.where(inside, 0.0, 0.0)
    if RESET:
        born = tl.load(reset + at, mask=inside, other=0).to(tl.float32)
    r, m = born * 0.0 + 1.0, born * 0.0 + 1.0
    if RETAIN:
        r = tl.load(retain + at, mask=w, other=1.0).to(tl.float32)
    if MOMENTUM:
        m = tl.load(momentum + at, mask=w, other=1.0).to(tl.float32)
    return w, born, r, m


@triton.jit
def logs(gate):
    """log2 of the cumulative products of gates, as two float32 numbers whose sum has twice the digits. A gate of 0
    counts as 2^-16384: products across it underflow to 0, products on one side of it are unaffected."""
    # log2(0) is infinite, and a difference of infinities is NaN.
    dead = gate == 0
    found = tl.cumsum(tl.where(dead, -16384.0, tl.log2(tl.where(dead, 1.0, gate).to(tl.float64))), 0)
    high = found.to(tl.float32)
    return high, (found - high.to(tl.float64)).to(tl.float32)


@triton.jit
def spans(to, low_to, on, low_on, there):
    """Products of gates `[t, j]`: the product up to token t over the product up to token j; 0 where the mask is
    false."""
    return tl.where(there, tl.exp2((to[:, None] - on[None, :]) + (low_to[:, None] - low_on[None, :])), 0.0)


@triton.jit
def through(gate, i):
    """Products of gates over j < l <= t, `[t, j]`; 1 on the diagonal, 0 above."""
    x, low = logs(gate)
    return spans(x, low, x, low, i[:, None] >= i[None, :])


@triton.jit
def between(previous, gate, i, inside):
    """Products of gates over j < l < t, `[t, j]`, given each token's previous gate too; 0 on and above the diagonal,
    and for tokens beyond the sequence, whose previous gate is unknown."""
    to, low_to = logs(previous)
    on, low_on = logs(gate)
    return spans(to, low_to, on, low_on, (i[:, None] > i[None, :]) & inside[:, None])


@triton.jit
def decays(
    retain, momentum, write, reset, at, step, i, inside,
    RETAIN: tl.constexpr, MOMENTUM: tl.constexpr, MASK: tl.constexpr, RESET: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """(w, born, retain, R, R before retain, P, a, a before retain, e) for the tokens of a tile.

    Factors before retain are computed only if EARLY."""
    w, born, r, m = gates_at(retain, momentum, write, reset, at, inside, RETAIN, MOMENTUM, MASK, RESET)
    R, a = through(r * (1 - born), i), tl.cumprod(r * (1 - born), 0)
    B, early, Pm, e = R, a, R, a
    if EARLY:
        _, b, p, _ = gates_at(retain, momentum, write, reset, at - step, inside & (i > 0), RETAIN, False, MASK, RESET)
        # Before its retain a token sees what its predecessor left: gates lag by one token.
        B = between(p * (1 - b), r * (1 - born), i, inside) * (1 - born)[:, None]
        early = tl.cumprod(p * (1 - b), 0) * (1 - born)
    if MOMENTUM:
        Pm, e = through(m * (1 - born), i), tl.cumprod(m * (1 - born), 0)
    return w, born, r, R, B, Pm, a, early, e


@triton.jit
def seen(R, a, w, born, r, Pm, e, AHEAD: tl.constexpr, MOMENTUM: tl.constexpr, DT: tl.constexpr, EXACT: tl.constexpr):
    """(K, s, z) of a view of the memory with factors R and a. AHEAD: a view before retain, in which a reset token sees
    Z."""
    z = tl.sum(R * (born * r)[None, :], 1)
    if AHEAD:
        z += born
    K, s = R, a * 0.0
    if MOMENTUM:
        Rw = tl.where(w[None, :], R, 0.0)
        K, s = in_halves(Rw, Pm, DT, EXACT), tl.sum(Rw * e[None, :], 1)
    return K, s, z


@triton.jit
def views(
    R, B, Pm, a, early, e, w, born, r, i,
    MOMENTUM: tl.constexpr, EARLY_READ: tl.constexpr, MOVES: tl.constexpr, DECAYED: tl.constexpr, DT: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """(K, s, z) after a write, (K, a, s, z) of the view that is read and, where u depends on predictions (MOVES), of
    the view that predicts."""
    K, s, z = seen(R, a, w, born, r, Pm, e, False, MOMENTUM, DT, EXACT)
    Kq, aq, sq, zq = K, a, s, z
    if EARLY_READ:
        Kq, sq, zq = seen(B, early, w, born, r, Pm, e, True, MOMENTUM, DT, EXACT)
        aq = early
    F, af, sf, zf = Kq, a, s, z
    if MOVES:
        if DECAYED:
            F, sf, _ = seen(tl.where(i[:, None] > i[None, :], R, 0.0), a, w, born, r, Pm, e, False, MOMENTUM, DT, EXACT)
        else:
            F, sf, zf = seen(B, early, w, born, r, Pm, e, True, MOMENTUM, DT, EXACT)
            af = early
    return K, s, z, Kq, aq, sq, zq, F, af, sf, zf


@triton.jit
def channels_at(retain, at, w, o, P: tl.constexpr):
    """Retain per phi channel, rows `[C, P]`; 1 where nothing is written."""
    there = w[:, None] & (o < P)[None, :]
    return tl.load(retain + at[:, None] * P + o[None, :], mask=there, other=1.0).to(tl.float32)
