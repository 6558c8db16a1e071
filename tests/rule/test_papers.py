"""Values of the knobs against the papers' own forms, and rules that must coincide."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hecate import Gates, MemoryConfig, memory_scan
from tests.memories import case_of, close, config_of
from tests.reference import papers
from tests.reference.memory import elu

LENGTHS = (1, 13, 70)


class Draw:
    """Random inputs of one head, as numpy arrays and as tensors `[1, T, 1, *]`."""

    def __init__(self, length: int, d: int = 4, width: int = 3, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.q, self.k, self.v = (rng.normal(size=(length, n)) for n in (d, d, width))
        self.unit = self.k / np.linalg.norm(self.k, axis=1, keepdims=True)
        self.rate, self.keep, self.carry = rng.uniform(0.1, 0.95, size=(3, length))
        self.channels = rng.uniform(0.3, 1.0, size=(length, d))
        self.w1, self.w2 = rng.normal(size=(3 * d, d)) / 2, rng.normal(size=(width, 3 * d)) / 3


def wide(array: Any) -> Any:
    return None if array is None else torch.as_tensor(np.asarray(array))[None, :, None]


def run(config: MemoryConfig, draw: Draw, k: Any, gates: tuple = (), **options: Any) -> Any:
    y, state = memory_scan(config, wide(draw.q), wide(k), wide(draw.v), Gates(*map(wide, gates)), **options)
    return y[0, :, 0], state


def agree(got: tuple, expected: Any, *weights: Any) -> None:
    y, state = got
    close(y, expected, 1e-10, "y")
    for mine, theirs in zip(state.memory.values(), weights, strict=bool(weights)):
        close(mine[0, 0], theirs, 1e-10, "memory")


ENGINES = pytest.mark.parametrize("engine", ["sequential", "parallel"])
TIMES = pytest.mark.parametrize("length", LENGTHS)


@pytest.mark.spec("BIAS-DOT-R1", "RULE-NORM-R1")
@ENGINES
@TIMES
def test_linear_attention(engine, length):
    draw = Draw(length)
    config = config_of(bias="dot", feature_map="elu", normalizer="sum")
    expected = papers.linear_attention(elu(draw.q), elu(draw.k), draw.v)
    y, _ = run(config, draw, draw.k, (np.ones(length),), engine=engine)
    close(y, expected, 1e-10)


@pytest.mark.spec("BIAS-L2-R1")
@ENGINES
@TIMES
def test_delta_rule_as_fast_weights(engine, length):
    draw = Draw(length)
    expected = papers.fast_weights(draw.q, draw.unit, draw.v, draw.rate)
    agree(run(config_of(), draw, draw.unit, (draw.rate,), engine=engine), *expected)
    # key_norm does what the paper does by hand; its query is normalised too.
    draw.q = 3 * draw.q
    unit = draw.q / np.linalg.norm(draw.q, axis=1, keepdims=True)
    expected = papers.fast_weights(unit, draw.unit, draw.v, draw.rate)
    config = config_of(key_norm="l2")
    agree(run(config, draw, draw.k, (draw.rate,), engine=engine), *expected)


@pytest.mark.spec("RULE-KEY-R1")
@ENGINES
def test_delta_rule_with_sum_normalised_features(engine):
    draw = Draw(20)
    key, query = (elu(x) / elu(x).sum(1, keepdims=True) for x in (draw.k, draw.q))
    expected = papers.fast_weights(query, key, draw.v, draw.rate)
    config = config_of(key_norm="sum", feature_map="elu")
    agree(run(config, draw, draw.k, (draw.rate,), engine=engine), *expected)


@pytest.mark.spec("RULE-ORDER-R1")
@ENGINES
@TIMES
def test_gated_delta_rule_recurrent_and_chunkwise(engine, length):
    draw = Draw(length)
    config = config_of(retention="decay", decay_order="before_gradient")
    got = run(config, draw, draw.unit, (draw.rate, draw.keep), engine=engine)
    inputs = (draw.q, draw.unit, draw.v, draw.keep, draw.rate)
    agree(got, *papers.gated_delta(*inputs))
    for chunk in (1, 4, 64):
        agree(got, *papers.gated_delta_chunkwise(*inputs, chunk))


@pytest.mark.spec("RET-DECAY-R1")
@TIMES
def test_gated_linear_attention_per_channel(length):
    draw = Draw(length)
    config = config_of(bias="dot", retention="decay")
    got = run(config, draw, draw.k, (np.ones(length), draw.channels))
    agree(got, *papers.gla(draw.q, draw.k, draw.v, draw.channels))
    gate = np.broadcast_to(draw.keep[:, None], draw.channels.shape)
    agree(
        run(config, draw, draw.k, (np.ones(length), draw.keep), engine="parallel"),
        *papers.gla(draw.q, draw.k, draw.v, gate),
    )


@pytest.mark.spec("ALG-MOM-R1")
@ENGINES
@TIMES
def test_titans_linear_with_momentum(engine, length):
    draw = Draw(length)
    config = config_of(retention="decay", algorithm="momentum")
    # Their alpha is the forgotten share, their eta the momentum, their theta the learning rate.
    gates = (draw.rate, 1 - 0.3 * draw.keep, draw.carry)
    y, memory, slot = papers.titans_linear(draw.q, draw.unit, draw.v, draw.rate, 0.3 * draw.keep, draw.carry)
    got = run(config, draw, draw.unit, gates, engine=engine)
    agree(got, y, memory)
    close(got[1].slots["momentum.weight"][0, 0], slot, 1e-10)


@pytest.mark.spec("STR-MLP-R1")
def test_titans_deep():
    draw = Draw(13)
    structure = {"kind": "mlp", "layers": 2, "expansion": 3, "activation": "silu"}
    config = config_of(structure=structure, retention={"kind": "decay", "towards": "zero"}, algorithm="momentum")
    gates = (0.3 * draw.rate, 1 - 0.3 * draw.keep, 0.5 * draw.carry)
    initial = {"w1": torch.tensor(draw.w1)[None], "w2": torch.tensor(draw.w2)[None]}
    got = run(config, draw, draw.unit, gates, initial=initial)
    expected = papers.titans_mlp(draw.q, draw.unit, draw.v, gates[0], 0.3 * draw.keep, gates[2], draw.w1, draw.w2)
    agree(got, *expected[:3])


@pytest.mark.spec("RULE-STEP-R1")
@ENGINES
def test_longhorn_is_the_implicit_step(engine):
    draw = Draw(20)
    rate = 30 * draw.rate  # far beyond 2 / |k|^2: the implicit step is stable at any rate
    expected = papers.longhorn(draw.q, draw.k, draw.v, rate)
    agree(run(config_of(step="implicit"), draw, draw.k, (rate,), engine=engine), *expected)


@pytest.mark.spec("RULE-CHUNK-R1")
@pytest.mark.parametrize("batch", [1, 3, 5, 20])
def test_ttt_linear_by_mini_batches(batch):
    draw = Draw(20)
    gates = (0.3 * draw.rate,)
    expected = papers.ttt_linear(draw.q, draw.unit, draw.v, *gates, batch)
    agree(run(config_of(chunk=batch), draw, draw.unit, gates), *expected)


# Rules that must coincide, inputs and all.


def equal_rules(one: dict, other: dict, first: tuple = (), second: tuple = (), **options: Any) -> None:
    results = []
    for fields, gates in ((one, first), (other, second)):
        base = case_of(config_of(), length=12, **options)
        gates = Gates(*gates) if gates else base.gates
        case = base._replace(config=config_of(**fields), gates=gates).fresh()
        y, state = case.scan(engine="sequential")
        grads = torch.autograd.grad(y.square().sum(), [case.q, case.k, case.v])
        results.append((y, state.memory["weight"], *grads))
    for mine, theirs in zip(*results, strict=True):
        close(mine, theirs, 1e-10)


@pytest.mark.spec("ALG-MOM-R2")
def test_momentum_of_zero_is_gradient_descent():
    fields = {"retention": "decay"}
    equal_rules({**fields, "algorithm": "momentum"}, fields, (0.3, 0.8, 0.0), (0.3, 0.8), masks=True)


@pytest.mark.spec("RET-DECAY-R2")
def test_retain_of_one_is_no_retention():
    equal_rules({"retention": "decay"}, {}, (0.3, 1.0), (0.3,))


@pytest.mark.spec("RULE-COMMIT-R1")
@pytest.mark.parametrize("order", ["with_step", "before_gradient"])
def test_committing_chunks_of_one_token_is_committing_tokens(order):
    fields = {"retention": "decay", "algorithm": "momentum", "decay_order": order}
    gates = (0.3, 0.8, 0.5)
    equal_rules({**fields, "commit": "chunk"}, fields, gates, gates, masks=True)


@pytest.mark.spec("BIAS-LP-R1", "BIAS-HUBER-R1")
@pytest.mark.parametrize("bias", [{"kind": "lp", "p": 2.0}, {"kind": "huber", "delta": 1e6}])
def test_losses_that_are_l2(bias):
    equal_rules({"bias": bias}, {})


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


@pytest.mark.spec("RET-DECAY-I1")
@ENGINES
@pytest.mark.parametrize("retain", [0.5, 0.9, 0.99])
def test_half_life(engine, retain):
    """An item stored once is read back at retain^n after n further tokens of other keys."""
    steps = 80
    config = config_of(retention="decay")
    k = torch.zeros(1, steps, 1, 2)
    k[:, 0, :, 0], k[:, 1:, :, 1] = 1, 1
    q = torch.zeros(1, steps, 1, 2)
    q[..., 0] = 1
    v = torch.tensor([0.7, -1.3]).expand(1, steps, 1, 2)
    y, _ = memory_scan(config, q, k, v, Gates(1.0, retain), engine=engine)
    close(y[0, :, 0], retain ** torch.arange(steps)[:, None] * v[0, 0], 1e-12)
    half = int(np.ceil(np.log(0.5) / np.log(retain)))
    assert float(y[0, half, 0, 0]) <= 0.35 + 1e-12 < float(y[0, half - 1, 0, 0]) + 2e-12


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
