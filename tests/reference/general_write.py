"""One token with n writes, each of which is affine in the memory: three forms, one head, numpy float64.

    X = diag(retain_value) M diag(retain)
    e_j = A (erase_j o k_j) - v_j,   X = X - lr_j e_j (write_j o k_j)^T       for j = 1..n
    M' = X,   y = M' q

A is X, and for the first write M itself under `decay_order="with_step"`. Shapes: q `[T, P]`, k `[T, n, P]`, v
`[T, n, V]`, lr `[T, n]`, erase and write `[T, n, P]`, retain `[T, P]`, retain_value `[T, V]`, momentum `[T]` or None,
initial `[V, P]` or None; factors may be anything that broadcasts to these. Returned are y `[T, V]` and M `[V, P]`, and
with momentum, S' = momentum S - lr e k^T and X + S' in place of the step, also S `[V, P]`.
"""

import numpy as np


def prepare(q, k, v, lr, erase=1.0, write=1.0, retain=1.0, retain_value=1.0, momentum=None, initial=None):
    """Every input at its full shape."""
    (steps, writes, d), width = k.shape, v.shape[2]
    if momentum is not None and writes > 1:
        raise ValueError("a momentum added to the memory once per write is not defined for several")
    lr = np.broadcast_to(lr, (steps, writes))
    erase, write = (np.broadcast_to(item, k.shape) for item in (erase, write))
    retain, retain_value = np.broadcast_to(retain, (steps, d)), np.broadcast_to(retain_value, (steps, width))
    momentum = np.broadcast_to(0.0 if momentum is None else momentum, (steps,))
    return lr, erase, write, retain, retain_value, momentum, np.zeros((width, d)) if initial is None else initial


def general_write(q, k, v, lr, *, decay_order="before_gradient", read="after", **factors):
    """The loop."""
    lr, erase, write, retain, retain_value, momentum, m = prepare(q, k, v, lr, **factors)
    slot, out = np.zeros_like(m), []
    for t in range(len(q)):
        before = m
        x = retain_value[t][:, None] * m * retain[t]
        for j in range(k.shape[1]):
            seen = m if decay_order == "with_step" and j == 0 else x
            e = seen @ (erase[t, j] * k[t, j]) - v[t, j]
            slot = momentum[t] * slot - lr[t, j] * np.outer(e, write[t, j] * k[t, j])
            x = x + slot
        m = x
        out.append((before if read == "before" else m) @ q[t])
    return (np.array(out), m) if factors.get("momentum") is None else (np.array(out), m, slot)


def general_write_products(q, k, v, lr, *, decay_order="before_gradient", read="after", **factors):
    """The same row by row of the memory, from its last token to the first: a row [m, s] of the memory and of the slot
    goes to [m, s] F + w at a token, so a query x is read as w x at the last token and as F x before."""
    lr, erase, write, retain, retain_value, momentum, start = prepare(q, k, v, lr, **factors)
    steps, writes, d = k.shape
    width, unit = v.shape[2], np.eye(d)

    def token(t, c):
        kept = retain_value[t, c] * np.diag(retain[t])
        if factors.get("momentum") is not None:
            a, b = erase[t, 0] * k[t, 0], lr[t, 0] * write[t, 0] * k[t, 0]
            step = np.outer(a if decay_order == "with_step" else kept @ a, b)
            f = np.block([[kept - step, -step], [momentum[t] * unit, momentum[t] * unit]])
            return f, np.concatenate([v[t, 0, c] * b, v[t, 0, c] * b])
        f, w = kept, np.zeros(d)
        for j in range(writes):
            a, b = erase[t, j] * k[t, j], lr[t, j] * write[t, j] * k[t, j]
            step = unit - np.outer(a, b)
            f = kept - np.outer(a, b) if decay_order == "with_step" and j == 0 else f @ step
            w = w @ step + v[t, j, c] * b
        return f, w

    def read_row(c, x, last):
        row = start[c] if factors.get("momentum") is None else np.concatenate([start[c], np.zeros(d)])
        y = 0.0
        for t in range(last, -1, -1):
            f, w = token(t, c)
            y, x = y + w @ x, f @ x
        return y + row @ x

    def padded(x):
        return x if factors.get("momentum") is None else np.concatenate([x, np.zeros(d)])

    lag = 1 if read == "before" else 0
    y = [[read_row(c, padded(q[t]), t - lag) for c in range(width)] for t in range(steps)]
    m = [[read_row(c, padded(unit[p]), steps - 1) for p in range(d)] for c in range(width)]
    return np.array(y), np.array(m)


def general_write_solve(q, k, v, lr, *, decay_order="before_gradient", **factors):
    """The same by one triangular system over all writes: row i = (t, j), a = erase o k, b = lr write o k.

    K[i, l] `[P]` is what is left of write l at row i, R[i] and D[i] of the start, per phi and per value channel, up to
    and with row i's token; the error of a first write under "with_step" sees what was left before its token.
    With before_gradient, u_i = e_i / D_i:
        u_i + sum_{l < i} (a_i . K[i, l] o b_l) u_l = M_0 (R_i o a_i) - v_i / D_i
        y_t = D_t o (M_0 (R_t o q_t) - sum_{l <= t} (q_t . K[t, l] o b_l) u_l)
    """
    lr, erase, write, retain, retain_value, momentum, start = prepare(q, k, v, lr, **factors)
    steps, writes, d = k.shape
    rows, with_step = steps * writes, decay_order == "with_step"
    if np.any(retain_value != 1) and (with_step or factors.get("momentum") is not None):
        raise ValueError(
            "value channels that decay by themselves share the system neither under with_step nor with a slot"
        )
    a, b = (erase * k).reshape(rows, d), (lr[..., None] * write * k).reshape(rows, d)
    first = np.arange(rows) % writes == 0
    r = np.where(first[:, None], np.repeat(retain, writes, 0), 1.0)
    left = np.cumprod(r, 0)
    value_left = np.cumprod(np.where(first[:, None], np.repeat(retain_value, writes, 0), 1.0), 0)
    mu = np.repeat(momentum, writes)
    kernel = np.zeros((rows, rows, d))
    for col in range(rows):
        carried = np.ones(d)  # of the slot: the products of momentum since the write
        kernel[col, col] = 1.0
        for i in range(col + 1, rows):
            carried = mu[i] * carried
            kernel[i, col] = r[i] * kernel[i - 1, col] + carried
    seen, seen_left = np.zeros_like(kernel), np.ones_like(left)
    for i in range(rows):
        scale = np.ones(d) if with_step and first[i] else r[i]
        if i:
            seen[i], seen_left[i] = scale * kernel[i - 1], scale * left[i - 1]
        else:
            seen_left[i] = scale
    system = np.eye(rows) + np.tril(np.einsum("ip,ilp,lp->il", a, seen, b), -1)
    u = np.linalg.solve(system, (seen_left * a) @ start.T - v.reshape(rows, -1) / value_left)
    last = writes * np.arange(steps) + writes - 1
    weights = np.einsum("tp,tlp,lp->tl", q, kernel[last], b)
    y = value_left[last] * ((left[last] * q) @ start.T - weights @ u)
    m = value_left[-1][:, None] * (start * left[-1] - np.einsum("lv,lp->vp", u, kernel[-1] * b))
    return y, m
