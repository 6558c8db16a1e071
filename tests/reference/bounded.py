"""Memories of few slots in numpy: Lattice's slots and Trellis' two passes, token by token."""

from __future__ import annotations

import numpy as np

Array = np.ndarray


def lattice(start: Array, k: Array, q: Array, v: Array, lr: Array, retain: Array, sphere: bool):
    """Slots `[m, V]` as rows: the residual's part across each unit slot, one slot at a time."""
    slots, outputs = start.copy(), []
    for t in range(len(k)):
        norms = np.linalg.norm(slots, axis=1)
        unit = slots / norms[:, None]
        residual = unit.T @ k[t] - v[t]
        new = np.empty_like(slots)
        for i in range(len(slots)):
            across = residual - unit[i] * (unit[i] @ residual)
            new[i] = retain[t] * slots[i] - lr[t] * k[t][i] * across / norms[i]
            if sphere:
                new[i] /= np.linalg.norm(new[i])
        slots = new
        outputs.append((slots / np.linalg.norm(slots, axis=1)[:, None]).T @ q[t])
    return np.stack(outputs), slots


def link(name: str, z: Array) -> tuple[Array, Array]:
    """f(z) and its Jacobian."""
    if name == "identity":
        return z, np.eye(len(z))
    if name == "softmax":
        f = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
        return f, np.diag(f) - np.outer(f, f)
    sigmoid = 1 / (1 + np.exp(-z))
    s, slope = z * sigmoid, sigmoid + z * sigmoid * (1 - sigmoid)
    norm = np.sqrt(s @ s + 1e-6)
    return s / norm, (np.eye(len(z)) / norm - np.outer(s, s) / norm**3) @ np.diag(slope)


def trellis(name: str, keys: Array, values: Array, w, a, q, v, lr, retain):
    """Key pass towards the code, value pass from it, then a read through both."""
    outputs = []
    for t in range(len(w)):
        code, jacobian = link(name, keys @ w[t])
        error = jacobian.T @ (code - a[t])
        pred = values @ a[t]
        keys = retain[t] * keys - lr[t] * np.outer(error, w[t])
        values = retain[t] * values - lr[t] * np.outer(pred - v[t], a[t])
        outputs.append(values @ link(name, keys @ q[t])[0])
    return np.stack(outputs), keys, values
