"""Norms of a token's numbers, which LLVM makes vectors of.

Loops go over views, of which LLVM knows that no index counts from their end. [ENG-LAYERS-D2]
"""

from __future__ import annotations

import math

from numba import njit

from hecate.engine.cpu.passes import out_of_line
from hecate.engine.cpu.vectors import number

# Sums of a loop in any order, so that it becomes one of vectors; NaN and infinities stay what they are.
loose = njit(
    error_model="numpy", fastmath={"reassoc", "contract", "nsz"}, no_cfunc_wrapper=True, no_cpython_wrapper=True
)


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
