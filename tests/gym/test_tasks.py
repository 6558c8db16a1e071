"""Streams: drawn from (seed, index) alone, with the levels that their formulas promise."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hecate.errors import ConfigError, HecateError
from hecate.gym import GymTask, run, tasks
from hecate.gym.tasks import (
    EvenTeacher,
    Facts,
    LinearMap,
    NoisyMap,
    OddTeacher,
    Outliers,
    Overwrite,
    Recall,
    Return,
    Row,
    TwoPaces,
)

ALL = sorted(tasks())


def small(kind: str) -> GymTask:
    return tasks()[kind].model_validate({}).quick()


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.spec("GYM-ROW-D1")
def test_rows_are_functions_of_seed_and_index(kind):
    task = small(kind)
    torch.manual_seed(1)
    found = task.stream(3)
    torch.manual_seed(2)
    wider = task.model_copy(update={"rows": 3}).stream(3)
    assert torch.equal(found.keys, wider.keys[:2]) and torch.equal(found.values, wider.values[:2])
    other = task.stream(4)
    assert not torch.equal(found.keys, other.keys) and not torch.equal(found.keys[0], found.keys[1])
    assert found.keys.norm(dim=-1).sub(1).abs().max() < 1e-5
    assert found.values.shape[:2] == found.keys.shape[:2] and found.written.shape == found.keys.shape[1:2]


@pytest.mark.spec("GYM-ROW-D1")
def test_rows_beyond_the_machine_are_refused_before_they_are_drawn(monkeypatch):
    task = small("linear").model_copy(update={"rows": 1 << 20})
    monkeypatch.setattr("hecate.checks.memory_of", lambda _: 1 << 20)
    with pytest.raises(ConfigError, match="rows: 1,048,576 of task 'linear': .* more than the 1 MiB"):
        task.stream(0)


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.spec("GYM-SCORE-D1")
def test_chance_is_what_answers_without_a_memory_score(kind):
    task = small(kind).model_copy(update={"rows": 40})
    stream = task.stream(0)
    part = next(iter(stream.parts))
    if task.metric == "error":
        assert torch.equal(stream.scores(torch.zeros_like(stream.values), part), torch.ones(40))
    else:
        g = torch.Generator().manual_seed(0)
        guessed = torch.randn(stream.values.shape, generator=g, dtype=torch.float32)
        asked = 40 * int(stream.parts[part].sum())
        chance, scored = task.chance(), float(stream.scores(guessed, part).mean())
        assert abs(scored - chance) < 5 * math.sqrt(chance * (1 - chance) / asked)
    assert float(stream.scores(stream.values, part).mean()) == (0 if task.metric == "error" else 1)


def delta_rule(keys: np.ndarray, values: np.ndarray, lr: float) -> np.ndarray:
    """Squared errors ahead of each write `[B, T]`, in float64."""
    memory, errors = np.zeros((len(keys), keys.shape[2], values.shape[2])), []
    for k, v in zip(keys.swapaxes(0, 1), values.swapaxes(0, 1), strict=True):
        left = v - np.einsum("bd,bdv->bv", k, memory)
        errors.append((left**2).sum(-1))
        memory += lr * k[:, :, None] * left[:, None]
    return np.stack(errors, 1)


@pytest.mark.parametrize(
    "task",
    [LinearMap(rows=600), NoisyMap(rows=60), Outliers(rows=60), Return(rows=400, phase=128)],
    ids=lambda task: task.kind,
)
@pytest.mark.spec("GYM-MAP-D1")
def test_the_delta_rule_is_where_the_formula_says(task):
    stream = task.stream(7)
    scored = next(iter(stream.parts.values())).numpy()
    keys, values = stream.keys.double().numpy(), stream.values.double().numpy()
    rows = delta_rule(keys, values, 1.0)[:, scored].sum(1)
    # A mean over rows of a ratio to the mean energy: the error of both is that of 600, 60 or 400 rows.
    energy = (values[:, scored] ** 2).sum((1, 2))
    found, error = rows.mean() / energy.mean(), (rows - rows.mean() / energy.mean() * energy).std() / energy.mean()
    assert abs(found - task.known()["delta rule, lr 1"]) < 4 * error / math.sqrt(len(rows))


@pytest.mark.spec("GYM-MAP-D1")
def test_every_tenth_value_is_wrong_and_the_right_ones_are_a_map():
    stream = Outliers(rows=2, times=5.0).stream(3)
    assert stream.written.all() and list(stream.parts) == [
        "right ones of the second half",
        "right ones of the first half",
    ]
    right = sum(stream.parts.values()) > 0
    assert right.nonzero().flatten().tolist() == [token for token in range(1024) if token % 10 != 9]
    for keys, values in zip(stream.keys.double(), stream.values.double(), strict=True):
        fitted = keys[right] @ torch.linalg.lstsq(keys[right], values[right]).solution
        assert float((fitted - values[right]).norm()) < 1e-5 * float(values[right].norm())
        assert (values[~right].norm(dim=-1) - 5).abs().max() < 1e-5


@pytest.mark.spec("GYM-MAP-D1")
def test_a_bounded_step_survives_wrong_values():
    best, squared = run(["delta, huber", "delta"], [Outliers(rows=4, length=512)], seeds=1)
    assert best.spread.mean < 0.01 < squared.spread.mean < 0.2


@pytest.mark.parametrize("task", [OddTeacher(rows=6), EvenTeacher(rows=6)], ids=lambda task: task.kind)
@pytest.mark.spec("GYM-MAP-D1")
def test_the_best_linear_map_is_where_the_integral_says(task):
    stream, left = task.stream(7), []
    for keys, values in zip(stream.keys.double().numpy(), stream.values.double().numpy(), strict=True):
        fitted = keys @ np.linalg.solve(keys.T @ keys, keys.T @ values)
        left.append(((fitted - values) ** 2).sum() / (values**2).sum())
        assert abs((values**2).sum(-1).mean() - 1) < 1e-5
        # E f = 0: the mean of T draws is within 5 / sqrt(T) of the values' length.
        assert np.linalg.norm(values.mean(0)) < 5 / math.sqrt(len(values))
    # The fit has D of T degrees, a share of 2e-3; the share left varies by 1 / sqrt(T) of itself a row.
    best = task.known()["best linear map"]
    assert abs(np.mean(left) - best) < (2e-3 + 5 / math.sqrt(6 * 8192)) * best


@pytest.mark.spec("GYM-FLAG-D1")
def test_the_floor_is_the_noise_of_what_is_scored():
    task = NoisyMap(rows=3, noise=0.3)
    stream, scored = task.stream(5), slice(task.length // 2, task.length)
    name = int.from_bytes(__import__("hashlib").sha256(b"noisy").digest()[:4])
    shares = []
    for index in range(3):
        row = task.row(np.random.Generator(np.random.PCG64(np.random.SeedSequence((name, 5, index)))))
        assert np.abs(stream.values[index].numpy() - row.values).max() < 1e-6
        shares.append((row.noise[scored] ** 2).sum() / (row.values[scored] ** 2).sum())
    assert abs(stream.floor - np.mean(shares)) < 1e-12
    # 512 tokens x 16 coordinates of noise: its energy is known to 1 / sqrt(4,096), its share a little worse.
    assert abs(stream.floor - 0.3) < 0.02


@pytest.mark.spec("GYM-RECALL-D1")
def test_pairs_are_written_once_and_asked_after():
    stream = Recall(rows=2, pairs=5).stream(0)
    assert stream.written.tolist() == [True] * 5 + [False] * 5
    assert torch.equal(stream.keys[:, :5], stream.keys[:, 5:]) and torch.equal(stream.values[:, :5], stream.candidates)
    assert stream.parts["all pairs"].tolist() == [False] * 5 + [True] * 5


@pytest.mark.spec("GYM-RECALL-D1")
def test_the_latest_value_counts():
    task = Overwrite(rows=2, keys=3, times=4)
    stream = task.stream(0)
    for row in range(2):
        last = {}
        for token in range(12):
            last[tuple(stream.keys[row, token].tolist())] = stream.values[row, token]
        assert len(last) == 3
        for token in range(12, 15):
            assert torch.equal(stream.values[row, token], last[tuple(stream.keys[row, token].tolist())])
    assert task.known()["any value of the key"] == 1 / 4 and task.chance() == 1 / 12


@pytest.mark.spec("GYM-RECALL-D1")
def test_facts_are_asked_at_their_distances():
    task = Facts(distances=(10, 100), overlap=0.25)
    stream = task.stream(0)
    count = 8
    told, values = stream.keys[:, :count], stream.values[:, :count]
    noise = 0
    places = []
    for token in range(count, stream.keys.shape[1]):
        noise += int(stream.written[token])
        if not stream.written[token]:
            places.append(noise)
    assert places == [10] * count + [100] * count
    asked = ~stream.written
    assert torch.equal(stream.keys[:, asked], told.repeat(1, 2, 1))
    assert torch.equal(stream.values[:, asked], values.repeat(1, 2, 1))
    basis = torch.linalg.qr(told[0].double().mT)[0]
    among = (stream.keys[0, stream.written][count:].double() @ basis).norm(dim=-1)
    assert (among - 0.25).abs().max() < 1e-5  # float32 keys
    assert list(stream.parts) == ["all distances", "after 10", "after 100"]


@pytest.mark.spec("GYM-CHANGE-D1")
def test_the_matrix_changes_with_the_period_and_the_teacher_stays():
    fast = TwoPaces(rows=1, length=512, period=256, fast=0.999).stream(0)
    keys, values = fast.keys[0].double().numpy(), fast.values[0].double().numpy()

    def left(span):
        fitted = keys[span] @ np.linalg.lstsq(keys[span], values[span], rcond=None)[0]
        return ((fitted - values[span]) ** 2).sum() / (values[span] ** 2).sum()

    assert left(slice(0, 256)) < 2e-3 > left(slice(256, 512)) and left(slice(0, 512)) > 0.3
    task = TwoPaces(rows=1, length=4096)
    rng, again = (np.random.default_rng(0) for _ in range(2))
    row = task.row(rng)
    again.standard_normal(row.keys.shape)  # the keys
    slow = task.taught(again, row.keys, 1 - task.fast)
    left = ((row.values - slow) ** 2).sum() / (row.values**2).sum()
    # The product of two maps that know nothing of each other is a mean over 16 matrices of 256 entries.
    assert abs(left - task.known()["the teacher alone"]) < 5 * 2 * math.sqrt(0.3 * 0.7 / 4096)


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        ("linear", {"length": 20}, "length=20"),
        ("facts", {"distances": [100, 10]}, "must rise"),
        ("noisy", {"noise": 1.0}, "noise"),
        ("recall", {"rows": 0}, "rows"),
    ],
)
def test_impossible_tasks_are_refused(kind, fields, said):
    with pytest.raises(ConfigError, match=said):
        tasks()[kind].model_validate(fields)


OWN = {
    "no part": (lambda task, rng: ROW, lambda task: (ALL, {}), "names no part"),
    "another length": (lambda task, rng: ROW, lambda task: (ALL[:5], {"all": ALL}), r"'written' as bool \[8\]"),
    "whole numbers": (lambda task, rng: ROW, lambda task: (ALL.long(), {"all": ALL}), "got torch.int64"),
    "empty": (lambda task, rng: ROW, lambda task: (ALL, {"none": ~ALL}), "part 'none' has no token"),
    "zero": (lambda task, rng: Row(ROW.keys, 0 * ROW.keys), lambda task: (ALL, {"all": ALL}), "values of zero"),
    "nan": (lambda task, rng: Row(ROW.keys, np.nan * ROW.keys), lambda task: (ALL, {"all": ALL}), "must be finite"),
    "candidates": (lambda task, rng: ROW._replace(candidates=ROW.values), lambda task: (ALL, {"all": ALL}), "accuracy"),
    "rows": (
        lambda task, rng: Row(ROW.keys[: rng.integers(2, 8)], ROW.values), lambda task: (ALL, {"all": ALL}), "alike",
    ),
}  # fmt: skip
ALL, ROW = torch.ones(8, dtype=torch.bool), Row(np.ones((8, 4)), np.ones((8, 4)))


@pytest.mark.parametrize(("row", "layout", "said"), OWN.values(), ids=OWN)
@pytest.mark.spec("GYM-ROW-D1")
def test_streams_of_a_task_that_is_not_ours_are_checked(row, layout, said, monkeypatch):
    monkeypatch.setattr(Recall, "row", row)
    monkeypatch.setattr(Recall, "layout", layout)
    monkeypatch.setattr(Recall, "metric", "error")
    with pytest.raises(HecateError, match=said):
        Recall().stream(0)
