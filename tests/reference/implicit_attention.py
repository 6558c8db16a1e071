"""Attention maps of linear rules in closed form, one head of one sequence, in numpy.

M_t reads after the write, phi is the identity, and memories start at zero. Q, K `[T, D]`, gates
`[T]`; a map is `[T, T]`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def kept(retain: Array) -> Array:
    """The product of retain over s < r <= t, 0 above the diagonal."""
    length = len(retain)
    result = np.zeros((length, length))
    for t in range(length):
        for s in range(t + 1):
            result[t, s] = np.prod(retain[s + 1 : t + 1])
    return result


def hebbian(q: Array, k: Array, lr: Array, retain: Array) -> Array:
    """M_t = retain_t M_(t-1) + lr_t v_t k_t^T."""
    return kept(retain) * (q @ k.T) * lr


def normalised(q: Array, k: Array, lr: Array) -> Array:
    """sum_s lr_s (q_t.k_s) v_s over sum_s lr_s (q_t.k_s)."""
    weights = np.tril(q @ k.T) * lr
    return weights / weights.sum(1, keepdims=True)


def delta(q: Array, k: Array, lr: Array, retain: Array) -> Array:
    """M_t = retain_t M_(t-1) (I - lr_t k_t k_t^T) + lr_t v_t k_t^T: the gated delta rule.

    With u_t = lr_t (v_t - retain_t M_(t-1) k_t), M_t = sum_s kept[t, s] u_s k_s^T; so
    (I + diag(lr) strictly lower(kept * K K^T)) u = diag(lr) v.
    """
    products = kept(retain)
    below = np.tril(products * (k @ k.T), -1)
    written = np.linalg.solve(np.eye(len(lr)) + lr[:, None] * below, np.diag(lr))
    return (products * (q @ k.T)) @ written
