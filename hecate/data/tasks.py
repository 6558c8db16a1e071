"""Synthetic tasks, whose batches are generated: copying, recall with and without overwriting, and formal languages,
whose next state needs all that was read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import combinations, permutations
from math import factorial
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hecate.checks import Size
from hecate.data.base import IGNORED, Batch, DataConfig, Source, as_batch, stream
from hecate.errors import ConfigError, DataError
from hecate.variant import Conflicts

Rows = NDArray[np.int64]
VALIDATION_SEED = 0


class Task(DataConfig):
    """A synthetic task: `sample` gives rows, `chances` the accuracy of guessing.

    Every task has a fixed length and labels only the positions whose answer the row determines.
    """

    def vocabulary(self) -> int:
        """Number of token ids the model must know: the field `vocab_size`, where a task does not say otherwise."""
        found = vars(self).get("vocab_size")
        return super().vocabulary() if found is None else int(found)

    def length(self) -> int | None:
        """Length of its sequences: the field `seq_len`, where a task does not say otherwise."""
        found = vars(self).get("seq_len")
        return super().length() if found is None else int(found)

    def sample(self, rng: np.random.Generator, rows: int) -> tuple[Rows, Rows]:
        """`rows` fresh examples: tokens and targets, both `[rows, length]`."""
        raise NotImplementedError(f"{type(self).__name__} does not define sample")

    def chances(self) -> dict[str, float]:
        """Expected accuracy of predictors that know nothing but the format, by name."""
        raise NotImplementedError(f"{type(self).__name__} does not define chances")

    def of_length(self, length: int) -> Self:
        """The same task with sequences of this length; `ConfigError` where its other fields decide that."""
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
        self.fingerprint = hashlib.sha256(task.model_dump_json().encode()).hexdigest()

    def train_batch(self, seed: int, step: int, batch_size: int, seq_len: int, rows: range | None = None) -> Batch:
        self._check(seq_len)
        batch = as_batch(*self.task.sample(stream(seed, "train", step), batch_size))
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


def distinct(rng: np.random.Generator, rows: int, pool: int, count: int) -> Rows:
    """`count` distinct numbers below `pool` in random order for each row: int64 `[rows, count]`."""
    return np.argsort(rng.random((rows, pool)), axis=1)[:, :count].astype(np.int64)


class Copy(Task):
    """copy: s1 ... sn | s1 ... sn, where the second half is predicted.

    n symbols (ids 1 .. V-1) drawn with replacement, the delimiter 0, and the symbols again but the last, which no label
    needs. From the delimiter on, each position is labelled with the next symbol.

    Shapes: tokens, targets `[rows, 2 n]`, n labels per row.
    Cost: O(rows n).
    References: Neural Turing Machines (Graves et al., 2014, arXiv 1410.5401). [DATA-COPY-D1]
    """

    kind: Literal["copy"] = "copy"
    vocab_size: int = Field(32, ge=3, le=1 << 20)
    symbols: int = Field(16, ge=1, le=1 << 19)

    def length(self) -> int:
        return 2 * self.symbols

    def sample(self, rng: np.random.Generator, rows: int) -> tuple[Rows, Rows]:
        text = rng.integers(1, self.vocab_size, size=(rows, self.symbols), dtype=np.int64)
        tokens = np.concatenate([text, np.zeros((rows, 1), dtype=np.int64), text[:, :-1]], axis=1)
        return tokens, np.concatenate([np.full_like(text, IGNORED), text], axis=1)

    def chances(self) -> dict[str, float]:
        return {"any symbol": 1 / (self.vocab_size - 1)}


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

    def conflicts(self) -> Conflicts:
        if self.seq_len % 2:
            yield ("seq_len",), f"must be even, pairs and query slots are two tokens, got {self.seq_len}"
        if 4 * self.num_pairs > self.seq_len:
            yield (
                ("num_pairs",),
                f"num_pairs={self.num_pairs} needs seq_len >= {4 * self.num_pairs} (two tokens per pair and two per "
                f"query), got seq_len={self.seq_len}",
            )
        if self.num_pairs > self.vocab_size // 2 - 1:
            yield (
                ("num_pairs",),
                f"num_pairs={self.num_pairs} distinct keys need vocab_size >= {2 * self.num_pairs + 2}, got "
                f"vocab_size={self.vocab_size}",
            )

    def sample(self, rng: np.random.Generator, rows: int) -> tuple[Rows, Rows]:
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

    def _gaps(self, rng: np.random.Generator, rows: int) -> Rows:
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

    def conflicts(self) -> Conflicts:
        if self.queries > self.num_keys:
            yield ("queries",), f"queries={self.queries} distinct keys cannot be asked with num_keys={self.num_keys}"

    @property
    def pairs(self) -> int:
        """L: written pairs per row."""
        return 2 * self.num_keys if self.replacement else self.num_keys

    def vocabulary(self) -> int:
        return 2 * self.num_keys + 1

    def length(self) -> int:
        return 2 * self.pairs + self.queries

    def sample(self, rng: np.random.Generator, rows: int) -> tuple[Rows, Rows]:
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


class Parity(Task):
    """parity: x1 x2 ... in {0, 1}, each labelled with (x1 + ... + xt) mod 2.

    Every prefix of a row is an example of its own, so one length teaches all up to it. A model that keeps a count
    answers at any length; one that has learnt the lengths of training does not.

    Shapes: tokens, targets `[rows, seq_len]`; every position is labelled.
    Cost: O(rows seq_len).
    References: Practical Computational Power of Linear Transformers and Their Recurrent and Self-Referential Extensions
    (Irie, Csordas, Schmidhuber, 2023, arXiv 2310.16076). [DATA-FORMAL-D1]
    """

    kind: Literal["parity"] = "parity"
    seq_len: int = Field(50, ge=1, le=1 << 20)

    def vocabulary(self) -> int:
        return 2

    def sample(self, rng: np.random.Generator, rows: int) -> tuple[Rows, Rows]:
        return _sums(rng, rows, self.seq_len, 2)

    def chances(self) -> dict[str, float]:
        return {"a coin": 1 / 2}


class ModularCounting(Task):
    """modular_counting: x1 x2 ... in {0, ..., m-1}, each labelled with (x1 + ... + xt) mod m.

    Words of the cyclic group of `modulus` elements, uniform; modulus 2 is parity.

    Shapes: tokens, targets `[rows, seq_len]`; every position is labelled.
    Cost: O(rows seq_len).
    References: Neural Networks and the Chomsky Hierarchy (Deletang et al., 2022, arXiv 2207.02098), whose modular
    arithmetic without brackets has operators between its numbers. [DATA-FORMAL-D1]
    """

    kind: Literal["modular_counting"] = "modular_counting"
    modulus: int = Field(5, ge=2, le=1 << 16)
    seq_len: int = Field(50, ge=1, le=1 << 20)

    def vocabulary(self) -> int:
        return self.modulus

    def sample(self, rng: np.random.Generator, rows: int) -> tuple[Rows, Rows]:
        return _sums(rng, rows, self.seq_len, self.modulus)

    def chances(self) -> dict[str, float]:
        return {"any number": 1 / self.modulus}


class Permutations(Task):
    """permutations: x1 x2 ... in S_n, each labelled with the product xt ... x1: first x1, then x2.

    The word problem of the symmetric group of `degree` letters. Ids are the permutations in lexicographic order, 0 the
    identity. `elements` "all" draws words from the whole group, "swaps" from its transpositions, "generators" from the
    first swap, the cycle of all letters and its inverse. S_5 is the smallest that is not solvable: models whose state
    moves along a diagonal cannot follow it at a fixed depth.

    Shapes: tokens, targets `[rows, seq_len]`; every position is labelled.
    Cost: O(rows seq_len), and a table of n!^2 numbers, at most 720^2.
    References: The Illusion of State in State-Space Models (Merrill, Petty, Sabharwal, 2024, arXiv 2404.08819).
    [DATA-FORMAL-D2]
    """

    kind: Literal["permutations"] = "permutations"
    degree: int = Field(5, ge=2, le=6)
    elements: Literal["all", "swaps", "generators"] = "all"
    seq_len: int = Field(32, ge=1, le=1 << 20)

    def vocabulary(self) -> int:
        return factorial(self.degree)

    def sample(self, rng: np.random.Generator, rows: int) -> tuple[Rows, Rows]:
        group = np.array(list(permutations(range(self.degree))), dtype=np.int64)
        weights = self.degree ** np.arange(self.degree)
        ids = np.zeros(self.degree**self.degree, dtype=np.int64)
        ids[group @ weights] = np.arange(len(group))
        then = ids[group[:, group] @ weights]  # then[b, a]: first a, then b, which takes i to b[a[i]]
        letters = {"all": group, "swaps": _swaps(self.degree), "generators": _generators(self.degree)}
        chosen = ids[np.array(letters[self.elements]) @ weights]
        tokens = chosen[rng.integers(0, len(chosen), size=(rows, self.seq_len))]
        targets, at = np.empty_like(tokens), np.zeros(rows, dtype=np.int64)
        for place in range(self.seq_len):
            at = targets[:, place] = then[tokens[:, place], at]
        return tokens, targets

    def chances(self) -> dict[str, float]:
        odd = self.elements == "swaps" or (self.elements == "generators" and self.degree % 2 == 0)  # every letter
        return {"any permutation of its sign" if odd else "any permutation": (1 + odd) / factorial(self.degree)}


def _sums(rng: np.random.Generator, rows: int, length: int, modulus: int) -> tuple[Rows, Rows]:
    """Uniform numbers and the sums of their prefixes, modulo `modulus`."""
    tokens = rng.integers(0, modulus, size=(rows, length), dtype=np.int64)
    return tokens, tokens.cumsum(1) % modulus


def _swaps(degree: int) -> list[tuple[int, ...]]:
    """The transpositions."""
    return [tuple({a: b, b: a}.get(n, n) for n in range(degree)) for a, b in combinations(range(degree), 2)]


def _generators(degree: int) -> list[tuple[int, ...]]:
    """Permutations of which every one is a product: a swap, a cycle, and back."""
    return list(dict.fromkeys(((1, 0, *range(2, degree)), (*range(1, degree), 0), (degree - 1, *range(degree - 1)))))
