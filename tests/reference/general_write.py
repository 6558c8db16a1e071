"""One token with n writes, each of which is affine in the memory: one head, numpy float64.

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
