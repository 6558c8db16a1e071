"""The study of drift: its memories against a loop by hand, and what a quick run must show."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from studies import drift
from studies.drift import (
    CHUNKS,
    KINDS,
    LOST,
    MOMENTUM,
    PAIRS,
    QUICK,
    SHOWN,
    TOKENS,
    WIDTH,
    World,
    answers,
    apart,
    curvature,
    draw_world,
    initial,
)
from studies.run import progress
from tests.reference.memory import Rule, predict, scan

SEEDS = [3, 4]


@pytest.fixture(autouse=True)
def as_on_the_command_line():
    torch.set_default_dtype(torch.float32)


def double(world: World) -> World:
    return World(*(part.double() if part.is_floating_point() else part for part in world))


@pytest.mark.parametrize("chunk", [1, 4, 64])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_memories_by_hand(kind, chunk: int):
    world, start = double(draw_world(SEEDS)), initial(kind, SEEDS)
    start = {name: weight.double() for name, weight in start.items()}
    lr, retain = kind.lrs[1], 0.97
    got = answers(kind, chunk, kind.gates(lr, retain), world, start)
    rule = Rule(decay=True, momentum=kind.algorithm == "momentum", chunk=chunk)
    for seed in range(2):
        k, v = world.k[seed, :, 0].numpy(), world.v[seed, :, 0].numpy()
        weights = [weight[seed, 0].numpy() for weight in start.values()]
        gates = (np.full(TOKENS, gate) for gate in (lr, retain, MOMENTUM))
        y, state = scan(rule, k, k, v, *gates, weights)
        np.testing.assert_allclose(got.y[seed].numpy(), y, rtol=1e-8, atol=1e-11)
        said = np.array([predict(rule, state.weights, key)[-1] for key in world.keys[seed].numpy()])
        right = np.argmax(said @ world.code[seed].numpy().T, 1) == world.values[seed].numpy()
        assert got.recalled[seed].item() == pytest.approx(right.mean(), abs=1e-6)


def test_the_world_writes_its_pairs():
    world = draw_world(SEEDS)
    again = draw_world([4])
    assert all(torch.equal(a[1], b[0]) for a, b in zip(world, again, strict=True))
    assert not torch.equal(world.keys[0], world.keys[1])
    for seed in range(2):
        at = (world.k[seed] == world.keys[seed]).all(-1).int().argmax(1)
        assert torch.equal(world.k[seed, :, 0], world.keys[seed, at])
        assert torch.equal(world.v[seed, :, 0], world.code[seed, world.values[seed, at]])
        assert len(set(at.tolist())) == PAIRS


def test_distance():
    exact = torch.tensor([[[3.0, 0.0]], [[1.0, 0.0]], [[1.0, 0.0]], [[1.0, 0.0]]])
    y = torch.tensor([[[3.0, 1.5]], [[1.0, 0.0]], [[500.0, 0.0]], [[math.nan, 0.0]]])
    assert apart(y, exact).tolist() == [0.5, 0.0, LOST, LOST]


def test_curvature_is_the_largest_of_all_chunks():
    k = draw_world(SEEDS).k.double()
    wanted = max(
        np.linalg.eigvalsh(part.T @ part)[-1] for row in k[:, :, 0].numpy() for part in row.reshape(-1, 64, WIDTH)
    )
    assert curvature(k, 64) == pytest.approx(wanted)
    assert curvature(k, 1) == pytest.approx(1)  # float32 keys of unit length


def test_a_step_beyond_two_over_curvature_overshoots():
    """One chunk of one key, C times: the error of its memory is multiplied by 1 - lr C."""
    for lr, grows in ((0.02, False), (0.04, True)):
        world = draw_world([0])
        key, value = world.k[:, :1], world.v[:, :1]
        same = world._replace(k=key.expand_as(world.k), v=value.expand_as(world.v))
        kind = KINDS[0]
        y = answers(kind, 64, kind.gates(lr, 1.0), same, initial(kind, [0])).y
        off = (y[0, 63::64] - value[0, 0]).norm(dim=-1)
        assert bool(off[-1] > off[0]) is grows
        assert (lr * curvature(same.k, 64) > 2) is grows


def test_the_quick_run_shows_drift_and_its_cost(monkeypatch):
    monkeypatch.setattr(drift, "_costs", lambda kind, chunks, rounds: ([1.0] * 4, [4.0, 3.0, 2.0, 1.0]))
    result = drift.Drift().run(True, [0, 1], progress)
    assert set(SHOWN) < set(QUICK) < set(CHUNKS)
    for row in result.rows:
        name, lr, retain, four, sixteen, many, exact, *rest = row
        rest, times = rest[:3], rest[4:]
        assert 0 < four.mean < sixteen.mean < many.mean
        assert sixteen.mean < 0.5
        weak = lr == next(kind for kind in KINDS if kind.name == name).lrs[0]
        if weak:
            assert many.mean < 0.3 and abs(rest[-1].mean - exact.mean) < 0.15
        if retain == 1 and lr == next(k for k in KINDS if k.name == name).lrs[2]:
            assert many.mean > 3 and rest[-1].mean < 0.3 < 0.9 < exact.mean
        assert times == [round(1 - QUICK.index(c) / 4, 2) for c in SHOWN]
