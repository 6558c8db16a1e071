"""cosFormer's attention as a sum over all pairs of tokens, in numpy, for one row and one head."""

from math import cos, pi

import numpy as np


def positions(write, reset):
    """The number of tokens written before each one, since the last reset."""
    found, count = [], 0
    for w, r in zip(write, reset, strict=True):
        count = 0 if r else count
        found.append(count)
        count += int(w)
    return found, count


def attention(q, k, v, lr, write, reset, largest, normalised):
    """y_t = sum over written s <= t of t's document, weighed by lr and the kernel."""
    place, _ = positions(write, reset)
    document = np.cumsum(reset)
    rows = []
    for t in range(len(q)):
        total, weight = np.zeros(v.shape[-1]), 0.0
        for s in range(t + 1):
            if not write[s] or document[s] != document[t]:
                continue
            dot = sum(max(a, 0.0) * max(b, 0.0) for a, b in zip(q[t], k[s], strict=True))
            near = lr[s] * dot * cos(pi * (place[t] - place[s]) / (2 * largest))
            total, weight = total + near * v[s], weight + near
        rows.append(total / weight if normalised and weight > 0 else total)
    return np.array(rows)
