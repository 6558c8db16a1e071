"""Every row of every task obeys its definition, and draws have the stated law."""

from __future__ import annotations

import copy
import hashlib
import pickle
from itertools import chain
from typing import Literal

import numpy as np
import pytest
import torch
from pydantic import Field

from hecate.data import IGNORED, MQAR, Copy, DataConfig, Loader, Retrieval, Task, TaskSource, stream
from hecate.errors import ConfigError, DataError
from hecate.train import Trainer, load_experiment
from hecate.train.catalogue import catalogue


def rows(task, count=64, seed=0):
    batch = task.load().train_batch(seed, 0, count, task.length())
    assert batch.tokens.dtype == batch.targets.dtype == torch.int64
    assert batch.tokens.shape == batch.targets.shape == (count, task.length())
    assert int(batch.tokens.min()) >= 0 and int(batch.tokens.max()) < task.vocabulary()
    return zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True)


@pytest.mark.spec("DATA-MQAR-D1")
@pytest.mark.parametrize("filler", [True, False])
@pytest.mark.parametrize(("vocab", "pairs", "length"), [(12, 2, 16), (16, 7, 28), (17, 4, 64), (256, 8, 64)])
def test_mqar_rows(vocab, pairs, length, filler):
    task = MQAR(vocab_size=vocab, num_pairs=pairs, seq_len=length, random_filler=filler)
    for tokens, targets in rows(task):
        keys, values = tokens[0 : 2 * pairs : 2], tokens[1 : 2 * pairs : 2]
        assert len(set(keys)) == len(set(values)) == pairs
        assert all(1 <= key < vocab // 2 for key in keys)
        assert all(vocab // 2 <= value < vocab for value in values)
        asked = [t for t in range(length) if targets[t] != IGNORED]
        assert all(t >= 2 * pairs and t % 2 == 0 for t in asked)
        assert sorted(tokens[t] for t in asked) == sorted(keys)  # each key exactly once
        assert all(targets[t] == values[keys.index(tokens[t])] for t in asked)
        if not filler:
            rest = [t for t in range(2 * pairs, length) if t not in asked]
            assert all(tokens[t] == 0 for t in rest)


@pytest.mark.spec("DATA-MQAR-D2")
def test_mqar_gaps_follow_the_power_law_drawn_one_after_the_other():
    task = MQAR(vocab_size=64, num_pairs=2, seq_len=16, power=0.3)
    slots, count = 16 // 2 - 2, 40_000
    gaps = task._gaps(stream(0, "train", 0), count)
    p = np.array([g ** (0.3 - 1) for g in range(1, slots + 1)])
    p /= p.sum()
    second = np.array([sum(p[i] * p[j] / (1 - p[i]) for i in range(slots) if i != j) for j in range(slots)])
    for column, expected in ((0, p), (1, second)):
        seen = np.bincount(gaps[:, column], minlength=slots) / count
        # five standard deviations of a binomial share, in each of twelve cells
        assert np.all(np.abs(seen - expected) < 5 * np.sqrt(expected * (1 - expected) / count))
    assert np.all(gaps[:, 0] != gaps[:, 1])


@pytest.mark.spec("DATA-MQAR-D1")
def test_mqar_keys_and_values_are_uniform():
    task = MQAR(vocab_size=20, num_pairs=3, seq_len=12)
    tokens = task.load().train_batch(1, 0, 20_000, 12).tokens.numpy()
    for column, low, size in ((0, 1, 9), (2, 1, 9), (4, 1, 9), (1, 10, 10), (5, 10, 10)):
        seen = np.bincount(tokens[:, column] - low, minlength=size) / 20_000
        assert len(seen) == size
        assert np.all(np.abs(seen - 1 / size) < 5 * np.sqrt((1 - 1 / size) / size / 20_000))


@pytest.mark.spec("DATA-COPY-D1")
def test_copy_rows():
    task = Copy(vocab_size=5, symbols=7)
    seen = set()
    for tokens, targets in rows(task):
        assert tokens[7] == 0 and all(1 <= t <= 4 for t in tokens[:7])
        assert tokens[8:] == tokens[:6]
        assert targets == [IGNORED] * 7 + tokens[:7]
        seen |= set(tokens[:7])
    assert seen == {1, 2, 3, 4}


@pytest.mark.spec("DATA-RETRIEVAL-D1")
@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize(("size", "queries"), [(1, 1), (4, 1), (4, 4), (9, 3)])
def test_retrieval_rows(size, queries, replacement):
    task = Retrieval(num_keys=size, replacement=replacement, queries=queries)
    pairs = 2 * size if replacement else size
    overwritten = 0
    for tokens, targets in rows(task, 200):
        keys, values = tokens[0 : 2 * pairs : 2], tokens[1 : 2 * pairs : 2]
        assert all(1 <= key <= size for key in keys)
        assert all(size < value <= 2 * size for value in values)
        if not replacement:
            assert len(set(keys)) == len(set(values)) == size
        memory = dict(zip(keys, values, strict=True))  # a later value replaces an earlier one
        overwritten += any(memory[k] != v for k, v in zip(keys, values, strict=True))
        assert targets[: 2 * pairs] == [IGNORED] * (2 * pairs)
        asked = list(zip(tokens[2 * pairs :], targets[2 * pairs :], strict=True))
        real = [key for key, label in asked if label != IGNORED]
        assert len(real) == len(set(real)) == min(queries, len(memory))
        assert all(label == memory[key] for key, label in asked if label != IGNORED)
        assert all(key == 0 for key, label in asked if label == IGNORED)
    assert (overwritten > 0) == (replacement and size > 1)


@pytest.mark.spec("DATA-RETRIEVAL-D1")
def test_retrieval_asks_present_keys_uniformly():
    task = Retrieval(num_keys=3, replacement=True)
    count = 60_000
    tokens = task.load().train_batch(0, 0, count, task.length()).tokens.numpy()
    keys, query = tokens[:, 0:12:2], tokens[:, 12]
    two = (keys[:, :, None] == np.arange(1, 4)).sum(1)  # occurrences of each key
    rare = two.min(1) == 1
    chosen = np.take_along_axis(two, query[:, None] - 1, 1)[:, 0]
    only = rare & ((two == 1).sum(1) == 1)  # exactly one key occurs once, the others more often
    share = (chosen[only] == 1).mean()
    assert abs(share - 1 / 3) < 5 * np.sqrt(2 / 9 / only.sum())
    everyone = two.min(1) > 0
    for key in (1, 2, 3):
        share = (query[everyone] == key).mean()
        assert abs(share - 1 / 3) < 5 * np.sqrt(2 / 9 / everyone.sum())


TASKS = [MQAR(), Copy(), Retrieval(num_keys=5, queries=2, replacement=True)]


@pytest.mark.spec("DATA-BASE-D1", "DATA-LOADER-D1")
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.kind)
def test_batches_are_a_function_of_seed_and_step(task):
    source, length = task.load(), task.length()
    one = source.train_batch(3, 7, 4, length)
    source.train_batch(3, 8, 4, length)
    torch.rand(3)
    np.random.default_rng(0).random(3)
    again = task.load().train_batch(3, 7, 4, length)
    assert torch.equal(one.tokens, again.tokens) and torch.equal(one.targets, again.targets)
    for seed, step in ((4, 7), (3, 8)):
        assert not torch.equal(one.tokens, source.train_batch(seed, step, 4, length).tokens)


@pytest.mark.spec("DATA-BASE-D1")
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.kind)
def test_examples_come_once_an_epoch_in_an_order_of_its_own(task):
    few, length = task.model_copy(update={"examples": 5}), task.length()

    def drawn(source, seed, steps, size=3):
        batches = [source.train_batch(seed, step, size, length) for step in steps]
        return [torch.cat(pair, 1).tolist() for batch in batches for pair in [(batch.tokens, batch.targets)]]

    found = list(chain(*drawn(few.load(), 3, range(5))))  # 15 rows: 3 epochs, whose borders lie within batches
    own = torch.cat([torch.from_numpy(part) for part in task.sample(stream(3, "train", 0), 5)], 1).tolist()
    epochs = [[own.index(row) for row in found[first : first + 5]] for first in (0, 5, 10)]
    assert [sorted(epoch) for epoch in epochs] == 3 * [[0, 1, 2, 3, 4]] and epochs[0] != epochs[1]
    assert drawn(few.load(), 3, [4]) == [found[12:]]  # a step needs none of those before it
    assert drawn(few.load(), 3, range(3), 5) == [found[:5], found[5:10], found[10:]]  # whatever the batch
    source = few.load()
    assert drawn(source, 4, [0]) != drawn(source, 3, [0]) == [found[:3]]
    part = few.load().train_batch(3, 1, 3, length, range(1, 3))
    assert torch.cat([part.tokens, part.targets], 1).tolist() == found[4:6]
    for one, other in zip(*(t.load().validation_batches(4, length, 2) for t in (few, task)), strict=True):
        assert torch.equal(one.tokens, other.tokens)


@pytest.mark.spec("DATA-BASE-D1")
def test_the_order_of_an_epoch_is_drawn_once(monkeypatch):
    asked = []
    monkeypatch.setattr("hecate.data.base.stream", lambda *which: (asked.append(which), stream(*which))[1])
    source, task = Copy(examples=50).load(), Copy()
    for step in range(20):
        source.train_batch(3, step, 8, task.length())
    assert asked == [(3, "train", number) for number in range(5)]  # the examples, then four epochs
    batch = source.train_batch(4, 0, 8, task.length())
    assert torch.equal(batch.tokens, Copy(examples=50).load().train_batch(4, 0, 8, task.length()).tokens)


def test_examples_beyond_the_machine_are_refused_before_they_are_drawn(monkeypatch):
    monkeypatch.setattr(Copy, "sample", lambda *_: pytest.fail("drawn"))
    monkeypatch.setattr("hecate.checks.memory_of", lambda _: 1 << 30)
    with pytest.raises(
        ConfigError, match=r"examples: 16,777,216 of task 'copy': .* more than the 1 GiB .* data.examples"
    ):
        Copy(examples=1 << 24).load()


class Noted(TaskSource):
    """A source of a user's, with an argument of its own."""

    def __init__(self, task: Task, note: str) -> None:
        super().__init__(task)
        self.note, self.fingerprint = note, self.fingerprint + note


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda source: pickle.loads(pickle.dumps(source))])
def test_a_copy_of_a_source_keeps_all_that_it_had(copied):
    source = Noted(Copy(examples=5), "seen")
    source.train_batch(0, 0, 4, 32)
    again = copied(source)
    assert type(again) is Noted and (again.note, again.fingerprint) == (source.note, source.fingerprint)
    assert torch.equal(again.train_batch(1, 2, 4, 32).tokens, source.train_batch(1, 2, 4, 32).tokens)


def test_without_examples_a_fingerprint_is_what_it_was():
    old = '{"kind":"copy","vocab_size":32,"symbols":16}'
    assert Copy().load().fingerprint == hashlib.sha256(old.encode()).hexdigest()
    assert Copy(examples=9).load().fingerprint != Copy(examples=8).load().fingerprint != Copy().load().fingerprint


@pytest.mark.spec("DATA-LOADER-D1")
def test_a_cursor_of_other_data_is_refused():
    state = Loader(Copy().load(), seed=0, batch_size=2, seq_len=32).state_dict()
    for other in (
        Loader(Copy().load(), seed=1, batch_size=2, seq_len=32),
        Loader(Copy().load(), seed=0, batch_size=3, seq_len=32),
        Loader(Copy(vocab_size=9).load(), seed=0, batch_size=2, seq_len=32),
    ):
        with pytest.raises(DataError, match="the saved data cursor has"):
            other.load_state_dict(state)


@pytest.mark.spec("DATA-BASE-D2")
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.kind)
def test_validation_is_fixed_and_apart_from_training(task):
    source, length = task.load(), task.length()
    first = list(source.validation_batches(8, length, 3))
    again = list(source.validation_batches(8, length, 3))
    assert len(first) == 3
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a.tokens, b.tokens) and torch.equal(a.targets, b.targets)
    seen = {tuple(r) for s in (0, 1) for r in source.train_batch(s, 0, 8, length).tokens.tolist()}
    assert not seen & {tuple(row) for batch in first for row in batch.tokens.tolist()}


@pytest.mark.spec("DATA-CHANCE-D1")
def test_the_chance_of_mqar_is_that_of_a_value_of_the_row():
    rng, task = np.random.default_rng(0), MQAR(num_pairs=4)
    tokens, targets = task.sample(stream(0, "train", 0), 4000)
    labelled = targets != IGNORED
    guesses = np.take_along_axis(tokens, 1 + 2 * rng.integers(0, 4, tokens.shape), 1)
    share, chance = (guesses == targets)[labelled].mean(), task.chances()["a value of the row"]
    assert abs(share - chance) < 5 * np.sqrt(chance * (1 - chance) / labelled.sum())


def test_a_task_of_your_own_is_one_class(monkeypatch, tmp_path):
    monkeypatch.setattr(DataConfig, "_registry", dict(DataConfig._registry))

    class Echo(Task):
        """echo: a b, where b is a."""

        kind: Literal["echo"] = "echo"
        symbols: int = Field(4, ge=2)

        def vocabulary(self):
            return self.symbols

        def length(self):
            return 3

        def sample(self, rng, rows):
            tokens = np.repeat(rng.integers(0, self.symbols, size=(rows, 1)), 3, axis=1)
            return tokens, np.where(np.arange(3) < 2, IGNORED, tokens)

        def chances(self):
            return {"any": 1 / self.symbols}

    (tmp_path / "echo.yaml").write_text("data: {kind: echo, symbols: 6}\nmodel: {d_model: 8, layers: 1, heads: 2}\n")
    config = load_experiment(tmp_path / "echo.yaml", ["budget.batch_size=2"])
    trainer = Trainer(config)
    assert trainer.train_step().tokens == 6 and trainer.baselines() == {"any": 1 / 6}
    assert "echo" in [row[0] for row in catalogue("data")[1]]
    with pytest.raises(ConfigError, match=r"data.symbols: must be >= 2, got 1  \[--set symbols=1\]"):
        load_experiment(tmp_path / "echo.yaml", ["symbols=1"])
