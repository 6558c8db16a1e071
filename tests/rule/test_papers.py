"""Values of the knobs against the papers' own forms, and rules that must coincide."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hecate import Gates, MemoryConfig, memory_scan, named_rule
from hecate.algorithm import RLS
from tests.memories import case_of, close, config_of
from tests.reference import papers
from tests.reference import papers_2025 as older
from tests.reference import papers_2026 as newer
from tests.reference.memory import elu
from tests.rule.draws import KEYS, Array, Draw, same

ENGINES = pytest.mark.parametrize("engine", ["sequential", "parallel"])


@pytest.fixture
def x() -> Draw:
    return Draw()


def wide(item: Any) -> Tensor:
    return torch.as_tensor(item)[None, :, None]


def scan(config: MemoryConfig, q: Array, k: Array, v: Array, *gates: Any, **options: Any) -> tuple[Any, Any]:
    """Outputs `[T, V]` and the matrix `[V, P]` of the public scan of one head."""
    y, state = memory_scan(config, *map(wide, (q, k, v)), Gates(*map(wide, gates)), **options)
    return y[0, :, 0], state.memory["weight"][0, 0]


@pytest.mark.spec("RULE-KEY-R1")
@ENGINES
def test_delta_rule_with_sum_normalised_features(x, engine):
    key, query = (elu(item) / elu(item).sum(1, keepdims=True) for item in (x.k, x.q))
    config = config_of(key_norm="sum", feature_map="elu")
    same(scan(config, x.q, x.k, x.v, x.lr, engine=engine), papers.fast_weights(query, key, x.v, x.lr), 1e-10)


# Rules that must coincide, inputs and all: fields and gates of one, and of the other.
DECAY, MOMENTUM = {"retention": "decay"}, {"retention": "decay", "algorithm": "momentum"}
EARLY = {**MOMENTUM, "decay_order": "before_gradient"}
COINCIDE = {
    "momentum of zero": ((MOMENTUM, (0.3, 0.8, 0.0)), (DECAY, (0.3, 0.8))),
    "retain of one": ((DECAY, (0.3, 1.0)), ({}, (0.3,))),
    "chunks of one token": (({**MOMENTUM, "commit": "chunk"}, (0.3, 0.8, 0.5)), (MOMENTUM, (0.3, 0.8, 0.5))),
    "chunks of one token, early": (({**EARLY, "commit": "chunk"}, (0.3, 0.8, 0.5)), (EARLY, (0.3, 0.8, 0.5))),
}


@pytest.mark.spec("ALG-MOM-R2", "RET-DECAY-R2", "RULE-COMMIT-R1")
@pytest.mark.parametrize("name", COINCIDE)
def test_rules_that_coincide(name):
    results = []
    for fields, gates in COINCIDE[name]:
        case = case_of(config_of(), length=12, masks=True)
        case = case._replace(config=config_of(**fields), gates=Gates(*gates)).fresh()
        y, state = case.scan(engine="sequential")
        grads = torch.autograd.grad(y.square().sum(), [case.q, case.k, case.v])
        results.append((y, state.memory["weight"], *grads))
    for mine, theirs in zip(*results, strict=True):
        close(mine, theirs, 1e-10)


@pytest.mark.spec("RULE-CHUNK-R2")
def test_a_chunk_beyond_the_end_is_linear_attention_on_values_minus_the_first_prediction():
    config = config_of(chunk=1000)
    case = case_of(config, length=12)
    y, state = case.scan()
    first = torch.einsum("hvp,bthp->bthv", case.initial["weight"], case.k)
    hebb = case._replace(config=config_of(bias="dot"), v=case.v - first)
    expected, final = hebb.scan(engine="parallel")
    close(y, expected, 1e-12)
    close(state.memory["weight"], final.memory["weight"], 1e-12)


@pytest.mark.spec("RULE-COMMIT-R2")
def test_committing_a_chunk_equals_freezing_it_where_it_ends():
    """Without decay and momentum the two differ only in what reads inside the chunk see."""
    frozen, committed = (config_of(chunk=4, **f) for f in ({}, {"commit": "chunk"}))
    case = case_of(frozen, length=8)
    y, state = case.scan()
    other, final = case._replace(config=committed).scan()
    close(state.memory["weight"], final.memory["weight"], 1e-12)
    ends = torch.tensor([3, 7])
    close(other[:, ends], y[:, ends], 1e-12, "the token that closes a chunk sees the commit")
    start = torch.einsum("hvp,bthp->bthv", case.initial["weight"], case.q)
    close(other[:, :3], start[:, :3], 1e-12, "reads inside the first chunk see the initial state")


@pytest.mark.spec("RULE-ORDER-D1")
def test_the_two_decay_orders_differ_by_the_gradients_anchor():
    """M k grows from 1: with_step erases M k itself, before_gradient the decayed retain M k."""
    one = torch.ones(1, 1, 1, 1)
    for order, expected in (("with_step", 0.5 - 0.25), ("before_gradient", 0.5 - 0.125)):
        config = config_of(retention="decay", decay_order=order)
        _, state = memory_scan(config, one, one, 0 * one, Gates(0.25, 0.5), initial={"weight": one[0]})
        assert float(state.memory["weight"]) == expected


@pytest.mark.spec("BIAS-L2-I1")
@ENGINES
def test_a_full_step_stores_exactly(engine, generator):
    """lr |phi|^2 = 1: whatever was written before, the last value of a key is read back."""
    k = torch.randn(1, 30, 2, 4, generator=generator)
    v = torch.randn(1, 30, 2, 3, generator=generator)
    y, _ = memory_scan(config_of(), k, k, v, Gates(1 / k.square().sum(-1)), engine=engine)
    close(y, v, 1e-12)
    y, _ = memory_scan(config_of(key_norm="l2"), k, k, v, Gates(1.0), engine=engine)
    close(y, v, 1e-12)


@pytest.mark.spec("BIAS-L2-E1")
def test_the_factor_two_of_papers_is_a_doubled_learning_rate():
    """A loss of |e|^2 has the gradient 2 (M k - v) k^T; the papers print it without the 2."""
    k, v = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0]])
    weight = torch.tensor([[[0.5, -1.0]]], requires_grad=True)
    loss = (weight[0] @ k[0] - v[0]).square().sum()
    (true,) = torch.autograd.grad(loss, weight)
    (ours,) = MemoryConfig().rule.gradient((weight.detach(),), k, v)
    assert torch.equal(true, 2 * ours)


@pytest.mark.spec("RULE-STEP-I1")
def test_step_rules_bound_the_step_whatever_the_key(generator):
    k = 100 * torch.randn(1, 200, 1, 4, generator=generator)
    v = torch.randn(1, 200, 1, 3, generator=generator)
    for step, lr in (("normalized", 1.9), ("implicit", 1e3)):
        _, state = memory_scan(config_of(step=step), k, k, v, Gates(lr))
        assert float(state.memory["weight"].norm()) < 10


@pytest.mark.spec("GATE-TARGET-E1")
def test_lr_weighs_the_sum_of_a_chunk():
    config = named_rule("in_place_ttt")
    assert (config.algorithm.lr, config.chunk) == (0.3, 32)
    one = np.ones((8, 1))
    steps = [
        scan(config_of(bias="dot", chunk=chunk, commit="chunk", read="before"), one, one, one, 0.3 * one[:, 0])[0]
        for chunk in (2, 4)
    ]
    assert steps[0][2, 0].item() == pytest.approx(0.6) and steps[1][4, 0].item() == pytest.approx(1.2)


@pytest.mark.spec("ALG-RLS-E1")
def test_a_discount_of_rls_is_not_the_decay_of_mesa(x):
    full, ridge = np.ones(x.length), np.full(KEYS, 0.8)

    def gap(discount: float) -> float:
        got, _ = scan(config_of(algorithm=RLS(ridge=0.8, discount=discount)), x.q, x.k, x.v, full)
        expected = older.mesa(x.q, x.k, x.v, discount * full, full, ridge)[0]
        return float(np.linalg.norm(got.numpy() - expected) / np.linalg.norm(expected))

    assert gap(1.0) < 1e-10 and gap(0.9) > 0.2


@pytest.mark.spec("GATE-KALMA-E1")
def test_keys_and_values_scaled_by_lr_weigh_its_square(x):
    weight = older.gated_kalmanet(x.q, x.k, x.v, x.keep, x.lr, np.zeros(x.length))[1]
    same(scan(config_of(bias="dot", retention="decay"), x.q, x.k, x.v, x.lr**2, x.keep)[1], weight)


@pytest.mark.spec("GATE-MAMBA-E1")
def test_one_input_and_several_turn_other_pairs(x):
    angle = x.rng.normal(size=(x.length, KEYS // 2))
    ahead = [*range(0, KEYS, 2), *range(1, KEYS, 2)]
    neighbours = newer.rotate(x.k, angle)
    same(newer.rotate(x.k[:, ahead], angle, halves=True), neighbours[:, ahead])
    assert abs(newer.rotate(x.k, angle, halves=True) - neighbours).max() > 0.1
