"""Four rows of a state in registers: a row, or a tile of it, is one vector."""

from __future__ import annotations

from hecate.engine.cpu.lanes import (
    add,
    alive,
    along,
    inline,
    lanes,
    load,
    load_like,
    load_row,
    mad,
    mul,
    shrunk,
    splat_row,
    store,
    sums,
)
from hecate.engine.cpu.rows import psi, pulled, put, slope


@inline
def four(A, o, P, width):
    """Four rows of an array."""
    return (
        load_row(A, o, width),
        load_row(A, o + P, width),
        load_row(A, o + 2 * P, width),
        load_row(A, o + 3 * P, width),
    )


@inline
def inner(a, x):
    """Four rows times one."""
    a0, a1, a2, a3 = a
    return sums(along(a0, x), along(a1, x), along(a2, x), along(a3, x))


@inline
def plus(a, w, x):
    """Four rows, each plus a number times x."""
    (a0, a1, a2, a3), (w0, w1, w2, w3) = a, w
    return (
        mad(splat_row(x, w0), x, a0),
        mad(splat_row(x, w1), x, a1),
        mad(splat_row(x, w2), x, a2),
        mad(splat_row(x, w3), x, a3),
    )


@inline
def scaled(a, x):
    """Four rows times one, number by number."""
    a0, a1, a2, a3 = a
    return mul(a0, x), mul(a1, x), mul(a2, x), mul(a3, x)


@inline
def added(a, b):
    """Four rows plus four."""
    (a0, a1, a2, a3), (b0, b1, b2, b3) = a, b
    return add(a0, b0), add(a1, b1), add(a2, b2), add(a3, b3)


@inline
def shrunken(a, cut):
    """Four rows, every number moved towards 0."""
    a0, a1, a2, a3 = a
    return shrunk(a0, cut), shrunk(a1, cut), shrunk(a2, cut), shrunk(a3, cut)


@inline
def living(g, a):
    """Four rows where four others are not 0."""
    (g0, g1, g2, g3), (a0, a1, a2, a3) = g, a
    return alive(g0, a0), alive(g1, a1), alive(g2, a2), alive(g3, a3)


@inline
def combined(w, a):
    """The sum of four rows, each times a number."""
    (w0, w1, w2, w3), (a0, a1, a2, a3) = w, a
    total = mad(splat_row(a1, w1), a1, mul(splat_row(a0, w0), a0))
    return mad(splat_row(a3, w3), a3, mad(splat_row(a2, w2), a2, total))


@inline
def meeting(a, b):
    """Four rows times four, number by number, summed over the four."""
    (a0, a1, a2, a3), (b0, b1, b2, b3) = a, b
    return mad(a3, b3, mad(a2, b2, mad(a1, b1, mul(a0, b0))))


@inline
def zeros(like):
    """Four rows of zeros."""
    zero = splat_row(like[0], 0.0)
    return zero, zero, zero, zero


@inline
def minus(u):
    """Four numbers, negated."""
    u0, u1, u2, u3 = u
    return -u0, -u1, -u2, -u3


@inline
def keep(A, o, P, a):
    """Four rows into an array."""
    a0, a1, a2, a3 = a
    put(A, o, P, a0, a1, a2, a3)


@inline
def gate(retain, at, row, channels, like, width):
    """Retain of a token, in every place of a row."""
    return load_row(retain, row, width) if channels is not None else splat_row(like, retain[at])


@inline
def quartet(x, at):
    """Four numbers."""
    return x[at], x[at + 1], x[at + 2], x[at + 3]


@inline
def learned(form, a, b, preds, v):
    """u of four coordinates."""
    (p0, p1, p2, p3), (v0, v1, v2, v3) = preds, v
    return (
        psi(form, a, b, p0, v0), psi(form, a, b, p1, v1),
        psi(form, a, b, p2, v2), psi(form, a, b, p3, v3),
    )  # fmt: skip


@inline
def times(w, u):
    """Four numbers times one."""
    u0, u1, u2, u3 = u
    return w * u0, w * u1, w * u2, w * u3


@inline
def note(x, at, u, j):
    """Four numbers into an array, added to those of the columns before j."""
    u0, u1, u2, u3 = u
    if j > 0:
        u0, u1, u2, u3 = x[at] + u0, x[at + 1] + u1, x[at + 2] + u2, x[at + 3] + u3
    x[at], x[at + 1], x[at + 2], x[at + 3] = u0, u1, u2, u3


@inline
def accumulate(x, at, row, c):
    """A row into an array, added to those of the rows before c."""
    if c > 0:
        row = add(load_like(x, at, row), row)
    store(x, at, row)


@inline
def tally_row(x, i, a, b):
    """Adds the products of two rows to the vector of sums of a token."""
    at = i * lanes(x)
    store(x, at, add(load(x, at), along(a, b)))


@inline
def tally(x, i, a, b):
    """The same for four rows with four."""
    (a0, a1, a2, a3), (b0, b1, b2, b3) = a, b
    at = i * lanes(x)
    first = add(along(a0, b0), along(a1, b1))
    store(x, at, add(load(x, at), add(first, add(along(a2, b2), along(a3, b3)))))


@inline
def pull(form, a, b, l, d, preds, v, u):
    """Cotangents of four predictions, and of v, from those of the steps."""
    (d0, d1, d2, d3), (p0, p1, p2, p3), (v0, v1, v2, v3), (u0, u1, u2, u3) = d, preds, v, u
    e0, t0 = pulled(form, -l * d0, slope(form, a, b, p0, v0, u0))
    e1, t1 = pulled(form, -l * d1, slope(form, a, b, p1, v1, u1))
    e2, t2 = pulled(form, -l * d2, slope(form, a, b, p2, v2, u2))
    e3, t3 = pulled(form, -l * d3, slope(form, a, b, p3, v3, u3))
    return (e0, e1, e2, e3), (t0, t1, t2, t3)
