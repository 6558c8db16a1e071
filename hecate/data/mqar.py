"""Multi-query associative recall."""

from __future__ import annotations

from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from hecate.checks import Size
from hecate.data.base import IGNORED, Task, distinct
from hecate.errors import ConfigError


class MQAR(Task):
    """mqar: k1 v1 ... kN vN, then each key once more, answered by its value.

    The recall task of the Zoology study. N pairs without repeated keys (ids 1 .. V/2-1) or values (ids V/2 .. V-1);
    then the keys return in slots of two tokens, at gaps g drawn without replacement with p(g) proportional to
    g^(power-1), so most queries follow soon and a few wait long. The label, the key's value, stands at the query
    itself: the model answers after reading the key. Everything else is filler, random ids when `random_filler`,
    otherwise 0.

    Shapes: tokens, targets `[rows, seq_len]`, N labels per row.
    Cost: O(rows (V + seq_len) log V), vectorised.
    References: Zoology: Measuring and Improving Recall in Efficient Language Models (Arora et al., 2023, arXiv
    2312.04927). [DATA-MQAR-D1]
    """

    kind: Literal["mqar"] = "mqar"
    vocab_size: int = Field(256, ge=4, le=1 << 20)
    num_pairs: Size = Field(8, ge=1)
    seq_len: int = Field(64, ge=4, le=1 << 20)
    power: float = Field(0.01, gt=0)
    random_filler: bool = True

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.seq_len % 2:
            raise ConfigError(f"must be even, pairs and query slots are two tokens, got {self.seq_len}", ("seq_len",))
        if 4 * self.num_pairs > self.seq_len:
            raise ConfigError(
                f"num_pairs={self.num_pairs} needs seq_len >= {4 * self.num_pairs} (two tokens per pair and two per "
                f"query), got seq_len={self.seq_len}",
                ("num_pairs",),
            )
        if self.num_pairs > self.vocab_size // 2 - 1:
            raise ConfigError(
                f"num_pairs={self.num_pairs} distinct keys need vocab_size >= {2 * self.num_pairs + 2}, got "
                f"vocab_size={self.vocab_size}",
                ("num_pairs",),
            )
        return self

    def vocabulary(self) -> int:
        return self.vocab_size

    def length(self) -> int:
        return self.seq_len

    def sample(self, rng: np.random.Generator, rows: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        pairs, half = self.num_pairs, self.vocab_size // 2
        keys = 1 + distinct(rng, rows, half - 1, pairs)
        values = half + distinct(rng, rows, self.vocab_size - half, pairs)
        queries = 2 * pairs + 2 * self._gaps(rng, rows)
        tokens = np.zeros((rows, self.seq_len), dtype=np.int64)
        if self.random_filler:
            tokens = rng.integers(0, self.vocab_size, size=tokens.shape, dtype=np.int64)
        tokens[:, 0 : 2 * pairs : 2], tokens[:, 1 : 2 * pairs : 2] = keys, values
        np.put_along_axis(tokens, queries, keys, axis=1)
        targets = np.full_like(tokens, IGNORED)
        np.put_along_axis(targets, queries, values, axis=1)
        return tokens, targets

    def _gaps(self, rng: np.random.Generator, rows: int) -> NDArray[np.int64]:
        """Query slots `[rows, num_pairs]`, drawn one after the other without replacement.

        Sorting E_g / p(g) with standard exponential E_g is the same law as drawing and removing: the smallest of
        independent exponentials with rates p(g) is g with probability p(g), and so on.
        """
        slots = self.seq_len // 2 - self.num_pairs
        weights = np.arange(1, slots + 1, dtype=np.float64) ** (self.power - 1)
        race = rng.standard_exponential((rows, slots)) / weights
        return np.argsort(race, axis=1)[:, : self.num_pairs].astype(np.int64)

    def chances(self) -> dict[str, float]:
        half = self.vocab_size // 2
        return {"any value": 1 / (self.vocab_size - half), "a value of the row": 1 / self.num_pairs}
