"""Biases as the kernels know them: `psi`, the inner gradient u of predictions, and `slope`, its derivative.

Rows of values `[C, V]`, whole ones where coordinates meet. The formulas are those of `KernelForm`.
"""

import triton
import triton.language as tl


@triton.jit
def power(x, n):
    """x^n for x >= 0 and n >= 0, 1 at 0^0."""
    return tl.where(x > 0, tl.exp2(n * tl.log2(tl.where(x > 0, x, 1.0))), tl.where(n > 0, 0.0, 1.0))


@triton.jit
def softmax(x, inside):
    """Of each row, within the width."""
    x = tl.where(inside, x, float("-inf"))
    e = tl.exp(x - tl.max(x, 1)[:, None])
    return e / tl.sum(e, 1)[:, None]


@triton.jit
def psi(p, v, a, b, inside, FORM: tl.constexpr):
    """u at predictions p and targets v."""
    e = p - v
    if FORM == "target":
        u = -v
    elif FORM == "error":
        u = e
    elif FORM == "clip":
        u = tl.where(e > a, a, tl.where(e < -a, -a, e))  # of NaN NaN, which the hardware's minimum is not
    elif FORM == "power":
        r = tl.where(a >= 2, tl.abs(e), tl.sqrt(e * e + b * b))
        s = tl.where(a >= 2, r, e * e / (r + b))
        u = power(s, a - 1) * e / tl.where(r > 0, r, 1.0)
    elif FORM == "sign":
        u = e / tl.sqrt(e * e + b * b)
    elif FORM == "softmax":
        u = softmax(p, inside) - tl.where(a > 0, softmax(v / tl.where(a > 0, a, 1.0), inside), v)
    elif FORM == "ball":
        n = tl.sqrt(tl.sum(e * e, 1))[:, None]
        u = e * tl.where(n > a, a / tl.where(n > a, n, 1.0), 1.0)
    elif FORM == "jump":
        n = tl.sqrt(tl.sum(e * e, 1))[:, None]
        u = tl.where(n > a, a * e / tl.sqrt(e * e + b * b), e)
    else:  # pull
        u = e + a * e / tl.sqrt(tl.sum(e * e, 1)[:, None] + b * b)
    return u


@triton.jit
def slope(p, v, x, a, b, inside, FORM: tl.constexpr):
    """Cotangents of p and v from that x of u."""
    e = p - v
    if FORM == "target":
        gp, gv = x * 0.0, -x
    elif FORM == "softmax":
        s = softmax(p, inside)
        gp = s * (x - tl.sum(s * x, 1)[:, None])
        t = softmax(v / tl.where(a > 0, a, 1.0), inside)
        gv = -tl.where(a > 0, t * (x - tl.sum(t * x, 1)[:, None]) / tl.where(a > 0, a, 1.0), x)
    else:
        if FORM == "error":
            gp = x
        elif FORM == "clip":
            gp = tl.where(tl.abs(e) <= a, x, 0.0)
        elif FORM == "power":
            r = tl.where(a >= 2, tl.abs(e), tl.sqrt(e * e + b * b))
            s = tl.where(a >= 2, r, e * e / (r + b))
            c = tl.where(a >= 2, 1.0, r)  # where r may be 0, it is not divided by
            flat = power(s, a - 1) * ((a - 1) * (c + b) / (c * c) + b * b / (c * c * c))
            gp = x * tl.where(a >= 2, (a - 1) * power(r, tl.maximum(a - 2, 0.0)), flat)
        elif FORM == "sign":
            r = tl.sqrt(e * e + b * b)
            gp = tl.where(e == 0, 0.0, x * (b / r) * (b / r) / r)
        elif FORM == "ball":
            n = tl.sqrt(tl.sum(e * e, 1))[:, None]
            c = tl.where(n > a, n, 1.0)
            gp = tl.where(n > a, a / c * (x - e / c * (tl.sum(e * x, 1)[:, None] / c)), x)
        elif FORM == "jump":
            n = tl.sqrt(tl.sum(e * e, 1))[:, None]
            r = tl.sqrt(e * e + b * b)
            gp = x * tl.where(n > a, tl.where(e == 0, 0.0, a * (b / r) * (b / r) / r), 1.0)
        else:  # pull
            r = tl.sqrt(tl.sum(e * e, 1)[:, None] + b * b)
            off = tl.max(tl.abs(e), 1)[:, None] > 0
            gp = x + tl.where(off, a / r * (x - e / r * (tl.sum(e * x, 1)[:, None] / r)), 0.0)
        gv = -gp
    return gp, gv
