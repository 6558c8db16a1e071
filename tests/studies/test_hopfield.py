"""The study of associative recall: its memories against loops in numpy, its estimates against
enumeration."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from studies import hopfield, patterns
from studies.against_softmax import parameters

KERNELS = {
    patterns.CLASSICAL: lambda z, d: z,
    patterns.IDENTITY: lambda z, d: z,
    patterns.POLYNOMIALS[0]: lambda z, d: 1 + z + z**2,
    patterns.POLYNOMIALS[1]: lambda z, d: 1 + z + z**2 + z**3,
    patterns.SOFTMAX[0]: lambda z, d: np.exp(0.25 * z),
    patterns.SOFTMAX[2]: lambda z, d: np.exp(4 * (z - d)),
}


def share(memory, d, count, seed):
    """What `recovered` finds for one number of patterns, from the kernel, pattern by pattern."""
    g = torch.Generator().manual_seed(seed)
    stored = patterns.drawn(count, d, g)
    wanted, noisy = patterns.queries(stored, g)
    x, y = stored.double().numpy(), noisy.double().numpy()
    values = np.zeros_like(y)
    for i, query in enumerate(y):
        for pattern in x:
            values[i] += KERNELS[memory](pattern @ query, d) * pattern
    if memory is patterns.CLASSICAL:
        values -= count * y
    return (np.sign(values) == wanted.numpy()).all(1).mean()


@pytest.mark.parametrize("memory", KERNELS, ids=lambda memory: memory.name)
def test_recall_against_loops(memory):
    counts = [3, 7, 12]
    found = [patterns.recovered(memory, 12, [count], 5)[0] for count in counts]
    assert found == pytest.approx([share(memory, 12, count, 5) for count in counts], abs=1e-6)
    assert any(value < 1 for value in found) or memory in patterns.SOFTMAX


def test_a_growing_matrix_holds_what_it_held():
    """Counts on the way do not change the last state, only the flips."""
    for memory in (patterns.IDENTITY, patterns.SOFTMAX[0]):
        g = torch.Generator().manual_seed(0)
        stored = patterns.drawn(700, 20, g)
        noisy = patterns.queries(stored, g)[1]
        make = patterns._similar if memory.phi is None else patterns._matrix
        seed = () if memory.phi is None else (0,)
        once, often = (make(memory, stored, *seed) for _ in range(2))
        for count in (1, 2, 600):
            often(noisy, count)
        torch.testing.assert_close(once(noisy, 700), often(noisy, 700))


def test_favor_reads_as_its_features_say():
    memory = patterns.favor(32, 0.1)
    g = torch.Generator().manual_seed(1)
    stored = patterns.drawn(9, 10, g)
    noisy = patterns.queries(stored, g)[1]
    w = parameters(memory.phi, 10, 1, torch.float32)["frozen"]["w"][0].double().numpy()
    root = math.sqrt(0.1)
    phi = [np.exp(root * z.double().numpy() @ w - 0.5) / math.sqrt(32) for z in (stored, noisy)]
    expected = phi[1] @ phi[0].T @ stored.double().numpy()
    found = patterns._matrix(memory, stored, 1)(noisy, 9)
    np.testing.assert_allclose(found.numpy(), expected, rtol=2e-5, atol=2e-5)
    assert memory.numbers(10) == 320 and memory.is_random


def test_patterns_and_queries():
    g = torch.Generator().manual_seed(0)
    stored = patterns.drawn(1000, 30, g)
    assert set(stored.unique().tolist()) == {-1.0, 1.0} and stored.mean().abs() < 0.03
    wanted, noisy = patterns.queries(stored[:3], g)
    assert torch.equal(wanted[3:6], stored[:3]) and len(wanted) == patterns.QUERIES
    assert ((wanted != noisy).sum(1) == 3).all()
    assert (wanted != noisy).float().mean(0).std() < 0.05  # no bit is preferred
    assert [patterns.flips(d) for d in (4, 16, 64)] == [1, 2, 6]
    assert patterns.grid(16) == [1, 2, 3, 4, 6, 8, 11, 16]


def test_capacity():
    counts = [1, 4, 16, 64]
    assert patterns.capacity(counts, [1, 1, 0, 0]) == pytest.approx(8)  # half way, on a log scale
    assert patterns.capacity(counts, [1, 0.5, 0.4, 0]) == 4
    assert patterns.capacity(counts, [1, 1, 1, 0.75]) == math.inf
    assert patterns.capacity(counts, [0.4, 0.3, 0.2, 0.1]) == 1


def moments(kernel, d, own):
    """Mean and variance of what one random pattern adds to a bit, towards the query's bit."""
    values = []
    for signs in itertools.product((-1, 1), repeat=d):
        overlap = sum(signs) if own else sum(signs[1:])
        values.append(signs[0] * kernel(overlap))  # the query is all ones
    return np.mean(values), np.var(values)


@pytest.mark.parametrize("own", [True, False])
def test_expected_recall_against_enumeration(own):
    d, count = 10, 4
    kernel = (lambda z: z**3 + z) if own else (lambda z: z)
    pull, variance = moments(kernel, d, own)
    signal, noise = kernel(d - 2), math.sqrt((count - 1) * variance)
    good, bad = (0.5 * math.erfc(-(signal + sign * (count - 1) * pull) / noise / math.sqrt(2)) for sign in (1, -1))
    found = patterns.expected(kernel, d, count, own)
    assert found == pytest.approx(good ** (d - 1) * bad, rel=1e-9)
    assert (pull == 0) is not own


def test_expected_capacities_are_near_the_measured():
    for memory in (patterns.IDENTITY, *patterns.POLYNOMIALS):
        counts = patterns.grid(512)
        found = [patterns.capacity(counts, patterns.recovered(memory, 32, counts, s)) for s in (0, 1)]
        hoped = patterns.expected_capacity(memory, 32)
        # Normal noise is an approximation; the measured are within a fifth of it.
        assert np.mean(found) == pytest.approx(hoped, rel=0.2)
    assert patterns.expected_capacity(patterns.SOFTMAX[0], 32) is None
    assert patterns.expected_capacity(patterns.favor(64, 0.1), 32) is None


def test_softmax_is_limited_by_the_nearest_pattern():
    ball = 1 + 16 + 16 * 15 // 2  # patterns at most 2 flips away
    assert patterns.nearest(16) == pytest.approx(1 + math.log(0.5) / math.log(1 - ball / 2**16))
    counts = patterns.grid(2**10)
    found = [patterns.capacity(counts, patterns.recovered(patterns.SOFTMAX[2], 16, counts, s)) for s in (0, 1)]
    assert np.mean(found) == pytest.approx(patterns.nearest(16), rel=0.2)


def test_the_order_of_capacities():
    """More features hold more: identity < degree 2 < degree 3 < softmax, at d = 32."""
    counts = patterns.grid(512)
    found = [
        patterns.capacity(counts, patterns.recovered(memory, 32, counts, 0))
        for memory in (patterns.CLASSICAL, *patterns.POLYNOMIALS, patterns.SOFTMAX[2])
    ]
    assert found == sorted(found) and found[-1] == math.inf and 5 * found[0] < found[1]


def test_growth_is_a_slope():
    half = {16: [1.0, 0.5, 0.0, 0.0], 32: [1.0, 1.0, 0.5, 0.0]}  # capacities 4 and 16
    found = patterns.Outcome(patterns.IDENTITY, [1, 4, 16, 64], {d: [half[d]] * 2 for d in half})
    assert found.capacities(32) == [16, 16] and found.reached() == [16, 32]
    assert patterns.growth(found, math.log) == pytest.approx([2, 2])
    assert patterns.growth(found, float) == pytest.approx([2 / 16, 2 / 16])
    ratio = patterns.expected_capacity(found.memory, 32) / patterns.expected_capacity(found.memory, 16)
    assert patterns.expected_growth(found) == pytest.approx(math.log2(ratio))
    endless = found._replace(shares={16: [half[16]], 32: [[1.0] * 4]})
    assert endless.reached() == [16] and patterns.growth(endless, math.log) is None
    assert hopfield._cell(endless, 32) == ">= 64" and hopfield._cell(endless, 48) is None
