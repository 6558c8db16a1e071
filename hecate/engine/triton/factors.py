"""The kernel before the walks: interactions within each chunk of C tokens, for all chunks in parallel.

Names are those of `block`. F and K_q weigh earlier writes in predictions and in reads; Q, K and W are a chunk's
queries, keys and written keys as rows; lr scales columns:

    L = F o (K W^T) lr,   A = K_q o (Q W^T) lr,   T = (I + L)^-1.

For an error bias the writes are D = T (V - pred), with pred the predictions from the chunk's first states, and outputs
are the reads of these states plus A D. Row norms, the query scale and lr go into scalars per token, so that bfloat16
keys reach the tensor cores as stored. [ENG-TRITON-D10]
"""

import triton
import triton.language as tl

from hecate.engine.triton.block import decays, end_of, narrowed, rows, segment_of, times, views
from hecate.engine.triton.maps import COUNTS, PLAIN, over, sized


@triton.jit
def over_size(x, NORM: tl.constexpr):
    """Reciprocals of the sizes of rows."""
    found = tl.sum(x.to(tl.float32) * 0.0, 1) + 1.0
    if NORM != "none":
        _, size = sized(x.to(tl.float32), NORM)
        found = over(size)
    return found


@triton.jit
def keys_of(q, k, kw, lr, at, inside, w, op, P, APART: tl.constexpr, MAP: tl.constexpr, SIZE: tl.constexpr):
    """(queries, keys, written keys) as operands, and the scalars still to multiply each: lr for written keys, too."""
    own, asked = rows(k, at, w, op, P, MAP), rows(q, at, inside, op, P, MAP)
    of_k, of_q = over_size(own, SIZE), over_size(asked, SIZE) * MAP[3]
    step, written = tl.load(lr + at, mask=w, other=0.0).to(tl.float32), own
    if APART:
        written = rows(kw, at, w, op, P, PLAIN)
    else:
        step = step * of_k
    return asked, own, written, of_q, of_k, step


@triton.jit
def at_level(x, i, h: tl.constexpr):
    """x in the lower left quadrants of the 2 h x 2 h blocks on the diagonal, 0 elsewhere."""
    # The diagonal blocks of h rows are inverted; the quadrant below merges two of them into one of 2 h rows.
    left = tl.where(i // h % 2 == 0, i // h + 1, -1)  # the h rows of a column's quadrant
    return tl.where((i // h)[:, None] == left[None, :], x, 0.0)


@triton.jit
def inverse(L, i, LOG: tl.constexpr, HALVES: tl.constexpr, DT: tl.constexpr, EXACT: tl.constexpr):
    """(I + L)^-1 of 2^LOG rows, L strictly lower triangular, by merging diagonal blocks. Powers of L are avoided: for a
    run of equal keys at lr 1, L is all ones and its powers lose every digit. Narrow operands leave an error of up to
    1e-2, which one Newton step squares; its residual takes L in two halves."""
    one = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    X = one - at_level(L, i, 1)
    # [[A, 0], [L, B]]^-1 = [[A^-1, 0], [-B^-1 L A^-1, B^-1]], for all blocks of a size at once.
    for n in tl.static_range(1, LOG):
        X -= at_level(times(times(X, L, DT, EXACT), X, DT, EXACT), i, 1 << n)
    if HALVES:
        X = narrowed(X, DT)
        high = narrowed(L, DT)
        rest = one - X.to(tl.float32) - times(high, X, DT, EXACT) - times(L - high.to(tl.float32), X, DT, EXACT)
        X = X.to(tl.float32) + times(X, rest, DT, EXACT)
    return X


@triton.jit
def put(x, place, i, m, C: tl.constexpr, HALVES: tl.constexpr):
    """Stores a chunk's matrix of pairs, in two halves if HALVES."""
    N: tl.constexpr = 2 if HALVES else 1
    pair = x + place * N * C * C + i[:, None] * C + i[None, :]
    high = narrowed(m, x.dtype.element_ty)
    tl.store(pair, high.to(x.dtype.element_ty))
    if HALVES:
        tl.store(pair + C * C, narrowed(m - high.to(tl.float32), x.dtype.element_ty).to(x.dtype.element_ty))


@triton.jit(do_not_specialize_on_alignment=COUNTS)
def factors(
    q, k, kw, lr, retain, momentum, write, reset, spans, lower, attend, numbers, ends, T, H, N,
    P: tl.constexpr, BP: tl.constexpr, C: tl.constexpr, SEG: tl.constexpr, LOG: tl.constexpr, FORM: tl.constexpr,
    RETAIN: tl.constexpr, MOMENTUM: tl.constexpr, MASK: tl.constexpr, RESET: tl.constexpr, APART: tl.constexpr,
    DECAYED: tl.constexpr, EARLY_READ: tl.constexpr, DT: tl.constexpr, EXACT: tl.constexpr, FINE: tl.constexpr,
    HALVES: tl.constexpr, MAP: tl.constexpr, SIZE: tl.constexpr, DOCS: tl.constexpr,
):  # fmt: skip
    """One program per chunk: T (L if u is not an error), A, and the coefficients of tokens and of the chunk's end.

    numbers `[chunks, 8, C]`: aq, sq, zq; af, sf, zf; K and P at the chunk's end, times lr. ends `[chunks, 4]`: a, s, e,
    z there."""
    MOVES: tl.constexpr = FORM != "target"
    EARLY: tl.constexpr = EARLY_READ or (MOVES and not DECAYED)
    i, op = tl.arange(0, C), tl.arange(0, BP)
    at, inside, _, place = segment_of(spans, T, H, N, C, SEG, DOCS)
    w, born, r, R, B, Pm, a, early, e = decays(
        retain, momentum, write, reset, at, H, i, inside, RETAIN, MOMENTUM, MASK, RESET, EARLY
    )
    K, s, z, Kq, aq, sq, zq, F, af, sf, zf = views(
        R, B, Pm, a, early, e, w, born, r, i, MOMENTUM, EARLY_READ, MOVES, DECAYED, DT, FINE
    )
    asked, own, written, of_q, of_k, step = keys_of(q, k, kw, lr, at, inside, w, op, P, APART, MAP, SIZE)
    A = Kq * times(asked, tl.trans(written), DT, EXACT) * of_q[:, None] * step[None, :]
    put(attend, place, i, A, C, HALVES)
    mine = numbers + place * 8 * C + i
    if MOVES:
        L = F * times(own, tl.trans(written), DT, EXACT) * of_k[:, None] * step[None, :]
        if FORM == "error":
            L = inverse(L, i, LOG, HALVES, DT if HALVES else tl.float32, EXACT)
        put(lower, place, i, L, C, HALVES)
        tl.store(mine + 3 * C, af * of_k)
        tl.store(mine + 4 * C, sf * of_k)
        tl.store(mine + 5 * C, zf * of_k)
    tl.store(mine, aq * of_q)
    tl.store(mine + C, sq * of_q)
    tl.store(mine + 2 * C, zq * of_q)
    # Row C - 1 of K and P holds the weight of each token's write at the chunk's end.
    last = (i == C - 1)[:, None]
    tl.store(mine + 6 * C, tl.sum(tl.where(last, K, 0.0), 0) * step)
    tl.store(mine + 7 * C, tl.sum(tl.where(last, Pm, 0.0), 0) * step)
    end = ends + place * 4
    tl.store(end, end_of(a, i, C))
    tl.store(end + 1, end_of(s, i, C))
    tl.store(end + 2, end_of(e, i, C))
    tl.store(end + 3, end_of(z, i, C))
