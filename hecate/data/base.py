"""What training data is: a config that loads into a source of batches; each is a pure function
of (seed, step)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hecate.variant import Variant

IGNORED = -100
"""Target of a position that has no label: the loss and every metric leave it out."""

Split = Literal["train", "validation"]
Metric = Literal["bits_per_byte", "accuracy"]
_SPLITS: dict[Split, int] = {"train": 0, "validation": 1}


class Batch(NamedTuple):
    """Tokens and targets, both int64 `[B, T]`; `targets[b, t]` follows `tokens[b, :t+1]`."""

    tokens: Tensor
    targets: Tensor


def stream(seed: int, split: Split, step: int) -> np.random.Generator:
    """The random numbers of one batch: independent for every (seed, split, step). [DATA-BASE-D1]

    numpy rather than `torch.Generator`: a SeedSequence mixes all three numbers into 128 bits, whereas torch's CPU
    generator keeps 32 bits of its seed, so that two steps of a long run would coincide.
    """
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, _SPLITS[split], step))))


def distinct(rng: np.random.Generator, rows: int, pool: int, count: int) -> NDArray[np.int64]:
    """`count` distinct numbers below `pool` in random order for each row: int64 `[rows, count]`."""
    return np.argsort(rng.random((rows, pool)), axis=1)[:, :count].astype(np.int64)


def as_batch(tokens: NDArray[np.int64], targets: NDArray[np.int64]) -> Batch:
    """A `Batch` of freshly owned tensors."""
    return Batch(torch.tensor(tokens), torch.tensor(targets))


class Source(ABC):
    """Loaded data: training batches at any cursor and a fixed set of validation batches."""

    vocab_size: int
    metric: ClassVar[Metric]

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """SHA-256 of everything that decides the batches; a resumed run must find the same one."""

    @abstractmethod
    def train_batch(self, seed: int, step: int, batch_size: int, seq_len: int) -> Batch:
        """The training batch of this step: the same arguments always give the same bits."""

    @abstractmethod
    def validation_batches(self, batch_size: int, seq_len: int, batches: int) -> Iterator[Batch]:
        """Held-out batches, the same at every call and for every training seed."""

    @abstractmethod
    def baselines(self, batch_size: int, seq_len: int, batches: int) -> dict[str, float]:
        """Scores (in `metric`) of simple predictors on these very validation batches, by name."""

    def describe(self) -> dict[str, str | int | float]:
        """Facts for the report: sizes and where the data came from."""
        return {}


class DataConfig(Variant, family="data"):
    """A data set: a text corpus or a synthetic task, loaded by `load()`."""

    def vocabulary(self) -> int:
        """Number of token ids the model must know."""
        raise NotImplementedError(f"{type(self).__name__} does not define vocabulary")

    def length(self) -> int | None:
        """The fixed sequence length of a task; None when any length can be cut from a text."""
        return None

    def load(self) -> Source:
        """Reads or prepares the data; raises `DataError` when it cannot be used."""
        raise NotImplementedError(f"{type(self).__name__} does not define load")
