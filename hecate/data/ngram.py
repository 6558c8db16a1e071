"""Unigram and bigram baselines over bytes, in bits per byte."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

BYTES = 256
_GRID = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)


class NGrams(NamedTuple):
    """Byte probabilities: unigram `[256]` and bigram `[256, 256]` (row: previous byte)."""

    unigram: NDArray[np.float64]
    bigram: NDArray[np.float64]

    def bits(self, previous: NDArray[np.uint8], following: NDArray[np.uint8]) -> tuple[float, float]:
        """Mean bits per byte of `following` under the unigram and, given `previous`, the bigram."""
        return (
            float(-np.log2(self.unigram[following]).mean()),
            float(-np.log2(self.bigram[previous, following]).mean()),
        )


def fit_ngrams(train: NDArray[np.uint8]) -> NGrams:
    """Smoothed counts of the training bytes. [DATA-NGRAM-D1]

    Unigram p(b) = (c(b) + 1) / (n + 256). Bigram p(b|a) = (c(ab) + m p(b)) / (c(a) + m): a Dirichlet prior of weight m
    around the unigram. m is the best of a fixed grid when counts of the first nine tenths predict the last tenth; the
    returned counts are those of all training bytes. Validation bytes are never seen.
    """
    cut = max(len(train) - len(train) // 10, 1)
    head, tail = train[:cut], train[cut - 1 :]
    weight = 1.0
    if len(tail) > 1:
        costs = [_smoothed(head, m).bits(tail[:-1], tail[1:])[1] for m in _GRID]
        weight = _GRID[int(np.argmin(costs))]
    return _smoothed(train, weight)


def _smoothed(text: NDArray[np.uint8], weight: float) -> NGrams:
    single = np.bincount(text, minlength=BYTES).astype(np.float64)
    pair_ids = text[:-1].astype(np.int64) * BYTES + text[1:]
    pairs = np.bincount(pair_ids, minlength=BYTES * BYTES).astype(np.float64).reshape(BYTES, BYTES)
    unigram = (single + 1) / (single.sum() + BYTES)
    bigram = (pairs + weight * unigram) / (pairs.sum(1, keepdims=True) + weight)
    return NGrams(unigram, bigram)
