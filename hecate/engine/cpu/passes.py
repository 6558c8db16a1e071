"""What kernels of layers are made of: passes over a weight in vectors, and formulas of a number that LLVM makes vectors
of.

Weights are flat, rows in fours and in vectors of 64 bytes, padded with zeros that no pass moves; `o`, `to` and the like
say where a row or a number begins. `exp` and `cbrt` are polynomials in float32, so that loops over them have no calls,
and libm's in float64. [ENG-LAYERS-D2]
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

from hecate.engine.cpu.vectors import (
    ONE, ROWS, add, filled, get, helper, load, load_rows, mad, mul, number, per_vector, psi, put, slope, store,
    store_rows, sums, total, zeros,
)  # fmt: skip

# Sums of a loop in any order, so that it becomes one of vectors; NaN and infinities stay what they are.
loose = njit(
    error_model="numpy", fastmath={"reassoc", "contract", "nsz"}, no_cfunc_wrapper=True, no_cpython_wrapper=True
)
_INLINE = {"error_model": "numpy", "forceinline": True}


def digest(*names: str) -> str:
    """Of files of this folder: numba's cache on disk watches the file of a function alone."""
    files = ("vectors", "passes", *names)
    return hashlib.sha256(
        b"".join(Path(__file__).with_name(f"{name}.py").read_bytes() for name in files)
    ).hexdigest()[:12]


@helper
def fill(target, to, size, value):
    """target[to:] = value."""
    wide = filled(target, value)
    for j in range(0, size, per_vector(target)):
        store(target, to + j, wide)


@helper
def copy(source, at, target, to, size):
    """target[to:] = source[at:]."""
    for j in range(0, size, per_vector(source)):
        store(target, to + j, load(source, at + j, ONE))


@helper
def moved(G, at, size, T, to):
    """T[to:] += G[at:], and G[at:] = 0."""
    zero = filled(G, 0.0)
    for j in range(0, size, per_vector(G)):
        store(T, to + j, add(load(T, to + j, ONE), load(G, at + j, ONE)))
        store(G, at + j, zero)


@helper
def scaled(A, at, B, to, size, r):
    """B = r A."""
    for j in range(0, size, per_vector(A)):
        store(B, to + j, mul(r, load(A, at + j, ONE)))


@helper
def decayed(G, go, A, o, size, r):
    """<G, A>, and G = r G."""
    sum0 = zeros(G)
    step = per_vector(G)
    for j in range(0, size, ROWS * step):
        g = load_rows(G, go + j, step, ONE)
        sum0 = mad(g, load_rows(A, o + j, step, ONE), sum0)
        store_rows(G, go + j, step, mul(r, g))
    a, b, c, d = sums(sum0)
    return a + b + c + d


# One weight W [V, P] of a memory.


@helper
def dots(W, o, V, P, x, at, y, to):
    """y = W x."""
    for c in range(0, V, ROWS):
        acc = zeros(W)
        for j in range(0, P, per_vector(W)):
            acc = mad(load_rows(W, o + j, P, ONE), load(x, at + j, ONE), acc)
        put(y, to + c, sums(acc))
        o += ROWS * P


@helper
def dots_more(W, o, V, P, x, at, y, to):
    """y += W x."""
    for c in range(0, V, ROWS):
        acc = zeros(W)
        for j in range(0, P, per_vector(W)):
            acc = mad(load_rows(W, o + j, P, ONE), load(x, at + j, ONE), acc)
        a, b, c0, d = sums(acc)
        e, f, g, h = get(y, to + c)
        put(y, to + c, (a + e, b + f, c0 + g, d + h))
        o += ROWS * P


@helper
def backs(W, o, V, P, g, at, x, to):
    """x += W^T g."""
    for c in range(0, V, ROWS):
        gc = get(g, at + c)
        for j in range(0, P, per_vector(W)):
            store(x, to + j, add(load(x, to + j, ONE), total(gc, load_rows(W, o + j, P, ONE))))
        o += ROWS * P


@helper
def pulled_once(W, o, M, mo, V, P, g, at, h, ho, x, to):
    """x += W^T g, M += g h^T."""
    for c in range(0, V, ROWS):
        gc = get(g, at + c)
        for j in range(0, P, per_vector(W)):
            store(x, to + j, add(load(x, to + j, ONE), total(gc, load_rows(W, o + j, P, ONE))))
            store_rows(M, mo + j, P, mad(gc, load(h, ho + j, ONE), load_rows(M, mo + j, P, ONE)))
        o += ROWS * P
        mo += ROWS * P


@helper
def pulled_twice(W, o, M, mo, V, P, g, at, h, ho, f, fo, c, co, x, to):
    """x += W^T g, M += g h^T + f c^T."""
    for r in range(0, V, ROWS):
        gr, fr = get(g, at + r), get(f, fo + r)
        for j in range(0, P, per_vector(W)):
            store(x, to + j, add(load(x, to + j, ONE), total(gr, load_rows(W, o + j, P, ONE))))
            m = mad(gr, load(h, ho + j, ONE), load_rows(M, mo + j, P, ONE))
            store_rows(M, mo + j, P, mad(fr, load(c, co + j, ONE), m))
        o += ROWS * P
        mo += ROWS * P


@helper
def written(A, ao, B, bo, V, P, d, at, h, ho, l, r):
    """B = r A - l d h^T."""
    for c in range(0, V, ROWS):
        d0, d1, d2, d3 = get(d, at + c)
        w = -l * d0, -l * d1, -l * d2, -l * d3
        for j in range(0, P, per_vector(A)):
            store_rows(B, bo + j, P, mad(w, load(h, ho + j, ONE), mul(r, load_rows(A, ao + j, P, ONE))))
        ao += ROWS * P
        bo += ROWS * P


@helper
def written_on(A, ao, S, so, B, R, bo, V, P, d, at, h, ho, l, r, m):
    """R = m S - l d h^T, B = r A + R."""
    for c in range(0, V, ROWS):
        d0, d1, d2, d3 = get(d, at + c)
        w = -l * d0, -l * d1, -l * d2, -l * d3
        for j in range(0, P, per_vector(A)):
            s = mad(w, load(h, ho + j, ONE), mul(m, load_rows(S, so + j, P, ONE)))
            store_rows(R, bo + j, P, s)
            store_rows(B, bo + j, P, mad(r, load_rows(A, ao + j, P, ONE), s))
        ao += ROWS * P
        so += ROWS * P
        bo += ROWS * P


@helper
def unwritten(G, go, A, ao, V, P, d, at, h, ho, x, to, y, yo, r):
    """The reverse of `written`: x = G h, y += G^T d, G = r G; returns <G, A>."""
    e = zeros(G)
    for c in range(0, V, ROWS):
        acc, dc = zeros(G), get(d, at + c)
        for j in range(0, P, per_vector(G)):
            g = load_rows(G, go + j, P, ONE)
            acc = mad(g, load(h, ho + j, ONE), acc)
            store(y, yo + j, add(load(y, yo + j, ONE), total(dc, g)))
            e = mad(g, load_rows(A, ao + j, P, ONE), e)
            store_rows(G, go + j, P, mul(r, g))
        put(x, to + c, sums(acc))
        go += ROWS * P
        ao += ROWS * P
    e0, e1, e2, e3 = sums(e)
    return e0 + e1 + e2 + e3


@helper
def unwritten_on(G, H, go, A, S, ao, so, V, P, d, at, h, ho, x, to, y, yo, r, m):
    """The reverse of `written_on`, X = G + H: x = X h, y += X^T d, G = r G, H = m X; returns <G, A> and <X, S>."""
    e, n = zeros(G), zeros(G)
    for c in range(0, V, ROWS):
        acc, dc = zeros(G), get(d, at + c)
        for j in range(0, P, per_vector(G)):
            g = load_rows(G, go + j, P, ONE)
            e = mad(g, load_rows(A, ao + j, P, ONE), e)
            store_rows(G, go + j, P, mul(r, g))
            g = add(g, load_rows(H, go + j, P, ONE))
            acc = mad(g, load(h, ho + j, ONE), acc)
            store(y, yo + j, add(load(y, yo + j, ONE), total(dc, g)))
            n = mad(g, load_rows(S, so + j, P, ONE), n)
            store_rows(H, go + j, P, mul(m, g))
        put(x, to + c, sums(acc))
        go += ROWS * P
        ao += ROWS * P
        so += ROWS * P
    (e0, e1, e2, e3), (n0, n1, n2, n3) = sums(e), sums(n)
    return e0 + e1 + e2 + e3, n0 + n1 + n2 + n3


# Formulas of one number.


@intrinsic
def _as_float(_: Any, x: Any) -> Any:
    return types.float32(types.int32), lambda context, builder, _, args: builder.bitcast(args[0], ir.FloatType())


@intrinsic
def _as_int(_: Any, x: Any) -> Any:
    return types.int32(types.float32), lambda context, builder, _, args: builder.bitcast(args[0], ir.IntType(32))


def exp(x):
    """e^x."""
    raise NotImplementedError("only within kernels")


def cbrt(x):
    """The cube root of a positive number."""
    raise NotImplementedError("only within kernels")


def erf(x, gauss):
    """erf(x), given exp(-x^2)."""
    raise NotImplementedError("only within kernels")


_F = np.float32
_LOG2E, _LN2H, _LN2L, _LOW, _HIGH = _F(1.4426950408889634), _F(0.693359375), _F(-2.12194440e-4), _F(-87), _F(88.7)
_C0, _C1, _C2 = _F(1.9875691500e-4), _F(1.3981999507e-3), _F(8.3334519073e-3)
_C3, _C4, _C5 = _F(4.1665795894e-2), _F(1.6666665459e-1), _F(5.0000001201e-1)
_E1, _E2, _E3, _E4, _E5 = _F(0.254829592), _F(-0.284496736), _F(1.421413741), _F(-1.453152027), _F(1.061405429)
_EP, _UNIT, _HALF, _NIL, _TWO, _THIRD = _F(0.3275911), _F(1), _F(0.5), _F(0), _F(2), _F(1 / 3)


def _exp32(x):
    # Cephes; clipped to where 2^i is a number. A NaN stays one.
    y = min(max(x, _LOW), _HIGH)
    i = np.int32(y * _LOG2E + (_HALF if y >= _NIL else -_HALF))
    n = _F(i)
    r = y - n * _LN2H - n * _LN2L
    p = ((((_C0 * r + _C1) * r + _C2) * r + _C3) * r + _C4) * r + _C5
    p = (p * r * r + r + _UNIT) * _as_float(np.int32((i + np.int32(127)) << np.int32(23)))
    return p if x == x else x


def _cbrt32(x):
    # A third of the bits, then Newton's method.
    r = _as_float(np.int32(np.int32(_F(_as_int(x)) * _THIRD) + np.int32(709921077)))
    r = (_TWO * r + x / (r * r)) * _THIRD
    r = (_TWO * r + x / (r * r)) * _THIRD
    r = (_TWO * r + x / (r * r)) * _THIRD
    return r if x == x else x


def _erf32(x, gauss):
    # Abramowitz and Stegun 7.1.26, to 1.5e-7.
    a = abs(x)
    t = _UNIT / (_UNIT + _EP * a)
    y = _UNIT - ((((_E5 * t + _E4) * t + _E3) * t + _E2) * t + _E1) * t * gauss
    return y if x >= _NIL else -y


@overload(exp, jit_options=_INLINE)
def _exp(x):
    return _exp32 if x == types.float32 else lambda x: math.exp(x)


@overload(cbrt, jit_options=_INLINE)
def _cbrt(x):
    return _cbrt32 if x == types.float32 else lambda x: x ** (1 / 3)


@overload(erf, jit_options=_INLINE)
def _erf(x, gauss):
    return _erf32 if x == types.float32 else lambda x, gauss: math.erf(x)


ACTIVATIONS = {"gelu": 0, "silu": 1, "tanh": 2, "relu": 3}


@loose
def activated(kind, x, at, size, y, to, wide):
    """act(x), and `wide` numbers on act'(x), then act''(x)."""
    zero, one, two, half = number(x[at], 0), number(x[at], 1), number(x[at], 2), number(x[at], 0.5)
    if kind == 0:
        root, density = number(x[at], 0.7071067811865476), number(x[at], 0.3989422804014327)
        for i in range(size):
            z = x[at + i]
            g = exp(-half * z * z)
            c, d = half * (one + erf(z * root, g)), density * g
            y[to + i], y[to + wide + i], y[to + 2 * wide + i] = z * c, c + z * d, d * (two - z * z)
    elif kind == 1:
        for i in range(size):
            z = x[at + i]
            s = one / (one + exp(-z))
            t = s * (one - s)
            y[to + i], y[to + wide + i], y[to + 2 * wide + i] = z * s, s + z * t, t * (two + z * (one - two * s))
    elif kind == 2:
        for i in range(size):
            t = math.tanh(x[at + i])
            d = one - t * t
            y[to + i], y[to + wide + i], y[to + 2 * wide + i] = t, d, -two * t * d
    else:
        for i in range(size):
            z = x[at + i]
            y[to + i], y[to + wide + i] = (z, one) if z > zero else (zero, zero)
            y[to + 2 * wide + i] = zero


BIASES = {"target": 0, "error": 1, "clip": 2, "power": 3, "sign": 4, "ball": 5}


@loose
def errors(form, a, b, pred, at, v, vo, size, u, uo, wide):
    """u = d loss / d pred of a token, and `wide` numbers on its slope."""
    one, zero = number(a, 1), number(a, 0)
    if form == 0:
        for i in range(size):
            u[uo + i], u[uo + wide + i] = -v[vo + i], zero
    elif form == 1:
        for i in range(size):
            u[uo + i], u[uo + wide + i] = pred[at + i] - v[vo + i], one
    elif form < 5:
        for i in range(size):
            p, t = pred[at + i], v[vo + i]
            x = psi(form, a, b, p, t)
            u[uo + i], u[uo + wide + i] = x, slope(form, a, b, p, t, x)
    else:
        square = zero
        for i in range(size):
            e = pred[at + i] - v[vo + i]
            square += e * e
        inside = square <= a * a
        for i in range(size):
            e = pred[at + i] - v[vo + i]
            r = math.sqrt(e * e + b * b)
            u[uo + i] = e if inside else a * e / r
            u[uo + wide + i] = one if inside else a * (b / r) * (b / r) / r


@loose
def centred(x, at, size, y, to):
    """y = x less its mean."""
    mean = x[at] - x[at]
    for i in range(size):
        mean += x[at + i]
    mean /= number(mean, size)
    for i in range(size):
        y[to + i] = x[at + i] - mean


@loose
def normed(x, at, size, eps, y, to, wide):
    """y = (x - mean) / s, and `wide` numbers on 1/s."""
    centred(x, at, size, y, to)
    square = x[at] - x[at]
    for i in range(size):
        square += y[to + i] * y[to + i]
    s = number(eps, 1) / math.sqrt(square / number(square, size) + eps)
    for i in range(size):
        y[to + i] *= s
    y[to + wide] = s


@loose
def norm_pulled(y, yo, s, size, g, go, x, to):
    """x = J g, J that of `normed`."""
    mean, along = g[go] - g[go], g[go] - g[go]
    for i in range(size):
        mean += g[go + i]
        along += g[go + i] * y[yo + i]
    mean /= number(mean, size)
    along /= number(along, size)
    for i in range(size):
        x[to + i] = (g[go + i] - mean - y[yo + i] * along) * s


# Links: W = link(A) of one weight of V rows of P numbers, `wide` apart, and cotangents.

LINKS = {"softmax": 1, "cube_root": 2}


@loose
def linked(link, A, o, W, to, V, P, wide, a, b):
    """W = link(A); returns the scale of the cube root."""
    zero = number(a, 0)
    if link == 1:
        for r in range(V):
            top, both = A[o], zero
            for i in range(P):
                top = A[o + i] if A[o + i] > top else top
            for i in range(P):
                W[to + i] = exp(A[o + i] - top)
            for i in range(P):
                both += W[to + i]
            both = a / both
            for i in range(P):
                W[to + i] *= both
            o += wide
            to += wide
        return zero
    both, size = zero, V * wide
    for i in range(size):
        x = abs(A[o + i])
        r = cbrt(x if x >= b else b)
        c = A[o + i] / (r * r)
        W[to + i] = c
        both += c * c * c * c
    floor = cbrt(b)
    scale = math.sqrt(both)
    scale = scale if scale > floor * floor else floor * floor
    for i in range(size):
        W[to + i] *= scale
    return scale


@loose
def unlinked(link, A, o, W, to, scale, M, mo, G, go, V, P, wide, a, b):
    """G += the cotangent of A from that of W, M; M = 0."""
    zero, one = number(a, 0), number(a, 1)
    if link == 1:
        for r in range(V):
            along = zero
            for i in range(P):
                along += W[to + i] * M[mo + i]
            along /= a
            for i in range(P):
                G[go + i] += W[to + i] * (M[mo + i] - along)
                M[mo + i] = zero
            to += wide
            mo += wide
            go += wide
        return
    size, along, three = V * wide, zero, number(a, 1 / 3)
    floor = cbrt(b)
    floor *= floor
    below, tilt = one / floor, zero
    if scale > floor:
        # c = W / scale, and the fourth power of its length is scale^2.
        for i in range(size):
            along += W[to + i] * M[mo + i]
        tilt = along + along
        tilt /= scale * scale * scale
        tilt /= scale * scale * scale
    for i in range(size):
        x, w, g = abs(A[o + i]), W[to + i], M[mo + i]
        c = w / scale
        s = three / (c * c) if x >= b else below
        G[go + i] += s * scale * (g + tilt * w * w * w)
        M[mo + i] = zero
