"""Training data: configs, such as synthetic tasks, which load a source of batches, each a pure function of (seed,
step); and the cursor over these batches."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, ClassVar, Literal, NamedTuple, Self, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from hecate.checks import check_room
from hecate.data.tokenizer import Tokenizer
from hecate.errors import ConfigError, DataError
from hecate.variant import Variant

IGNORED = -100
"""Target of a position without a label: the loss and every metric leave it out."""

Rows = NDArray[np.int64]
Split = Literal["train", "validation"]
Metric = Literal["bits_per_byte", "perplexity", "accuracy"]


def places_of(starts: Tensor) -> Tensor:
    """Position of each token in its document, int64 `[B, T]`; `starts`, bool `[B, T]`, marks where documents start."""
    places = torch.arange(starts.shape[1], device=starts.device).expand(starts.shape)
    return places - torch.where(starts, places, 0).cummax(1).values


class Batch(NamedTuple):
    """Tokens and targets, both int64 `[B, T]`; `targets[b, t]` follows `tokens[b, :t+1]`.

    `resets`, bool `[B, T]` or None for nowhere, is true where a document starts: the memory is reset there.
    """

    tokens: Tensor
    targets: Tensor
    resets: Tensor | None = None

    def part(self, rows: range | None = None, span: slice = slice(None)) -> Batch:
        """The part of the batch with some consecutive rows (None: all) and a span of positions."""
        chosen = slice(None) if rows is None else slice(rows.start, rows.stop), span
        return Batch(self.tokens[chosen], self.targets[chosen], None if self.resets is None else self.resets[chosen])


def stream(seed: int, split: Split, step: int) -> np.random.Generator:
    """The random generator of one batch: independent for every (seed, split, step). [DATA-BASE-D1]

    It is numpy's rather than `torch.Generator`: a SeedSequence mixes all three numbers into 128 bits, whereas torch's
    CPU generator only uses 32 bits of its seed, so that two steps of a long run would coincide.
    """
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, get_args(Split).index(split), step))))


def as_batch(tokens: NDArray[np.int64], targets: NDArray[np.int64]) -> Batch:
    """A `Batch` of tensors with copies of these arrays."""
    return Batch(torch.tensor(tokens), torch.tensor(targets))


class Source(ABC):
    """Loaded data: training batches at any cursor and a fixed set of validation batches."""

    metric: Metric
    fingerprint: str
    """SHA-256 of everything that determines the batches; a resumed run must have the same."""
    carries: bool = False
    """True if each row of a batch continues the same row of the batch before, with the state it left."""
    ordered: bool = False
    """True if batches are consecutive parts of one order over the data, instead of independent draws."""
    lengths: Tensor | None = None
    """Bytes of text that each token stands for, int64 `[vocabulary]`; None if tokens are bytes, or if not known."""

    @abstractmethod
    def train_batch(self, seed: int, step: int, batch_size: int, seq_len: int, rows: range | None = None) -> Batch:
        """The training batch of this step: the same arguments always give the same bits.

        `rows`, consecutive ones, returns only those rows, with the same bits as in the whole batch.
        """

    @abstractmethod
    def validation_batches(self, batch_size: int, seq_len: int, batches: int) -> Iterator[Batch]:
        """Held-out batches, the same at every call and for every training seed."""

    @abstractmethod
    def baselines(self, batch_size: int, seq_len: int, batches: int) -> dict[str, float]:
        """Scores (in `metric`) of simple predictors on the same validation batches, by name."""

    def describe(self) -> dict[str, str | int | float]:
        """Facts for the report: sizes and where the data came from."""
        return {}


class WindowSource(Source):
    """A source of windows of a token stream, such as text: `train`, and `validation` after it; lengths are in
    `unit`s."""

    train: Any
    validation: Any
    unit: ClassVar[str]

    @abstractmethod
    def windows(self, part: Any, starts: Rows, seq_len: int) -> Batch:
        """The windows of `seq_len` tokens at these starts; the last label is the token after the window."""

    def windows_of(self, split: str, seq_len: int) -> int:
        """Number of disjoint windows of a split; one more token is needed as the last label."""
        size = len(self.train if split == "training" else self.validation)
        if size <= seq_len:
            raise DataError(
                f"the {split} split has {size} {self.unit}, a window of seq_len={seq_len} needs {seq_len + 1}; use "
                "more text, another data.validation or a smaller budget.seq_len"
            )
        return (size - 1) // seq_len

    def held_out_starts(self, batch_size: int, seq_len: int, batches: int) -> Rows:
        """Starts of disjoint validation windows, spread evenly."""
        available = self.windows_of("validation", seq_len)
        count = min(batch_size * batches, available)
        return np.arange(count, dtype=np.int64) * available // count * seq_len

    def validation_batches(self, batch_size: int, seq_len: int, batches: int) -> Iterator[Batch]:
        starts = self.held_out_starts(batch_size, seq_len, batches)
        for first in range(0, len(starts), batch_size):
            yield self.windows(self.validation, starts[first : first + batch_size], seq_len)


class DataConfig(Variant, family="data"):
    """A data set: a text corpus or a synthetic task, loaded by `load()`."""

    def vocabulary(self) -> int:
        """Number of token ids the model must know."""
        raise NotImplementedError(f"{type(self).__name__} does not define vocabulary")

    @property
    def carries(self) -> bool:
        """True if rows continue from batch to batch, as in `Source.carries`."""
        return False

    def tokenizer(self) -> Tokenizer | None:
        """Tokenizer from text to token ids and back, opened without the data; None for data that are not text."""
        return None

    def length(self) -> int | None:
        """The fixed sequence length of a task; None for data that can be cut into windows of any length."""
        return None

    def load(self) -> Source:
        """Reads or prepares the data; raises `DataError` if they cannot be used."""
        raise NotImplementedError(f"{type(self).__name__} does not define load")


VALIDATION_SEED = 0


class Task(DataConfig):
    """A synthetic task: `sample` gives rows, `chances` the accuracy of guessing.

    Every task has a fixed length, and labels only the positions whose answer the row determines. Training uses fresh
    rows, or a fixed set of `examples`, shuffled anew in every epoch; validation rows are always fresh. [DATA-BASE-D1]
    """

    examples: int | None = Field(
        None, ge=1, le=1 << 24, description="Rows that training draws from, epoch by epoch; null: every batch is fresh."
    )

    def vocabulary(self) -> int:
        """Number of token ids the model must know: by default the field `vocab_size`."""
        size = vars(self).get("vocab_size")
        return super().vocabulary() if size is None else int(size)

    def length(self) -> int | None:
        """Length of its sequences: by default the field `seq_len`."""
        length = vars(self).get("seq_len")
        return super().length() if length is None else int(length)

    def sample(self, rng: np.random.Generator, rows: int) -> tuple[Rows, Rows]:
        """`rows` fresh examples: tokens and targets, both `[rows, length]`."""
        raise NotImplementedError(f"{type(self).__name__} does not define sample")

    def chances(self) -> dict[str, float]:
        """Expected accuracy of predictors that only know the format, by name."""
        raise NotImplementedError(f"{type(self).__name__} does not define chances")

    def of_length(self, length: int) -> Self:
        """The same task with sequences of this length; `ConfigError` if the length follows from other fields."""
        if length == self.length():
            return self
        if "seq_len" not in type(self).model_fields:
            raise ConfigError(
                f"task {self.kind!r} has sequences of length {self.length()}, which follows from its fields, got a "
                f"request for {length}; change those"
            )
        return self.model_copy(update={"seq_len": length})

    def load(self) -> TaskSource:
        """The task as a source of batches."""
        return TaskSource(self)


class TaskSource(Source):
    """Batches of a task; training and validation draw from independent streams."""

    metric = "accuracy"

    def __init__(self, task: Task) -> None:
        self.task = task
        if task.examples is not None:
            size = 2 * 8 * task.examples * (task.length() or 1)  # tokens and targets, int64
            check_room(size, f"examples: {task.examples:,} of task {task.kind!r}", "lower data.examples")
        fresh = {"examples"} if task.examples is None else None  # the fingerprint stays as before there was this field
        self.fingerprint = hashlib.sha256(task.model_dump_json(exclude=fresh).encode()).hexdigest()
        self._make_caches()

    def __getstate__(self) -> dict[str, Any]:
        caches = "_examples", "_order"  # they are of this process
        return {name: value for name, value in vars(self).items() if name not in caches}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._make_caches()

    def _make_caches(self) -> None:
        # Stream 0 draws the examples, stream e + 1 the order of epoch e. A batch may end one epoch and begin the next.
        task, count = self.task, self.task.examples or 0
        self._examples = lru_cache(1)(lambda seed: task.sample(stream(seed, "train", 0), count))
        self._order = lru_cache(2)(lambda seed, epoch: stream(seed, "train", epoch + 1).permutation(count))

    def train_batch(self, seed: int, step: int, batch_size: int, seq_len: int, rows: range | None = None) -> Batch:
        self._check(seq_len)
        if (count := self.task.examples) is None:
            batch = as_batch(*self.task.sample(stream(seed, "train", step), batch_size))
        else:  # the next examples, in a new order every epoch
            tokens, targets = self._examples(seed)
            numbers = range(step * batch_size, (step + 1) * batch_size)
            chosen = [self._order(seed, number // count)[number % count] for number in numbers]
            batch = as_batch(tokens[chosen], targets[chosen])
        return batch if rows is None else batch.part(rows)

    def validation_batches(self, batch_size: int, seq_len: int, batches: int) -> Iterator[Batch]:
        self._check(seq_len)
        for index in range(batches):
            yield as_batch(*self.task.sample(stream(VALIDATION_SEED, "validation", index), batch_size))

    def baselines(self, batch_size: int, seq_len: int, batches: int) -> dict[str, float]:
        return self.task.chances()

    def describe(self) -> dict[str, str | int | float]:
        return {"task": self.task.kind, "vocabulary": self.task.vocabulary(), "length": self.task.length() or 0}

    def _check(self, seq_len: int) -> None:
        if seq_len != self.task.length():
            raise DataError(
                f"task {self.task.kind!r} has sequences of length {self.task.length()}, got a "
                f"request for {seq_len}; leave seq_len out"
            )


class Loader:
    """Cursor over training batches in order; its whole state is five plain values. [DATA-LOADER-D1]

    The batch of a step only depends on (seed, step), so that resuming needs no replay and no generator state. `rows`
    are the rows of each batch that this process reads (None: all). They are not part of the state, so that a run can be
    resumed with another number of processes. [DATA-LOADER-D2]
    """

    def __init__(self, source: Source, *, seed: int, batch_size: int, seq_len: int, rows: range | None = None) -> None:
        if rows is not None and not (rows.step == 1 and 0 <= rows.start < rows.stop <= batch_size):
            raise DataError(f"rows must be consecutive ones of a batch of {batch_size}, got {rows}")
        self.source, self.seed, self.rows = source, seed, rows
        self.batch_size, self.seq_len = batch_size, seq_len
        self.step = 0

    def next(self) -> Batch:
        """This process's rows of the batch at the cursor; advances the cursor by one."""
        some = () if self.rows is None else (self.rows,)
        batch = self.source.train_batch(self.seed, self.step, self.batch_size, self.seq_len, *some)
        self.step += 1
        return batch

    def state_dict(self) -> dict[str, int | str]:
        """The cursor, with the values that must be equal for it to mean the same batches."""
        return {"step": self.step, **self._identity()}

    def load_state_dict(self, state: dict[str, int | str]) -> None:
        """Moves the cursor to a saved one; refuses a cursor over other data."""
        for name, here in self._identity().items():
            if state.get(name) != here:
                raise DataError(
                    f"the saved data cursor has {name}={state.get(name)!r}, this run has {here!r}: the batches would "
                    "differ; resume with the data, seed and batch of the original run"
                )
        step = state.get("step")
        if type(step) is not int or step < 0:
            raise DataError(f"the saved data cursor has step={step!r}, which must be a count")
        self.step = step

    def _identity(self) -> dict[str, int | str]:
        sizes = {"seed": self.seed, "batch_size": self.batch_size, "seq_len": self.seq_len}
        return {**sizes, "fingerprint": self.source.fingerprint}
