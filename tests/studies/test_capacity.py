"""The study of capacity: sequences, sum rule, training and bounds against loops by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hecate.engine import memory_scan
from hecate.phi import DPFP, ELU
from hecate.rule import MemoryConfig
from studies import associations
from studies.associations import (
    ENOUGH,
    MAPS,
    PATIENCE,
    SUMS,
    WIDTH,
    Associator,
    Pairs,
    SumRule,
    draw_pairs,
    evaluate,
    floor,
    loss_of,
    train,
)  # fmt: skip

BY_NAME = {contender.name: contender for contender in MAPS}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def elu(x):
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def dpfp(x, nu):
    y = np.concatenate([np.maximum(x, 0), np.maximum(-x, 0)])
    return np.concatenate([y * np.roll(y, j) for j in range(1, nu + 1)])


WEIGHTS = {
    "elu": lambda q, k: elu(q) @ elu(k),
    "DPFP-1": lambda q, k: dpfp(q, 1) @ dpfp(k, 1),
    "DPFP-2": lambda q, k: dpfp(q, 2) @ dpfp(k, 2),
    "softmax": lambda q, k: math.exp(q @ k / 8),
}


def projections(model: Associator, pairs: Pairs):
    """k, lr of every pair and q of every key, from the definition with whole one-hot vectors."""
    p = {name: item.detach().numpy() for name, item in model.named_parameters()}
    x = [
        [np.concatenate([np.eye(pairs.size)[v], p["embedding"][k]]) for k, v in zip(*row, strict=True)]
        for row in zip(pairs.keys.tolist(), pairs.values.tolist(), strict=True)
    ]
    k = np.array(x) @ p["key"] + p["key_bias"]
    lr = 1 / (1 + np.exp(-(np.array(x) @ p["gate"] + p["gate_bias"])))
    return k, lr[..., 0], p["embedding"] @ p["query"] + p["query_bias"]


def test_sequences():
    pairs = draw_pairs(6, 6, 50, False, generator())
    for part in (pairs.keys, pairs.values):
        assert (part.sort(1).values == torch.arange(6)).all()
    assert not torch.equal(pairs.keys, pairs.values)
    again = draw_pairs(5, 10, 30, True, generator())
    values, held = again.last()
    for row, (keys, written) in enumerate(zip(again.keys.tolist(), again.values.tolist(), strict=True)):
        known = dict(zip(keys, written, strict=True))
        assert held[row].tolist() == [key in known for key in range(5)]
        assert all(values[row, key] == value for key, value in known.items())
    assert not held.all() and max(map(len, map(set, again.keys.tolist()))) == 5


@pytest.mark.parametrize("name", WEIGHTS)
def test_the_sum_rule_by_hand(name: str):
    feature_map = BY_NAME[name].rule
    model = SumRule(5, feature_map, generator()).double()
    pairs = draw_pairs(5, 9, 2, True, generator(1))
    asked = torch.tensor([[0, 3], [4, 1]])
    got = model.answers(pairs, asked, generator()).detach().numpy()
    k, _, q = projections(model, pairs)
    for row in range(2):
        for at, key in enumerate(asked[row].tolist()):
            weights = [WEIGHTS[name](q[key], one) for one in k[row]]
            total = sum(weights) + (0 if name == "softmax" else 1e-6)
            wanted = np.zeros(5)
            for weight, value in zip(weights, pairs.values[row].tolist(), strict=True):
                wanted[value] += weight / total
            np.testing.assert_allclose(got[row, at], wanted, rtol=1e-10, atol=1e-13)


def test_the_sum_rule_is_a_memory_with_bias_dot():
    model = SumRule(7, ELU(), generator()).double()
    pairs = draw_pairs(7, 7, 3, False, generator(1))
    asked = torch.arange(7).expand(3, 7)
    config = MemoryConfig(bias="dot", feature_map="elu", normalizer="sum")
    k, q = model.keys(pairs).unsqueeze(2), model.queries().expand(3, 7, WIDTH).unsqueeze(2)
    v = torch.eye(7, dtype=torch.float64)[pairs.values].unsqueeze(2)
    _, state = memory_scan(config, k, k, v)
    y, _ = memory_scan(config, q, q, v, state=state, write_mask=torch.zeros(3, 7, dtype=torch.bool))
    # EPS over a sum of 7 weights of at least some tenths
    torch.testing.assert_close(model.answers(pairs, asked, generator()), y[:, :, 0], rtol=1e-6, atol=0)


def test_random_maps_are_drawn_at_every_call():
    model = SumRule(4, BY_NAME["FAVOR+ 64"].rule, generator())
    pairs, asked = draw_pairs(4, 4, 1, False, generator()), torch.tensor([[0]])
    g = generator()
    first, second = (model.answers(pairs, asked, g) for _ in range(2))
    assert not torch.allclose(first, second)
    assert torch.equal(first, model.answers(pairs, asked, generator()))


class Saying(Associator):
    """Answers with the embedding, which is trained, times a factor."""

    factor = 0.0

    def answers(self, pairs, asked, g):
        return self.embedding[:, : pairs.size][asked] * self.factor


def test_training_stops_by_its_rules(monkeypatch):
    monkeypatch.setattr(associations, "EVERY", 2)
    silent = train(Saying(4, ELU(), generator()), 4, False, 0, 1000)
    assert silent.steps == 2 * (1 + PATIENCE) and silent.finished and silent.best == 0.5
    cut = train(Saying(4, ELU(), generator()), 4, False, 0, 10)
    assert cut.steps == 10 and len(cut.losses) == 5 and not cut.finished and not cut.lost
    lost = Saying(4, ELU(), generator())
    lost.factor = math.nan
    ended = train(lost, 4, False, 0, 10)
    assert ended.lost and ended.finished and ended.steps == 2 and ended.best == 0.5
    done = train(SumRule(4, DPFP(), generator()), 4, False, 0, 1000)
    assert done.losses[-1] <= ENOUGH < done.losses[0] and done.finished and done.steps < 1000


def test_losses():
    answers = torch.tensor([[[1.0, 0.0], [0.5, 0.5]]], dtype=torch.float64)
    assert loss_of(answers, torch.tensor([[0, 0]])).tolist() == [[0.0, 0.25]]
    model = Saying(6, ELU(), generator())
    assert evaluate(model, draw_pairs(6, 4, 3, True, generator()), generator()) == 0.5


def test_no_model_is_below_the_floor():
    model = SumRule(100, ELU(), generator())
    loss = evaluate(model, draw_pairs(100, 100, 4, False, generator()), generator())
    assert loss >= floor(BY_NAME["elu"], 100) == pytest.approx(0.18)


def test_published_below_the_floor_is_where_the_last_block_is_short():
    below = {
        (c.name, size)
        for c in MAPS
        for size, loss in zip(SUMS.sizes, c.published, strict=True)
        if loss < floor(c, size)
    }
    assert below == {("elu", 100), ("elu", 120), ("DPFP-1", 200)}
    assert all(size % 32 for _, size in below)


def quick_run_shows(result):
    """The order of capacities; `test_studies` runs it."""
    rows = {(row[0], row[1]): row for row in result.rows}

    def loss(name, size):
        return rows[name, size][3].mean

    assert loss("DPFP-1", 80) < 50 and loss("DPFP-2", 80) < 50 and loss("softmax", 80) < 5
    assert 100 <= loss("elu", 80) < 300 and rows["elu", 80][8] == pytest.approx(100)
    assert loss("FAVOR+ 64", 80) > 400
    notes = "\n".join(result.notes)
    assert "cut: steps are at most" in notes and "FAVOR+ 64 S=80" in notes
