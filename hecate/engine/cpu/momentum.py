"""Steps of momentum on many tensors, in one pass over each, with the bits of torch's operations on lists; of what is
written into momenta those of `lanes`.

Tensors come as addresses and sizes in int64: contiguous, of one float type. Threads share them out. [OPT-FUSED-D1]
"""

from __future__ import annotations

import hashlib
import math
from functools import cache
from types import FunctionType
from typing import Any

from numba.extending import intrinsic

from hecate.engine.cpu.lanes import NAMES, _called, first, larger, sqrt
from hecate.engine.cpu.lanes import top as largest
from hecate.engine.cpu.vectors import ONE, each, filled, inline, kernel, load, mad, per_vector, raw, store, sums


@intrinsic
def rounded(_: Any, a: Any, b: Any) -> Any:
    """a b, which no sum is contracted with."""
    return each(lambda builder, a, b: builder.fmul(a, b), a, b)


@intrinsic
def fma(_: Any, a: Any, b: Any, c: Any) -> Any:
    """a b + c, rounded once."""
    return each(_called("fma"), a, b, c)


def finite(lo, hi, like, places, sizes):
    """0 if all numbers of the tensors from lo to hi are finite, else NaN."""
    step, told = per_vector(like), 0.0
    for i in range(lo, hi):
        x, found = raw(like, places[i]), filled(like, 0.0)
        whole = sizes[i] - sizes[i] % step
        for c in range(0, whole, step):
            found = mad(load(x, c, ONE), filled(like, 0.0), found)
        told += sums((found, found, found, found))[0]
        for c in range(whole, sizes[i]):
            told += x[c] * 0.0
        if math.isnan(told):
            break
    return told


def phi(g, numbers):
    """Stands for that of the source which `mover` is given."""
    return g


@inline
def _length(like, g, size):
    """The length of a row, at any size that its type has, 1 of a row of zeros."""
    step = per_vector(like)
    whole, most = size - size % step, filled(like, 0.0)
    for c in range(0, whole, step):
        most = larger(most, abs(load(g, c, ONE)))
    for c in range(whole, size):
        most = larger(most, abs(filled(like, g[c])))
    top = first(largest(most))
    if not top > 0:
        top = like[0] * 0 + 1
    square = filled(like, 0.0)
    for c in range(0, whole, step):
        x = load(g, c, ONE) / top
        square = mad(x, x, square)
    total = sums((square, square, square, square))[0]
    for c in range(whole, size):
        total += (g[c] / top) * (g[c] / top)
    return top if total < 1 else top * math.sqrt(total)


def _moved(form, numbers, hope, nesterov, squares, scale, back, w, g, m, v):
    """Weights, their momentum and mean squares after a step."""
    momentum, gain, coupled, kept, step, lr = form[0], form[1], form[2], form[3], form[4], form[5]
    if coupled != 0:
        g = fma(coupled, w, g)
    g = phi(g, numbers) if scale == 0 else phi(g / scale, numbers) * back
    if squares:
        v = fma(rounded(form[7], g), g, rounded(form[6], v))
        g = g / (sqrt(v) + form[8])
    m = fma(gain, g, rounded(momentum, m))
    ahead = m
    if nesterov:
        ahead = fma(momentum, m, rounded(lr, g) if hope else g)
    if kept != 1:
        w = rounded(kept, w)
    return fma(step, ahead, w), m, v


def _move(lo, hi, form, numbers, hope, nesterov, rows, places, sizes):
    step = per_vector(form)
    for i in range(lo, hi):
        w, g, m = raw(form, places[0, i]), raw(form, places[1, i]), raw(form, places[2, i])
        squares = places.shape[0] > 3
        v = raw(form, places[3, i]) if squares else m
        scale, back = form[0] * 0, form[0]
        if rows.size:
            scale = _length(form, g, sizes[i])
            back = scale * rows[1, i] if rows[1, i] > 0 else scale * 0 + 1
            scale *= rows[0, i]
        whole = sizes[i] - sizes[i] % step
        for c in range(0, whole, step):
            x = load(w, c, ONE), load(g, c, ONE), load(m, c, ONE), load(v, c, ONE)
            x, y, z = _moved(form, numbers, hope, nesterov, squares, scale, back, *x)
            store(w, c, x)
            store(m, c, y)
            if squares:
                store(v, c, z)
        for c in range(whole, sizes[i]):
            x = filled(form, w[c]), filled(form, g[c]), filled(form, m[c]), filled(form, v[c])
            x, y, z = _moved(form, numbers, hope, nesterov, squares, scale, back, *x)
            w[c], m[c] = first(x), first(y)
            if squares:
                v[c] = first(z)


@cache
def mover(source: str) -> Any:
    """`move(lo, hi, form, numbers, hope, nesterov, rows, places, sizes)` of tensors from lo to hi of `places`:
    [weights, gradients, momenta] and maybe their mean squares, all but gradients in place.

    `phi(g, numbers)` of the source is what a gradient writes into momentum; `form` has momentum, the factor of what is
    written, the decay in gradients, what is kept of weights, the factor of momentum in them and, for `hope`, that of
    what is written ahead of it; and for mean squares what is kept of them, what is added, and eps. Where there are
    `rows`, phi gets g over its length times the first number, and makes what is written times the length and the
    second, if that is not 0."""
    space = {**globals(), **NAMES, "INF": math.inf, "NAN": math.nan}
    exec(compile(source, __file__, "exec"), space)  # printed: names of the table and numbers alone
    space["phi"] = inline(space["phi"])
    space["_moved"] = inline(FunctionType(_moved.__code__, space, "_moved"))
    text = hashlib.sha256(source.encode()).hexdigest()[:16]
    move = FunctionType(_move.__code__, space, "move")
    move.__qualname__ = f"move_{text}"
    return kernel(move)


finite = kernel(finite)
