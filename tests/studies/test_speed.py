"""speed and decode: what is timed is what it says, and crossings are where ratios pass 1."""

from __future__ import annotations

import pytest
import torch

from studies.costs.harness import cpu_times, forward_backward
from studies.speed import EPS, HEADS, LONGEST, NAIVE, WAYS, WIDTH, contenders, crossover, draw_inputs, ratio
from studies.study import Spread

pytestmark = pytest.mark.usefixtures("float32")


def by_formula(q, k, v, features, causal):
    """Every weight of every pair, in float64: relu(q W).relu(k W) or exp(q.k / sqrt(d))."""
    q, k, v = (x[0, 0].double() for x in (q, k, v))
    if features is None:
        weights = (q @ k.T / q.shape[-1] ** 0.5).exp()
    else:
        weights = features(q) @ features(k).T
    if causal:
        weights = weights.tril()
    return weights @ v / (weights.sum(-1, keepdim=True) + (EPS if features is not None else 0))


MEMORIES = ("gated delta, causal", "titans_linear, causal")


@pytest.mark.parametrize("name", [name for name in contenders(0) if name not in MEMORIES])
def test_contenders_compute_what_they_are_called(name):
    inputs = draw_inputs(37, 5)
    side = contenders(0)[name]
    features = None
    if name.startswith("ReLU"):
        features = lambda x: x.clamp(min=0)  # noqa: E731
    elif name.startswith("266"):
        drawn = next(c for n, c in contenders(0).items() if n == "266 ReLU features")
        feature_map, params = drawn.args
        w = params["frozen"]["w"][0].double()

        def features(x):
            return ((x @ w).clamp(min=0) + feature_map.kernel_epsilon) / 266**0.5

    expected = by_formula(*inputs, features, "causal" in name)
    got = side(*inputs)[0, 0].double()
    # float32 sums of 37 terms; a causal ReLU read may rest on few small weights.
    assert (got - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.parametrize("name", MEMORIES)
def test_memories_write_and_read_token_by_token(name):
    """M = retain M - S, S = momentum S + lr (M k - v) k^T, which gated delta writes to what it has decayed."""
    q, k, v = (x[0, 0].double() for x in draw_inputs(37, 5))
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    lr, retain, momentum = (v[:, :3].sigmoid() * torch.tensor([0.1, 0.1, 0.9])).unbind(-1)
    memory, velocity = torch.zeros(2, 64, 64, dtype=torch.float64)
    for t in range(37):
        kept = (0.9 + retain[t]) * memory
        error = (kept if name.startswith("gated") else memory) @ k[t] - v[t]
        velocity = lr[t] * torch.outer(error, k[t]) + (momentum[t] * velocity if name.startswith("titans") else 0)
        memory = kept - velocity
        expected = memory @ q[t]
    got = contenders(0)[name](*draw_inputs(37, 5))[0, 0, -1].double()
    assert (got - expected).norm() < 1e-4 * expected.norm()


def test_the_naive_form_stops_before_its_scores_fill_the_memory():
    assert set(LONGEST) <= set(contenders(0))
    assert {name for name, longest in LONGEST.items() if longest == NAIVE} == {
        "naive softmax", "naive softmax, causal",
    }  # fmt: skip


def test_a_call_with_backward_returns_every_gradient():
    inputs = draw_inputs(16, 0)
    _, *got = forward_backward(contenders(0)["ReLU"], inputs)()
    assert [g.shape for g in got] == [x.shape for x in inputs]
    assert all(g.abs().sum() > 0 for g in got) and not any(x.requires_grad for x in inputs)


def test_ratios_are_theirs_over_ours_seed_by_seed():
    taken = {("a", "forward", 8): [2.0, 6.0], ("b", "forward", 8): [1.0, 2.0]}
    assert ratio(taken, "a", "b", "forward", 8) == Spread.of([2.0, 3.0])
    assert ratio(taken, "a", "b", "forward", 16) is None


def test_a_crossover_is_where_the_ratio_passes_one_for_good():
    def taken(*ratios):
        lengths = [2**i for i in range(len(ratios))]
        sides = {"a": list(ratios), "b": [1.0] * len(ratios)}
        return {(s, "forward", n): [t] for s in sides for n, t in zip(lengths, sides[s], strict=True)}, lengths

    def found(*ratios):
        given, lengths = taken(*ratios)
        return crossover(given, "a", "b", "forward", lengths)

    assert found(2.0, 3.0, 4.0) == "N = 1 or less on"
    assert found(0.5, 0.6, 0.7) == "beyond N = 4"
    assert found(0.1, 0.25, 0.5, 2.0) == "N = 6 on"  # halfway between 4 and 8 in logarithms
    assert found(0.5, 2.0, 0.5, 2.0) == "N = 6 on"  # not the first time


def test_every_run_has_a_time_per_round():
    order = []
    runs = {name: (lambda name=name: order.append(name)) for name in "ab"}
    times = cpu_times(runs, rounds=3)
    assert list(times) == ["a", "b"] and all(t.shape == (3,) for t in times.values())
    turns = "".join(name for i, name in enumerate(order) if name != order[i - 1] or not i)
    assert turns == "ab" + 3 * "ab"  # to warm up and count, then in turn


@pytest.mark.parametrize("name", WAYS)
def test_a_step_leaves_the_state_it_started_from(name):
    sizes = [WAYS[name](context, 0)[1] for context in (16, 48)]
    if "cache" in name:
        assert sizes == [2 * HEADS * WIDTH * n * 4 for n in (16, 48)]
    else:
        assert sizes[0] == sizes[1] > HEADS * WIDTH * WIDTH * 4 - 1
    run, _ = WAYS[name](16, 0)
    run()
