"""Building blocks of the kernels of layers: passes over a weight, norms of a token's numbers, and the bound by which a
step is normalised.

Weights are flat, rows in fours and in vectors of 64 bytes, padded with zeros that no pass moves; `o`, `to` and the like
say where a row or a number begins. [ENG-LAYERS-D1]

Norms go over views, of which LLVM knows that no index counts from their end: it makes vectors of them. [ENG-LAYERS-D2]

The bound is `hecate.structure.bound` on a row of values: `v` holds bounds of the squared columns of d prediction / d
value where the value itself lies in its row, and `t` at its first place their bound in all. [STR-BOUND-D1]
"""

from __future__ import annotations

import math

from numba import njit, types
from numba.extending import intrinsic

from hecate.engine.cpu.vectors import (
    ONE, ROWS, add, filled, get, helper, load, load_rows, mad, mul, number, per_vector, put, store, store_rows, sums,
    total, zeros,
)  # fmt: skip
from hecate.structure.bound import ROOT


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


@helper
def _node(plan, n):
    """The columns of a node."""
    c = plan[n]
    return c[0], c[2], c[3], c[4], c[5], c[6], c[7], c[8], c[9]


@helper
def _square(x, at, size):
    """|x|^2."""
    s = number(x[at], 0)
    for j in range(size):
        s += x[at + j] * x[at + j]
    return s


@helper
def bounded(plan, nodes, W, wo, x, xo, v, t, L, hidden):
    """The sum over layers of b |h|^2, and what it is made of in v and t."""
    out_of_line()
    nil, one, found, root = L - L, number(x[xo], 1), number(x[xo], 0), number(x[xo], ROOT)
    fill(v, nil, L, 0.0)
    fill(t, nil, L, 0.0)
    # The derivative of the prediction by itself is the identity: of columns of length 1, and of norm 1.
    at, wide = plan[nodes - 1, 7], plan[nodes - 1, 9]
    fill(v, at, wide, 1.0)
    t[at] = one
    for n in range(nodes - 1, -1, -1):
        op, o, V, P, a, b, at, size, wide = _node(plan, n)
        if op == 0:
            # A layer's part of |J|^2: |h|^2 times the square norm of the derivative by its outputs.
            found += (t[at] + root) * _square(x, xo + a, P)
            if 0 < a < hidden:
                columns(W, wo + o, V, P, v, a)
                s = number(x[xo], 0)
                for j in range(P):
                    v[a + j] *= t[at]
                    s += v[a + j]
                t[a] = s
        elif op == 1:
            s = number(x[xo], 0)
            for i in range(size):
                q = x[xo + at + wide + i]
                # Behind f(z) lies q = f'(z), by which the column of z is stretched.
                v[a + i] = v[at + i] * q * q
                s += v[a + i]
            t[a] = s
        elif op == 2:
            for k in (a, b):
                if 0 < k < hidden:
                    copy(v, at, v, k, wide)
                    t[k] = t[at]
        elif op == 3:
            s, u = number(x[xo], 0), number(x[xo], 0)
            for i in range(size):
                p, q, w = x[xo + a + i], x[xo + b + i], v[at + i]
                v[a + i], v[b + i] = w * q * q, w * p * p
                s += v[a + i]
                u += v[b + i]
            t[a], t[b] = s, u
        else:
            q = x[xo + at + wide]
            t[a] = t[at] * q * q
            fill(v, a, wide, t[a])
    return found


@helper
def bounded_back(plan, nodes, W, wo, M, mo, x, xo, v, t, e, gv, gt, g, row, L, hidden):
    """The reverse of `bounded` for the cotangent e of its sum: added to g those of the values, to M of the weights."""
    out_of_line()
    nil, two = L - L, number(x[xo], 2)
    fill(gv, nil, L, 0.0)
    fill(gt, nil, L, 0.0)
    for n in range(nodes):
        op, o, V, P, a, b, at, size, wide = _node(plan, n)
        if op == 0:
            c, w = e * _square(x, xo + a, P), two * e * (t[at] + number(x[xo], ROOT))
            for j in range(P):
                g[a + j] += w * x[xo + a + j]
            if 0 < a < hidden:
                fill(row, nil, P, 0.0)
                columns(W, wo + o, V, P, row, nil)
                for j in range(P):
                    r = gv[a + j] + gt[a]
                    c += r * row[j]
                    row[j] = two * t[at] * r
                spread_columns(W, wo + o, M, mo + o, V, P, row, nil)
            gt[at] += c
        elif op == 1:
            for i in range(size):
                r, q = gv[a + i] + gt[a], x[xo + at + wide + i]
                gv[at + i] += r * q * q
                g[a + i] += two * v[at + i] * q * x[xo + at + 2 * wide + i] * r
        elif op == 2:
            for k in (a, b):
                if 0 < k < hidden:
                    for i in range(wide):
                        gv[at + i] += gv[k + i]
                    gt[at] += gt[k]
        elif op == 3:
            for i in range(size):
                p, q, w = x[xo + a + i], x[xo + b + i], two * v[at + i]
                r, s = gv[a + i] + gt[a], gv[b + i] + gt[b]
                gv[at + i] += r * q * q + s * p * p
                g[a + i] += w * p * s
                g[b + i] += w * q * r
        else:
            # A norm stretches no direction by more than s, one over the root mean square.
            q, r = x[xo + at + wide], gt[a]
            for i in range(size):
                r += gv[a + i]
            gt[at] += r * q * q
            r *= two / number(x[xo], size) * t[at] * q * q * q
            for i in range(size):
                g[a + i] -= r * x[xo + at + i]
