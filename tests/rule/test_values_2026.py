"""Rules of 2025 and 2026 that the public API has as values: its scan beside their references."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

from hecate import Gates, MemoryConfig, memory_scan, named_rule
from hecate.algorithm import RLS
from tests.memories import config_of
from tests.reference import gates_2026 as heads
from tests.reference import papers
from tests.reference import papers_2025 as older
from tests.reference import papers_2026 as newer
from tests.rule.draws import KEYS, VALUES, Array, Draw, mamba3_inputs, same


@pytest.fixture
def x() -> Draw:
    return Draw()


ENGINES = pytest.mark.parametrize("engine", ["sequential", "parallel"])
GATED = {"retention": "decay", "decay_order": "before_gradient"}
HEBBIAN = {"bias": "dot", "retention": "decay"}


def wide(item: Any) -> Any:
    return None if item is None else torch.as_tensor(np.ascontiguousarray(item))[None, :, None]


def scan(config: MemoryConfig, q: Array, k: Array, v: Array, *gates: Any, **options: Any) -> tuple[Any, Any]:
    """Outputs `[T, V]` and the matrix `[V, P]` of the public scan of one head."""
    y, state = memory_scan(config, *map(wide, (q, k, v)), Gates(*map(wide, gates)), **options)
    return y[0, :, 0], state.memory["weight"][0, 0]


def interleave(*items: Array) -> Array:
    """Virtual tokens: the items of each token one after the other."""
    return np.stack(items, 1).reshape(-1, *items[0].shape[1:])


@ENGINES
def test_products_are_virtual_tokens(x, engine):
    keys, config = older.unit(x.ks), config_of(**GATED)
    retain = interleave(x.keep, *np.ones((2, x.length)))
    flat = (np.repeat(x.q, 3, 0), keys.reshape(-1, KEYS), x.vs.reshape(-1, VALUES))
    y, m = scan(config, *flat, x.lrs.ravel(), retain, engine=engine)
    same((y[2::3], m), older.gated_delta_product(x.q, keys, x.vs, x.lrs, x.keep))
    retain = interleave(x.channels, np.ones_like(x.k))
    flat = (np.repeat(x.q, 2, 0), interleave(x.unit_e, x.unit), interleave(0 * x.v, x.v))
    y, m = scan(config, *flat, interleave(x.gate, x.lr), retain, engine=engine)
    same((y[1::2], m), newer.erase_then_delta(x.q, x.unit, x.v, x.unit_e, x.channels, x.lr, x.gate))


@ENGINES
def test_steps_that_are_gates(x, engine):
    square = (x.k**2).sum(1)
    rate = -np.expm1(-x.lr * square) / square
    same(scan(config_of(), x.q, x.k, x.v, rate, engine=engine), older.efla(x.q, x.k, x.v, x.lr))
    # Kaczmarz linear attention: the projection on the key, relaxed.
    expected = papers.gated_delta(x.q, x.k, x.v, x.keep, x.lr / (square + 1e-6))
    same(scan(config_of(**GATED, step="normalized"), x.q, x.k, x.v, x.lr, x.keep, engine=engine), expected)
    c, d = 0.7, 0.4
    inputs = (x.q - d * c * x.unit, x.unit, x.v / c, c * x.lr, x.keep)
    expected = older.comba(x.q, x.unit, x.v, x.keep, x.lr, c, d)
    same(scan(config_of(**GATED), *inputs, engine=engine), expected)
    written = x.value_channels * x.v / x.lr[:, None]
    expected = newer.gated_delta_2(x.q, x.unit, x.v, x.channels, x.lr[:, None] + 0 * x.k, x.value_channels)
    same(scan(config_of(**GATED), x.q, x.unit, written, x.lr, x.channels, engine=engine), expected)
    beta = newer.kalman_gain_isotropic(x.unit, x.channels, x.gate, x.carry)
    expected = newer.kalman_delta(x.q, x.unit, x.v, beta[:, None] * x.unit, x.channels)
    same(scan(config_of(**GATED), x.q, x.unit, x.v, beta, x.channels, engine=engine), expected)


@ENGINES
@pytest.mark.parametrize("decayed", [True, False])
def test_momentum_delta_is_titans_linear(x, engine, decayed):
    eta, beta, before = 1 + x.gate, x.lr, np.append(x.lr[0], x.lr[:-1])
    mu = x.carry * np.minimum(1.0, before / beta)  # gates.momentum takes no more than 1
    momentum, order = mu * beta / before, "before_gradient" if decayed else "with_step"
    config = config_of(retention="decay", algorithm="momentum", decay_order=order)
    got = scan(config, x.q, x.unit, x.v, beta * eta, x.keep, momentum, engine=engine)
    same(got, newer.momentum_delta(x.q, x.unit, x.v, x.keep, beta, mu, eta, decayed=decayed)[:2])


@ENGINES
def test_hebbian_rules(x, engine):
    config, full = config_of(**HEBBIAN), np.ones(x.length)
    a, dt, trapezoid, angle = mamba3_inputs(x)
    theta = np.cumsum(angle, 0)
    q, k = newer.rotate(x.q, theta), newer.rotate(x.k, theta)
    early, late = (np.concatenate([0 * item[:1], item[:-1]]) for item in (k, x.v))
    gates = interleave((1 - trapezoid) * dt * a, trapezoid * dt), interleave(a, full)
    y, m = scan(config, np.repeat(q, 2, 0), interleave(early, k), interleave(late, x.v), *gates, engine=engine)
    same((y[1::2], m), newer.mamba3(x.q, x.k, x.v, a, dt, trapezoid, angle))
    same(scan(config, x.q, 1 - x.channels, x.v, full, x.channels, engine=engine), older.hgrn2(x.q, x.channels, x.v))
    # mLSTM: stabilised gates, and a second memory that counts.
    i, f = 3 * x.q[:, 0], heads.sigmoid(2 + x.q[:, 1])
    m = np.array(functools.reduce(lambda z, t: [*z, max(np.log(f[t]) + z[-1], i[t])], range(x.length), [-np.inf]))
    gates = np.exp(i - m[1:]), np.exp(np.log(f) + m[:-1] - m[1:])
    c, _ = scan(config, x.q, x.k, x.v, *gates, engine=engine)
    n, _ = scan(config, x.q, x.k, np.ones((x.length, 1)), *gates, engine=engine)
    floor = torch.as_tensor(np.exp(-m[1:]))[:, None]
    same(c / torch.maximum(n.abs(), floor), older.mlstm(x.q, x.k, x.v, i, f)[0])


def test_retention_of_all_heads(x):
    gamma = heads.retnet(3)
    q, k, v = (x.rng.normal(size=(3, x.length, n)) for n in (KEYS, KEYS, VALUES))
    config = config_of(**HEBBIAN, query_scale="key_dim")
    rows = (torch.as_tensor(item).transpose(0, 1)[None] for item in (q, k, v))
    retain = torch.as_tensor(gamma).expand(1, x.length, 3)
    y, state = memory_scan(config, *rows, Gates(1.0, retain), engine="parallel")
    same((y[0].transpose(0, 1), state.memory["weight"][0]), older.retention(q, k, v, gamma))


def test_ridge_statistics_and_the_beta_gate(x):
    config = config_of(**HEBBIAN)
    _, g, h = older.mesa(x.q, x.k, x.v, x.keep, x.lr, np.ones(KEYS))
    same(scan(config, x.q, x.k, x.v, x.lr, x.keep)[1], g)
    same(scan(config, x.q, x.k, x.k, x.lr, x.keep)[1], h)
    root, full = np.sqrt(x.lr)[:, None], np.ones(x.length)
    got, _ = scan(config_of(algorithm=RLS(ridge=0.8)), x.q, root * x.k, root * x.v, full)
    same(got, older.mesa(x.q, x.k, x.v, full, x.lr, np.full(KEYS, 0.8))[0])


def test_states_of_memories_that_predict_keys(x):
    """Only the states: such a memory is read from its other side."""
    value, slots = older.unit(x.v), x.rng.normal(size=(x.length, 5))
    _, m = scan(config_of(**GATED), value, value, x.k, x.lr, x.value_channels)
    same(m.T, older.gated_oja(x.q, x.k, value, x.lr, x.value_channels)[1])
    written, kept = heads.gsa(slots)
    keys, values = (scan(config_of(**HEBBIAN), slots, written, item, np.ones(x.length), kept)[1] for item in (x.k, x.v))
    same((keys.T, values.T), older.gsa(x.q, x.k, x.v, written, kept)[1:])


def test_in_place_ttt_is_a_hebbian_commit_of_chunks(x):
    hidden, chunk, eta = 6, 4, 0.3
    w_gate, w_up = x.rng.normal(size=(2, hidden, KEYS))
    w_down, conv = x.rng.normal(size=(VALUES, hidden)), x.rng.normal(size=(5, VALUES))
    y, after = newer.in_place_ttt(x.q, x.v, w_gate, w_up, w_down, conv, chunk, eta)
    z = x.q @ w_gate.T
    z = z * heads.sigmoid(z) * (x.q @ w_up.T)
    target = np.zeros_like(x.v)
    for at in range(0, x.length, chunk):
        padded = np.pad(x.v[at : at + chunk], ((2, 2), (0, 0)))
        target[at : at + chunk] = sum(conv[tap] * padded[tap : len(padded) - 4 + tap] for tap in range(5))
    config = config_of(bias="dot", chunk=chunk, commit="chunk", read="before")
    initial = {"weight": torch.as_tensor(w_down)[None]}
    same(scan(config, z, z, target, np.full(x.length, eta), initial=initial), (y, after))


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
    same(scan(config_of(**HEBBIAN), x.q, x.k, x.v, x.lr**2, x.keep)[1], weight)


@pytest.mark.spec("GATE-OSDN-E1")
def test_a_preconditioner_of_one_stays(x):
    forget = np.ones(x.length)
    same(newer.hypergradient(x.unit, forget, start=1.0), np.ones_like(x.k))
    assert abs(newer.hypergradient(x.unit, forget) - 1).max() > 0.1
    assert abs(newer.hypergradient(x.unit, 0.9 * forget, start=1.0) - 1).max() > 0.05


@pytest.mark.spec("GATE-MAMBA-E1")
def test_one_input_and_several_turn_other_pairs(x):
    angle = x.rng.normal(size=(x.length, KEYS // 2))
    ahead = [*range(0, KEYS, 2), *range(1, KEYS, 2)]
    neighbours = newer.rotate(x.k, angle)
    same(newer.rotate(x.k[:, ahead], angle, halves=True), neighbours[:, ahead])
    assert abs(newer.rotate(x.k, angle, halves=True) - neighbours).max() > 0.1


def test_tnt_is_two_memories_and_a_projection(x):
    chunk, local, restart = 8, 2, 4
    v0, w0, slow, fast = x.start, x.start, 0.1 * x.lr, 0.5 * x.lr
    expected, weight, w = older.tnt(x.q, x.unit, x.v, slow, fast, chunk, local, restart, v0, w0)
    steps = np.arange(x.length)
    start = {"weight": torch.as_tensor(v0)[None]}, {"weight": torch.as_tensor(w0)[None]}
    resets = [torch.as_tensor((steps % n == 0) & (steps > 0))[None] for n in (restart, local)]
    config = config_of(chunk=chunk, commit="chunk", read="before")
    far, m = scan(config, x.q, x.unit, x.v, slow, initial=start[0])
    same(m, weight)
    # The projection starts anew with every local chunk.
    full = np.ones(x.length)
    query, _ = scan(config_of(bias="dot"), x.q, x.unit, x.unit, full, reset_mask=resets[1])
    config = config_of(chunk=local)
    near, m = scan(config, query.numpy(), x.unit, x.v, fast, initial=start[1], reset_mask=resets[0])
    same((far.double() + near, m), (expected, w))
