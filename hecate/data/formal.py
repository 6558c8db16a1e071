"""Formal languages whose next state needs all that was read: words of groups, of which parity is the smallest."""

from __future__ import annotations

from itertools import combinations, permutations
from math import factorial
from typing import Literal

import numpy as np
from pydantic import Field

from hecate.data.tasks import Rows, Task


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
