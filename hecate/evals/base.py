"""Evaluations: a config that gives rows with labelled answers, and how a model is asked for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from hecate.data import IGNORED
from hecate.errors import ConfigError, NonFiniteError
from hecate.train.evaluate import Buckets, Positions, evaluating
from hecate.variant import Variant

PIECE = 1024
"""Tokens that a model with a state reads at once."""
Metric = Literal["exact", "accuracy", "loss"]
Ids = NDArray[np.int64]
COLUMNS = ("name", "length", "metric", "score", "error", "chance", "rows", "answers", "labels", "exact", "accuracy",
           "loss")  # fmt: skip
"""Facts of a result that are one value each."""


class Encoder(NamedTuple):
    """Encoder of texts into the ids of each; every row begins with the ids `start`."""

    ids: Callable[[Sequence[str]], list[Ids]]
    start: tuple[int, ...] = ()


class Row(NamedTuple):
    """A sequence of tokens `[T]`; `targets[t]` is what follows token t where that is asked, else -100.

    `answers[t]` numbers the answer that the label is a part of: it is right where all of its labels are. `depth` is how
    deep in the text a needle is, from 0 to 1, where one is.
    """

    tokens: Ids
    targets: Ids
    answers: Ids
    depth: float | None = None


class Part(NamedTuple):
    """Rows of one length, `row(index)` each, of which one number is told.

    `metric`: "exact" is the share of answers that are right as a whole, "accuracy" that of right labels, "loss" the
    mean loss in nats. `chance` is what guessing scores, None where that is no question.
    """

    name: str
    length: int
    rows: int
    row: Callable[[int], Row]
    metric: Metric
    chance: float | None


class Given(NamedTuple):
    """Inputs to tasks: the encoder of texts, a text to hide things in, the model's number of ids and most tokens."""

    encoder: Encoder | None = None
    text: str | None = None
    vocabulary: int | None = None
    longest: int | None = None


class Evaluation(Variant, family="evaluation"):
    """A task that a trained model is asked; its rows are a function of (seed, index) alone."""

    def parts(self, given: Given) -> list[Part]:
        """Its parts, for one model; `ConfigError` or `DataError` where it cannot be asked this."""
        raise NotImplementedError(f"{type(self).__name__} does not define parts")


def draws(seed: int, part: int, index: int) -> np.random.Generator:
    """The random numbers of one row, independent for every (seed, part, index). [EVAL-ROW-D1]"""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, part, index))))


class Reader:
    """A model, however it is called: with a state that it hands on (hecate's own), or tokens to logits alone.

    Args:
        model: tokens int64 `[B, T]` to logits `[B, T, V]`, an object with `.logits`, or a tuple with the logits first.
        device: where tokens go; None for the model's own, or the CPU.
        piece: tokens read at once on a carried state, `model(tokens, state) -> (logits, state)`; None reads all.
        vocabulary: how many ids the model knows, where that is known.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        device: torch.device | None = None,
        piece: int | None = None,
        vocabulary: int | None = None,
    ) -> None:
        self._model, self._piece, self._vocabulary = model, piece, vocabulary
        if device is None:
            parameter = next(model.parameters(), None) if isinstance(model, nn.Module) else None
            device = torch.device("cpu") if parameter is None else parameter.device
        self._device = device

    def read(self, tokens: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Logits of consecutive spans of `[B, T]` tokens, each with the place of its first token."""
        step = self._piece or tokens.shape[1]
        most = int(tokens.max())
        if self._vocabulary is not None and most >= self._vocabulary:
            raise ConfigError(
                f"the task has token {most}, and the model knows {self._vocabulary} ids; take the tokenizer it was "
                "trained with, or a task it was trained on"
            )
        state: Any = None
        for first in range(0, tokens.shape[1], step):
            part = tokens[:, first : first + step].to(self._device)
            if self._piece is None:
                yield first, self._logits(self._model(part), part)
            else:
                output, state = self._model(part) if state is None else self._model(part, state)
                yield first, self._logits(output, part)

    def _logits(self, output: Any, tokens: Tensor) -> Tensor:
        logits = getattr(output, "logits", output)
        logits = logits[0] if isinstance(logits, tuple) else logits
        if not isinstance(logits, Tensor) or logits.dim() != 3 or logits.shape[:2] != tokens.shape:
            shape = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise ConfigError(f"the model must give logits [B, T, V] for tokens {list(tokens.shape)}, got {shape}")
        return logits

    def scored(self, part: Part, tokens_at_once: int) -> Result:
        """The score of a part, `tokens_at_once` tokens a call, one row at least. [EVAL-SCORE-D1]"""
        with evaluating(self._model) if isinstance(self._model, nn.Module) else torch.no_grad():
            tally = _Tally()
            size = max(1, tokens_at_once // part.length)
            for first in range(0, part.rows, size):
                tally.batch(self, [part.row(index) for index in range(first, min(first + size, part.rows))])
        return tally.result(part)


@dataclass
class Result:
    """Score of a model in a part: `score` in its metric beside `chance`, and all that was counted.

    `exact` is the share of answers right as a whole, `accuracy` that of right labels, `loss` the mean of labels in
    nats; `error` is sqrt(p (1 - p) / n), the standard error of n independent answers or labels, which those of one row
    may not be. `depths` has the share of right answers by how deep the needle was, `positions` loss and labels by how
    much was read before.
    """

    name: str
    length: int
    metric: Metric
    chance: float | None
    rows: int
    answers: int
    labels: int
    exact: float
    accuracy: float
    loss: float
    depths: dict[float, float] = field(default_factory=dict)
    positions: list[Positions] = field(default_factory=list)

    @property
    def score(self) -> float:
        """In the part's metric."""
        return {"exact": self.exact, "accuracy": self.accuracy, "loss": self.loss}[self.metric]

    @property
    def error(self) -> float | None:
        """The standard error of the score, None for a loss."""
        count = self.answers if self.metric == "exact" else self.labels
        return None if self.metric == "loss" else math.sqrt(self.score * (1 - self.score) / count)

    def record(self) -> dict[str, Any]:
        """For JSON."""
        plain = {name: getattr(self, name) for name in COLUMNS}
        depths = [{"depth": depth, "exact": share} for depth, share in sorted(self.depths.items())]
        return {**plain, "depths": depths, "positions": [span._asdict() for span in self.positions]}


class _Tally:
    """Counts of a part, row by row."""

    def __init__(self) -> None:
        self.loss, self.hits, self.labels, self.right, self.answers, self.rows = 0.0, 0, 0, 0, 0, 0
        self.depths: dict[float, list[int]] = {}
        self.buckets = Buckets()

    def batch(self, reader: Reader, rows: Sequence[Row]) -> None:
        """Asks a batch of rows of one length."""
        tokens = torch.from_numpy(np.stack([row.tokens for row in rows]))
        targets = torch.from_numpy(np.stack([row.targets for row in rows]))
        right = torch.zeros_like(targets, dtype=torch.bool)
        for first, logits in reader.read(tokens):
            labels = targets[:, first : first + logits.shape[1]]
            mask = labels != IGNORED
            if not mask.any():
                continue
            if (largest := int(labels.max())) >= logits.shape[-1]:
                raise ConfigError(f"a label is token {largest}, and the model has logits for {logits.shape[-1]}")
            chosen = logits[mask.to(logits.device)].float().cpu()
            losses = functional.cross_entropy(chosen, labels[mask], reduction="none").double()
            if bool(losses.isnan().any()):  # the likeliest of them would be the first
                raise NonFiniteError(f"the model's logits for tokens {first} and on hold NaN, which are no answers")
            right[:, first : first + logits.shape[1]][mask] = chosen.argmax(-1) == labels[mask]
            self.buckets.add(torch.nonzero(mask)[:, 1] + first, losses)
            self.loss += float(losses.sum())
        for row, hits in zip(rows, right.numpy(), strict=True):
            self.row(row, hits)

    def row(self, row: Row, hits: Any) -> None:
        """Counts one row, given where the model was right."""
        mask = row.targets != IGNORED
        numbers, labels = np.unique(row.answers[mask], return_counts=True)
        whole = np.array([hits[mask][row.answers[mask] == number].all() for number in numbers])
        self.rows, self.labels, self.hits = self.rows + 1, self.labels + int(labels.sum()), self.hits + int(hits.sum())
        self.answers, self.right = self.answers + len(whole), self.right + int(whole.sum())
        if row.depth is not None:
            known = self.depths.setdefault(row.depth, [0, 0])
            known[0], known[1] = known[0] + int(whole.sum()), known[1] + len(whole)

    def result(self, part: Part) -> Result:
        """The shares."""
        return Result(
            part.name, part.length, part.metric, part.chance, self.rows, self.answers, self.labels,
            self.right / max(self.answers, 1), self.hits / max(self.labels, 1), self.loss / max(self.labels, 1),
            {depth: right / count for depth, (right, count) in self.depths.items()}, self.buckets.positions(),
        )  # fmt: skip


def check_lengths(name: str, inputs: Given, lengths: Sequence[int]) -> None:
    """Refuses lengths that the model cannot read."""
    if inputs.longest is not None and max(lengths) > inputs.longest:
        raise ConfigError(
            f"{name} of length {max(lengths)} is beyond the {inputs.longest} positions of the model; take less"
        )
