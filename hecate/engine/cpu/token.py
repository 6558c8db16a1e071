"""One token through what stands between a layer's projections: convolution, norms of queries and keys, write, read,
norm and gate, in one pass over the state; and what stands around the products of its block.

Tensors come as addresses, since to look at one as an array takes as long as its arithmetic; they are contiguous, of one
float type, and the widths of a head whole vectors. A memory reads and writes nothing of another, so threads change no
sum. [NN-TOKEN-D1]
"""

from __future__ import annotations

import math

from hecate.engine.cpu.lanes import exp
from hecate.engine.cpu.vectors import ONE, filled, inline, kernel, load, raw, mad, mul, number, per_vector, store, sums


@inline
def _convolved(like, x, at, past, own, after, w, channel, C, K, active, width, z, to):
    """z from `to` on = sum_j w_j x_(t-j) of so many channels, or SiLU of it, and their past one token on."""
    for c in range(0, width, per_vector(like)):
        # `past` is [K - 1, C], the oldest token first: that of j tokens ago lies in row K - 1 - j.
        seen = load(x, at + c, ONE)
        found = load(w, channel + c, ONE) * seen
        for j in range(1, K):
            found = mad(load(w, j * C + channel + c, ONE), load(past, own + (K - 1 - j) * C + c, ONE), found)
        store(z, to + c, found / (exp(-found) + 1.0) if active else found)
        for j in range(K - 2):
            store(after, own + j * C + c, load(past, own + (j + 1) * C + c, ONE))
        store(after, own + (K - 2) * C + c, seen)


@inline
def _along(like, x, at, y, to, width):
    """x . y of so many numbers from two places on."""
    found = filled(like, 0.0)
    for c in range(0, width, per_vector(like)):
        found = mad(load(x, at + c, ONE), load(y, to + c, ONE), found)
    return sums((found, found, found, found))[0]


@inline
def _scaled(like, x, at, width, by):
    """Multiplies so many numbers in place."""
    for c in range(0, width, per_vector(like)):
        store(x, at + c, mul(number(like[0], by), load(x, at + c, ONE)))


@inline
def _normalised(form, x, at, P):
    """A query or a key after `qk_norm` and `key_norm`, in place; False where its length has to be looked at."""
    size, eps, unit, far = form[0], form[1], form[2], form[3]
    if size == 0 and unit == 0:
        return True
    square, by = _along(form, x, at, x, at, P), 1.0
    # Not `square >= inf`, which NaN would pass.
    if not square < math.inf:
        return False
    if size != 0:
        by = 1.0 / math.sqrt(square / size + eps)
    if unit != 0:
        # The square of what the first norm has left, without a second pass over it.
        square *= by * by
        if not 1.0 / far <= square <= far:
            return False
        by /= math.sqrt(square)
    _scaled(form, x, at, P, by)
    return True


@inline
def _gate(form, values, biases, bias, n, h, x, at, X):
    """A gate of a head: as it is given, or sigmoid(w . x + b) of its row of weights where x has X numbers."""
    if X == 0:
        return values[n]
    logit = _along(form, values, h * X, x, at, X)
    if bias != 0:
        logit += biases[h]
    return number(form[0], 1.0 / (1.0 + math.exp(-logit)))


@inline
def _written(form, x, q, P, V, M, M1, S, S1, at, rate, carried, moves, gathers, blind, early, after_write):
    """Writes a memory `[V, P]` and reads it, row by row; a sum that is finite if all that it leaves is, and that of the
    squares of the answers. x has q, k, retain, v and room for the answers from a place on. With `gathers` S has the
    sum of the chunk's gradients, which grows, and the memory stays."""
    k, kept, v, answer, step = q + P, q + 2 * P, q + 3 * P, q + 3 * P + V, per_vector(form)
    told, square = 0.0, 0.0
    # Rows twice, the second time from the cache: a prediction has to be whole before its row moves.
    for r in range(V):
        o = at + r * P
        predicted = filled(form, 0.0)
        if not blind:
            for c in range(0, P, step):
                m = load(M, o + c, ONE)
                if early:
                    m = m * load(x, kept + c, ONE)
                predicted = mad(m, load(x, k + c, ONE), predicted)
        d = rate * (x[v + r] - sums((predicted, predicted, predicted, predicted))[0])
        new, old = filled(form, 0.0), filled(form, 0.0)
        for c in range(0, P, step):
            m, key, query = load(M, o + c, ONE), load(x, k + c, ONE), load(x, q + c, ONE)
            # Both answers, before the write and after it: one is wanted, the other is cheaper than a branch.
            old = mad(m, query, old)
            if gathers:
                s = mad(-d, key, load(S, o + c, ONE))
                store(S1, o + c, s)
                store(M1, o + c, m)
                new = mad(s, query, new)
                continue
            m = m * load(x, kept + c, ONE)
            if moves:
                s = mad(d, key, mul(carried, load(S, o + c, ONE)))
                store(S1, o + c, s)
                m = m + s
            else:
                m = mad(d, key, m)
            store(M1, o + c, m)
            new = mad(m, query, new)
        both = sums((new, old, new, old))
        # Any NaN or infinity of the new row is in this sum, which is all that the caller looks at.
        told += both[0]
        x[answer + r] = both[0] if after_write and not gathers else both[1]
        square += x[answer + r] * x[answer + r]
    return told, square


@inline
def _opened(like, x, at, weight, own, gate, opens, y, to, V):
    """y = x weight silu(gate) of a head, or without a gate x weight."""
    for c in range(0, V, per_vector(like)):
        z = load(x, at + c, ONE) * load(weight, own + c, ONE)
        if opens:
            opened = load(gate, to + c, ONE)
            z = z * (opened / (exp(-opened) + 1.0))
        store(y, to + c, z)


def token(
    lo, hi, H, P, V, K, X, chunk, active, blind, early, after_write, channels, dampens, form, counts, rows,
    x, lr, lr_bias, retain, retain_bias, momentum, momentum_bias, mixed, past, w, memory, slot, pending, position,
    weight, gate, past_after, memory_after, slot_after, pending_after, position_after, y,
):  # fmt: skip
    """Memories lo to hi, head by head of sequence by sequence: the sum of their answers, not finite where anything that
    they leave is not, or the length of a query or key has to be looked at.

    `form` has the divisor of squares of `qk_norm` (0: no such norm), eps beside them, 1 for `key_norm` l2 and the
    longest square that it takes, what queries are multiplied by, eps beside mean squares of answers and the ceiling of
    lr; `rows` has room for 3 P + 2 V numbers of each memory. retain, slot, gate and biases are 0 where there is none.
    lr, retain and momentum are numbers of each memory, with `channels` retain P of them; or, unless X is 0, the weights
    of sigmoids of x, X numbers of each head. Where gradients gather for a `chunk` of more than one token, slot has
    their sum, pending the product of the chunk's retain gates, and position, like `counts` in int64, its tokens so far;
    not finite is also the sum of a token that ends one.
    """
    IN, MIXED, PAST, W, PAST1 = (
        raw(form, x), raw(form, mixed), raw(form, past), raw(form, w), raw(form, past_after)
    )  # fmt: skip
    LR, RETAIN, MOMENTUM, ROWS = raw(form, lr), raw(form, retain), raw(form, momentum), raw(form, rows)
    BIASES = raw(form, lr_bias), raw(form, retain_bias), raw(form, momentum_bias)
    PENDING, PENDING1 = raw(form, pending), raw(form, pending_after)
    POSITION, POSITION1 = raw(counts, position), raw(counts, position_after)
    M, M1, S, S1 = raw(form, memory), raw(form, memory_after), raw(form, slot), raw(form, slot_after)
    WEIGHT, GATE, Y = raw(form, weight), raw(form, gate), raw(form, y)
    C, told, step = H * (2 * P + V), 0.0, per_vector(form)
    for n in range(lo, hi):
        b, h, q = n // H, n % H, n * (3 * P + 2 * V)
        k, kept, v, answer = q + P, q + 2 * P, q + 3 * P, q + 3 * P + V
        for part in range(3):
            width, to = (V, v) if part == 2 else (P, q + part * P)
            at = part * H * P + h * width
            _convolved(form, MIXED, b * C + at, PAST, b * (K - 1) * C + at, PAST1, W, at, C, K, active, width, ROWS, to)
        if not (_normalised(form, ROWS, q, P) and _normalised(form, ROWS, k, P)):
            return math.nan
        _scaled(form, ROWS, q, P, form[4])
        keep, carried = number(form[0], 1.0), number(form[0], 0.0)
        if retain != 0 and not channels:
            keep = _gate(form, RETAIN, BIASES[1], retain_bias, n, h, IN, b * X, X)
        if chunk > 1:
            # The token that ends a chunk moves the memory: the caller takes the long way for it.
            if POSITION[n] + 1 >= chunk:
                return math.nan
            POSITION1[n] = POSITION[n] + 1
            keep = keep * PENDING[n]
            PENDING1[n] = keep
        for c in range(0, P, step):
            # Spread over a row either way, so that the write knows retain per channel alone.
            store(ROWS, kept + c, load(RETAIN, n * P + c, ONE) if channels else filled(form, keep))
        rate = _gate(form, LR, BIASES[0], lr_bias, n, h, IN, b * X, X)
        if X != 0:
            rate = rate * form[6]
        if slot != 0 and chunk == 1:
            carried = _gate(form, MOMENTUM, BIASES[2], momentum_bias, n, h, IN, b * X, X)
            if dampens:
                rate = rate * (number(rate, 1.0) - carried)
        every, square = _written(
            form, ROWS, q, P, V, M, M1, S, S1, n * V * P, rate, carried, slot != 0, chunk > 1, blind, early, after_write
        )
        told += every + square
        # The norm of the answer, whose square was summed up as it was read.
        _scaled(form, ROWS, answer, V, 1.0 / math.sqrt(square / V + form[5]))
        _opened(form, ROWS, answer, WEIGHT, h * V, GATE, gate != 0, Y, n * V, V)
    return told


def add_norm(N, D, form, x, more, weight, total, y):
    """Rows y of x + more, which `total` keeps, at root mean square 1 times the weight; of x alone where `more` is 0.
    `form` has eps."""
    X, MORE, WEIGHT = raw(form, x), raw(form, more), raw(form, weight)
    TOTAL, Y = raw(form, total), raw(form, y)
    for at in range(0, N * D, D):
        found = filled(form, 0.0)
        for c in range(0, D, per_vector(form)):
            v = load(X, at + c, ONE)
            if more != 0:
                v = v + load(MORE, at + c, ONE)
                store(TOTAL, at + c, v)
            found = mad(v, v, found)
        by = number(form[0], 1.0 / math.sqrt(sums((found, found, found, found))[0] / D + form[0]))
        for c in range(0, D, per_vector(form)):
            v = load(TOTAL, at + c, ONE) if more != 0 else load(X, at + c, ONE)
            store(Y, at + c, mul(by, v) * load(WEIGHT, c, ONE))


def swiglu(N, D, form, x, y):
    """Rows y `[D]` = silu(a) b of rows [a, b]."""
    X, Y = raw(form, x), raw(form, y)
    for n in range(N):
        for c in range(0, D, per_vector(form)):
            z = load(X, 2 * n * D + c, ONE)
            store(Y, n * D + c, z / (exp(-z) + 1.0) * load(X, (2 * n + 1) * D + c, ONE))


# A token over states of transformers, which are written in place; that of the delta rule is read twice: once for what
# it answers key and query, once to be decayed and written.


def conv_update(x, state, weight, bias, y):
    """y = silu(bias + sum_j weight_j x_(t-j)) of x `[B, C]` after the state `[B, C, K]`, which takes it."""
    batch, channels, kernel = state.shape
    for b in range(batch):
        for c in range(channels):
            total = bias[c] if bias.size else x[b, c] * 0
            for j in range(kernel - 1):
                state[b, c, j] = state[b, c, j + 1]
                total += weight[c, j] * state[b, c, j]
            state[b, c, kernel - 1] = x[b, c]
            total += weight[c, kernel - 1] * x[b, c]
            y[b, c] = total / (1 + math.exp(-total))


def delta_update(q, k, v, g, beta, state, y, scratch):
    """q, k `[B, H', K]`, v and y `[B, H, V]`, g `[B, H, 1 or K]`, beta `[B, H]`, state `[B, H, K, V]`."""
    batch, heads, width, values = state.shape
    several = heads // k.shape[1]
    unit_q, unit_k, decay, held = scratch[0], scratch[1], scratch[2], scratch[3]
    for b in range(batch):
        for h in range(heads):
            row_q, row_k, gate = q[b, h // several], k[b, h // several], g[b, h]
            size_q, size_k, both = row_q[0] * 0, row_q[0] * 0, row_q[0] * 0
            for i in range(width):
                size_q += row_q[i] * row_q[i]
                size_k += row_k[i] * row_k[i]
            size_q, size_k = 1 / math.sqrt((size_q + 1e-6) * width), 1 / math.sqrt(size_k + 1e-6)
            first = math.exp(gate[0])
            for i in range(width):
                unit_q[i], unit_k[i] = row_q[i] * size_q, row_k[i] * size_k
                decay[i] = first if gate.size == 1 else math.exp(gate[i])
                both += unit_q[i] * unit_k[i]
            cells, out = state[b, h], y[b, h]
            for j in range(values):
                held[j], out[j] = 0, 0
            for i in range(width):
                read_k, read_q = decay[i] * unit_k[i], decay[i] * unit_q[i]
                for j in range(values):
                    held[j] += read_k * cells[i, j]
                    out[j] += read_q * cells[i, j]
            for j in range(values):
                held[j] = (v[b, h, j] - held[j]) * beta[b, h]
                out[j] += both * held[j]
            for i in range(width):
                kept, write = decay[i], unit_k[i]
                for j in range(values):
                    cells[i, j] = kept * cells[i, j] + write * held[j]


token, add_norm, swiglu = map(kernel, (token, add_norm, swiglu))
conv_update, delta_update = (kernel(function, fastmath={"contract"}) for function in (conv_update, delta_update))
