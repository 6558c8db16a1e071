"""Normaliser of a step for one token in the kernels of layers: `hecate.structure.bound` on a row of values.

`v` holds bounds of the squared columns of d prediction / d value where the value itself lies in its row, and `t` at its
first place their bound in all. [STR-BOUND-D1]
"""

from __future__ import annotations

from hecate.engine.cpu.passes import columns, copy, fill, out_of_line, spread_columns
from hecate.engine.cpu.vectors import helper, number
from hecate.structure.bound import ROOT


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
