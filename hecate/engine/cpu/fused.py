"""Kernels of the blocks around a memory: what would pass over a tensor many times, in one pass there and one back.

Arrays are flat and C-contiguous, rows of whole vectors; bfloat16 lies as int16, is read as float32 and rounded once, to
even, where it is written. What going back needs is computed again. Threads change no sum. [NN-BLOCK-D1]
"""

from __future__ import annotations

import math

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from hecate.engine.cpu.lanes import _all, exp
from hecate.engine.cpu.vectors import (
    ONE, Vector, filled, inline, kernel, load, mad, mul, number, per_vector, store, sums,
)  # fmt: skip

BLOCK = 8  # vectors of channels that go together: their taps, sums and slopes stay in the first cache
PART = 128  # rows whose cotangents of weights are summed up by one thread
SPAN = 512  # tokens that are summed up before they join the sum of all


def _lying(context, builder, array, args, count):
    """A pointer to so many numbers of an array as they lie, and their type."""
    kind = ir.IntType(16) if array.dtype == types.int16 else context.get_value_type(array.dtype)
    data, wide = context.make_array(array)(context, builder, args[0]).data, ir.VectorType(kind, count)
    return builder.bitcast(builder.gep(data, [args[1]]), wide.as_pointer()), wide


@intrinsic
def read(_, array, at):
    """The vector of numbers from a place of an array on."""
    half = array.dtype == types.int16
    vector = Vector(types.float32 if half else array.dtype)

    def code(context, builder, signature, args):
        pointer, _ = _lying(context, builder, array, args, vector.count)
        found = builder.load(pointer, align=array.dtype.bitwidth // 8)
        if half:
            whole = ir.VectorType(ir.IntType(32), vector.count)
            bits = builder.shl(builder.zext(found, whole), _all(whole, 16))
            return builder.bitcast(bits, context.get_value_type(vector))
        return found

    return vector(array, types.intp), code


@intrinsic
def write(_, array, at, value):
    """A vector into an array."""

    def code(context, builder, signature, args):
        pointer, lying = _lying(context, builder, array, args, value.count)
        found = args[2]
        if array.dtype == types.int16:
            whole = ir.VectorType(ir.IntType(32), value.count)
            bits = builder.bitcast(found, whole)
            odd = builder.and_(builder.lshr(bits, _all(whole, 16)), _all(whole, 1))
            even = builder.add(builder.add(bits, odd), _all(whole, 0x7FFF))
            even = builder.select(builder.fcmp_unordered("uno", found, found), _all(whole, 0x7FC00000), even)
            found = builder.trunc(builder.lshr(even, _all(whole, 16)), lying)
        builder.store(found, pointer, align=array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, types.intp, value), code


# Convolution: y_t = silu(sum_j w_j x_(t-j)). `head` has the inputs before a sequence, then its first K - 1 again, so
# that the taps of a token are K rows of one array.


@inline
def _taps(b, t, T, K, segment, written):
    """Taps of a token that see anything, as bits."""
    seen, own = 1, b * (T + K - 1) + t + K - 1
    for j in range(1, K):
        if segment is not None and segment[own - j] != segment[own]:
            continue
        if written is None or t < j or written[b * T + t - j]:
            seen |= 1 << j
    return seen


@inline
def _mixed(source, at, C, K, seen, w, c):
    """The sum over taps of one vector of channels."""
    z = mul(load(w, c, ONE), read(source, at + c))
    for j in range(1, K):
        if seen >> j & 1:
            z = mad(load(w, j * C + c, ONE), read(source, at - j * C + c), z)
    return z


def convolve(B, T, C, K, heads, active, segment, written, x, head, w, y, lo, hi):
    """y in the blocks of channels from lo to hi; `heads` rows of `head` a sequence."""
    step = per_vector(w)
    for block in range(lo, hi):
        start = block * BLOCK * step
        end = min(C, start + BLOCK * step)
        for b in range(B):
            for t in range(T):
                seen, at = _taps(b, t, T, K, segment, written), (b * T + t) * C
                source, own = (head, (b * heads + K - 1 + t) * C) if t < K - 1 else (x, at)
                for c in range(start, end, step):
                    z = _mixed(source, own, C, K, seen, w, c)
                    if active:
                        z = z / (exp(-z) + 1.0)
                    write(y, at + c, z)


def convolve_back(
    B, T, C, K, heads, active, segment, written, ring, x, head, w, g, gx, gpast, gw, slopes, parts, marks, lo, hi
):
    """Cotangents of x, of what came before it and of the taps, from the last token to the first. For each block
    `slopes` and `marks` have the cotangents of the sums of the last tokens and their taps, `ring` of them, a power of
    two; `parts` starts at zero."""
    step, last = per_vector(w), ring - 1
    wide = BLOCK * step
    for block in range(lo, hi):
        start = block * wide
        end, own, mark = min(C, start + wide), block * K * wide - start, block * ring
        near = block * ring * wide - start
        for b in range(B):
            for t in range(T - 1, -K if gpast is not None else -1, -1):
                at = (b * T + t) * C
                if t >= 0:
                    seen = marks[mark + (t & last)] = _taps(b, t, T, K, segment, written)
                    source, first = (head, (b * heads + K - 1 + t) * C) if t < K - 1 else (x, at)
                    to = near + (t & last) * wide
                    for c in range(start, end, step):
                        h = read(g, at + c)
                        if active:
                            z = _mixed(source, first, C, K, seen, w, c)
                            p = 1.0 / (exp(-z) + 1.0)
                            h = h * (p * mad(z, 1.0 - p, 1.0))
                        store(slopes, to + c, h)
                        for j in range(K):
                            if seen >> j & 1:
                                i = own + j * wide + c
                                store(parts, i, mad(h, read(source, first - j * C + c), load(parts, i, ONE)))
                for c in range(start, end, step):
                    z = filled(w, 0.0)
                    for j in range(max(0, -t), min(K, T - t)):
                        if marks[mark + (t + j & last)] >> j & 1:
                            z = mad(load(w, j * C + c, ONE), load(slopes, near + (t + j & last) * wide + c, ONE), z)
                    if t >= 0:
                        write(gx, at + c, z)
                    elif gpast is not None:
                        write(gpast, (b * (K - 1) + K - 1 + t) * C + c, z)
                if t >= 0 and t % SPAN == 0:
                    for j in range(K):
                        for c in range(start, end, step):
                            i = own + j * wide + c
                            store(gw, j * C + c, load(gw, j * C + c, ONE) + load(parts, i, ONE))
                            store(parts, i, filled(w, 0.0))


# Norms: y = w x / sqrt(|x|^2 / size + eps) silu(gate), each row of a token by itself, without w or a gate where these
# are None. `form` has size and eps; a row of zeros has the divisor 1.


@inline
def _scale(x, at, D, form, odd):
    """One over the divisor of a row; `odd` is told of squares that are no finite number."""
    sum0, step = filled(form, 0.0), per_vector(form)
    for c in range(0, D, step):
        v = read(x, at + c)
        sum0 = mad(v, v, sum0)
    square = sums((sum0, sum0, sum0, sum0))[0]
    if not square < math.inf:
        odd[0] = 1
    return number(square, 1.0 if square == 0.0 else 1.0 / math.sqrt(square / form[0] + form[1]))


def norm(N, H, D, form, x, apart, odd, w, gate, y, lo, hi):
    """y of the parts from lo to hi; rows of tokens lie `apart`."""
    step = per_vector(form)
    for n in range(lo * PART, min(N, hi * PART)):
        for h in range(H):
            at, own, to = n * apart + h * D, h * D, (n * H + h) * D
            r = _scale(x, at, D, form, odd)
            for c in range(0, D, step):
                v = mul(r, read(x, at + c))
                if w is not None:
                    v = v * load(w, own + c, ONE)
                if gate is not None:
                    z = read(gate, to + c)
                    v = v * (z / (exp(-z) + 1.0))
                write(y, to + c, v)


def norm_back(N, H, D, form, x, apart, odd, w, gate, g, gx, gw, ggate, row, lo, hi):
    """Cotangents of x and of the gate, and of w a row for each part: with u = r x and e what reaches u,
    r (e - u <e, u> / size)."""
    step, to_row = per_vector(form), lo * D
    for n in range(lo * PART, min(N, hi * PART)):
        for h in range(H):
            at, own, to = n * apart + h * D, h * D, (n * H + h) * D
            r, sum0 = _scale(x, at, D, form, odd), filled(form, 0.0)
            for c in range(0, D, step):
                u, e = mul(r, read(x, at + c)), read(g, to + c)
                v = u if w is None else u * load(w, own + c, ONE)
                if gate is not None:
                    z = read(gate, to + c)
                    p = 1.0 / (exp(-z) + 1.0)
                    write(ggate, to + c, e * v * (p * mad(z, 1.0 - p, 1.0)))
                    e = e * (z * p)
                if w is not None:
                    i = n // PART * H * D + own + c
                    store(gw, i, mad(e, u, load(gw, i, ONE)))
                    e = e * load(w, own + c, ONE)
                sum0 = mad(e, u, sum0)
                store(row, to_row + c, e)
            along = number(r, sums((sum0, sum0, sum0, sum0))[0] / form[0])
            for c in range(0, D, step):
                e, u = load(row, to_row + c, ONE), mul(r, read(x, at + c))
                write(gx, to + c, mul(r, mad(-along, u, e)))


# SwiGLU: y = silu(a) b of rows [a, b]; the last vector of a row starts where it ends with it.


def swiglu(N, W, x, apart, like, y, lo, hi):
    """y of the parts from lo to hi."""
    step = per_vector(like)
    for n in range(lo * PART, min(N, hi * PART)):
        for at in range(0, W, step):
            c = n * apart + min(at, W - step)
            z = read(x, c)
            write(y, n * W + min(at, W - step), z / (exp(-z) + 1.0) * read(x, c + W))


def swiglu_back(N, W, x, apart, like, g, gx, lo, hi):
    """Cotangent of the rows."""
    step = per_vector(like)
    for n in range(lo * PART, min(N, hi * PART)):
        for at in range(0, W, step):
            c, to = n * apart + min(at, W - step), 2 * n * W + min(at, W - step)
            z, e = read(x, c), read(g, n * W + min(at, W - step))
            p = 1.0 / (exp(-z) + 1.0)
            write(gx, to + W, e * (z * p))
            write(gx, to, e * read(x, c + W) * (p * mad(z, 1.0 - p, 1.0)))


convolve, convolve_back, norm, norm_back, swiglu, swiglu_back = (
    kernel(function) for function in (convolve, convolve_back, norm, norm_back, swiglu, swiglu_back)
)
