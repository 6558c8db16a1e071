"""Random inputs of one head in numpy, and how references are compared."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.memories import close
from tests.reference.papers_2025 import unit

LENGTH, KEYS, VALUES, RTOL = 13, 4, 3, 1e-12
Array = np.ndarray


class Draw:
    """Random inputs of one head."""

    def __init__(self, length: int = LENGTH, seed: int = 0) -> None:
        rng = self.rng = np.random.default_rng(seed)
        self.length = length
        self.q, self.k, self.e = (rng.normal(size=(length, KEYS)) for _ in range(3))
        self.v = rng.normal(size=(length, VALUES))
        self.unit, self.unit_q, self.unit_e = (unit(x) for x in (self.k, self.q, self.e))
        self.lr, self.gate, self.carry = rng.uniform(0.1, 0.95, size=(3, length))
        self.keep = rng.uniform(0.6, 1.0, size=length)
        self.channels = rng.uniform(0.5, 1.0, size=(length, KEYS))
        self.value_channels = rng.uniform(0.5, 1.0, size=(length, VALUES))
        self.ks, self.vs = rng.normal(size=(length, 3, KEYS)), rng.normal(size=(length, 3, VALUES))
        self.lrs = rng.uniform(0.1, 1.9, size=(length, 3))

    @property
    def start(self) -> Array:
        return self.rng.normal(size=(VALUES, KEYS))


def same(got: Any, expected: Any, rtol: float = RTOL) -> None:
    """Every result that both sides have."""
    got, expected = (item if isinstance(item, tuple) else (item,) for item in (got, expected))
    for at, (mine, theirs) in enumerate(zip(got, expected, strict=False)):
        close(mine, theirs, rtol, f"result {at}")


def one(*items: Array) -> tuple[Array, ...]:
    """Inputs of a single write per token."""
    return tuple(item[:, None] for item in items)
