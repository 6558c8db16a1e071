"""Parts of a token's step on a memory: functions that `walk` is given, each with its derivative.

A part is compiled by itself and called by its address, so that a rule of known parts compiles nothing that another has
compiled before it. States, weights M, directions D and cotangents are flat arrays `[V, P]` in whole fours and vectors
with zeros behind the true widths, u and predictions `[V]`, keys `[P]`; `x` is scratch space of V P + 8 (V + P) numbers
and `c` has the numbers of the form. What ends in `_back` adds to the cotangents of M, keys and gates and writes the
others; what a bias, a step of retention, a link and most algorithms bring is printed by `rows` and `cells`.
[ENG-NUM-D8]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hecate.engine.cpu import passes
from hecate.engine.cpu.lanes import sqrt
from hecate.engine.cpu.vectors import (
    ONE, ROWS, add, filled, get, helper, load, load_rows, mad, mul, per_vector, put, scores, store,
    store_rows, sums, times, total, zeros,
)  # fmt: skip


# Sums and products of whole matrices.


@helper
def dots(M, k, y, V, P):
    """y = M k."""
    o = V - V
    passes.dots(M, o, V, P, k, o, y, o)


@helper
def down(M, u, y, V, P):
    """y = M^T u."""
    for j in range(0, P, per_vector(M)):
        row = filled(M, 0.0)
        for r in range(0, V, ROWS):
            row = add(row, total(get(u, r), load_rows(M, r * P + j, P, ONE)))
        store(y, j, row)


@helper
def inner(A, B, count):
    """<A, B> of so many numbers, in whole vectors."""
    row = filled(A, 0.0)
    for j in range(0, count, per_vector(A)):
        row = mad(load(A, j, ONE), load(B, j, ONE), row)
    return sums((row, row, row, row))[0]


@helper
def square(u, V):
    """|u|^2 of V numbers."""
    y = u[0] - u[0]
    for r in range(0, V, ROWS):
        y += scores(get(u, r), get(u, r))
    return y


@helper
def plus(x, at, row):
    """x[at:] += row."""
    store(x, at, add(load(x, at, ONE), row))


# Structures, `(M, k, p, V, P, x, c)`: the prediction p.


def matrix(M, k, p, V, P, x, c):
    dots(M, k, p, V, P)


def matrix_back(M, k, gp, G, gk, V, P, x, c):
    o = V - V
    passes.pulled_once(M, o, G, V, P, gp, o, k, o, gk, o)


@helper
def _lengths(M, u, y, seen, V, P, floor):
    """1 / sqrt(|column|^2 + floor^2), and M^T u."""
    for j in range(0, P, per_vector(M)):
        square, along = filled(M, 0.0), filled(M, 0.0)
        for r in range(0, V, ROWS):
            a = load_rows(M, r * P + j, P, ONE)
            square, along = add(square, total(a, a)), add(along, total(get(u, r), a))
        store(y, j, 1.0 / sqrt(square + floor * floor))
        store(seen, j, along)


def directions(M, k, p, V, P, x, c):
    """The columns of M divided by their lengths, which have c = the floor beside them."""
    for j in range(0, P, per_vector(k)):
        square = filled(k, 0.0)
        for r in range(0, V, ROWS):
            a = load_rows(M, r * P + j, P, ONE)
            square = add(square, total(a, a))
        store(x, j, load(k, j, ONE) / sqrt(square + c[0] * c[0]))
    dots(M, x, p, V, P)


def directions_back(M, k, gp, G, gk, V, P, x, c):
    seen = x[P:]
    _lengths(M, gp, x, seen, V, P, c[0])
    for j in range(0, P, per_vector(k)):
        i, b = load(x, j, ONE), load(seen, j, ONE)
        a = mul(load(k, j, ONE), i)
        plus(gk, j, mul(b, i))
        store(x, j, a)
        store(seen, j, mul(mul(a, b), mul(mul(i, i), -1.0)))
    _outer_and(G, M, gp, x, seen, V, P)


@helper
def _outer_and(G, M, u, a, t, V, P):
    """G += u a^T + M diag(t)."""
    for r in range(0, V, ROWS):
        g = get(u, r)
        for j in range(0, P, per_vector(a)):
            o = r * P + j
            new = mad(g, load(a, j, ONE), load_rows(G, o, P, ONE))
            store_rows(G, o, P, mad(load(t, j, ONE), load_rows(M, o, P, ONE), new))


# Descents, `(M, S, u, w, lr, m, D, V, P, v, p, x, c)`: the new slots D, of which the direction is the last, or all.
# Back, H is the cotangent of D on the way in and that of S on the way out; `out` gets those of lr and m. Those whose
# slot is the direction, and those that know M, are here, others printed.


def descent(moving: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """D = (m S) - lr u w^T."""

    def do(M, S, u, w, lr, m, D, V, P, v, p, x, c):
        for r in range(0, V, ROWS):
            f = times(-lr, get(u, r))
            for j in range(0, P, per_vector(w)):
                o = r * P + j
                if moving:
                    store_rows(D, o, P, mad(f, load(w, j, ONE), mul(m, load_rows(S, o, P, ONE))))
                else:
                    store_rows(D, o, P, mul(f, load(w, j, ONE)))

    def back(M, S, u, w, lr, m, H, G, gu, gw, out, V, P, v, p, x, c):
        gl, gm = lr * 0, filled(w, 0.0)
        for r in range(0, V, ROWS):
            four, f = zeros(w), times(-lr, get(u, r))
            for j in range(0, P, per_vector(w)):
                o = r * P + j
                h = load_rows(H, o, P, ONE)
                four = mad(h, load(w, j, ONE), four)
                plus(gw, j, total(f, h))
                if moving:
                    gm = add(gm, total(h, load_rows(S, o, P, ONE)))
                    store_rows(H, o, P, mul(m, h))
            d = sums(four)
            gl -= scores(get(u, r), d)
            put(gu, r, times(-lr, d))
        out[0], out[1] = gl, sums((gm, gm, gm, gm))[0]

    return do, back


@helper
def _erased(u, w, V, P, c):
    """g = c |u|^2 with c = e / (1 + e |u|^2 |w|^2), or c = 1, and its slopes by |u|^2 and |w|^2."""
    n, e = square(u, V), c[0]
    if c[1] == 0:
        return n, e * 0 + 1, e * 0
    d = 1 + e * n * inner(w, w, P)
    return e * n / d, e / d / d, -(e * n / d) * (e * n / d)


def erasing(M, S, u, w, lr, m, D, V, P, v, p, x, c):
    """D = m S - (g S w + lr u) w^T: for a gradient G of rank one S G^T G is |u|^2 S w w^T."""
    g, _, _ = _erased(u, w, V, P, c)
    dots(S, w, x, V, P)
    for r in range(0, V, ROWS):
        (s0, s1, s2, s3), (u0, u1, u2, u3) = get(x, r), get(u, r)
        f = -g * s0 - lr * u0, -g * s1 - lr * u1, -g * s2 - lr * u2, -g * s3 - lr * u3
        for j in range(0, P, per_vector(w)):
            o = r * P + j
            store_rows(D, o, P, mad(f, load(w, j, ONE), mul(m, load_rows(S, o, P, ONE))))


def erasing_back(M, S, u, w, lr, m, H, G, gu, gw, out, V, P, v, p, x, c):
    g, by_u, by_w = _erased(u, w, V, P, c)
    y, z, gg, gl, gm = x, x[V:], lr * 0, lr * 0, filled(w, 0.0)
    dots(S, w, y, V, P)
    dots(H, w, z, V, P)
    for r in range(V):
        gg -= y[r] * z[r]
        gl -= u[r] * z[r]
    for r in range(V):
        gu[r] = -lr * z[r] + 2 * gg * by_u * u[r]
        y[r] = -g * y[r] - lr * u[r]
        z[r] = -g * z[r]
    for r in range(0, V, ROWS):
        f, e = get(y, r), get(z, r)
        for j in range(0, P, per_vector(w)):
            o = r * P + j
            h, s = load_rows(H, o, P, ONE), load_rows(S, o, P, ONE)
            plus(gw, j, add(total(f, h), total(e, s)))
            gm = add(gm, total(h, s))
            store_rows(H, o, P, mad(e, load(w, j, ONE), mul(m, h)))
    for j in range(0, P, per_vector(w)):
        plus(gw, j, mul(2 * gg * by_w, load(w, j, ONE)))
    out[0], out[1] = gl, sums((gm, gm, gm, gm))[0]


def turning(moving: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """D = (m S) - lr G for `directions`: with i = 1/|M_j| and a = w i, G = u a^T - M diag(a (M^T u) i^2)."""

    def do(M, S, u, w, lr, m, D, V, P, v, p, x, c):
        seen = x[P:]
        _lengths(M, u, x, seen, V, P, c[0])
        for j in range(0, P, per_vector(w)):
            i = load(x, j, ONE)
            a = mul(load(w, j, ONE), i)
            store(x, j, a)
            store(seen, j, mul(mul(a, load(seen, j, ONE)), mul(mul(i, i), lr)))
        for r in range(0, V, ROWS):
            f = times(-lr, get(u, r))
            for j in range(0, P, per_vector(w)):
                o = r * P + j
                d = mul(load(seen, j, ONE), load_rows(M, o, P, ONE))
                if moving:
                    d = mad(m, load_rows(S, o, P, ONE), d)
                store_rows(D, o, P, mad(f, load(x, j, ONE), d))

    def back(M, S, u, w, lr, m, H, G, gu, gw, out, V, P, v, p, x, c):
        near, seen, along = x[P:], x[2 * P :], x[3 * P :]
        _lengths(M, u, x, seen, V, P, c[0])
        for j in range(0, P, per_vector(w)):
            y, z = filled(w, 0.0), filled(w, 0.0)
            for r in range(0, V, ROWS):
                h = load_rows(H, r * P + j, P, ONE)
                y, z = add(y, total(get(u, r), h)), add(z, total(h, load_rows(M, r * P + j, P, ONE)))
            store(near, j, y)
            store(along, j, z)
        gl, gm = filled(w, 0.0), filled(w, 0.0)
        for j in range(0, P, per_vector(w)):
            i = load(x, j, ONE)
            a, s, h = mul(load(w, j, ONE), i), mul(i, load(seen, j, ONE)), mul(i, load(along, j, ONE))
            b = mad(mul(s, -1.0), h, load(near, j, ONE))
            gl = mad(a, b, gl)
            b = mul(-lr, b)
            plus(gw, j, mul(b, i))
            ai = mul(a, i)
            # Into x, near, seen, along: the factors of H and M in gu, of H, u and M in G, -lr taken along.
            store(x, j, mul(-lr, a))
            store(near, j, mul(mul(lr, ai), h))
            store(seen, j, mul(mul(lr, ai), s))
            store(along, j, mul(i, mul(ai, mad(mul(-2.0 * lr, h), s, mul(-1.0, b)))))
        for r in range(0, V, ROWS):
            four, f = zeros(w), get(u, r)
            for j in range(0, P, per_vector(w)):
                o = r * P + j
                h, a = load_rows(H, o, P, ONE), load_rows(M, o, P, ONE)
                bend = load(near, j, ONE)
                four = mad(h, load(x, j, ONE), mad(a, bend, four))
                g = mad(load(seen, j, ONE), h, mad(f, bend, load_rows(G, o, P, ONE)))
                store_rows(G, o, P, mad(load(along, j, ONE), a, g))
                if moving:
                    gm = add(gm, total(h, load_rows(S, o, P, ONE)))
                    store_rows(H, o, P, mul(m, h))
            put(gu, r, sums(four))
        out[0], out[1] = -sums((gl, gl, gl, gl))[0], sums((gm, gm, gm, gm))[0]

    return do, back


# Gains, `(C, k, g, C', P, p, x, c)`: what is written with in place of k, from a matrix `[P, P]` that is carried.


@helper
def _mapped(C, k, x, P, c):
    """(C + I/ridge) k, and the filter's total; c = 1/ridge, discount."""
    dots(C, k, x, P, P)
    for j in range(0, P, per_vector(k)):
        store(x, j, mad(c[0], load(k, j, ONE), load(x, j, ONE)))
    return c[1] + inner(k, x, P)


def filtering(C, k, g, C2, P, p, x, c):
    """g = C k / (discount + k.C k), C' = (C - g (C k)^T) / discount, where C is held without its start."""
    whole = _mapped(C, k, x, P, c)
    for j in range(0, P, per_vector(k)):
        store(g, j, load(x, j, ONE) / whole)
    back = 1 / c[1]
    for r in range(0, P, ROWS):
        f = times(-back, get(g, r))
        for j in range(0, P, per_vector(k)):
            o = r * P + j
            store_rows(C2, o, P, mad(f, load(x, j, ONE), mul(back, load_rows(C, o, P, ONE))))
    if back != 1:
        for r in range(p):
            C2[r * P + r] += (back - 1) * c[0]


def filtering_back(C, k, GC, gg, gk, P, p, x, c):
    whole, both, other = _mapped(C, k, x, P, c), x[P:], x[2 * P :]
    back = 1 / c[1]
    dots(GC, x, both, P, P)
    down(GC, x, other, P, P)
    total_cotangent = whole * 0
    for j in range(P):
        both[j] = back * (both[j] + other[j])
        total_cotangent += (0.5 * both[j] - gg[j]) * x[j] / whole
    total_cotangent /= whole
    for j in range(P):
        both[j] = (gg[j] - both[j]) / whole + total_cotangent * k[j]
    down(C, both, other, P, P)
    for j in range(P):
        gk[j] += total_cotangent * x[j] + other[j] + c[0] * both[j]
    for r in range(0, P, ROWS):
        f = get(both, r)
        for j in range(0, P, per_vector(k)):
            o = r * P + j
            store_rows(GC, o, P, mad(f, load(k, j, ONE), mul(back, load_rows(GC, o, P, ONE))))


def no_gain(C, k, g, C2, P, p, x, c):
    """Keys are written as they are."""


def no_gain_back(C, k, GC, gg, gk, P, p, x, c):
    """Nothing."""


def no_link(A, M, V, P, v, p, x, c):
    """The memory is what is carried."""


def no_link_back(A, M, G, H, V, P, v, p, x, c):
    """Nothing."""
