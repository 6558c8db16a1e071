"""Studies that train small layers: what is judged, what is chosen, and that contenders are what they are called."""

from __future__ import annotations

from types import SimpleNamespace as Namespace

import numpy as np
import pytest
import torch

from hecate.errors import NonFiniteError
from hecate.gym.training import trained
from hecate.rule import MemoryConfig
from studies import layers
from studies.layers import Outcome, best, judged, settled
from studies.study import Kept

pytestmark = pytest.mark.usefixtures("float32")


@pytest.mark.parametrize(("name", "low", "high"), [("delta, lr to 2", 0.99, 1.0), ("delta, lr to 1", 0.3, 0.8)])
def test_parity_needs_steps_beyond_one(name, low, high):
    """A write with lr up to 1 never turns a sign (Grazzi et al., 2024)."""
    parity = layers.GROUPS["parity"]
    trainer = trained(layers.contenders()[name][0], layers.at(parity, 12), 0, 1e-2, 60)
    assert low <= judged(trainer, layers.at(parity, 24), 0.5) <= high


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
    task = layers.TASKS["far"]
    assert all(judged(Namespace(model=Answers()), layers.at(task.data, length), 0.5) == 1.0 for length in task.lengths)
    blank = Namespace(model=torch.nn.Module())
    blank.model.forward = lambda tokens: (torch.zeros(*tokens.shape, 64), None)
    assert judged(blank, layers.at(task.data, 64)) == 0.0


def test_only_the_later_share_of_a_sequence_is_judged():
    class Early(Answers):
        def forward(self, tokens):
            logits, _ = super().forward(tokens)
            logits[:, tokens.shape[1] // 2 :] = 0.0
            return logits, None

    task = layers.at(layers.TASKS["far"].data, 64)
    assert judged(Namespace(model=Early()), task, 0.5) == 0.0 < judged(Namespace(model=Early()), task) < 1.0


def test_chances_are_those_of_the_tasks():
    """Blind guesses over the values of a task, from its own sequences."""
    from hecate.data import IGNORED, DataConfig

    for task in layers.TASKS.values():
        _, targets = DataConfig.model_validate(layers.at(task.data, task.lengths[0])).sample(
            np.random.default_rng(0), 2000
        )
        values, counts = np.unique(targets[targets != IGNORED], return_counts=True)
        assert len(values) == round(1 / task.chance)
        assert counts.max() / counts.sum() < 1.3 * task.chance


def test_the_best_is_the_first_of_equals_and_nobody_is_asked_in_vain():
    asked = []

    def score(lr):
        asked.append(lr)
        return min(lr, 1.0)

    assert best((0.5, 0.2, 0.5), score) == 0.5
    assert best((0.5, 1.0, 2.0), score) == 1.0 and asked == [0.5, 0.2, 0.5, 0.5, 1.0]
    assert best((3.0,), lambda lr: 1 / 0) == 3.0
    assert best((1.0, 2.0), lambda lr: 0.0) == 1.0


def test_rates_and_models_are_chosen_on_a_seed_of_its_own(monkeypatch):
    asked = []

    class Fitted(Namespace):
        def model(self, tokens):
            return None, ()

    def trained(model, data, seed, lr, steps, mixer, batch):
        asked.append((seed, model, lr))
        if lr == 4:
            raise NonFiniteError("too far")
        return Fitted(score=0.1 * lr + 0.01 * seed * (seed < 3) + 0.05 * (model == "second"), config=Fitted(seq_len=3))

    monkeypatch.setattr(layers, "trained", trained)
    monkeypatch.setattr(layers, "judged", lambda run, task, since: run.score + since)
    monkeypatch.setattr(layers, "bytes_of", lambda state: 7)
    found = settled(["first", "second", "third"], ["task"], 1, (1, 2, 4), [0, 1, 2], Kept(), 0.5)
    assert asked[:6] == [
        (1000, model, lr) for model, lr in zip(["first"] * 3 + ["second", "third"], (1, 2, 4, 2, 2), strict=True)
    ] + [(0, "second", 2)]
    assert found.model == 1 and found.lr == 2 and found.bytes == 7
    assert found.scores == [[pytest.approx(0.75 + 0.01 * seed) for seed in range(3)]]


def test_recall_tells_intervals_and_who_was_asked():
    outcome = Outcome([[0.60, 0.61, 0.62]], 0.01, 0, 64)
    far = outcome._replace(scores=3 * outcome.scores, model=2)
    result = layers.report({"replaced": {"delta": outcome}, "far": {"delta": far}, "beyond": {"phi": outcome}})
    guess, delta, phi = result.rows
    assert guess[2] == 0.125 and guess[4] == 0.031 and guess[-2] == 0.031
    # Student's t of two degrees of freedom is 4.303 at 95 %: .61 +- 4.303 .01 / sqrt(3)
    assert delta[2].mean == pytest.approx(0.61) and delta[3] == "0.59 to 0.63" and len(delta) == len(result.columns)
    assert delta[-2:] == [None, None] and phi[2:4] == [None, None] and phi[-1] == "0.59 to 0.63"
    assert "delta 0.01, 0.01 of 3; phi 0.01" in result.notes[-1]


def test_attention_sees_the_token_before_and_no_later_one():
    layer = layers.Convolved(torch.Generator().manual_seed(0)).double()
    x = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    y, state = layer(x, None)
    (grad,) = torch.autograd.grad(y[0, 3].sum(), x, retain_graph=True)
    seen = grad[0].abs().sum(-1)
    assert (seen[:4] > 0).all() and (seen[4:] == 0).all()
    (grad,) = torch.autograd.grad(state.keys[0, 3].sum(), x)
    assert grad[0].abs().sum(-1).nonzero().flatten().tolist() == [2, 3]


def test_layers_with_a_phi_hold_as_many_numbers_as_wide_keys():
    for name, models in list(layers.maps().items())[1:]:
        for model in models:
            config = MemoryConfig.model_validate(model["memory"])
            assert config.feature_map.output_dim(model["d_key"]) == 8 * layers.KEYS, name
