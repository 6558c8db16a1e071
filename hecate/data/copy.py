"""Copying a sequence."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hecate.data.base import IGNORED, Task


class Copy(Task):
    """copy: s1 ... sn | s1 ... sn, where the second half is predicted.

    n symbols (ids 1 .. V-1) drawn with replacement, the delimiter 0, and the symbols again but the last, which no label
    needs. From the delimiter on, each position is labelled with the next symbol.

    Shapes: tokens, targets `[rows, 2 n]`, n labels per row.
    Cost: O(rows n).
    References: Neural Turing Machines (Graves et al., 2014, arXiv 1410.5401). [DATA-COPY-D1]
    """

    kind: Literal["copy"] = "copy"
    vocab_size: int = Field(32, ge=3, le=1 << 20)
    symbols: int = Field(16, ge=1, le=1 << 19)

    def vocabulary(self) -> int:
        return self.vocab_size

    def length(self) -> int:
        return 2 * self.symbols

    def sample(self, rng: np.random.Generator, rows: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        text = rng.integers(1, self.vocab_size, size=(rows, self.symbols), dtype=np.int64)
        tokens = np.concatenate([text, np.zeros((rows, 1), dtype=np.int64), text[:, :-1]], axis=1)
        return tokens, np.concatenate([np.full_like(text, IGNORED), text], axis=1)

    def chances(self) -> dict[str, float]:
        return {"any symbol": 1 / (self.vocab_size - 1)}
