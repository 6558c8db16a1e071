"""Studies that train small layers: what is judged, what is chosen, and that contenders are what they are called."""

from __future__ import annotations

from types import SimpleNamespace as Namespace

import numpy as np
import pytest
import torch

from hecate.rule import MemoryConfig
from studies import layers, phi, recall, words
from studies.layers import best_rate, judged
from studies.run import progress


@pytest.fixture(autouse=True)
def as_on_the_command_line():
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(("name", "low", "high"), [("delta, lr to 2", 0.99, 1.0), ("delta, lr to 1", 0.3, 0.8)])
def test_parity_needs_steps_beyond_one(name, low, high):
    """A write with lr up to 1 never turns a sign (Grazzi et al., 2024)."""
    chosen = next(c for c in words.contenders() if c.name == name)
    trainer = layers.trained(chosen.model, words.at("parity", 24), 0, 1e-2, 120)
    assert low <= judged(trainer, words.at("parity", 48), 0.5) <= high


class Answers(torch.nn.Module):
    """Answers every key by the value that followed it among the first pairs."""

    def forward(self, tokens):
        logits = torch.zeros(*tokens.shape, 64)
        for row, written in enumerate(tokens[:, :8].view(-1, 4, 2)):
            for key, value in written:
                logits[row, tokens[row] == key, value] = 1.0
        return logits, None


def test_a_pair_is_found_again_behind_nothing():
    """A memory that answers every key by its value is right at any length, and one that does not is not."""
    task = recall.TASKS["far"]
    assert all(judged(Namespace(model=Answers()), task.at(length), 0.5) == 1.0 for length in task.lengths)
    blank = Namespace(model=torch.nn.Module())
    blank.model.forward = lambda tokens: (torch.zeros(*tokens.shape, 64), None)
    assert judged(blank, task.at(64)) == 0.0


def test_only_the_later_share_of_a_sequence_is_judged():
    class Early(Answers):
        def forward(self, tokens):
            logits, _ = super().forward(tokens)
            logits[:, tokens.shape[1] // 2 :] = 0.0
            return logits, None

    task = recall.TASKS["far"].at(64)
    assert judged(Namespace(model=Early()), task, 0.5) == 0.0 < judged(Namespace(model=Early()), task) < 1.0


def test_chances_are_those_of_the_tasks():
    """Blind guesses over the values of a task, from its own sequences."""
    from hecate.data import IGNORED, DataConfig

    for task in recall.TASKS.values():
        _, targets = DataConfig.model_validate(task.at(task.lengths[0])).sample(np.random.default_rng(0), 2000)
        values, counts = np.unique(targets[targets != IGNORED], return_counts=True)
        assert len(values) == round(1 / task.chance)
        assert counts.max() / counts.sum() < 1.3 * task.chance


def test_the_rate_is_the_better_one():
    assert best_rate((1.0, 2.0), lambda lr: lr) == 2.0
    assert best_rate((1.0,), lambda lr: 1 / 0) == 1.0


def test_recall_chooses_on_a_seed_of_its_own_and_tells_intervals(monkeypatch):
    asked = []

    def trained(model, data, seed, lr, steps, mixer):
        asked.append((seed, lr))
        return Namespace(model=Answers(), score=0.5 + 0.1 * (lr == recall.RATES[1]) + 0.01 * (seed < 3) * seed)

    monkeypatch.setattr(recall, "trained", trained)
    monkeypatch.setattr(recall, "judged", lambda run, task, since: run.score)
    monkeypatch.setattr(recall, "TASKS", {kind: recall.TASKS[kind] for kind in ("replaced", "far")})
    monkeypatch.setattr(recall, "contenders", lambda: {"delta": {"memory": "delta"}})
    result = recall.Recall().run(False, [0, 1, 2], progress)
    assert asked == 2 * [(seed, recall.RATES[at]) for seed, at in ((1000, 0), (1000, 1), (0, 1), (1, 1), (2, 1))]
    guess, delta = result.rows
    assert guess[2] == 0.125 and guess[4] == 0.031
    # Student's t of two degrees of freedom is 4.303 at 95 %: .61 +- 4.303 .01 / sqrt(3)
    assert delta[2].mean == pytest.approx(0.61) and delta[3] == "0.59 to 0.63" and len(delta) == len(result.columns)


def test_attention_sees_the_token_before_and_no_later_one():
    layer = recall.Convolved(torch.Generator().manual_seed(0)).double()
    x = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    y, state = layer(x, None)
    (grad,) = torch.autograd.grad(y[0, 3].sum(), x, retain_graph=True)
    seen = grad[0].abs().sum(-1)
    assert (seen[:4] > 0).all() and (seen[4:] == 0).all()
    (grad,) = torch.autograd.grad(state.keys[0, 3].sum(), x)
    assert grad[0].abs().sum(-1).nonzero().flatten().tolist() == [2, 3]


def test_states_of_study_phi_are_equal():
    """16 numbers of a value for each of about 128 features, a deep memory's two matrices, or trained layers."""
    keys, values = phi.draw_pairs([0], 8)
    sizes = {name: phi.recalled(settings[0], keys, values)[1] for name, settings in phi.untrained().items()}
    assert sizes.pop("identity") == 16 * 16 and sizes.pop("polynomial, degree 2") == 16 * 153
    assert set(sizes.values()) == {16 * 128}
    for name, models in list(phi.layers().items())[1:]:
        for model in models:
            config = MemoryConfig.model_validate(model["memory"])
            assert config.feature_map.output_dim(model["d_key"]) == 8 * phi.KEYS, name


def test_recall_after_one_pass_by_hand():
    """The delta rule of identity against a loop in numpy."""
    setting = phi.untrained()["identity"][1]
    keys, values = phi.draw_pairs([3], 24)
    memory = np.zeros((16, 16))
    for k, v in zip(keys[0].double().numpy(), values[0].double().numpy(), strict=True):
        memory += 0.6 * np.outer(v - memory @ k, k)
    right = ((keys[0].double().numpy() @ memory.T @ values[0].double().numpy().T).argmax(1) == np.arange(24)).mean()
    (share,), numbers = phi.recalled(setting, keys, values)
    assert share == pytest.approx(right) and 0.1 < share < 1 and numbers == 256


def test_random_features_hold_more_pairs_than_keys_are_wide():
    keys, values = phi.draw_pairs([0, 1], 64)
    found = {
        name: max(sum(phi.recalled(setting, keys, values)[0]) / 2 for setting in phi.untrained()[name])
        for name in ("identity", "random_fourier, sigma tuned")
    }
    assert found["identity"] < 0.5 < 0.9 < found["random_fourier, sigma tuned"]
