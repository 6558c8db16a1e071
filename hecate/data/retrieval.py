"""Associative retrieval, with and without overwriting."""

from __future__ import annotations

from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from hecate.checks import Size
from hecate.data.base import IGNORED, Task, distinct
from hecate.errors import ConfigError


class Retrieval(Task):
    """retrieval: k1 v1 ... kL vL k, answered by the value last paired with k.

    The two settings of the fast weight programmer study, as tokens: keys are ids 1 .. S, values S+1 .. 2S. Without
    `replacement` every key and every value occurs once (L = S): capacity. With it both are drawn with replacement (L =
    2S) and the label is the value written last: overwriting, which a sum of outer products cannot do and a delta rule
    can. `queries` keys, distinct and uniform among those that occurred, are asked at the end; where fewer occurred the
    rest is the unlabelled filler 0.

    Shapes: tokens, targets `[rows, 2 L + queries]`, at most `queries` labels per row.
    Cost: O(rows S log S), vectorised.
    Warning: the study feeds key and value as one vector and minimises a squared error; here they are consecutive tokens
    and the loss is the cross-entropy, so its published losses do not compare.
    References: Linear Transformers Are Secretly Fast Weight Programmers (Schlag, Irie, Schmidhuber, 2021, arXiv
    2102.11174). [DATA-RETRIEVAL-D1]
    """

    kind: Literal["retrieval"] = "retrieval"
    num_keys: int = Field(20, ge=1, le=1 << 16)
    replacement: bool = False
    queries: Size = Field(1, ge=1)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.queries > self.num_keys:
            raise ConfigError(
                f"queries={self.queries} distinct keys cannot be asked with num_keys={self.num_keys}", ("queries",)
            )
        return self

    @property
    def pairs(self) -> int:
        """L: written pairs per row."""
        return 2 * self.num_keys if self.replacement else self.num_keys

    def vocabulary(self) -> int:
        return 2 * self.num_keys + 1

    def length(self) -> int:
        return 2 * self.pairs + self.queries

    def sample(self, rng: np.random.Generator, rows: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        size, pairs = self.num_keys, self.pairs
        if self.replacement:
            keys = rng.integers(0, size, size=(rows, pairs), dtype=np.int64)
            values = rng.integers(0, size, size=(rows, pairs), dtype=np.int64)
        else:
            keys, values = distinct(rng, rows, size, pairs), distinct(rng, rows, size, pairs)
        last = np.full((rows, size), -1, dtype=np.int64)
        for position in range(pairs):  # in order, so that a later value replaces an earlier one
            np.put_along_axis(last, keys[:, position, None], values[:, position, None], axis=1)
        # Keys that never occurred get a score above every draw, so they are asked last, as filler.
        score = rng.random((rows, size)) + 2.0 * (last < 0)
        asked = np.argsort(score, axis=1)[:, : self.queries]
        answer = np.take_along_axis(last, asked, axis=1)
        tokens = np.empty((rows, self.length()), dtype=np.int64)
        tokens[:, 0 : 2 * pairs : 2], tokens[:, 1 : 2 * pairs : 2] = keys + 1, values + size + 1
        tokens[:, 2 * pairs :] = np.where(answer >= 0, asked + 1, 0)
        targets = np.full_like(tokens, IGNORED)
        targets[:, 2 * pairs :] = np.where(answer >= 0, answer + size + 1, IGNORED)
        return tokens, targets

    def chances(self) -> dict[str, float]:
        return {"any value": 1 / self.num_keys}
