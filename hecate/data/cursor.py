"""One integer gives every batch: windows of a stream in a keyed order, each once per epoch, without a list.

The rows of all batches are numbered: row i of the batch of step s is number s * batch_size + i, whatever process reads
it and in how many micro-batches. Number n is place n mod `windows` of epoch n // `windows`, and the place goes through
that epoch's permutation. So a run that is resumed in another number of processes reads what one that never stopped
would have read.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

ROUNDS = 6
Numbers = NDArray[np.int64]


def epoch_keys(seed: int, epoch: int) -> NDArray[np.uint64]:
    """The keys of an epoch's permutation, one a round."""
    digest = hashlib.blake2b(f"hecate/{seed}/{epoch}".encode(), digest_size=8 * ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def permuted(places: Numbers, size: int, keys: NDArray[np.uint64]) -> Numbers:
    """A bijection of 0 .. size-1, of every place. [DATA-CURSOR-D2]

    A Feistel network on the next even number of bits; what lands outside goes through it again, fewer than four times
    on average, until it lands inside.
    """
    half = max(1, -(-(size - 1).bit_length() // 2))
    mask, shift = np.uint64((1 << half) - 1), np.uint64(half)
    out = np.array(places, dtype=np.uint64)
    outside = np.ones(out.shape, dtype=bool)
    while outside.any():
        left, right = out[outside] >> shift, out[outside] & mask
        for key in keys:
            left, right = right, left ^ (_mixed(right, key) & mask)
        out[outside] = (left << shift) | right
        outside = out >= size
    return out.astype(np.int64)


def _mixed(x: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """The finaliser of splitmix64: uint64 arithmetic, the same on every platform and version."""
    with np.errstate(over="ignore"):
        x = (x ^ key) + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def numbers_of(step: int, batch_size: int, rows: range | None = None) -> Numbers:
    """The numbers of rows of the batch of a step; None for all of them."""
    chosen = range(batch_size) if rows is None else rows
    return step * batch_size + np.arange(chosen.start, chosen.stop, dtype=np.int64)


def shuffled(numbers: Numbers, windows: int, seed: int) -> Numbers:
    """The window of each number; a batch may span two epochs. [DATA-CURSOR-D1]"""
    found = np.empty_like(numbers)
    epochs = numbers // windows
    for epoch in np.unique(epochs):
        own = epochs == epoch
        found[own] = permuted(numbers[own] % windows, windows, epoch_keys(seed, int(epoch)))
    return found


def in_lanes(
    step: int, batch_size: int, windows: int, seed: int, rows: range | None = None
) -> tuple[Numbers, NDArray[np.bool_]]:
    """The window of each row of a step where rows go on from batch to batch, and whether a row starts anew there.

    The windows, as a ring that begins where the epoch's key says, are cut into `batch_size` lanes of equal length, and
    row b reads lane b from its first window to its last, one a step. It starts anew at the first, and where the ring
    closes, which no text goes across. What the division leaves over is another part of the ring in every epoch.
    [DATA-CURSOR-D3]
    """
    lane = windows // batch_size
    epoch, place = divmod(step, lane)
    begin = int(epoch_keys(seed, epoch)[0] % np.uint64(windows))
    found = (begin + numbers_of(0, batch_size, rows) * lane + place) % windows
    return found, (found == 0) | (place == 0)
