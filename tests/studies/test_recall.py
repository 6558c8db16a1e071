"""The study of recall: its sizes, its comparisons and its claims, and what a quick run shows."""

from __future__ import annotations

import pytest
import torch

from studies.recall import (
    JUDGE,
    RATES,
    TASK,
    WIDTH,
    Convolved,
    Mixer,
    Outcome,
    Recall,
    against_sum,
    claims,
    mixers,
    ordered,
    state_bytes,
    trainer_of,
)
from studies.run import progress


@pytest.fixture(autouse=True)
def as_on_the_command_line():
    torch.set_default_dtype(torch.float32)


FEATURES = {
    "identity": lambda d: d,
    "elu": lambda d: d,
    "DPFP-1": lambda d: 2 * d,
    "Taylor": lambda d: 1 + d + d * (d + 1) // 2,
}


def test_states_have_the_sizes_that_they_are_said_to_have():
    sizes = {}
    for mixer in mixers():
        size = state_bytes(trainer_of(mixer, 0, 1, 1e-2).model)
        sizes.setdefault(mixer.name, []).append(size)
        if mixer.memory is None:
            assert size == 2 * 4 * TASK.seq_len * WIDTH
        else:
            phi = mixer.memory.get("feature_map", {})
            d_phi = phi["num_features"] if mixer.phi == "FAVOR+" else FEATURES[mixer.phi](mixer.d_key)
            assert size == 4 * d_phi * (WIDTH + (mixer.rule == "sum"))  # the normaliser is a row
    assert len(sizes) == 11 and all(row == sorted(set(row)) for row in sizes.values())


def test_seeds_draw_models_and_data_anew():
    for mixer in (mixers()[0], mixers()[1]):
        first, same, other = (trainer_of(mixer, seed, 1, 1e-2) for seed in (3, 3, 4))
        models = ([p.detach() for p in t.model.parameters()] for t in (first, same, other))
        own, again, another = models
        assert all(map(torch.equal, own, again))
        drawn = [a for a, b in zip(own, another, strict=True) if not torch.equal(a, b)]
        assert all((a == a.flatten()[0]).all() for a in own if not any(a is b for b in drawn))
        batches = [t.loader.next().tokens for t in (first, same, other)]
        assert torch.equal(batches[0], batches[1]) and not torch.equal(batches[0], batches[2])


def test_attention_sees_the_token_before_and_no_later_one():
    layer = Convolved(torch.Generator().manual_seed(0)).double()
    x = torch.randn(1, 6, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x.requires_grad_()
    y, state = layer(x, None)
    (grad,) = torch.autograd.grad(y[0, 3].sum(), x, retain_graph=True)
    seen = grad[0].abs().sum(-1)
    assert (seen[:4] > 0).all() and (seen[4:] == 0).all()
    (grad,) = torch.autograd.grad(state.keys[0, 3].sum(), x)
    assert grad[0].abs().sum(-1).nonzero().flatten().tolist() == [2, 3]


def outcome(rule: str, phi: str, d: int, size: int, *accuracy: float) -> Outcome:
    return Outcome(Mixer(rule, phi, d, {}), size, 1e-2, list(accuracy))


SUMS = [outcome("sum", "elu", 4, 528, 0.2, 0.3), outcome("sum", "elu", 16, 2112, 0.5, 0.7)]
DELTAS = [outcome("delta", "elu", 4, 512, 0.1, 0.32), outcome("delta", "elu", 16, 2048, 0.9, 0.9)]


def test_order_and_difference():
    assert ordered([*SUMS, *DELTAS]) == (4, 4)  # sizes apart by a normaliser do not count
    worse = outcome("delta", "elu", 32, 4096, 0.6, 0.6)
    assert ordered([*DELTAS, worse]) == (2, 3)
    (small, gap), (large, other) = against_sum([*SUMS, *DELTAS], "delta")
    assert (small, large) == ("elu 4", "elu 16")
    assert gap.mean == pytest.approx(-0.04) and gap.error == pytest.approx(0.06)
    assert other.mean == pytest.approx(0.3) and other.error == pytest.approx(0.1)
    assert against_sum(SUMS, "delta") == []


def test_claims_say_what_does_not_hold():
    size, within, delta = claims([*SUMS, *DELTAS])
    assert "in 4 of 4 pairs" in size and "holds for every one" in within
    assert "in 1 of 2 cases, below by as much in 0" in delta
    worse = outcome("sum", "elu", 32, 4224, 0.4, 0.4)
    assert "does NOT in sum, elu (2 of 3 pairs)" in claims([*SUMS, worse])[1]


def test_the_rate_is_the_better_one_on_a_seed_of_its_own(monkeypatch):
    asked = []

    def accuracy_of(mixer, seed, steps, lr):
        asked.append((seed, lr))
        return (0.9 if (lr == RATES[1]) is (mixer.rule == "delta") else 0.1), 512

    monkeypatch.setattr("studies.recall.accuracy_of", accuracy_of)
    result = Recall().run(False, [0, 1], progress)
    assert all(row[4] == RATES[row[0] == "delta"] and row[-1].mean == 0.9 for row in result.rows)
    assert asked[:4] == [(JUDGE, RATES[0]), (JUDGE, RATES[1]), (0, RATES[0]), (1, RATES[0])]


def quick_run_shows(result):
    """What state and rule are worth; `test_studies` runs it."""
    accuracy = {(row[0], row[2]): row[-1].mean for row in result.rows}
    assert accuracy["delta", 16] > accuracy["delta", 4] + 0.3
    assert accuracy["delta", 16] > accuracy["sum", 16] + 0.05
    assert accuracy["sum", 16] > 3 / TASK.num_pairs  # far above a guess
