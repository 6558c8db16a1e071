"""A trained model on other data and on longer sequences than it was trained on."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hecate.data import Bytes, Source, Text, Tokens
from hecate.data.shards import SIDECAR
from hecate.errors import ConfigError, DataError, shorten
from hecate.train.evaluate import Positions, loss_by_position
from hecate.train.trained import Trained

Table = tuple[tuple[str, ...], list[tuple[str, ...]]]


class OfLength(NamedTuple):
    """A model's loss on sequences of a length, by how much of them it has read."""

    length: int
    sequences: int
    positions: list[Positions]

    @property
    def labels(self) -> int:
        """All labels of these sequences."""
        return sum(span.labels for span in self.positions)

    @property
    def loss(self) -> float:
        """The mean over them, in nats."""
        return math.fsum(span.loss * span.labels for span in self.positions) / self.labels


def parse_lengths(text: str) -> list[int]:
    """Numbers of tokens, such as 512,4k: k is 1,024, m its square."""
    found = [re.fullmatch(r"(\d{1,9})([km]?)", part.strip(), re.I) for part in text.split(",")]
    lengths = [int(x[1]) * 1024 ** " km".index(x[2].lower() or " ") for x in found if x]
    if len(lengths) < len(found) or not all(0 < length <= 1 << 30 for length in lengths):
        raise ConfigError(f"--lengths must be numbers of tokens such as 1k,4k,16k, got {shorten(text)}")
    return sorted(set(lengths))


def source_of(trained: Trained, path: Path | None) -> Source:
    """The run's own data, or all of other ones for validation."""
    data = trained.config.data
    if path is None:
        return data.load()
    if isinstance(data, Tokens):
        if not ((path / SIDECAR).is_file() or path.suffix == ".bin" or any(path.glob("*.bin"))):
            raise DataError(
                f"{path} are no token shards, which this run was trained on; make some with: hecate data tokenize "
                f"{path} --tokenizer TOKENIZER --out FOLDER"
            )
        own = getattr(trained.tokenizer, "sha256", None)
        other = data.model_copy(update={"path": str(path), "validation": str(path), "tokenizer_file": None})
        theirs = other.tokenizer()
        if own is not None and theirs is not None and theirs.sha256 != own:
            raise DataError(
                f"the tokens of {path} are of another tokenizer than those of the run; tokenize it with that"
            )
        return other.load()
    if not isinstance(trained.tokenizer, Bytes):
        raise ConfigError(f"--data is for texts and tokens, and the run was trained on {data.kind!r}; leave it out")
    return Text.model_validate({"paths": [str(path)]}).load().held_out()


def by_length(trained: Trained, source: Source, lengths: Sequence[int]) -> list[OfLength]:
    """The loss of every length, each on about as many tokens as an evaluation of the run takes. [TRAIN-EVAL-D3]"""
    budget, fixed = trained.config.budget, trained.config.data.length()
    if fixed is not None and list(lengths) != [fixed]:
        raise ConfigError(
            f"--lengths: data {trained.config.data.kind!r} has sequences of length {fixed}, got "
            f"{', '.join(map(str, lengths))}; leave it out"
        )
    found = []
    for length in lengths:
        rows = max(1, min(budget.batch_size, budget.batch_size * trained.config.seq_len // length))
        batches = list(source.validation_batches(rows, length, budget.eval_batches))
        sequences = sum(len(batch.tokens) for batch in batches)
        found.append(OfLength(length, sequences, loss_by_position(trained.model, batches, trained.device)))
    return found


def tables(trained: Trained, source: Source, found: Sequence[OfLength]) -> list[Table]:
    """The printed tables: a row for each length, and the loss by position of all of them."""
    each = source.metric == "bits_per_byte" and source.lengths is None
    header: tuple[str, ...] = "length", "sequences", "labels", "loss (nats)", "bits per byte" if each else "perplexity"
    rows: list[tuple[str, ...]] = []
    for own in found:
        last = own.loss / math.log(2) if each else math.exp(min(own.loss, 700))
        rows.append((f"{own.length:,}", f"{own.sequences:,}", f"{own.labels:,}", f"{own.loss:.4f}", f"{last:.4f}"))
    spans = dict.fromkeys((span.first, span.last) for own in found for span in own.positions)
    losses = [{(span.first, span.last): span.loss for span in own.positions} for own in found]
    places: list[tuple[str, ...]] = []
    for first, last in sorted(spans):
        cells = [f"{own[first, last]:.4f}" if (first, last) in own else "" for own in losses]
        places.append((f"{first:,}" if first == last else f"{first:,} to {last:,}", *cells))
    return [(header, rows), (("tokens read", *(f"loss at {own.length:,}" for own in found)), places)]
