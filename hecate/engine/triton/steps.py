"""Parts of a token's step, as functions of a memory's whole state in registers: steps of retention, links from dual
states to memories, a ball around either, and the algorithm's direction; each with its pullback.

A tile is `[P, V]`: phi channels down, values along, padded with zeros, where `whole` says which cells are true and
`in_p` `[P, 1]` which rows are. The formulas are those of `StepForm`, `LinkForm` and `AlgorithmForm`. [ENG-TRITON-D5]
"""

import triton
import triton.language as tl

TINY = tl.constexpr(1e-30)  # the least that a logarithm here is taken of


@triton.jit
def raised(x, m):
    """x^m of positive numbers."""
    return tl.exp(m * tl.log(x))


@triton.jit
def along(A, B, COLUMN: tl.constexpr):
    """<A, B> of every slot: a column of a weight, which is a row of the tile, or a row of it."""
    if COLUMN:
        y = tl.sum(A * B, 1)[:, None]
    else:
        y = tl.sum(A * B, 0)[None, :]
    return y


# Steps: the state that follows X when moved by D under the gates r; c is the threshold or the least length.


@triton.jit
def free(X, D, r, c, in_p, P: tl.constexpr, STEP: tl.constexpr, COLUMN: tl.constexpr):
    """A step without its ball."""
    if STEP == "coupled":
        Y = r * (X + D)
    elif STEP == "threshold":
        Y = r * X + D
        Y = tl.where(tl.abs(Y) <= c, 0.0, tl.where(Y > 0, Y - c, Y + c))
    elif STEP == "centred":
        Y = r * X + D - tl.where(in_p, (tl.sum(D, 0) / P)[None, :], 0.0)
    elif STEP == "tangent":
        Y = r * X + D - X * along(X, D, COLUMN)
        Y = Y / tl.sqrt(tl.maximum(along(Y, Y, COLUMN), c * c))
    elif STEP == "divide":
        Y = r * X + D
        own, new = tl.maximum(along(X, X, COLUMN), c * c), tl.maximum(along(Y, Y, COLUMN), c * c)
        Y = Y * (tl.sqrt(own) / tl.sqrt(new))
    else:
        Y = r * X + D
    return Y


@triton.jit
def free_vjp(X, D, r, c, in_p, G, P: tl.constexpr, STEP: tl.constexpr, COLUMN: tl.constexpr):
    """Cotangents of X, D and, cell by cell, r."""
    if STEP == "coupled":
        GX, GD, GR = r * G, r * G, G * (X + D)
    elif STEP == "threshold":
        h = tl.where(tl.abs(r * X + D) > c, G, 0.0)
        GX, GD, GR = r * h, h, h * X
    elif STEP == "centred":
        GX, GD, GR = r * G, G - tl.where(in_p, (tl.sum(G, 0) / P)[None, :], 0.0), G * X
    elif STEP == "tangent":
        a = along(X, D, COLUMN)
        Y = r * X + D - X * a
        square = along(Y, Y, COLUMN)
        size = tl.sqrt(tl.maximum(square, c * c))
        h = (G - tl.where(square > c * c, along(Y, G, COLUMN) / size, 0.0) * (Y / size)) / size
        b = along(X, h, COLUMN)
        GX, GD, GR = r * h - h * a - D * b, h - X * b, h * X
    elif STEP == "divide":
        Y = r * X + D
        square, first = along(Y, Y, COLUMN), along(X, X, COLUMN)
        size, own = tl.sqrt(tl.maximum(square, c * c)), tl.sqrt(tl.maximum(first, c * c))
        out = along(Y, G, COLUMN) / size
        h = (own / size) * (G - tl.where(square > c * c, out, 0.0) * (Y / size))
        GX, GD, GR = r * h + X * tl.where(first > c * c, out / own, 0.0), h, h * X
    else:
        GX, GD, GR = r * G, G, G * X
    return GX, GD, GR


@triton.jit
def in_ball(M, cap):
    """M min(1, cap/|M|)."""
    square = tl.sum(M * M)
    return M * tl.where(square > cap * cap, cap / tl.sqrt(tl.where(square > 0, square, 1.0)), 1.0)


@triton.jit
def in_ball_vjp(M, cap, G):
    """Cotangent of M."""
    square = tl.sum(M * M)
    beyond = square > cap * cap
    size = tl.where(beyond, square, 1.0)
    inner = tl.where(beyond, tl.sum(M * G) / size, 0.0)
    return tl.where(beyond, cap / tl.sqrt(size), 1.0) * (G - inner * M)


@triton.jit
def moved(X, D, r, c, cap, in_p, P: tl.constexpr, STEP: tl.constexpr, COLUMN: tl.constexpr, CAP: tl.constexpr):
    """The next carried state."""
    Y = free(X, D, r, c, in_p, P, STEP, COLUMN)
    if CAP == "state":
        Y = in_ball(Y, cap)
    return Y


@triton.jit
def moved_vjp(X, D, r, c, cap, in_p, G, P: tl.constexpr, STEP: tl.constexpr, COLUMN: tl.constexpr, CAP: tl.constexpr):
    """Cotangents of X, D and, cell by cell, r."""
    if CAP == "state":
        G = in_ball_vjp(free(X, D, r, c, in_p, P, STEP, COLUMN), cap, G)
    return free_vjp(X, D, r, c, in_p, G, P, STEP, COLUMN)


# Links: the memory of what is carried; n0 to n4 are the numbers of the form.


@triton.jit
def banks(A, in_p):
    """cosh(A) and sinh(A) of every column, over the sum of the former. Near 0 a difference of powers has no digits of
    sinh; there its series has them all."""
    top = tl.max(tl.where(in_p, tl.abs(A), 0.0), 0)[None, :]
    x, y = tl.where(in_p, tl.exp(A - top), 0.0), tl.where(in_p, tl.exp(-A - top), 0.0)
    total, z = tl.sum(x + y, 0)[None, :], A * A
    near = 2.0 * A * (1.0 + z * (1 / 6 + z * (1 / 120 + z * (1 / 5040 + z / 362880)))) * tl.exp(-top)
    return (x + y) / total, tl.where(in_p & (z < 1), near, x - y) / total


@triton.jit
def shares(A, in_p):
    """The softmax of every column."""
    x = tl.exp(A - tl.max(tl.where(in_p, A, float("-inf")), 0)[None, :])
    x = tl.where(in_p, x, 0.0)
    return x / tl.sum(x, 0)[None, :]


@triton.jit
def length(B, floor, q):
    """max(|B|_q, floor), and whether that is the norm."""
    top = tl.maximum(tl.max(tl.abs(B)), floor)
    z = tl.abs(B) / top
    total = tl.sum(tl.where(z > TINY, raised(tl.maximum(z, TINY), q), 0.0))
    norm = top * raised(tl.where(total > 0, total, 1.0), 1.0 / q)
    beyond = (total > 0) & (norm >= floor)
    return tl.where(beyond, norm, floor), beyond


@triton.jit
def linked(A, n0, n1, n2, n3, n4, in_p, whole, LINK: tl.constexpr):
    """The memory of a dual state."""
    if LINK == "softmax":
        M = tl.where(whole, n0 * shares(A, in_p), 0.0)
    elif LINK == "banks":
        _, y = banks(A, in_p)
        M = tl.where(whole, n0 * y, 0.0)
    elif LINK == "sigmoid":
        M = tl.where(whole, n0 + n1 / (1.0 + tl.exp(-A)), 0.0)
    elif LINK == "powers":
        B = A * raised(tl.maximum(tl.abs(A), n1), n0)
        size, _ = length(B, n3, n4)
        M = B * raised(size, n2)
    else:
        M = A
    return M


@triton.jit
def linked_vjp(A, n0, n1, n2, n3, n4, in_p, whole, G, LINK: tl.constexpr):
    """Cotangent of the dual state."""
    if LINK == "softmax":
        s = tl.where(whole, shares(A, in_p), 0.0)
        G = n0 * s * (G - tl.sum(s * G, 0)[None, :])
    elif LINK == "banks":
        x, y = banks(A, in_p)
        G = n0 * tl.where(whole, x * G - y * tl.sum(y * G, 0)[None, :], 0.0)
    elif LINK == "sigmoid":
        small = tl.exp(-tl.abs(A))
        G = tl.where(whole, n1 * small / ((1.0 + small) * (1.0 + small)) * G, 0.0)
    elif LINK == "powers":
        near = tl.maximum(tl.abs(A), n1)
        B = A * raised(near, n0)
        size, beyond = length(B, n3, n4)
        unit = tl.abs(B) / size
        bend = tl.where(unit > TINY, raised(tl.maximum(unit, TINY), n4 - 1.0), 0.0)
        bend = tl.where(beyond, n2 * tl.sum(G * B) / size, 0.0) * tl.where(B < 0, -bend, bend)
        G = tl.where(tl.abs(A) >= n1, 1.0 + n0, 1.0) * raised(near, n0) * raised(size, n2) * (G + bend)
    return G


@triton.jit
def weights(A, n0, n1, n2, n3, n4, cap, in_p, whole, LINK: tl.constexpr, CAP: tl.constexpr):
    """The memory of a carried state, which predicts and is read."""
    M = linked(A, n0, n1, n2, n3, n4, in_p, whole, LINK)
    if CAP == "memory":
        M = in_ball(M, cap)
    return M


@triton.jit
def weights_vjp(A, n0, n1, n2, n3, n4, cap, in_p, whole, G, LINK: tl.constexpr, CAP: tl.constexpr):
    """Cotangent of what is carried."""
    if CAP == "memory":
        G = in_ball_vjp(linked(A, n0, n1, n2, n3, n4, in_p, whole, LINK), cap, G)
    return linked_vjp(A, n0, n1, n2, n3, n4, in_p, whole, G, LINK)


# Directions, of a gradient u w^T: u `[1, V]`, w `[P, 1]`; e is the strength of an erasing momentum.


@triton.jit
def erased(u, w, e, ALGORITHM: tl.constexpr):
    """c |u|^2 with c = e / (1 + e |u|^2 |w|^2), or c = 1, and its slopes by |u|^2 and |w|^2."""
    n = tl.sum(u * u)
    if ALGORITHM == "erase":
        g, by_u, by_w = n, n * 0.0 + 1.0, n * 0.0
    else:
        d = 1.0 + e * n * tl.sum(w * w)
        g, by_u, by_w = e * n / d, e / d / d, -(e * n / d) * (e * n / d)
    return g, by_u, by_w


@triton.jit
def direction(S, u, w, l, m, e, ALGORITHM: tl.constexpr):
    """The direction, and the momentum that is carried on: S without one."""
    D = w * (-l * u)
    if ALGORITHM == "momentum":
        S = m * S + D
        D = S
    elif ALGORITHM == "nesterov":
        S = m * S + D
        D = m * S + D
    elif ALGORITHM != "gd":
        g, _, _ = erased(u, w, e, ALGORITHM)
        S = m * S + D - w * (g * tl.sum(S * w, 0)[None, :])
        D = S
    return D, S


@triton.jit
def direction_vjp(S, u, w, l, m, e, X, Y, ALGORITHM: tl.constexpr):
    """Cotangents of S, u, w, l and m from those X of the direction and Y of the momentum."""
    if ALGORITHM == "erase" or ALGORITHM == "stable":
        X += Y
        g, by_u, by_w = erased(u, w, e, ALGORITHM)
        y, z = tl.sum(S * w, 0)[None, :], tl.sum(X * w, 0)[None, :]
        gg = -tl.sum(y * z)
        gu = 2.0 * gg * by_u * u - l * z
        gw = tl.sum(S * (-g * z) - X * (g * y + l * u), 1)[:, None] + 2.0 * gg * by_w * w
        gl, gm = -tl.sum(u * z), tl.sum(X * S)
        Y = m * X - w * (g * z)
    else:
        gm = tl.sum(u) * 0.0
        if ALGORITHM == "nesterov":
            gm = tl.sum((m * S - w * (l * u)) * X)
            Y += m * X
            X += Y
            gm += tl.sum(S * Y)
            Y = m * Y
        elif ALGORITHM == "momentum":
            X += Y
            gm = tl.sum(S * X)
            Y = m * X
        z = tl.sum(X * w, 0)[None, :]
        gu, gl = -l * z, -tl.sum(u * z)
        gw = tl.sum(X * (-l * u), 1)[:, None]
    return Y, gu, gw, gl, gm
