"""Formulas of a number that LLVM makes vectors of, over a token's numbers: norms and links.

`exp` and `thin` are polynomials in float32, so that loops over them have no calls, and libm's in float64. Loops go over
views, of which LLVM knows that no index counts from their end. [ENG-LAYERS-D2]
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

from hecate.engine.cpu.passes import out_of_line
from hecate.engine.cpu.vectors import ONE, add, filled, helper, load, mul, number, per_vector, store

# Sums of a loop in any order, so that it becomes one of vectors; NaN and infinities stay what they are.
loose = njit(
    error_model="numpy", fastmath={"reassoc", "contract", "nsz"}, no_cfunc_wrapper=True, no_cpython_wrapper=True
)
_INLINE = {"error_model": "numpy", "forceinline": True, "_nrt": False}


@intrinsic
def _as_float(_: Any, x: Any) -> Any:
    return types.float32(types.int32), lambda context, builder, _, args: builder.bitcast(args[0], ir.FloatType())


@intrinsic
def _as_int(_: Any, x: Any) -> Any:
    return types.int32(types.float32), lambda context, builder, _, args: builder.bitcast(args[0], ir.IntType(32))


def exp(x):
    """e^x."""
    raise NotImplementedError("only within kernels")


def thin(x):
    """One over the cube root of a positive number."""
    raise NotImplementedError("only within kernels")


_F = np.float32
_LOG2E, _LN2H, _LN2L, _LOW, _HIGH = _F(1.4426950408889634), _F(0.693359375), _F(-2.12194440e-4), _F(-87), _F(88.7)
_C0, _C1, _C2 = _F(1.9875691500e-4), _F(1.3981999507e-3), _F(8.3334519073e-3)
_C3, _C4, _C5 = _F(4.1665795894e-2), _F(1.6666665459e-1), _F(5.0000001201e-1)
_UNIT, _HALF, _NIL, _THIRD = _F(1), _F(0.5), _F(0), _F(1 / 3)


def _exp32(x):
    # Cephes; clipped to where 2^i is a number. A NaN stays one.
    y = min(max(x, _LOW), _HIGH)
    i = np.int32(y * _LOG2E + (_HALF if y >= _NIL else -_HALF))
    n = _F(i)
    r = y - n * _LN2H - n * _LN2L
    p = ((((_C0 * r + _C1) * r + _C2) * r + _C3) * r + _C4) * r + _C5
    p = (p * r * r + r + _UNIT) * _as_float(np.int32((i + np.int32(127)) << np.int32(23)))
    return p if x == x else x


def _thin32(x):
    # A third of the bits, then Newton's method for y^-3 = x, which has no quotients.
    y = _as_float(np.int32(np.int32(1419967116) - np.int32(_F(_as_int(x)) * _THIRD)))
    y += y * (_UNIT - x * y * y * y) * _THIRD
    y += y * (_UNIT - x * y * y * y) * _THIRD
    y += y * (_UNIT - x * y * y * y) * _THIRD
    return y if x == x else x


@overload(exp, jit_options=_INLINE)
def _exp(x):
    return _exp32 if x == types.float32 else lambda x: math.exp(x)


@overload(thin, jit_options=_INLINE)
def _thin(x):
    return _thin32 if x == types.float32 else lambda x: x ** (-1 / 3)


@loose
def centred(values, at, size, into, to):
    """y = x less its mean."""
    out_of_line()
    x, y = values[at : at + size], into[to : to + size]
    mean = values[at] - values[at]
    for i in range(size):
        mean += x[i]
    mean /= number(mean, size)
    for i in range(size):
        y[i] = x[i] - mean


@loose
def normed(values, at, size, eps, into, to, wide):
    """y = (x - mean) / s, and `wide` numbers on 1/s, which is 1 where the variance is 0."""
    out_of_line()
    centred(values, at, size, into, to)
    y, square = into[to : to + size], values[at] - values[at]
    for i in range(size):
        square += y[i] * y[i]
    s = number(eps, 1)
    if square != 0:
        s /= math.sqrt(square / number(square, size) + eps)
    for i in range(size):
        y[i] *= s
    into[to + wide] = s


@loose
def norm_pulled(values, yo, s, size, cotangents, go, into, to):
    """x = J g, J that of `normed`."""
    out_of_line()
    y, g, x = values[yo : yo + size], cotangents[go : go + size], into[to : to + size]
    mean, along = s - s, s - s
    for i in range(size):
        mean += g[i]
        along += g[i] * y[i]
    mean /= number(mean, size)
    along /= number(along, size)
    for i in range(size):
        x[i] = (g[i] - mean - y[i] * along) * s


# Links: W = link(A) of one weight of V rows of P numbers, `wide` apart, and cotangents.


@intrinsic
def _larger(_, a, b):
    """The larger of two numbers or of two vectors, number by number; of a number and NaN the number b."""

    def code(context, builder, signature, args):
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return a(a, b), code


@intrinsic
def _largest(_, a):
    """The largest number of a vector."""

    def code(context, builder, signature, args):
        def larger(x, y):
            return builder.select(builder.fcmp_ordered(">", x, y), x, y)

        return _folded(builder, args[0], larger)

    return a.scalar(a), code


@intrinsic
def _sum_of(_, a):
    """The sum of a vector, half and half."""

    def code(context, builder, signature, args):
        return _folded(builder, args[0], builder.fadd)

    return a.scalar(a), code


def _folded(builder, vector, joined):
    while vector.type.count > 1:
        half = vector.type.count // 2
        parts = []
        for start in (0, half):
            mask = ir.Constant(ir.VectorType(ir.IntType(32), half), [*range(start, start + half)])
            parts.append(builder.shuffle_vector(vector, vector, mask))
        vector = joined(*parts)
    return builder.extract_element(vector, ir.Constant(ir.IntType(32), 0))


@helper
def _top(x, at, size):
    """The largest of some numbers."""
    step = per_vector(x)
    top, rest = x[at], at
    if size >= step:
        wide = load(x, at, ONE)
        rest = at + size // step * step
        for j in range(at + step, rest, step):
            wide = _larger(load(x, j, ONE), wide)
        top = _largest(wide)
    for j in range(rest, at + size):
        top = _larger(x[j], top)
    return top


@loose
def _exponentials(x, at, size):
    """x = e^x."""
    out_of_line()
    y = x[at : at + size]
    for i in range(size):
        y[i] = exp(y[i])


@helper
def _softmax(x, at, y, to, V, size, wide, scale):
    out_of_line()
    for r in range(V):
        o, top = r * wide, -_top(x, at + r * wide, size)
        shift = filled(x, top)
        for j in range(o, o + wide, per_vector(x)):
            store(y, to + j, add(load(x, at + j, ONE), shift))
    # All rows at once: one loop of vectors.
    _exponentials(y, to, V * wide)
    for r in range(V):
        o, both = to + r * wide, filled(x, 0.0)
        for j in range(o + size, o + wide):
            y[j] = scale - scale
        for j in range(o, o + wide, per_vector(x)):
            both = add(both, load(y, j, ONE))
        share = scale / _sum_of(both)
        for j in range(o, o + wide, per_vector(x)):
            store(y, j, mul(share, load(y, j, ONE)))


@loose
def _softmax_pulled(weights, to, given, mo, into, go, V, size, wide, scale):
    out_of_line()
    w, m = weights[to : to + V * wide].reshape(V, wide), given[mo : mo + V * wide].reshape(V, wide)
    g, zero = into[go : go + V * wide].reshape(V, wide), scale - scale
    for r in range(V):
        along = zero
        for i in range(size):
            along += w[r, i] * m[r, i]
        along /= scale
        for i in range(size):
            g[r, i] += w[r, i] * (m[r, i] - along)
            m[r, i] = zero


@loose
def _cube_root(source, at, into, to, size, b):
    out_of_line()
    x, y, both = source[at : at + size], into[to : to + size], b - b
    for i in range(size):
        r = thin(max(abs(x[i]), b))
        c = x[i] * r * r
        y[i] = c
        c *= c
        both += c * c
    floor = number(b, 1) / thin(b)
    scale = max(math.sqrt(both), floor * floor)
    for i in range(size):
        y[i] *= scale
    return scale


@loose
def _cube_root_pulled(source, at, weights, to, scale, given, mo, into, go, size, b):
    out_of_line()
    x, w = source[at : at + size], weights[to : to + size]
    m, g = given[mo : mo + size], into[go : go + size]
    one, three, along = number(b, 1), number(b, 1 / 3), b - b
    floor = one / thin(b)
    floor *= floor
    below, tilt, square = scale / floor, b - b, three * scale * scale * scale
    if scale > floor:
        # c = W / scale, and the fourth power of its length is scale^2.
        for i in range(size):
            along += w[i] * m[i]
        tilt = (along + along) / (scale * scale * scale)
        tilt /= scale * scale * scale
    for i in range(size):
        squared = w[i] * w[i]
        s = square / squared if abs(x[i]) >= b else below
        g[i] += s * (m[i] + tilt * w[i] * squared)
        m[i] = b - b


@helper
def linked(link, A, o, W, to, V, P, wide, a, b):
    """W = link(A); returns the scale of the cube root."""
    if link == 2:
        return _cube_root(A, o, W, to, V * wide, b)
    _softmax(A, o, W, to, V, P, wide, a)
    return a


@helper
def unlinked(link, A, o, W, to, scale, M, mo, G, go, V, P, wide, a, b):
    """G += the cotangent of A from that of W, M; M = 0."""
    if link == 2:
        _cube_root_pulled(A, o, W, to, scale, M, mo, G, go, V * wide, b)
    else:
        _softmax_pulled(W, to, M, mo, G, go, V, P, wide, a)
