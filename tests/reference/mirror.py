"""Mirror descent on a matrix in numpy float64, one memory and one head.

What is carried is the dual state A and nothing else: every prediction, every gradient and every
read is by M = memory(A), every step is A <- retain A + D. The links are those of
`tests.reference.knobs`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tests.reference.knobs import Decayed


class Softmax(Decayed):
    """Rows are distributions times `scale`."""

    def __init__(self, scale=1.0):
        self.scale = scale

    def memory(self, carried):
        e = np.exp(carried - carried.max(1, keepdims=True))
        return self.scale * e / e.sum(1, keepdims=True)


class SignedSoftmax(Softmax):
    """One distribution over (A, -A) per row; what its second half holds counts as negative."""

    def memory(self, carried):
        more, less = np.split(super().memory(np.concatenate([carried, -carried], 1)), 2, 1)
        return more - less


class Timing(NamedTuple):
    """When gradients are taken, steps made and memories read."""

    chunk: int = 1
    commit: str = "token"
    read: str = "after"
    order: str = "with_step"


def scan(link, timing, dot, q, k, v, lr, retain, weights, write=None, reset=None):
    """Outputs `[T, V]`, the final memory and the final dual state. Bias l2, or dot."""
    start = link.start(weights)
    carried = anchor = start
    pending, kept, position = 0.0, 1.0, 0
    rows = []
    for t in range(len(v)):
        if reset is not None and reset[t]:
            carried, pending, kept, position = start, 0.0, 1.0, 0
        before = carried
        if write is None or write[t]:
            anchor = carried if position == 0 or timing.commit == "chunk" else anchor
            at = retain[t] * anchor if timing.order == "before_gradient" else anchor
            error = (0 if dot else link.memory(at) @ k[t]) - v[t]
            pending, kept = pending - lr[t] * np.outer(error, k[t]), kept * retain[t]
            position = (position + 1) % timing.chunk
            if timing.commit == "token" or position == 0:
                carried = link.advance(carried, pending, kept)
                pending, kept = 0.0, 1.0
        rows.append(link.memory(carried if timing.read == "after" else before) @ q[t])
    return np.array(rows), link.memory(carried), carried
