"""Steps of retention, links from dual states to memories, and a ball around either: parts, as in `parts`.
[ENG-NUM-D8]
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hecate.engine.cpu.lanes import normal_exp, normal_log, where
from hecate.engine.cpu.parts import columns, inner, plus, rows
from hecate.engine.cpu.vectors import (
    ONE, ROWS, add, alive, filled, get, helper, inline, load, load_rows, mad, mul, per_vector, put, scores,
    shrunk, store, store_rows, sums, times, total, zeros,
)  # fmt: skip

TINY = 1e-30  # the least that a logarithm here is taken of

# Steps, `(X, D, rv, rp, O, V, P, p, x, c)`: what is carried on, with r_ij = rv_i rp_j. Back, G is the cotangent of O on
# the way in and that of X on the way out, and that of D is added to H if it moves, else H is that.


# A step is made for retain per column, or for one number rp_0 for all: then grv gets sums over rows alone.


@inline
def _passed(H, o, P, g, moving):
    """The cotangent of D."""
    if moving:
        store_rows(H, o, P, add(g, load_rows(H, o, P, ONE)))
    else:
        store_rows(H, o, P, g)


def cells(form: int, channels: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Cell by cell, form 0: r X + D; 1: r (X + D); 2: r X + D, c nearer to 0; 3: r X + D, D without its rows' means."""

    def do(X, D, rv, rp, O, V, P, p, x, c):
        if form == 3:
            _constant(x, P, p)
        for r in range(0, V, ROWS):
            same = times(rp[0], get(rv, r))
            if form == 3:
                mean = _means(D, r * P, x, P, p)
            for j in range(0, P, per_vector(X)):
                o = r * P + j
                d = load_rows(D, o, P, ONE)
                if channels:
                    kept = mul(get(rv, r), load(rp, j, ONE))
                else:
                    kept = same
                if form == 1:
                    new = mul(kept, add(load_rows(X, o, P, ONE), d))
                else:
                    new = mad(kept, load_rows(X, o, P, ONE), d)
                if form == 2:
                    new = shrunk(new, c[0])
                if form == 3:
                    new = mad(mean, load(x, j, ONE), new)
                store_rows(O, o, P, new)

    def back(X, D, O, rv, rp, G, H, grv, grp, moving, V, P, p, x, c):
        if form == 3:
            _constant(x, P, p)
        for r in range(0, V, ROWS):
            four, same = zeros(X), times(rp[0], get(rv, r))
            if form == 3:
                mean = _means(G, r * P, x, P, p)
            for j in range(0, P, per_vector(X)):
                o = r * P + j
                g, a = load_rows(G, o, P, ONE), load_rows(X, o, P, ONE)
                if channels:
                    kept = mul(get(rv, r), load(rp, j, ONE))
                else:
                    kept = same
                if form == 2:
                    g = alive(g, load_rows(O, o, P, ONE))
                if form == 1:
                    a = add(a, load_rows(D, o, P, ONE))
                if channels:
                    share = mul(g, a)
                    plus(grp, j, total(get(rv, r), share))
                    four = mad(share, load(rp, j, ONE), four)
                else:
                    four = mad(g, a, four)
                new = mul(kept, g)
                store_rows(G, o, P, new)
                if form == 1:
                    g = new
                if form == 3:
                    g = mad(mean, load(x, j, ONE), g)
                _passed(H, o, P, g, moving)
            _add_rows(grv, r, sums(four))

    return do, back


# The commonest step and descent together, in one pass.


@helper
def write_rank_one(X, u, w, lr, rv, rp, O, V, P):
    """O = r X - lr u w^T."""
    for r in range(0, V, ROWS):
        f, kept = times(-lr, get(u, r)), times(rp[0], get(rv, r))
        for j in range(0, P, per_vector(X)):
            o = r * P + j
            store_rows(O, o, P, mad(f, load(w, j, ONE), mul(kept, load_rows(X, o, P, ONE))))


@helper
def write_rank_one_back(X, u, w, lr, rv, rp, G, grv, gu, gw, V, P):
    """Its reverse: G becomes that of X, gu is written, grv and gw are added to; returns the cotangent of lr."""
    gl = lr * 0
    for r in range(0, V, ROWS):
        four, sums_r = zeros(X), zeros(X)
        f, kept = times(-lr, get(u, r)), times(rp[0], get(rv, r))
        for j in range(0, P, per_vector(X)):
            o = r * P + j
            g = load_rows(G, o, P, ONE)
            four = mad(g, load(w, j, ONE), four)
            sums_r = mad(g, load_rows(X, o, P, ONE), sums_r)
            plus(gw, j, total(f, g))
            store_rows(G, o, P, mul(kept, g))
        d = sums(four)
        gl -= scores(get(u, r), d)
        put(gu, r, times(-lr, d))
        _add_rows(grv, r, sums(sums_r))
    return gl


@inline
def _add_rows(x, r, u):
    (x0, x1, x2, x3), (u0, u1, u2, u3) = get(x, r), u
    put(x, r, (x0 + u0, x1 + u1, x2 + u2, x3 + u3))


@helper
def _constant(x, P, p):
    """A row of ones where there are true columns."""
    for j in range(P):
        x[j] = 1 if j < p else 0


@inline
def _means(D, o, x, P, p):
    """Minus the means of four rows."""
    four = zeros(D)
    for j in range(0, P, per_vector(D)):
        four = mad(load_rows(D, o + j, P, ONE), load(x, j, ONE), four)
    return times(number_of(x, -1.0 / p), sums(four))


@inline
def number_of(x, value):
    """A number in the type of an array."""
    return x[0] * 0 + value


@helper
def _along(A, B, y, V, P, column):
    """<A, B> of every slot."""
    if column:
        columns(A, B, y, V, P)
    else:
        rows(A, B, y, V, P)


def sphere(column: bool, tangent: bool, channels: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Slots, columns or rows, as long as they were: r X + D - X (X.D) divided by its length, or r X + D brought back to
    the length of X. c = the least length."""
    return _onto(column, tangent, channels), _onto_back(column, tangent, channels)


def _onto(column: bool, tangent: bool, channels: bool) -> Callable[..., Any]:
    def do(X, D, rv, rp, O, V, P, p, x, c):
        count, least = P if column else V, c[0] * c[0]
        minus, length = x, x[count:]
        _along(X, D if tangent else X, minus, V, P, column)
        if tangent:
            _negate(minus, count)
        for r in range(0, V, ROWS):
            same = times(rp[0], get(rv, r))
            for j in range(0, P, per_vector(X)):
                o = r * P + j
                a = load_rows(X, o, P, ONE)
                if channels:
                    kept = mul(get(rv, r), load(rp, j, ONE))
                else:
                    kept = same
                new = mad(kept, a, load_rows(D, o, P, ONE))
                if tangent:
                    if column:
                        b = load(minus, j, ONE)
                    else:
                        b = get(minus, r)
                    new = mad(b, a, new)
                store_rows(O, o, P, new)
        _along(O, O, length, V, P, column)
        for i in range(count):
            f = math.sqrt(max(length[i], least))
            length[i] = 1 / f if tangent else math.sqrt(max(minus[i], least)) / f
        for r in range(0, V, ROWS):
            for j in range(0, P, per_vector(X)):
                o = r * P + j
                if column:
                    f = load(length, j, ONE)
                else:
                    f = get(length, r)
                store_rows(O, o, P, mul(f, load_rows(O, o, P, ONE)))

    return do


def _onto_back(column: bool, tangent: bool, channels: bool) -> Callable[..., Any]:
    def back(X, D, O, rv, rp, G, H, grv, grp, moving, V, P, p, x, c):
        count, least = P if column else V, c[0] * c[0]
        minus, length, outward = x, x[count:], x[2 * count :]
        other, moved = x[3 * count :], x[8 * (V + P) :]
        _along(X, D if tangent else X, minus, V, P, column)
        if tangent:
            _negate(minus, count)
        for r in range(0, V, ROWS):
            same = times(rp[0], get(rv, r))
            for j in range(0, P, per_vector(X)):
                o = r * P + j
                a = load_rows(X, o, P, ONE)
                if channels:
                    kept = mul(get(rv, r), load(rp, j, ONE))
                else:
                    kept = same
                new = mad(kept, a, load_rows(D, o, P, ONE))
                if tangent:
                    if column:
                        b = load(minus, j, ONE)
                    else:
                        b = get(minus, r)
                    new = mad(b, a, new)
                store_rows(moved, o, P, new)
        _alongs(moved, G, X, length, outward, other, x[4 * count :], V, P, column)
        _factors(minus, length, outward, other, x[4 * count :], count, least, tangent)
        for r in range(0, V, ROWS):
            four, same = zeros(X), times(rp[0], get(rv, r))
            for j in range(0, P, per_vector(X)):
                o = r * P + j
                if column:
                    f, e, b, w = load(length, j, ONE), load(outward, j, ONE), load(minus, j, ONE), load(other, j, ONE)
                else:
                    f, e, b, w = get(length, r), get(outward, r), get(minus, r), get(other, r)
                a = load_rows(X, o, P, ONE)
                if channels:
                    kept = mul(get(rv, r), load(rp, j, ONE))
                else:
                    kept = same
                h = mad(f, load_rows(G, o, P, ONE), mul(e, load_rows(moved, o, P, ONE)))
                if channels:
                    share = mul(h, a)
                    plus(grp, j, total(get(rv, r), share))
                    four = mad(share, load(rp, j, ONE), four)
                else:
                    four = mad(h, a, four)
                if tangent:
                    store_rows(G, o, P, mad(kept, h, mad(b, h, mul(w, load_rows(D, o, P, ONE)))))
                    h = mad(w, a, h)
                else:
                    store_rows(G, o, P, mad(kept, h, mul(w, a)))
                _passed(H, o, P, h, moving)
            _add_rows(grv, r, sums(four))

    return back


@helper
def _factors(minus, length, outward, other, crossed, count, least, tangent):
    """Of every slot the factors of G and of what moved in h, and that of D, or of X."""
    for i in range(count):
        f = 1 / math.sqrt(max(length[i], least))
        out = outward[i] * f * f if length[i] > least else f * 0
        if tangent:
            length[i], outward[i] = f, -f * out
            other[i] = -(f * other[i] - f * out * crossed[i])
        else:
            own = math.sqrt(max(minus[i], least))
            other[i] = outward[i] * f / own if minus[i] > least else f * 0
            length[i], outward[i] = f * own, -f * own * out


@helper
def _alongs(A, B, C, aa, ab, cb, ca, V, P, column):
    """<A, A>, <A, B>, <C, B> and <C, A> of every slot."""
    if column:
        for j in range(0, P, per_vector(A)):
            w = x = y = z = filled(A, 0.0)
            for r in range(0, V, ROWS):
                o = r * P + j
                a, b, c = load_rows(A, o, P, ONE), load_rows(B, o, P, ONE), load_rows(C, o, P, ONE)
                w, x, y, z = add(w, total(a, a)), add(x, total(a, b)), add(y, total(c, b)), add(z, total(c, a))
            store(aa, j, w)
            store(ab, j, x)
            store(cb, j, y)
            store(ca, j, z)
        return
    for r in range(0, V, ROWS):
        f = g = h = i = zeros(A)
        for j in range(0, P, per_vector(A)):
            o = r * P + j
            a, b, c = load_rows(A, o, P, ONE), load_rows(B, o, P, ONE), load_rows(C, o, P, ONE)
            f, g, h, i = mad(a, a, f), mad(a, b, g), mad(c, b, h), mad(c, a, i)
        put(aa, r, sums(f))
        put(ab, r, sums(g))
        put(cb, r, sums(h))
        put(ca, r, sums(i))


@helper
def _negate(x, count):
    for i in range(count):
        x[i] = -x[i]


# Links, `(A, M, V, P, v, p, x, c)`: the memory M of a dual state A, 0 beyond the true widths. Back, `(A, M, G, H, V, P,
# v, p, x, c)`, with G that of M: adds to H, that of A.


def no_link(A, M, V, P, v, p, x, c):
    """The memory is what is carried."""


def no_link_back(A, M, G, H, V, P, v, p, x, c):
    """Nothing."""


@helper
def _trim(M, V, P, v, p):
    """Zeros beyond the true widths."""
    for r in range(v):
        for j in range(p, P):
            M[r * P + j] = 0
    for i in range(v * P, V * P):
        M[i] = 0


@helper
def _tops(A, x, V, P, p, both):
    """Into x, the largest number of every row, of -A too if both."""
    wide = per_vector(A)
    whole = p - p % wide
    for r in range(V):
        top = A[r * P]
        if both:
            top = abs(top)
        if whole > 0:
            row = load(A, r * P, ONE)
            if both:
                row = abs(row)
            for j in range(wide, whole, wide):
                more = load(A, r * P + j, ONE)
                if both:
                    more = abs(more)
                row = where(row < more, more, row)
            store(x, V, row)
            for j in range(wide):
                top = max(top, x[V + j])
        for j in range(whole, p):
            top = max(top, abs(A[r * P + j]) if both else A[r * P + j])
        x[r] = top


def softmax(A, M, V, P, v, p, x, c):
    """c softmax of every row."""
    _tops(A, x, V, P, p, False)
    for r in range(0, V, ROWS):
        for j in range(0, P, per_vector(A)):
            o = r * P + j
            store_rows(M, o, P, _exp4(add(load_rows(A, o, P, ONE), _opposite(get(x, r)))))
    _trim(M, V, P, v, p)
    for r in range(0, V, ROWS):
        four = zeros(A)
        for j in range(0, P, per_vector(A)):
            four = add(four, load_rows(M, r * P + j, P, ONE))
        (a0, a1, a2, a3), s = sums(four), c[0]
        f = _over(s, a0), _over(s, a1), _over(s, a2), _over(s, a3)
        for j in range(0, P, per_vector(A)):
            o = r * P + j
            store_rows(M, o, P, mul(f, load_rows(M, o, P, ONE)))


@inline
def _over(a, b):
    """a / b, 0 for a row without numbers."""
    return a / b if b != 0 else b


@inline
def _opposite(u):
    a, b, c, d = u
    return -a, -b, -c, -d


@inline
def _exp4(four):
    a, b, c, d = four
    return normal_exp(a), normal_exp(b), normal_exp(c), normal_exp(d)


def softmax_back(A, M, G, H, V, P, v, p, x, c):
    rows(M, G, x, V, P)
    for r in range(0, V, ROWS):
        f = times(-1 / c[0], get(x, r))
        for j in range(0, P, per_vector(A)):
            o = r * P + j
            g = mul(load_rows(M, o, P, ONE), add(load_rows(G, o, P, ONE), f))
            store_rows(H, o, P, add(load_rows(H, o, P, ONE), g))


@inline
def _banks(A, o, P, top):
    """exp(A - top) and exp(-A - top) of four rows."""
    a = load_rows(A, o, P, ONE)
    return _exp4(add(a, _opposite(top))), _exp4(add(mul(-1.0, a), _opposite(top)))


@helper
def _bank_sums(A, x, V, P, v, p):
    """Into x the largest |A| of every row, then the inverse sum of its two banks."""
    _tops(A, x, V, P, p, True)
    ones = x[2 * V :]
    _constant(ones, P, p)
    for r in range(0, V, ROWS):
        four = zeros(A)
        for j in range(0, P, per_vector(A)):
            left, right = _banks(A, r * P + j, P, get(x, r))
            four = mad(add(left, right), load(ones, j, ONE), four)
        put(x, V + r, sums(four))
    for r in range(V):
        x[V + r] = 1 / x[V + r] if r < v and x[V + r] != 0 else 0


def banks(A, M, V, P, v, p, x, c):
    """c sinh(A) / sum cosh(A) of every row."""
    _bank_sums(A, x, V, P, v, p)
    for r in range(0, V, ROWS):
        for j in range(0, P, per_vector(A)):
            o = r * P + j
            left, right = _banks(A, o, P, get(x, r))
            store_rows(M, o, P, mul(times(c[0], get(x, V + r)), add(left, mul(-1.0, right))))
    _trim(M, V, P, v, p)


def banks_back(A, M, G, H, V, P, v, p, x, c):
    _bank_sums(A, x, V, P, v, p)
    ones, along = x[2 * V :], x[2 * V + P :]
    rows(M, G, along, V, P)
    for r in range(0, V, ROWS):
        f, e = times(c[0], get(x, V + r)), times(-1 / c[0], get(along, r))
        for j in range(0, P, per_vector(A)):
            o = r * P + j
            left, right = _banks(A, o, P, get(x, r))
            both = mul(load(ones, j, ONE), mul(f, add(left, right)))
            g = mad(both, load_rows(G, o, P, ONE), mul(e, load_rows(M, o, P, ONE)))
            store_rows(H, o, P, add(load_rows(H, o, P, ONE), g))


def sigmoid(A, M, V, P, v, p, x, c):
    """c_0 + c_1 sigmoid(A)."""
    for o in range(0, V * P, per_vector(A)):
        share = 1.0 / (normal_exp(-load(A, o, ONE)) + 1.0)
        store(M, o, mad(share, c[1], add(mul(share, 0.0), c[0])))
    _trim(M, V, P, v, p)


def sigmoid_back(A, M, G, H, V, P, v, p, x, c):
    for o in range(0, V * P, per_vector(A)):
        small = normal_exp(-abs(load(A, o, ONE)))
        share = 1.0 / (small + 1.0)
        g = mul(mul(mul(share, share), mul(small, c[1])), load(G, o, ONE))
        store(H, o, add(load(H, o, ONE), g))


# Odd powers, as `hecate.retention.mirror` has them. c = m, floor, and of the length m, floor and q.


@inline
def _least(a, floor):
    """max(a, floor), NaN where a is."""
    return where(a < floor, floor, a)


@inline
def _power(a, m, floor):
    """a max(|a|, floor)^m."""
    return a * normal_exp(m * normal_log(_least(abs(a), floor)))


@helper
def _powers(A, x, V, P, c):
    """Into x the powers B of A; max(|B|_q, floor), and whether that is the norm."""
    top, q = filled(A, 0.0), c[4]
    for o in range(0, V * P, per_vector(A)):
        b = _power(load(A, o, ONE), c[0], c[1])
        store(x, o, b)
        top = _least(abs(b), top)
    store(x, V * P, top)
    largest = c[3]
    for i in range(per_vector(A)):
        largest = max(largest, x[V * P + i])
    whole = filled(A, 0.0)
    for o in range(0, V * P, per_vector(A)):
        unit = abs(load(x, o, ONE) / largest)
        # A number below the least that log takes adds nothing.
        whole = whole + where(unit >= TINY, normal_exp(q * normal_log(_least(unit, TINY))), 0.0)
    norm = largest * sums((whole, whole, whole, whole))[0] ** (1 / q)
    return (norm, True) if norm >= c[3] else (c[3], False)


def powers(A, M, V, P, v, p, x, c):
    """B = A max(|A|, floor)^m, M = B max(|B|_q, floor)^m."""
    length, _ = _powers(A, x, V, P, c)
    f = length ** c[2]
    for o in range(0, V * P, per_vector(A)):
        store(M, o, mul(f, load(x, o, ONE)))


def powers_back(A, M, G, H, V, P, v, p, x, c):
    length, beyond = _powers(A, x, V, P, c)
    f = length ** c[2]
    along = c[2] * inner(G, x, V * P) / length if beyond else f * 0
    for o in range(0, V * P, per_vector(A)):
        a, unit = load(A, o, ONE), load(x, o, ONE) / length
        near = abs(unit)
        near = where(near >= TINY, normal_exp((c[4] - 1) * normal_log(_least(near, TINY))), 0.0)
        g = f * mad(along, where(unit < 0.0, -near, near), load(G, o, ONE))
        whole = abs(a)
        bend = where(whole >= c[1], c[0] + 1, 1.0)
        g = g * (bend * normal_exp(c[0] * normal_log(_least(whole, c[1]))))
        store(H, o, add(load(H, o, ONE), g))


# A ball around a memory.


@helper
def project(M, norm, count):
    """M min(1, norm/|M|), and norm/|M| where that is below 1, else 0."""
    square = inner(M, M, count)
    if not square > norm * norm:
        return norm * 0
    f = norm / math.sqrt(square)
    for o in range(0, count, per_vector(M)):
        store(M, o, mul(f, load(M, o, ONE)))
    return f


@helper
def project_back(M, f, norm, G, count):
    """G, the cotangent of the projected M, becomes that of the one before."""
    along = -inner(M, G, count) / (norm * norm)
    for o in range(0, count, per_vector(M)):
        store(G, o, mul(f, mad(along, load(M, o, ONE), load(G, o, ONE))))
