"""Synthetic tasks with generated batches: copying, recall with and without overwriting, formal languages that need
state tracking, and the tasks of mechanistic architecture design."""

from __future__ import annotations

from itertools import combinations, permutations
from math import factorial
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hecate.checks import Size
from hecate.data.base import IGNORED, Rows, Task
from hecate.variant import Conflicts


def distinct(rng: np.random.Generator, rows: int, pool: int, count: int) -> Rows:
    """`count` distinct numbers below `pool`, in random order, for each row: int64 `[rows, count]`."""
    return np.argsort(rng.random((rows, pool)), axis=1)[:, :count].astype(np.int64)


def in_turn(first: Rows, second: Rows) -> Rows:
    """Two arrays `[rows, n]` in turn, one from each: `[rows, 2 n]`."""
    return np.stack([first, second], axis=2).reshape(len(first), 2 * first.shape[1])


class Copy(Task):
    """copy: s1 ... sn | s1 ... sn, where the second half is predicted.

    n symbols (ids 1 .. V-1) drawn with replacement, the delimiter 0, and the symbols again except the last, after which
    there is no label. From the delimiter on, each position is labelled with the next symbol.

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
    g^(power-1), so that most queries come soon and a few much later. The label, the key's value, is at the query
    itself: the model answers after reading the key. All other tokens are filler, random ids with `random_filler`,
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
            needed = f"seq_len >= {4 * self.num_pairs} (two tokens per pair and two per query)"
            yield ("num_pairs",), f"num_pairs={self.num_pairs} needs {needed}, got seq_len={self.seq_len}"
        if self.num_pairs > self.vocab_size // 2 - 1:
            needed = f"vocab_size >= {2 * self.num_pairs + 2}, got vocab_size={self.vocab_size}"
            yield ("num_pairs",), f"num_pairs={self.num_pairs} distinct keys need {needed}"

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

        Sorting by E_g / p(g), with standard exponential E_g, has the same distribution as drawing and removing: the
        smallest of independent exponentials with rates p(g) is g with probability p(g), and so on.
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
    can. `queries` keys, distinct and uniform among those that occurred, are asked at the end; if fewer occurred, the
    remaining queries are the unlabelled filler 0.

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
        # Keys that never occurred get a score above every draw, so that they come last, as filler.
        score = rng.random((rows, size)) + 2.0 * (last < 0)
        asked = np.argsort(score, axis=1)[:, : self.queries]
        answer = np.take_along_axis(last, asked, axis=1)
        written = in_turn(keys + 1, values + size + 1)
        tokens = np.concatenate([written, np.where(answer >= 0, asked + 1, 0)], axis=1)
        labels = np.where(answer >= 0, answer + size + 1, IGNORED)
        return tokens, np.concatenate([np.full_like(written, IGNORED), labels], axis=1)

    def chances(self) -> dict[str, float]:
        return {"any value": 1 / self.num_keys}


class Parity(Task):
    """parity: x1 x2 ... in {0, 1}, each labelled with (x1 + ... + xt) mod 2.

    Every prefix of a row is an example, so that one length trains all up to it. A model that keeps a running count
    generalises to any length; one that has only learnt the lengths of training does not.

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
    """permutations: x1 x2 ... in S_n, each labelled with the product xt ... x1, x1 applied first.

    The word problem of the symmetric group of `degree` letters. Ids are the permutations in lexicographic order, 0 the
    identity. `elements` "all" draws words from the whole group, "swaps" from its transpositions, "generators" from the
    first swap, the cycle of all letters and its inverse. S_5 is the smallest that is not solvable: models with diagonal
    state transitions cannot track it at a fixed depth.

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
    """All transpositions of `degree` letters."""
    return [tuple({a: b, b: a}.get(n, n) for n in range(degree)) for a, b in combinations(range(degree), 2)]


def _generators(degree: int) -> list[tuple[int, ...]]:
    """Generators of the group: a swap, a cycle of all letters, and its inverse."""
    return list(dict.fromkeys(((1, 0, *range(2, degree)), (*range(1, degree), 0), (degree - 1, *range(degree - 1)))))


# The six tasks of mechanistic architecture design (MAD); each labels the positions whose answer is determined.

Length = Field(128, ge=4, le=1 << 20)


def _check_even(length: int) -> Conflicts:
    if length % 2:
        yield ("seq_len",), f"must be even, pairs are two tokens, got {length}"


class MADRecall(Task):
    """mad_recall: k v k v ... with repeated keys; a key that occurred before is labelled with its value.

    In-context recall with several queries. The lower half of the ids are keys, the upper half values. Each row draws a
    value for each key, and its keys with replacement; its last key occurred before, so that every row has a label. The
    label is at the key.

    Shapes: tokens, targets `[rows, seq_len]`, an even length.
    Cost: O(rows (seq_len + vocab_size)), vectorised over rows.
    Warning: MAD trains on every next token and evaluates on these labels; here training uses only these labels, too.
    References: Mechanistic Design and Scaling of Hybrid Architectures (Poli et al., 2024, arXiv 2403.17844).
    [DATA-MAD-D1]
    """

    kind: Literal["mad_recall"] = "mad_recall"
    vocab_size: Size = Field(16, ge=4)
    seq_len: int = Length

    def conflicts(self) -> Conflicts:
        return _check_even(self.seq_len)

    def sample(self, rng: np.random.Generator, rows: int) -> tuple[Rows, Rows]:
        return _pairs(rng, (rows, self.seq_len // 2), self.vocab_size, np.ones((rows, self.seq_len // 2), dtype=bool))

    def chances(self) -> dict[str, float]:
        return {"any value": 1 / (self.vocab_size - self.vocab_size // 2)}


class MADNoisyRecall(Task):
    """mad_noisy_recall: mad_recall in which a share `noise` of the pairs is replaced by two noise tokens.

    The last `noise_vocab` ids are noise. The first and last pair are never noise, so that every row has a label.

    Shapes: tokens, targets `[rows, seq_len]`, an even length.
    Cost: O(rows (seq_len + vocab_size)), vectorised over rows.
    Warning: as for mad_recall. MAD keeps one pair at a random place free of noise; here it is the first.
    References: Mechanistic Design and Scaling of Hybrid Architectures (Poli et al., 2024, arXiv 2403.17844).
    [DATA-MAD-D1]
    """

    kind: Literal["mad_noisy_recall"] = "mad_noisy_recall"
    vocab_size: Size = Field(32, ge=5)
    noise_vocab: Size = Field(16, ge=1)
    noise: float = Field(0.2, ge=0, lt=1)
    seq_len: int = Length

    def conflicts(self) -> Conflicts:
        if self.vocab_size - self.noise_vocab < 4:
            left = f"{self.vocab_size - self.noise_vocab} of vocab_size={self.vocab_size} for keys and values"
            yield ("noise_vocab",), f"noise_vocab={self.noise_vocab} leaves {left}, which need 4 at least"
        yield from _check_even(self.seq_len)

    def sample(self, rng: np.random.Generator, rows: int) -> tuple[Rows, Rows]:
        shape, used = (rows, self.seq_len // 2), self.vocab_size - self.noise_vocab
        clean = rng.random(shape) >= self.noise
        clean[:, [0, -1]] = True
        tokens, targets = _pairs(rng, shape, used, clean)
        noise = rng.integers(used, self.vocab_size, size=tokens.shape, dtype=np.int64)
        return np.where(np.repeat(clean, 2, axis=1), tokens, noise), targets

    def chances(self) -> dict[str, float]:
        used = self.vocab_size - self.noise_vocab
        return {"any value": 1 / (used - used // 2)}


class MADFuzzyRecall(Task):
    """mad_fuzzy_recall: mad_recall with keys of `key_size` tokens and values of 1 to `value_size` tokens.

    A key is `key_size` different ids of the lower half, a value a random number of different ids of the upper half. The
    last key of a row occurred before; after every key that did, all tokens of its value are labels. The remaining
    places at the front are padding, the last id, without labels.

    Shapes: tokens, targets `[rows, seq_len]`.
    Cost: a loop over the pairs of each row: milliseconds per batch.
    Warning: as for mad_recall. MAD trains on keys of 1 to `key_size` tokens and evaluates on keys of `key_size`; the
    answer to a shorter key that is the beginning of another is not determined, so here all keys have `key_size`.
    References: Mechanistic Design and Scaling of Hybrid Architectures (Poli et al., 2024, arXiv 2403.17844).
    [DATA-MAD-D2]
    """

    kind: Literal["mad_fuzzy_recall"] = "mad_fuzzy_recall"
    vocab_size: Size = Field(16, ge=3)
    key_size: int = Field(3, ge=1, le=64)
    value_size: int = Field(3, ge=1, le=64)
    seq_len: int = Length

    def conflicts(self) -> Conflicts:
        keys = (self.vocab_size - 1) // 2
        for name, size, ids in (("key", self.key_size, keys), ("value", self.value_size, self.vocab_size - 1 - keys)):
            if size > ids:
                known = f"the {ids} of vocab_size={self.vocab_size} that {name}s have"
                yield (f"{name}_size",), f"{name}_size={size} different tokens cannot be drawn from {known}"
        if self.seq_len < (least := 2 * (self.key_size + self.value_size)):
            pairs = f"a pair of key_size={self.key_size} and value_size={self.value_size} twice"
            yield ("seq_len",), f"must be at least {least}, {pairs}, got {self.seq_len}"

    def sample(self, rng: np.random.Generator, rows: int) -> tuple[Rows, Rows]:
        tokens = np.full((rows, self.seq_len), self.vocab_size - 1, dtype=np.int64)
        targets = np.full_like(tokens, IGNORED)
        for row in range(rows):
            pairs, known = self._row(rng), set()
            place = self.seq_len - sum(len(key) + len(value) for key, value in pairs)
            for key, value in pairs:
                start = place + len(key)
                tokens[row, place:start], tokens[row, start : start + len(value)] = key, value
                if key in known:
                    targets[row, start - 1 : start - 1 + len(value)] = value
                known.add(key)
                place = start + len(value)
        return tokens, targets

    def _row(self, rng: np.random.Generator) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Pairs of a row in order: as many as fit, then a last one, whose key is one of the others'."""
        keys, longest = (self.vocab_size - 1) // 2, self.key_size + self.value_size
        values: dict[tuple[int, ...], tuple[int, ...]] = {}
        pairs, used = [], 0
        while used + 2 * longest <= self.seq_len:
            key = tuple(rng.permutation(keys)[: self.key_size].tolist())
            if key not in values:
                size = int(rng.integers(1, self.value_size + 1))
                values[key] = tuple((keys + rng.permutation(self.vocab_size - 1 - keys)[:size]).tolist())
            pairs.append((key, values[key]))
            used += len(key) + len(values[key])
        return [*pairs, pairs[int(rng.integers(len(pairs)))]]

    def chances(self) -> dict[str, float]:
        return {"any value token": 1 / (self.vocab_size - 1 - (self.vocab_size - 1) // 2)}


class MADSelectiveCopy(Task):
    """mad_selective_copy: `symbols` tokens among blanks, a sign, and as many blanks, labelled with them in order.

    Symbols (ids 0 .. V-3) are at random places among blanks (V-2). After the sign V-1 come as many blanks as symbols;
    the n-th is labelled with the n-th symbol.

    Shapes: tokens, targets `[rows, seq_len]`, `symbols` labels per row.
    Cost: O(rows seq_len log seq_len), vectorised.
    Warning: MAD never has a blank between the last symbol and the sign; here all places are equally likely.
    References: Mechanistic Design and Scaling of Hybrid Architectures (Poli et al., 2024, arXiv 2403.17844); Mamba
    (Gu and Dao, 2023, arXiv 2312.00752). [DATA-MAD-D3]
    """

    kind: Literal["mad_selective_copy"] = "mad_selective_copy"
    vocab_size: Size = Field(16, ge=4)
    symbols: int = Field(16, ge=1, le=1 << 18)
    seq_len: int = Field(256, ge=3, le=1 << 20)

    def conflicts(self) -> Conflicts:
        least = 2 * self.symbols + 1
        if self.seq_len < least:
            yield ("symbols",), f"symbols={self.symbols} twice and a sign need seq_len >= {least}, got {self.seq_len}"

    def sample(self, rng: np.random.Generator, rows: int) -> tuple[Rows, Rows]:
        count, room = self.symbols, self.seq_len - self.symbols - 1
        symbols = rng.integers(0, self.vocab_size - 2, size=(rows, count), dtype=np.int64)
        tokens = np.full((rows, self.seq_len), self.vocab_size - 2, dtype=np.int64)
        np.put_along_axis(tokens, np.sort(distinct(rng, rows, room, count), axis=1), symbols, axis=1)
        tokens[:, room] = self.vocab_size - 1
        targets = np.full_like(tokens, IGNORED)
        targets[:, room + 1 :] = symbols
        return tokens, targets

    def chances(self) -> dict[str, float]:
        return {"any symbol": 1 / (self.vocab_size - 2)}


class MADCompression(Task):
    """mad_compression: x1 ... xn, a sign, and the places 1 ... n in random order, each labelled with its symbol.

    Every symbol has to be remembered: a state of constant size has to compress the row. Symbols are ids 0 .. V-2, the
    sign V-1, places V .. V+n-1, with n = (seq_len - 1) / 2.

    Shapes: tokens, targets `[rows, seq_len]`, an odd length; n labels per row.
    Cost: O(rows seq_len log seq_len), vectorised.
    Warning: MAD decodes the row from the model's output at the sign, with a separate decoder that gets the place as
    input. A causal language model has no such decoder, so this task measures its state instead, and MAD's figures do
    not compare.
    References: Mechanistic Design and Scaling of Hybrid Architectures (Poli et al., 2024, arXiv 2403.17844).
    [DATA-MAD-D4]
    """

    kind: Literal["mad_compression"] = "mad_compression"
    vocab_size: Size = Field(16, ge=3)
    seq_len: int = Field(63, ge=3, le=1 << 20)

    def conflicts(self) -> Conflicts:
        if self.seq_len % 2 == 0:
            yield ("seq_len",), f"must be odd, n symbols, a sign and n places, got {self.seq_len}"

    def vocabulary(self) -> int:
        return self.vocab_size + self.seq_len // 2

    def sample(self, rng: np.random.Generator, rows: int) -> tuple[Rows, Rows]:
        count = self.seq_len // 2
        symbols = rng.integers(0, self.vocab_size - 1, size=(rows, count), dtype=np.int64)
        places = distinct(rng, rows, count, count)
        sign = np.full((rows, 1), self.vocab_size - 1, dtype=np.int64)
        tokens = np.concatenate([symbols, sign, self.vocab_size + places], axis=1)
        asked = np.take_along_axis(symbols, places, axis=1)
        return tokens, np.concatenate([np.full((rows, count + 1), IGNORED, dtype=np.int64), asked], axis=1)

    def chances(self) -> dict[str, float]:
        return {"any symbol": 1 / (self.vocab_size - 1)}


class MADMemorization(Task):
    """mad_memorization: k ? k ? ..., each ? labelled with the value of the key before it, the same in every row.

    Facts to be learnt by the weights: keys (the lower half of the ids) have values (different ids of the upper half)
    that the seed `facts` fixes for training and validation. The sign ? is the last id.

    Shapes: tokens, targets `[rows, seq_len]`, an even length; seq_len / 2 labels per row.
    Cost: O(rows seq_len).
    References: Mechanistic Design and Scaling of Hybrid Architectures (Poli et al., 2024, arXiv 2403.17844).
    [DATA-MAD-D5]
    """

    kind: Literal["mad_memorization"] = "mad_memorization"
    vocab_size: Size = Field(256, ge=3)
    seq_len: int = Field(32, ge=2, le=1 << 20)
    facts: int = Field(12345, ge=0, lt=1 << 63)

    def conflicts(self) -> Conflicts:
        return _check_even(self.seq_len)

    def sample(self, rng: np.random.Generator, rows: int) -> tuple[Rows, Rows]:
        keys = (self.vocab_size - 1) // 2
        values = keys + np.random.Generator(np.random.PCG64(self.facts)).permutation(self.vocab_size - 1 - keys)
        asked = rng.integers(0, keys, size=(rows, self.seq_len // 2), dtype=np.int64)
        tokens = in_turn(asked, np.full_like(asked, self.vocab_size - 1))
        return tokens, in_turn(np.full_like(asked, IGNORED), values[asked])

    def chances(self) -> dict[str, float]:
        return {"any value": 1 / (self.vocab_size - 1 - (self.vocab_size - 1) // 2)}


def _pairs(
    rng: np.random.Generator, shape: tuple[int, int], vocabulary: int, clean: NDArray[np.bool_]
) -> tuple[Rows, Rows]:
    """Tokens `[rows, 2 pairs]` of keys and their values, and their targets. Pairs outside `clean` have no label, and do
    not count as an earlier occurrence. The last key of a row is one of those that occurred before."""
    rows, pairs = shape
    half = vocabulary // 2
    keys = rng.integers(0, half, size=shape, dtype=np.int64)
    values = rng.integers(half, vocabulary, size=(rows, half), dtype=np.int64)
    first = np.zeros(shape, dtype=bool)  # whether a key occurs for the first time
    present = np.zeros((rows, half), dtype=bool)
    for place in range(pairs - 1):
        key = keys[:, place, None]
        first[:, place] = clean[:, place] & ~np.take_along_axis(present, key, axis=1)[:, 0]
        known = np.take_along_axis(present, key, axis=1) | clean[:, place, None]
        np.put_along_axis(present, key, known, axis=1)
    keys[:, -1] = np.argmax(rng.random((rows, half)) * present, axis=1)  # uniform among those seen
    answers = np.take_along_axis(values, keys, axis=1)
    labels = np.where(clean & ~first, answers, IGNORED)
    return in_turn(keys, answers), in_turn(labels, np.full_like(labels, IGNORED))
