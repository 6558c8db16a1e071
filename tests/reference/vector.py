"""A diagonal memory token by token, number by number, for one sequence and one head in numpy.

Arrays: q, k, v `[T, P]`, gates `[T]` (retain also `[T, P]`), w `[P]`.
"""

import numpy as np

from tests.reference.memory import loss_gradient


def scan(rule, q, k, v, lr, retain, momentum, w, write=None, reset=None):
    """Outputs `[T, P]`, the last weights and the last momentum."""
    steps, width = v.shape
    start, w, s = w.copy(), w.copy(), np.zeros(width)
    y = np.zeros((steps, width))
    for t in range(steps):
        if reset is not None and reset[t]:
            w, s = start.copy(), np.zeros(width)
        before = w.copy()
        for c in range(width if write is None or write[t] else 0):
            kept = np.broadcast_to(retain[t], width)[c] if rule.decay else 1.0
            seen = kept * w[c] if rule.decay_order == "before_gradient" else w[c]
            u = loss_gradient(rule, np.array([seen * k[t, c]]), v[t, c : c + 1])[0]
            s[c] = (momentum[t] * s[c] if rule.momentum else 0.0) - lr[t] * u * k[t, c]
            w[c] = kept * w[c] + s[c]
        y[t] = (w if rule.read == "after" else before) * q[t]
    return y, w, s
