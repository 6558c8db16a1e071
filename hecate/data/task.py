"""Synthetic tasks: every batch is generated, so the validation set is a stream of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from hecate.data.base import Batch, DataConfig, Source, as_batch, stream
from hecate.errors import DataError

VALIDATION_SEED = 0


class Task(DataConfig):
    """A synthetic task: `sample` gives rows, `chances` the accuracy of guessing.

    Every task has a fixed length and labels only the positions whose answer the row determines.
    """

    def sample(self, rng: np.random.Generator, rows: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """`rows` fresh examples: tokens and targets, both `[rows, length]`."""
        raise NotImplementedError(f"{type(self).__name__} does not define sample")

    def chances(self) -> dict[str, float]:
        """Expected accuracy of predictors that know nothing but the format, by name."""
        raise NotImplementedError(f"{type(self).__name__} does not define chances")

    def load(self) -> TaskSource:
        """The task as a source of batches."""
        return TaskSource(self)


class TaskSource(Source):
    """Batches of a task; training and validation draw from independent streams."""

    metric = "accuracy"

    def __init__(self, task: Task) -> None:
        self.task = task
        self.vocab_size = task.vocabulary()

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(self.task.model_dump_json().encode()).hexdigest()

    def train_batch(self, seed: int, step: int, batch_size: int, seq_len: int) -> Batch:
        self._check(seq_len)
        return as_batch(*self.task.sample(stream(seed, "train", step), batch_size))

    def validation_batches(self, batch_size: int, seq_len: int, batches: int) -> Iterator[Batch]:
        self._check(seq_len)
        for index in range(batches):
            yield as_batch(*self.task.sample(stream(VALIDATION_SEED, "validation", index), batch_size))

    def baselines(self, batch_size: int, seq_len: int, batches: int) -> dict[str, float]:
        return self.task.chances()

    def describe(self) -> dict[str, str | int | float]:
        length = self.task.length()
        return {"task": self.task.kind, "vocabulary": self.vocab_size, "length": length or 0}

    def _check(self, seq_len: int) -> None:
        if seq_len != self.task.length():
            raise DataError(
                f"task {self.task.kind!r} has sequences of length {self.task.length()}, got a "
                f"request for {seq_len}; leave seq_len out"
            )
