"""Training data: a config that loads into a source of batches, each a pure function of (seed, step), and the cursor
over them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hecate.data.tokenizer import Tokenizer
from hecate.errors import DataError
from hecate.variant import Variant

IGNORED = -100
"""Target of a position that has no label: the loss and every metric leave it out."""

Split = Literal["train", "validation"]
Metric = Literal["bits_per_byte", "perplexity", "accuracy"]


def places_of(starts: Tensor) -> Tensor:
    """Number of tokens before each in its document, by where documents begin in rows `[B, T]`: int64 `[B, T]`."""
    places = torch.arange(starts.shape[1], device=starts.device).expand(starts.shape)
    return places - torch.where(starts, places, 0).cummax(1).values


class Batch(NamedTuple):
    """Tokens and targets, both int64 `[B, T]`; `targets[b, t]` follows `tokens[b, :t+1]`.

    `resets`, bool `[B, T]` or None for nowhere, is true where a document starts: what came before is not to be
    remembered there.
    """

    tokens: Tensor
    targets: Tensor
    resets: Tensor | None = None

    def part(self, rows: range | None = None, span: slice = slice(None)) -> Batch:
        """The batch of some consecutive rows (None: all), or of a span of positions."""
        chosen = slice(None) if rows is None else slice(rows.start, rows.stop), span
        return Batch(self.tokens[chosen], self.targets[chosen], None if self.resets is None else self.resets[chosen])


def stream(seed: int, split: Split, step: int) -> np.random.Generator:
    """The random numbers of one batch: independent for every (seed, split, step). [DATA-BASE-D1]

    numpy rather than `torch.Generator`: a SeedSequence mixes all three numbers into 128 bits, whereas torch's CPU
    generator keeps 32 bits of its seed, so that two steps of a long run would coincide.
    """
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, get_args(Split).index(split), step))))


def as_batch(tokens: NDArray[np.int64], targets: NDArray[np.int64]) -> Batch:
    """A `Batch` of freshly owned tensors."""
    return Batch(torch.tensor(tokens), torch.tensor(targets))


def spread_windows(tokens: int, seq_len: int, most: int) -> NDArray[np.int64]:
    """Starts of windows of a stream that share no label, `most` of them at most, spread evenly over it."""
    available = (tokens - 1) // seq_len
    count = min(most, available)
    return np.arange(count, dtype=np.int64) * available // count * seq_len


class Source(ABC):
    """Loaded data: training batches at any cursor and a fixed set of validation batches."""

    metric: Metric
    fingerprint: str
    """SHA-256 of everything that decides the batches; a resumed run must find the same one."""
    carries: bool = False
    """True if each row of a batch goes on where that row of the batch before ended, with the state it left."""
    ordered: bool = False
    """True if batches are consecutive parts of one order over the data, instead of draws of their own."""
    lengths: Tensor | None = None
    """Bytes of text that each token stands for, int64 `[vocabulary]`; None where a token is a byte or has no text."""

    @abstractmethod
    def train_batch(self, seed: int, step: int, batch_size: int, seq_len: int, rows: range | None = None) -> Batch:
        """The training batch of this step: the same arguments always give the same bits.

        `rows`, consecutive ones, gives those of the batch alone, with the bits they have in the whole.
        """

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

    @property
    def carries(self) -> bool:
        """True if rows go on from batch to batch, as `Source.carries`."""
        return False

    def tokenizer(self) -> Tokenizer | None:
        """Tokenizer of text to token ids and back, read without the data; None for data that are no text."""
        return None

    def length(self) -> int | None:
        """The fixed sequence length of a task; None when any length can be cut from a text."""
        return None

    def load(self) -> Source:
        """Reads or prepares the data; raises `DataError` when it cannot be used."""
        raise NotImplementedError(f"{type(self).__name__} does not define load")


class Loader:
    """Training batches in order; the whole state is five plain values. [DATA-LOADER-D1]

    The batch of a step depends on (seed, step) alone, so resuming needs no replay and no generator state. `rows` are
    those of the batch that this process reads (None: all); they are no part of the state, so that a run goes on in
    another number of processes. [DATA-LOADER-D2]
    """

    def __init__(self, source: Source, *, seed: int, batch_size: int, seq_len: int, rows: range | None = None) -> None:
        if rows is not None and not (rows.step == 1 and 0 <= rows.start < rows.stop <= batch_size):
            raise DataError(f"rows must be consecutive ones of a batch of {batch_size}, got {rows}")
        self.source, self.seed, self.rows = source, seed, rows
        self.batch_size, self.seq_len = batch_size, seq_len
        self.step = 0

    def next(self) -> Batch:
        """The rows of the batch at the cursor; advances the cursor by one."""
        some = () if self.rows is None else (self.rows,)
        batch = self.source.train_batch(self.seed, self.step, self.batch_size, self.seq_len, *some)
        self.step += 1
        return batch

    def state_dict(self) -> dict[str, int | str]:
        """The cursor, and what must be equal for it to mean the same batches."""
        return {"step": self.step, **self._identity()}

    def load_state_dict(self, state: dict[str, int | str]) -> None:
        """Moves the cursor; refuses a cursor over other data."""
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
