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

from numba import njit

from hecate.engine.cpu.vectors import (
    ONE, ROWS, add, copy, fill, get, helper, inline, load, load_rows, mad, mul, number, out_of_line, per_vector, put,
    store, store_rows, sums, times, total, zeros,
)  # fmt: skip
from hecate.structure.bound import ROOT


@helper
def scaled(A, B, r):
    """B = r A."""
    out_of_line()
    for j in range(0, A.size, per_vector(A)):
        store(B, j, mul(r, load(A, j, ONE)))


@helper
def regained(A, B, w):
    """A += w B."""
    out_of_line()
    for j in range(0, A.size, per_vector(A)):
        store(A, j, mad(w, load(B, j, ONE), load(A, j, ONE)))


@helper
def regained_back(G, B, T, w):
    """<G, B>, and T += w G."""
    out_of_line()
    sum0, step = zeros(G), per_vector(G)
    # Four vectors at once, lest each addition wait for the one before.
    for j in range(0, G.size, ROWS * step):
        g = load_rows(G, j, step, ONE)
        sum0 = mad(g, load_rows(B, j, step, ONE), sum0)
        store_rows(T, j, step, mad(w, g, load_rows(T, j, step, ONE)))
    a, b, c, d = sums(sum0)
    return a + b + c + d


@helper
def decayed(G, A, r):
    """<G, A>, and G = r G."""
    out_of_line()
    sum0, step = zeros(G), per_vector(G)
    for j in range(0, G.size, ROWS * step):
        g = load_rows(G, j, step, ONE)
        sum0 = mad(g, load_rows(A, j, step, ONE), sum0)
        store_rows(G, j, step, mul(r, g))
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


@inline
def dots(W, o, V, P, x, at, y, to):
    """y = W x."""
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
def spread_columns(W, o, M, V, P, x, at):
    """M += W diag(x)."""
    out_of_line()
    for _ in range(0, V, ROWS):
        for j in range(0, P, per_vector(W)):
            c = load(x, at + j, ONE)
            store_rows(M, o + j, P, mad(c, load_rows(W, o + j, P, ONE), load_rows(M, o + j, P, ONE)))
        o += ROWS * P


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


@inline
def pulled_once(W, o, M, V, P, g, at, h, ho, x, to):
    """x += W^T g, M += g h^T."""
    for c in range(0, V, ROWS):
        gc = get(g, at + c)
        for j in range(0, P, per_vector(W)):
            store(x, to + j, add(load(x, to + j, ONE), total(gc, load_rows(W, o + j, P, ONE))))
            store_rows(M, o + j, P, mad(gc, load(h, ho + j, ONE), load_rows(M, o + j, P, ONE)))
        o += ROWS * P


@helper
def pulled_twice(W, o, M, V, P, g, at, h, ho, f, fo, c, co, x, to):
    """x += W^T g, M += g h^T + f c^T."""
    out_of_line()
    for r in range(0, V, ROWS):
        gr, fr = get(g, at + r), get(f, fo + r)
        for j in range(0, P, per_vector(W)):
            store(x, to + j, add(load(x, to + j, ONE), total(gr, load_rows(W, o + j, P, ONE))))
            m = mad(gr, load(h, ho + j, ONE), load_rows(M, o + j, P, ONE))
            store_rows(M, o + j, P, mad(fr, load(c, co + j, ONE), m))
        o += ROWS * P


@inline
def written(A, S, B, R, I, o, V, P, d, at, h, ho, l, r, m):
    """B = r A - l d h^T, or with a momentum S, R = m S - l d h^T and B = r A + R; and (1 - r) I where there is an I."""
    w = number(r, 1) - r
    for c in range(0, V, ROWS):
        # A row's number, so that a cell costs one product and one sum.
        e = times(-l, get(d, at + c))
        for j in range(0, P, per_vector(A)):
            a, hj = load_rows(A, o + j, P, ONE), load(h, ho + j, ONE)
            if S is None:
                b = mad(e, hj, mul(r, a))
            else:
                s = mad(e, hj, mul(m, load_rows(S, o + j, P, ONE)))
                store_rows(R, o + j, P, s)
                b = mad(r, a, s)
            # B forgets towards I: r A + (1 - r) I.
            if I.size > 0:
                b = mad(w, load_rows(I, o + j, P, ONE), b)
            store_rows(B, o + j, P, b)
        o += ROWS * P


@inline
def unwritten(G, H, A, S, I, T, o, V, P, d, at, h, ho, x, to, y, yo, r, m):
    """The reverse of `written`, with X = G or, with a momentum, G + H: x = X h, y += X^T d, T += (1 - r) G, G = r G,
    H = m X; returns <G, A - I> and <X, S>."""
    e, n, minus, w = zeros(G), zeros(G), number(r, -1), number(r, 1) - r
    for c in range(0, V, ROWS):
        acc, dc = zeros(G), get(d, at + c)
        for j in range(0, P, per_vector(G)):
            g, a = load_rows(G, o + j, P, ONE), load_rows(A, o + j, P, ONE)
            if I.size > 0:
                # r scales A - I, so that is what the cotangent of r is a product with.
                a = mad(minus, load_rows(I, o + j, P, ONE), a)
                store_rows(T, o + j, P, mad(w, g, load_rows(T, o + j, P, ONE)))
            e = mad(g, a, e)
            store_rows(G, o + j, P, mul(r, g))
            if H is not None:
                # From here on X = G + H: B = r A + R hands G to R.
                g = add(g, load_rows(H, o + j, P, ONE))
                n = mad(g, load_rows(S, o + j, P, ONE), n)
                store_rows(H, o + j, P, mul(m, g))
            acc = mad(g, load(h, ho + j, ONE), acc)
            store(y, yo + j, add(load(y, yo + j, ONE), total(dc, g)))
        put(x, to + c, sums(acc))
        o += ROWS * P
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
def normed(values, at, size, eps, ulp, into, to, wide):
    """y = (x - mean) / s, and `wide` numbers on 1/s, which is 1 where the deviation is no more than rounding of the
    mean, size ulp |mean|."""
    out_of_line()
    centred(values, at, size, into, to)
    y, square = into[to : to + size], values[at] - values[at]
    for i in range(size):
        square += y[i] * y[i]
    square /= number(square, size)
    rounding = (values[at] - y[0]) * number(square, size) * ulp
    s = number(eps, 1)
    if not square <= rounding * rounding:
        s /= math.sqrt(square + eps)
    for i in range(size):
        y[i] *= s
    into[to + wide] = s


@loose
def norm_pulled(values, yo, s, size, cotangents, go, into, to):
    """x = J g, J that of `normed`; its mean is taken last, which rounding may leave to y."""
    out_of_line()
    y, g, x = values[yo : yo + size], cotangents[go : go + size], into[to : to + size]
    along = s - s
    for i in range(size):
        along += g[i] * y[i]
    along /= number(along, size)
    for i in range(size):
        x[i] = (g[i] - y[i] * along) * s
    centred(into, to, size, into, to)


@helper
def node(nodes, n):
    """The columns of a node: op, o, V, P, a, b, at, size, wide, width.

    op: 0 of a layer, 1 of an activation, 2 of a sum, 3 of a product, 4 of a norm; o: where a layer's weight lies in a
    state, its V rows and P columns, padded; a, b: where inputs begin in a row of values, at: where the value does, of
    `size` numbers, `wide` with padding; width: columns of a weight without.
    """
    c = nodes[n]
    return c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7], c[8], c[9]


@helper
def below(a, x):
    """True of a layer's input that has a layer below: neither the memory's nor the constant 1 behind biases."""
    return 0 < a < x.size - per_vector(x)


@helper
def _square(x, at, size):
    """|x|^2."""
    s = number(x[at], 0)
    for j in range(size):
        s += x[at + j] * x[at + j]
    return s


@helper
def bounded(nodes, W, x, v, t):
    """The sum over layers of b |h|^2, and what it is made of in v and t."""
    out_of_line()
    one, found, root = number(x[0], 1), number(x[0], 0), number(x[0], ROOT)
    fill(v, 0.0)
    fill(t, 0.0)
    # The derivative of the prediction by itself is the identity: of columns of length 1, and of norm 1.
    at, wide = nodes[len(nodes) - 1, 6], nodes[len(nodes) - 1, 8]
    fill(v[at : at + wide], 1.0)
    t[at] = one
    for n in range(len(nodes) - 1, -1, -1):
        op, o, V, P, a, b, at, size, wide, _ = node(nodes, n)
        if op == 0:
            # A layer's part of |J|^2: |h|^2 times the square norm of the derivative by its outputs.
            found += (t[at] + root) * _square(x, a, P)
            if below(a, x):
                columns(W, o, V, P, v, a)
                s = number(x[0], 0)
                for j in range(P):
                    v[a + j] *= t[at]
                    s += v[a + j]
                t[a] = s
        elif op == 1:
            s = number(x[0], 0)
            for i in range(size):
                q = x[at + wide + i]
                # Behind f(z) lies q = f'(z), by which the column of z is stretched.
                v[a + i] = v[at + i] * q * q
                s += v[a + i]
            t[a] = s
        elif op == 2:
            for k in (a, b):
                if below(k, x):
                    copy(v[at : at + wide], v[k : k + wide])
                    t[k] = t[at]
        elif op == 3:
            s, u = number(x[0], 0), number(x[0], 0)
            for i in range(size):
                p, q, w = x[a + i], x[b + i], v[at + i]
                v[a + i], v[b + i] = w * q * q, w * p * p
                s += v[a + i]
                u += v[b + i]
            t[a], t[b] = s, u
        else:
            q = x[at + wide]
            t[a] = t[at] * q * q
            fill(v[a : a + wide], t[a])
    return found


@helper
def bounded_back(nodes, W, M, x, v, t, e, gv, gt, g, row):
    """The reverse of `bounded` for the cotangent e of its sum: added to g those of the values, to M of the weights."""
    out_of_line()
    two = number(x[0], 2)
    fill(gv, 0.0)
    fill(gt, 0.0)
    for n in range(len(nodes)):
        op, o, V, P, a, b, at, size, wide, _ = node(nodes, n)
        if op == 0:
            c, w = e * _square(x, a, P), two * e * (t[at] + number(x[0], ROOT))
            for j in range(P):
                g[a + j] += w * x[a + j]
            if below(a, x):
                fill(row[:P], 0.0)
                columns(W, o, V, P, row, at - at)
                for j in range(P):
                    r = gv[a + j] + gt[a]
                    c += r * row[j]
                    row[j] = two * t[at] * r
                spread_columns(W, o, M, V, P, row, at - at)
            gt[at] += c
        elif op == 1:
            for i in range(size):
                r, q = gv[a + i] + gt[a], x[at + wide + i]
                gv[at + i] += r * q * q
                g[a + i] += two * v[at + i] * q * x[at + 2 * wide + i] * r
        elif op == 2:
            for k in (a, b):
                if below(k, x):
                    for i in range(wide):
                        gv[at + i] += gv[k + i]
                    gt[at] += gt[k]
        elif op == 3:
            for i in range(size):
                p, q, w = x[a + i], x[b + i], two * v[at + i]
                r, s = gv[a + i] + gt[a], gv[b + i] + gt[b]
                gv[at + i] += r * q * q + s * p * p
                g[a + i] += w * p * s
                g[b + i] += w * q * r
        else:
            # A norm stretches no direction by more than s, one over the root mean square.
            q, r = x[at + wide], gt[a]
            for i in range(size):
                r += gv[a + i]
            gt[at] += r * q * q
            r *= two / number(x[0], size) * t[at] * q * q * q
            for i in range(size):
                g[a + i] -= r * x[at + i]
