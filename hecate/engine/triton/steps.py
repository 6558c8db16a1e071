"""The parts of a token's step on a whole state in registers, each with its pullback: the step of a retention, the link
from a carried state to its memory, and the direction of an algorithm. All but erasing momenta are printed by `tiles`.

A tile is `[P, V]`, phi channels by values, padded with zeros. `whole` is the mask of its cells, `in_p` `[P, 1]` that of
rows and `in_v` `[1, V]` that of columns. [ENG-TRITON-D5]
"""

import triton
import triton.language as tl


@triton.jit
def moved(X, D, r, c, whole, in_p, in_v, P: tl.constexpr, V: tl.constexpr, STEP: tl.constexpr):
    """The next carried state."""
    return tl.where(whole, STEP(whole, in_p, in_v, P, V, X, D, r, c), 0.0)


@triton.jit
def moved_vjp(X, D, r, c, whole, in_p, in_v, G, P: tl.constexpr, V: tl.constexpr, STEP_BACK: tl.constexpr):
    """Cotangents of X, D and, per cell, r."""
    GX, GD, GR = STEP_BACK(whole, in_p, in_v, P, V, X, D, r, G, c)
    return tl.where(whole, GX, 0.0), tl.where(whole, GD, 0.0), tl.where(whole, GR, 0.0)


@triton.jit
def weights(A, c, whole, in_p, in_v, P: tl.constexpr, V: tl.constexpr, LINK: tl.constexpr, DUAL: tl.constexpr):
    """The memory of a carried state, for predictions and reads."""
    M = A
    if DUAL:
        M = tl.where(whole, LINK(whole, in_p, in_v, P, V, A, c), 0.0)
    return M


@triton.jit
def weights_vjp(A, c, whole, in_p, in_v, G, P: tl.constexpr, V: tl.constexpr, LINK_BACK: tl.constexpr):
    """Cotangent of a dual state, from that of its memory."""
    return tl.where(whole, LINK_BACK(whole, in_p, in_v, P, V, A, G, c), 0.0)


# Directions for a gradient u w^T: u `[1, V]`, w `[P, 1]`; ca: an algorithm's constants, or the strength of an erasing
# momentum.


@triton.jit
def erased(u, w, ca, ALGORITHM: tl.constexpr):
    """c |u|^2 with c = e / (1 + e |u|^2 |w|^2), or c = 1, and its derivatives by |u|^2 and |w|^2."""
    n, e = tl.sum(u * u), ca[0]
    if ALGORITHM == "erase":
        g, by_u, by_w = n, n * 0.0 + 1.0, n * 0.0
    else:
        d = 1.0 + e * n * tl.sum(w * w)
        g, by_u, by_w = e * n / d, e / d / d, -(e * n / d) * (e * n / d)
    return g, by_u, by_w


@triton.jit
def direction(
    S, u, w, l, m, ca, whole, in_p, in_v, P: tl.constexpr, V: tl.constexpr, DESCEND: tl.constexpr,
    ALGORITHM: tl.constexpr,
):  # fmt: skip
    """The direction, and the next slot: S itself without one."""
    if ALGORITHM == "printed":
        D, S = DESCEND(whole, in_p, in_v, P, V, w * u, l, m, S, ca)
        D, S = tl.where(whole, D, 0.0), tl.where(whole, S, 0.0)
    else:
        g, _, _ = erased(u, w, ca, ALGORITHM)
        S = m * S - w * (l * u) - w * (g * tl.sum(S * w, 0)[None, :])
        D = S
    return D, S


@triton.jit
def direction_vjp(
    S, u, w, l, m, ca, X, Y, whole, in_p, in_v, P: tl.constexpr, V: tl.constexpr, DESCEND_BACK: tl.constexpr,
    ALGORITHM: tl.constexpr,
):  # fmt: skip
    """Cotangents of S, u, w, l and m, from those of the direction (X) and of the slot (Y)."""
    if ALGORITHM == "printed":
        GG, gl, gm, Y = DESCEND_BACK(whole, in_p, in_v, P, V, w * u, l, m, S, X, Y, ca)
        GG, Y = tl.where(whole, GG, 0.0), tl.where(whole, Y, 0.0)
        gu, gw = tl.sum(GG * w, 0)[None, :], tl.sum(GG * u, 1)[:, None]
        nothing = tl.zeros([1, 1], tl.float32)  # sums over cells are 1 x 1 tiles, or the number 0
        gl, gm = tl.sum(gl + nothing), tl.sum(gm + nothing)
    else:
        X += Y
        g, by_u, by_w = erased(u, w, ca, ALGORITHM)
        y, z = tl.sum(S * w, 0)[None, :], tl.sum(X * w, 0)[None, :]
        gg = -tl.sum(y * z)
        gu = 2.0 * gg * by_u * u - l * z
        gw = tl.sum(S * (-g * z) - X * (g * y + l * u), 1)[:, None] + 2.0 * gg * by_w * w
        gl, gm = -tl.sum(u * z), tl.sum(X * S)
        Y = m * X - w * (g * z)
    return Y, gu, gw, gl, gm
