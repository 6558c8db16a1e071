"""The cursor: every window once per epoch, the same on every world, as random as a shuffle."""

from __future__ import annotations

import numpy as np
import pytest

from hecate.data.tokens import epoch_keys, in_lanes, numbers_of, permuted, shuffled


@pytest.mark.spec("DATA-CURSOR-D2")
@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 65, 1000, 4097, 100_003])
def test_a_permutation_of_any_size(size):
    found = permuted(np.arange(size), size, epoch_keys(7, 0))
    assert np.array_equal(np.sort(found), np.arange(size))
    few = np.arange(0, size, 7)
    assert np.array_equal(permuted(few, size, epoch_keys(7, 0)), found[few])


@pytest.mark.spec("DATA-CURSOR-D2")
def test_the_permutation_is_the_one_that_was_promised():
    """Frozen: runs that go on with another version must read the same."""
    assert permuted(np.arange(8), 8, epoch_keys(0, 0)).tolist() == FROZEN
    assert permuted(np.arange(3), 10**12, epoch_keys(1, 2)).tolist() == FROZEN_LARGE


FROZEN = [0, 5, 6, 1, 4, 3, 7, 2]
FROZEN_LARGE = [89418813182, 582838754806, 627860124425]


@pytest.mark.spec("DATA-CURSOR-D2")
def test_it_is_as_random_as_a_shuffle():
    """First places over many keys are uniform, neighbours are independent, one point in size is fixed."""
    size, draws = 1000, 4000
    first = np.array([permuted(np.arange(1), size, epoch_keys(seed, 0))[0] for seed in range(draws)])
    expected = draws / 20
    chi = float(((np.bincount(first // 50, minlength=20) - expected) ** 2 / expected).sum())
    assert chi < 19 + 5 * np.sqrt(2 * 19)  # 19 degrees of freedom, five standard deviations
    p = permuted(np.arange(100_000), 100_000, epoch_keys(3, 0))
    assert abs(np.corrcoef(p[:-1], p[1:])[0, 1]) < 5 / np.sqrt(100_000)
    fixed = [(permuted(np.arange(size), size, epoch_keys(seed, 1)) == np.arange(size)).sum() for seed in range(300)]
    assert abs(np.mean(fixed) - 1) < 5 / np.sqrt(300)  # Poisson of mean 1


@pytest.mark.spec("DATA-CURSOR-D1")
@pytest.mark.parametrize(("world", "micros"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 3), (4, 3)])
def test_every_window_once_per_epoch_on_any_world(world, micros):
    windows, batch, steps = 100, 24, 13  # three epochs, and batches across their borders
    seen = []
    for step in range(steps):
        share = batch // world
        for rank in range(world):
            rows = range(rank * share, (rank + 1) * share)
            part = share // micros
            for first in range(rows.start, rows.stop, part):
                seen += shuffled(numbers_of(step, batch, range(first, first + part)), windows, 5).tolist()
    for epoch in range(3):
        assert sorted(seen[epoch * windows : (epoch + 1) * windows]) == list(range(windows))
    assert seen[:windows] != seen[windows : 2 * windows]
    assert seen == shuffled(np.arange(steps * batch), windows, 5).tolist()
    assert seen != shuffled(np.arange(steps * batch), windows, 6).tolist()


@pytest.mark.spec("DATA-CURSOR-D3")
def test_lanes_go_on_from_step_to_step():
    windows, batch = 37, 4
    lane = windows // batch
    before, epochs = None, []
    for step in range(3 * lane):
        found, anew = in_lanes(step, batch, windows, 1)
        for rank in range(2):
            some, some_anew = in_lanes(step, batch, windows, 1, range(2 * rank, 2 * rank + 2))
            assert np.array_equal(some, found[2 * rank : 2 * rank + 2])
            assert np.array_equal(some_anew, anew[2 * rank : 2 * rank + 2])
        if step % lane == 0:
            assert anew.all()
            epochs.append([])
        else:
            assert np.array_equal(anew, found == 0)
            assert np.array_equal(found[~anew], before[~anew] + 1)  # goes on where it ended
        epochs[-1] += found.tolist()
        before = found
    for read in epochs:
        assert len(set(read)) == len(read) == lane * batch
    assert epochs[0] != epochs[1]
