"""Building blocks of the kernels of layers: passes over a weight, a few arrays each, in vectors.

Weights are flat, rows in fours and in vectors of 64 bytes, padded with zeros that no pass moves; `o`, `to` and the like
say where a row or a number begins. [ENG-LAYERS-D1]
"""

from __future__ import annotations

from numba import types
from numba.extending import intrinsic

from hecate.engine.cpu.vectors import (
    ONE, ROWS, add, filled, get, helper, load, load_rows, mad, mul, number, per_vector, put, store, store_rows, sums,
    total, zeros,
)  # fmt: skip


@intrinsic
def out_of_line(_):
    """Keeps the function that says so a call in those that call it: compiled once, not once per caller."""

    def code(context, builder, signature, args):
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), code


@helper
def fill(target, to, size, value):
    """target[to:] = value."""
    out_of_line()
    wide = filled(target, value)
    for j in range(0, size, per_vector(target)):
        store(target, to + j, wide)


@helper
def copy(source, at, target, to, size):
    """target[to:] = source[at:]."""
    out_of_line()
    for j in range(0, size, per_vector(source)):
        store(target, to + j, load(source, at + j, ONE))


@helper
def moved(G, at, size, T, to):
    """T[to:] += G[at:], and G[at:] = 0."""
    out_of_line()
    zero = filled(G, 0.0)
    for j in range(0, size, per_vector(G)):
        store(T, to + j, add(load(T, to + j, ONE), load(G, at + j, ONE)))
        store(G, at + j, zero)


@helper
def scaled(A, at, B, to, size, r):
    """B = r A."""
    out_of_line()
    for j in range(0, size, per_vector(A)):
        store(B, to + j, mul(r, load(A, at + j, ONE)))


@helper
def regained(A, at, B, to, size, w):
    """A += w B."""
    out_of_line()
    for j in range(0, size, per_vector(A)):
        store(A, at + j, mad(w, load(B, to + j, ONE), load(A, at + j, ONE)))


@helper
def regained_back(G, go, B, o, T, to, size, w):
    """<G, B>, and T += w G."""
    out_of_line()
    sum0 = zeros(G)
    step = per_vector(G)
    # Four vectors at once, lest each addition wait for the one before.
    for j in range(0, size, ROWS * step):
        g = load_rows(G, go + j, step, ONE)
        sum0 = mad(g, load_rows(B, o + j, step, ONE), sum0)
        store_rows(T, to + j, step, mad(w, g, load_rows(T, to + j, step, ONE)))
    a, b, c, d = sums(sum0)
    return a + b + c + d


@helper
def decayed(G, go, A, o, size, r):
    """<G, A>, and G = r G."""
    out_of_line()
    sum0 = zeros(G)
    step = per_vector(G)
    for j in range(0, size, ROWS * step):
        g = load_rows(G, go + j, step, ONE)
        sum0 = mad(g, load_rows(A, o + j, step, ONE), sum0)
        store_rows(G, go + j, step, mul(r, g))
    a, b, c, d = sums(sum0)
    return a + b + c + d


@helper
def added(x, at, y, to, size):
    """y += x."""
    out_of_line()
    for j in range(0, size, per_vector(x)):
        store(y, to + j, add(load(y, to + j, ONE), load(x, at + j, ONE)))


@helper
def summed(x, at, y, yo, z, to, size):
    """z = x + y."""
    out_of_line()
    for j in range(0, size, per_vector(x)):
        store(z, to + j, add(load(x, at + j, ONE), load(y, yo + j, ONE)))


@helper
def product(x, at, y, yo, z, to, size):
    """z = x y, number by number."""
    out_of_line()
    for j in range(0, size, per_vector(x)):
        store(z, to + j, mul(load(x, at + j, ONE), load(y, yo + j, ONE)))


@helper
def product_added(x, at, y, yo, z, to, size):
    """z += x y."""
    out_of_line()
    for j in range(0, size, per_vector(x)):
        store(z, to + j, mad(load(x, at + j, ONE), load(y, yo + j, ONE), load(z, to + j, ONE)))


@helper
def products_added(w, wo, x, at, y, yo, z, to, size):
    """z += w x y."""
    out_of_line()
    for j in range(0, size, per_vector(x)):
        wx = mul(load(w, wo + j, ONE), load(x, at + j, ONE))
        store(z, to + j, mad(wx, load(y, yo + j, ONE), load(z, to + j, ONE)))


# One weight W [V, P] of a memory.


@helper
def dots(W, o, V, P, x, at, y, to):
    """y = W x."""
    out_of_line()
    # Four rows at once: their input is loaded once for all of them.
    for c in range(0, V, ROWS):
        acc = zeros(W)
        for j in range(0, P, per_vector(W)):
            acc = mad(load_rows(W, o + j, P, ONE), load(x, at + j, ONE), acc)
        put(y, to + c, sums(acc))
        o += ROWS * P


@helper
def dots_more(W, o, V, P, x, at, y, to):
    """y += W x."""
    out_of_line()
    for c in range(0, V, ROWS):
        acc = zeros(W)
        for j in range(0, P, per_vector(W)):
            acc = mad(load_rows(W, o + j, P, ONE), load(x, at + j, ONE), acc)
        a, b, c0, d = sums(acc)
        e, f, g, h = get(y, to + c)
        put(y, to + c, (a + e, b + f, c0 + g, d + h))
        o += ROWS * P


@helper
def columns(W, o, V, P, x, to):
    """x += the sums of squares of W's columns."""
    out_of_line()
    for _ in range(0, V, ROWS):
        for j in range(0, P, per_vector(W)):
            w = load_rows(W, o + j, P, ONE)
            store(x, to + j, add(load(x, to + j, ONE), total(w, w)))
        o += ROWS * P


@helper
def spread_columns(W, o, M, mo, V, P, x, at):
    """M += W diag(x)."""
    out_of_line()
    for _ in range(0, V, ROWS):
        for j in range(0, P, per_vector(W)):
            c = load(x, at + j, ONE)
            store_rows(M, mo + j, P, mad(c, load_rows(W, o + j, P, ONE), load_rows(M, mo + j, P, ONE)))
        o += ROWS * P
        mo += ROWS * P


@helper
def backs(W, o, V, P, g, at, x, to):
    """x += W^T g."""
    out_of_line()
    # x is summed up in memory, once for every four rows: down the columns of W strides would be long.
    for c in range(0, V, ROWS):
        gc = get(g, at + c)
        for j in range(0, P, per_vector(W)):
            store(x, to + j, add(load(x, to + j, ONE), total(gc, load_rows(W, o + j, P, ONE))))
        o += ROWS * P


@helper
def pulled_once(W, o, M, mo, V, P, g, at, h, ho, x, to):
    """x += W^T g, M += g h^T."""
    out_of_line()
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
    out_of_line()
    for r in range(0, V, ROWS):
        gr, fr = get(g, at + r), get(f, fo + r)
        for j in range(0, P, per_vector(W)):
            store(x, to + j, add(load(x, to + j, ONE), total(gr, load_rows(W, o + j, P, ONE))))
            m = mad(gr, load(h, ho + j, ONE), load_rows(M, mo + j, P, ONE))
            store_rows(M, mo + j, P, mad(fr, load(c, co + j, ONE), m))
        o += ROWS * P
        mo += ROWS * P


@helper
def written(A, ao, B, bo, I, io, V, P, d, at, h, ho, l, r, w):
    """B = r A - l d h^T, and w I where there is an I."""
    out_of_line()
    for c in range(0, V, ROWS):
        d0, d1, d2, d3 = get(d, at + c)
        # A row's number, so that a cell costs one product and one sum.
        e = -l * d0, -l * d1, -l * d2, -l * d3
        # B forgets towards I: r A + (1 - r) I, w being 1 - r.
        if I.size > 0:
            for j in range(0, P, per_vector(A)):
                kept = mad(w, load_rows(I, io + j, P, ONE), mul(r, load_rows(A, ao + j, P, ONE)))
                store_rows(B, bo + j, P, mad(e, load(h, ho + j, ONE), kept))
            io += ROWS * P
        else:
            for j in range(0, P, per_vector(A)):
                store_rows(B, bo + j, P, mad(e, load(h, ho + j, ONE), mul(r, load_rows(A, ao + j, P, ONE))))
        ao += ROWS * P
        bo += ROWS * P


@helper
def written_on(A, ao, S, so, B, R, bo, I, io, V, P, d, at, h, ho, l, r, m, w):
    """R = m S - l d h^T, B = r A + R, and w I where there is an I."""
    out_of_line()
    for c in range(0, V, ROWS):
        d0, d1, d2, d3 = get(d, at + c)
        e = -l * d0, -l * d1, -l * d2, -l * d3
        for j in range(0, P, per_vector(A)):
            s = mad(e, load(h, ho + j, ONE), mul(m, load_rows(S, so + j, P, ONE)))
            store_rows(R, bo + j, P, s)
            if I.size > 0:
                s = mad(w, load_rows(I, io + j, P, ONE), s)
            store_rows(B, bo + j, P, mad(r, load_rows(A, ao + j, P, ONE), s))
        ao += ROWS * P
        so += ROWS * P
        bo += ROWS * P
        io += ROWS * P


@helper
def unwritten(G, go, A, ao, I, T, io, V, P, d, at, h, ho, x, to, y, yo, r, w):
    """The reverse of `written`: x = G h, y += G^T d, T += w G, G = r G; returns <G, A - I>."""
    out_of_line()
    e, minus = zeros(G), number(w, -1)
    for c in range(0, V, ROWS):
        acc, dc = zeros(G), get(d, at + c)
        for j in range(0, P, per_vector(G)):
            g = load_rows(G, go + j, P, ONE)
            acc = mad(g, load(h, ho + j, ONE), acc)
            store(y, yo + j, add(load(y, yo + j, ONE), total(dc, g)))
            a = load_rows(A, ao + j, P, ONE)
            if I.size > 0:
                # r scales A - I, so that is what the cotangent of r is a product with.
                a = mad(minus, load_rows(I, io + j, P, ONE), a)
                store_rows(T, io + j, P, mad(w, g, load_rows(T, io + j, P, ONE)))
            e = mad(g, a, e)
            store_rows(G, go + j, P, mul(r, g))
        put(x, to + c, sums(acc))
        go += ROWS * P
        ao += ROWS * P
        io += ROWS * P
    e0, e1, e2, e3 = sums(e)
    return e0 + e1 + e2 + e3


@helper
def unwritten_on(G, H, go, A, S, ao, so, I, T, io, V, P, d, at, h, ho, x, to, y, yo, r, m, w):
    """The reverse of `written_on`, X = G + H: x = X h, y += X^T d, T += w G, G = r G, H = m X; returns <G, A - I> and
    <X, S>."""
    out_of_line()
    e, n, minus = zeros(G), zeros(G), number(w, -1)
    for c in range(0, V, ROWS):
        acc, dc = zeros(G), get(d, at + c)
        for j in range(0, P, per_vector(G)):
            g, a = load_rows(G, go + j, P, ONE), load_rows(A, ao + j, P, ONE)
            if I.size > 0:
                a = mad(minus, load_rows(I, io + j, P, ONE), a)
                store_rows(T, io + j, P, mad(w, g, load_rows(T, io + j, P, ONE)))
            e = mad(g, a, e)
            store_rows(G, go + j, P, mul(r, g))
            # From here on X = G + H: B = r A + R hands G to R.
            g = add(g, load_rows(H, go + j, P, ONE))
            acc = mad(g, load(h, ho + j, ONE), acc)
            store(y, yo + j, add(load(y, yo + j, ONE), total(dc, g)))
            n = mad(g, load_rows(S, so + j, P, ONE), n)
            store_rows(H, go + j, P, mul(m, g))
        put(x, to + c, sums(acc))
        go += ROWS * P
        ao += ROWS * P
        so += ROWS * P
        io += ROWS * P
    (e0, e1, e2, e3), (n0, n1, n2, n3) = sums(e), sums(n)
    return e0 + e1 + e2 + e3, n0 + n1 + n2 + n3
