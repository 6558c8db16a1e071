"""Evaluations: configs that give rows with labelled answers, and the reader that scores a model on them."""

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
"""Tokens that a model with a state reads per call."""
Metric = Literal["exact", "accuracy", "loss"]
Ids = NDArray[np.int64]
COLUMNS = ("name", "length", "metric", "score", "error", "chance", "rows", "answers", "labels", "exact", "accuracy",
           "loss")  # fmt: skip
"""Facts of a result that are single values."""


class Encoder(NamedTuple):
    """A function from texts to the ids of each, and the ids `start` with which every row begins."""

    ids: Callable[[Sequence[str]], list[Ids]]
    start: tuple[int, ...] = ()


class Row(NamedTuple):
    """A sequence of tokens `[T]`; `targets[t]` is the token after token t if it is a label, else -100.

    `answers[t]` is the number of the answer that the label belongs to; an answer is right if all of its labels are.
    `depth` is the place of a needle in the text, from 0 to 1; None without a needle.
    """

    tokens: Ids
    targets: Ids
    answers: Ids
    depth: float | None = None


class Part(NamedTuple):
    """Rows of one length, `row(index)` each, that get one score.

    `metric`: "exact" is the share of answers that are right as a whole, "accuracy" that of right labels, "loss" the
    mean loss in nats. `chance` is the score of guessing, None if that does not apply.
    """

    name: str
    length: int
    rows: int
    row: Callable[[int], Row]
    metric: Metric
    chance: float | None


class Given(NamedTuple):
    """Inputs to tasks: the encoder of texts, a text to hide things in, the model's vocabulary size and largest
    length."""

    encoder: Encoder | None = None
    text: str | None = None
    vocabulary: int | None = None
    longest: int | None = None


class Evaluation(Variant, family="evaluation"):
    """A task to evaluate a trained model on; its rows only depend on (seed, index)."""

    def parts(self, given: Given) -> list[Part]:
        """Its parts for one model; `ConfigError` or `DataError` if the task does not fit the model."""
        raise NotImplementedError(f"{type(self).__name__} does not define parts")


def draws(seed: int, part: int, index: int) -> np.random.Generator:
    """The random generator of one row, independent for every (seed, part, index). [EVAL-ROW-D1]"""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, part, index))))


class Reader:
    """A common interface to models: with a state that is carried over (hecate's own), or from tokens to logits only.

    Args:
        model: function from tokens int64 `[B, T]` to logits `[B, T, V]`, an object with `.logits`, or a tuple with the
            logits first.
        device: device of the tokens; None for the model's own, or the CPU.
        piece: tokens per call with a carried state, `model(tokens, state) -> (logits, state)`; None reads all at once.
        vocabulary: number of ids that the model knows; None if unknown.
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
        """Logits of consecutive spans of tokens `[B, T]`, each with the position of its first token."""
        step = self._piece or tokens.shape[1]
        most = int(tokens.max())
        if self._vocabulary is not None and most >= self._vocabulary:
            cure = "take the tokenizer it was trained with, or a task it was trained on"
            raise ConfigError(f"the task has token {most}, and the model knows {self._vocabulary} ids; {cure}")
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
        """The score of a part, with about `tokens_at_once` tokens per batch, at least one row. [EVAL-SCORE-D1]"""
        with evaluating(self._model) if isinstance(self._model, nn.Module) else torch.no_grad():
            tally = _Tally()
            size = max(1, tokens_at_once // part.length)
            for first in range(0, part.rows, size):
                tally.batch(self, [part.row(index) for index in range(first, min(first + size, part.rows))])
        return tally.result(part)


@dataclass
class Result:
    """Score of a model in a part: `score` in its metric beside `chance`, and all counts.

    `exact` is the share of answers that are right as a whole, `accuracy` that of right labels, `loss` the mean over
    labels in nats; `error` is sqrt(p (1 - p) / n), the standard error for n independent answers or labels (those of one
    row may be dependent). `depths` has the share of right answers by the needle's depth, `positions` loss and number of
    labels by the number of tokens read before.
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
        """The score in the part's metric."""
        return {"exact": self.exact, "accuracy": self.accuracy, "loss": self.loss}[self.metric]

    @property
    def error(self) -> float | None:
        """The standard error of the score, None for a loss."""
        count = self.answers if self.metric == "exact" else self.labels
        return None if self.metric == "loss" else math.sqrt(self.score * (1 - self.score) / count)

    def record(self) -> dict[str, Any]:
        """The result as plain values, for JSON."""
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
        """Runs the model on a batch of rows of one length, and counts them."""
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
        """Counts one row; `hits` marks the labels that the model got right."""
        mask = row.targets != IGNORED
        numbers, labels = np.unique(row.answers[mask], return_counts=True)
        whole = np.array([hits[mask][row.answers[mask] == number].all() for number in numbers])
        self.rows, self.labels, self.hits = self.rows + 1, self.labels + int(labels.sum()), self.hits + int(hits.sum())
        self.answers, self.right = self.answers + len(whole), self.right + int(whole.sum())
        if row.depth is not None:
            known = self.depths.setdefault(row.depth, [0, 0])
            known[0], known[1] = known[0] + int(whole.sum()), known[1] + len(whole)

    def result(self, part: Part) -> Result:
        """The result of a part, from the counts."""
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
