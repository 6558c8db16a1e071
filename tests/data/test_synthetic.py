"""Formal languages and MAD's tasks against programs that go token by token."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from hecate.data import (
    IGNORED,
    MQAR,
    Copy,
    MADCompression,
    MADFuzzyRecall,
    MADMemorization,
    MADNoisyRecall,
    MADRecall,
    MADSelectiveCopy,
    ModularCounting,
    Parity,
    Permutations,
    Retrieval,
    stream,
)
from hecate.errors import ConfigError, DataError
from tests.data.test_tasks import rows


@pytest.mark.spec("DATA-FORMAL-D1")
@pytest.mark.parametrize("task", [Parity(seq_len=9), ModularCounting(modulus=5, seq_len=9)])
def test_sums(task):
    modulus = task.vocabulary()
    for tokens, targets in rows(task):
        count = 0
        for token, target in zip(tokens, targets, strict=True):
            count = (count + token) % modulus
            assert target == count


@pytest.mark.spec("DATA-FORMAL-D2")
@pytest.mark.parametrize("degree", [2, 3, 5])
@pytest.mark.parametrize("elements", ["all", "swaps", "generators"])
def test_permutations(degree, elements):
    group = list(permutations(range(degree)))
    drawn = set()
    for tokens, targets in rows(Permutations(degree=degree, elements=elements, seq_len=12)):
        at = tuple(range(degree))
        for token, target in zip(tokens, targets, strict=True):
            at = tuple(group[token][place] for place in at)  # first what was, then this one
            assert group[target] == at
            drawn.add(token)
    moved = {sum(a != b for a, b in enumerate(group[token])) for token in drawn}
    if elements == "generators":  # there and back lie around the identity, and two letters or all move
        assert moved == {2, degree} and len(drawn) == (1 if degree == 2 else 3)
        cycle, back = ([*range(degree)][turn:] + [*range(degree)][:turn] for turn in (1, -1))
        assert {group[token] for token in drawn} == {(1, 0, *range(2, degree)), tuple(cycle), tuple(back)}
        return
    assert moved == {2} if elements == "swaps" else len(drawn) > degree // 2


def test_permutations_are_in_order():
    swap, rest = Permutations(degree=3, seq_len=1).sample(stream(0, "train", 0), 200)
    assert (swap == rest).all()  # a word of one letter is its own product: the identity is id 0


def recalled(tokens, half, used):
    """Labels of a row of pairs, whose tokens from `used` on are noise."""
    known, expected = {}, [IGNORED] * len(tokens)
    for place in range(0, len(tokens), 2):
        key, value = tokens[place : place + 2]
        if key >= used:
            assert value >= used
            continue
        assert key < half <= value < used
        if key in known:
            assert known[key] == value
            expected[place] = value
        known[key] = value
    return expected


@pytest.mark.spec("DATA-MAD-D1")
@pytest.mark.parametrize(("vocab", "length"), [(4, 4), (16, 32), (17, 128)])
def test_recall(vocab, length):
    for tokens, targets in rows(MADRecall(vocab_size=vocab, seq_len=length)):
        assert targets == recalled(tokens, vocab // 2, vocab)
        assert targets[-2] != IGNORED


@pytest.mark.spec("DATA-MAD-D1")
@pytest.mark.parametrize("noise", [0.0, 0.3, 0.9])
def test_noisy_recall(noise):
    task = MADNoisyRecall(vocab_size=20, noise_vocab=8, noise=noise, seq_len=64)
    share = []
    for tokens, targets in rows(task, 200):
        assert targets == recalled(tokens, 6, 12)
        assert targets[-2] != IGNORED and tokens[0] < 6
        share += [token >= 12 for token in tokens[2:-2:2]]
    assert abs(np.mean(share) - noise) <= 5 * np.sqrt(noise * (1 - noise) / len(share))


@pytest.mark.spec("DATA-MAD-D2")
@pytest.mark.parametrize(("vocab", "key", "value", "length"), [(16, 3, 3, 128), (16, 1, 2, 24), (5, 2, 2, 8)])
def test_fuzzy_recall(vocab, key, value, length):
    task, keys = MADFuzzyRecall(vocab_size=vocab, key_size=key, value_size=value, seq_len=length), (vocab - 1) // 2
    sizes = set()
    for tokens, targets in rows(task):
        place = next(t for t, token in enumerate(tokens) if token != vocab - 1)
        expected, known = [IGNORED] * length, {}
        while place < length:
            own = tuple(tokens[place : place + key])
            place += key
            end = next((t for t in range(place, length) if tokens[t] < keys), length)
            answer = tokens[place:end]
            assert len(set(own)) == key and max(own) < keys
            assert 1 <= len(set(answer)) == len(answer) <= value
            if own in known:
                assert known[own] == answer
                expected[place - 1 : end - 1] = answer
            known[own] = answer
            sizes.add(len(answer))
            last, place = place - 1, end
        assert targets == expected and targets[last] != IGNORED
    assert sizes == set(range(1, value + 1))


@pytest.mark.spec("DATA-MAD-D3")
def test_selective_copy():
    for tokens, targets in rows(MADSelectiveCopy(vocab_size=6, symbols=4, seq_len=20)):
        assert tokens.index(5) == 15 and tokens[16:] == [4] * 4
        assert targets == [IGNORED] * 16 + [token for token in tokens[:15] if token != 4]


@pytest.mark.spec("DATA-MAD-D4")
def test_compression():
    for tokens, targets in rows(MADCompression(vocab_size=5, seq_len=13)):
        assert max(tokens[:6]) < 4 and tokens[6] == 4 and sorted(tokens[7:]) == list(range(5, 11))
        assert targets == [IGNORED] * 7 + [tokens[place - 5] for place in tokens[7:]]


@pytest.mark.spec("DATA-MAD-D5")
def test_memorization():
    task, facts = MADMemorization(vocab_size=16, seq_len=8), {}
    for seed in (0, 1):
        for tokens, targets in rows(task, seed=seed):
            assert tokens[1::2] == [15] * 4 and targets[::2] == [IGNORED] * 4
            for key, value in zip(tokens[::2], targets[1::2], strict=True):
                assert key < 7 <= value < 15 and facts.setdefault(key, value) == value
    assert len(set(facts.values())) == len(facts) == 7
    other = task.model_copy(update={"facts": 1}).sample(stream(0, "train", 0), 64)
    assert (other[1] != task.sample(stream(0, "train", 0), 64)[1]).any()


TASKS = [
    Parity(seq_len=8), ModularCounting(seq_len=8), Permutations(degree=3, seq_len=8),
    Permutations(degree=3, elements="swaps", seq_len=8), Permutations(degree=4, elements="generators", seq_len=8),
    Permutations(degree=3, elements="generators", seq_len=8), MADRecall(seq_len=32), MADNoisyRecall(seq_len=32),
    MADFuzzyRecall(seq_len=32), MADSelectiveCopy(symbols=4, seq_len=16), MADCompression(seq_len=15),
    MADMemorization(vocab_size=16), Copy(),
]  # fmt: skip


@pytest.mark.spec("DATA-CHANCE-D1", "DATA-BASE-D2")
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.kind)
def test_a_guess_scores_its_chance(task):
    rng = np.random.default_rng(0)
    tokens, targets = task.sample(stream(0, "validation", 0), 1000)
    again = task.sample(stream(0, "validation", 0), 1000)
    assert (tokens == again[0]).all() and (targets == again[1]).all()
    kept, (chance,) = targets != IGNORED, task.chances().values()
    labels = np.unique(targets[kept])
    if task.kind == "permutations" and task.elements == "swaps":  # at even places the even ones, at odd the odd
        known = [np.unique(targets[:, place]) for place in range(8)]
        assert {len(ids) for ids in known[2:]} == {3} and chance == 1 / 3
        return
    if task.kind == "permutations" and task.degree == 4:  # its cycle is odd, too; few letters take longer to mix
        known = [np.unique(targets[:, place]) for place in range(8)]
        assert {len(ids) for ids in known[6:]} == {12} and chance == 1 / 12
        return
    if task.kind == "mad_memorization":  # seven facts, and eight values that they could have
        labels = np.arange(7, 15)
    assert len(labels) == round(1 / chance)
    guesses = rng.choice(labels, size=targets.shape)
    share = (guesses == targets)[kept].mean()
    assert abs(share - chance) < 5 * np.sqrt(chance * (1 - chance) / kept.sum())


@pytest.mark.parametrize("task", [Copy, MQAR, Retrieval, MADRecall, MADNoisyRecall, MADFuzzyRecall, MADMemorization])
def test_no_rows(task):
    tokens, targets = task().sample(stream(0, "train", 0), 0)
    assert tokens.shape == targets.shape == (0, task().length()) and tokens.dtype == targets.dtype == np.int64


def test_impossible_sizes():
    for kind, fields, sentence in (
        (MQAR, {"num_pairs": 17, "seq_len": 64}, "^num_pairs: .*num_pairs=17.*seq_len >= 68"),
        (MQAR, {"num_pairs": 8, "vocab_size": 17}, "^num_pairs: .*num_pairs=8.*vocab_size >= 18"),
        (MQAR, {"seq_len": 63}, "^seq_len: .*even.*63"),
        (Retrieval, {"num_keys": 4, "queries": 5}, "queries=5 distinct keys cannot be asked with num_keys=4"),
        (MADRecall, {"seq_len": 7}, "seq_len: must be even, pairs are two tokens, got 7"),
        (MADNoisyRecall, {"noise_vocab": 30}, "noise_vocab=30 leaves 2 of vocab_size=32 for keys and values"),
        (MADFuzzyRecall, {"key_size": 8}, "key_size=8 different tokens cannot be drawn from the 7 of vocab_size=16"),
        (MADFuzzyRecall, {"seq_len": 11}, "seq_len: must be at least 12, a pair of key_size=3 and value_size=3 twice"),
        (MADSelectiveCopy, {"symbols": 200}, r"symbols=200 twice and a sign need seq_len >= 401, got 256"),
        (MADCompression, {"seq_len": 8}, "seq_len: must be odd, n symbols, a sign and n places, got 8"),
        (MADMemorization, {"seq_len": 3}, "seq_len: must be even"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            kind(**fields)
    MQAR(num_pairs=16, seq_len=64, vocab_size=34)


def test_another_length():
    assert MQAR().of_length(128).length() == 128 and Copy().of_length(32) == Copy()
    with pytest.raises(ConfigError, match="follows from its fields, got a request for 33"):
        Copy().of_length(33)
    with pytest.raises(DataError, match="sequences of length 64, got a request for 32"):
        MQAR().load().train_batch(0, 0, 1, 32)
