"""The references of the rules of 2025 and 2026: against each other, against the general write, as values of the public
API where they are ones today, and against fla-core's plain programs widened to float64."""

from __future__ import annotations

import functools
import importlib.metadata
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hecate import Gates, MemoryConfig, memory_scan
from hecate.algorithm import RLS
from studies.costs import peers
from tests.memories import close, config_of
from tests.reference import gates_2026 as heads
from tests.reference import papers
from tests.reference import papers_2025 as older
from tests.reference import papers_2026 as newer
from tests.reference.general_write import general_write, general_write_products, general_write_solve

LENGTH, KEYS, VALUES, RTOL = 13, 4, 3, 1e-12
Array = np.ndarray


class Draw:
    """Random inputs of one head."""

    def __init__(self, length: int = LENGTH, seed: int = 0) -> None:
        rng = self.rng = np.random.default_rng(seed)
        self.length = length
        self.q, self.k, self.e = (rng.normal(size=(length, KEYS)) for _ in range(3))
        self.v = rng.normal(size=(length, VALUES))
        self.unit, self.unit_q, self.unit_e = (older.unit(x) for x in (self.k, self.q, self.e))
        self.lr, self.gate, self.carry = rng.uniform(0.1, 0.95, size=(3, length))
        self.keep = rng.uniform(0.6, 1.0, size=length)
        self.channels = rng.uniform(0.5, 1.0, size=(length, KEYS))
        self.value_channels = rng.uniform(0.5, 1.0, size=(length, VALUES))
        self.ks, self.vs = rng.normal(size=(length, 3, KEYS)), rng.normal(size=(length, 3, VALUES))
        self.lrs = rng.uniform(0.1, 1.9, size=(length, 3))

    @property
    def start(self) -> Array:
        return self.rng.normal(size=(VALUES, KEYS))


@pytest.fixture
def x() -> Draw:
    return Draw()


def same(got: Any, expected: Any, rtol: float = RTOL) -> None:
    """Every result that both sides have."""
    got, expected = (item if isinstance(item, tuple) else (item,) for item in (got, expected))
    for at, (mine, theirs) in enumerate(zip(got, expected, strict=False)):
        close(mine, theirs, rtol, f"result {at}")


def one(*items: Array) -> tuple[Array, ...]:
    """Inputs of a single write per token."""
    return tuple(item[:, None] for item in items)


# The general write in its three forms.

ORDERS = pytest.mark.parametrize("order", ["before_gradient", "with_step"])


@ORDERS
@pytest.mark.parametrize("read", ["after", "before"])
@pytest.mark.parametrize("writes", [1, 3])
def test_general_write_by_products_of_transitions(x, order, read, writes):
    inputs = (x.q, x.ks[:, :writes] / 2, x.vs[:, :writes], x.lrs[:, :writes] / 2)
    erase, write = x.rng.uniform(0, 1.5, size=(2, *x.ks[:, :writes].shape))
    factors = {"erase": erase, "write": write, "retain": x.channels, "retain_value": x.value_channels}
    factors |= {"initial": x.start, "decay_order": order, "read": read}
    same(general_write_products(*inputs, **factors), general_write(*inputs, **factors))
    if writes == 1:
        factors["momentum"] = x.carry
        same(general_write_products(*inputs, **factors), general_write(*inputs, **factors))


@ORDERS
@pytest.mark.parametrize("writes", [1, 3])
def test_general_write_by_one_triangular_system(x, order, writes):
    inputs = (x.q, x.ks[:, :writes] / 2, x.vs[:, :writes], x.lrs[:, :writes] / 2)
    erase, write = x.rng.uniform(0, 1.5, size=(2, *x.ks[:, :writes].shape))
    factors = {"erase": erase, "write": write, "retain": x.channels, "initial": x.start, "decay_order": order}
    same(general_write_solve(*inputs, **factors), general_write(*inputs, **factors))
    if order == "before_gradient":
        both = {**factors, "retain_value": x.value_channels}
        same(general_write_solve(*inputs, **both), general_write(*inputs, **both))
    if writes == 1:
        factors["momentum"] = x.carry
        same(general_write_solve(*inputs, **factors), general_write(*inputs, **factors))


def test_general_write_refuses_what_has_no_meaning(x):
    with pytest.raises(ValueError, match="not defined for several"):
        general_write(x.q, x.ks, x.vs, x.lrs, momentum=x.carry)
    for options in ({"decay_order": "with_step"}, {"momentum": x.carry}):
        with pytest.raises(ValueError, match="share the system"):
            general_write_solve(x.q, *one(x.k, x.v, x.lr), retain_value=x.value_channels, **options)


# Papers as values of the general write.


def test_gated_delta_2_is_an_erase_gate(x):
    expected = newer.gated_delta_2(x.q, x.unit, x.v, x.channels, x.channels[::-1], x.value_channels)
    erase, value = x.channels[::-1][:, None], x.value_channels * x.v
    same(general_write(x.q, *one(x.unit, value), 1.0, erase=erase, retain=x.channels), expected)


def test_products_of_writes(x):
    keys = older.unit(x.ks)
    expected = older.gated_delta_product(x.q, keys, x.vs, x.lrs, x.keep)
    same(general_write(x.q, keys, x.vs, x.lrs, retain=x.keep[:, None]), expected)
    writes = np.stack([x.unit_e, x.unit], 1), np.stack([0 * x.v, x.v], 1), np.stack([x.gate, x.lr], 1)
    expected = newer.erase_then_delta(x.q, x.unit, x.v, x.unit_e, x.channels, x.lr, x.gate)
    same(general_write(x.q, *writes, retain=x.channels), expected)


def rwkv7_inputs(x: Draw) -> dict[str, Array]:
    return {
        "w": heads.rwkv7_decay(x.q[::-1]),
        "a": heads.sigmoid(x.e),
        "xi": x.rng.uniform(0.5, 0.9, KEYS),
        "alpha": x.rng.uniform(0.5, 1.5, KEYS),
    }


def test_rwkv7_is_two_writes_the_first_of_which_erases(x):
    given = rwkv7_inputs(x)
    expected = older.rwkv7(x.q, k=x.k, v=x.v, **given)
    removal, replacement = older.rwkv7_keys(x.k, given["a"], given["xi"], given["alpha"])
    keys, values = np.stack([removal, replacement], 1), np.stack([0 * x.v, x.v], 1)
    ones = np.ones_like(removal)
    erase, write = np.stack([ones, 0 * ones], 1), np.stack([given["a"], ones], 1)
    options = {"write": write, "retain": given["w"]}
    same(general_write(x.q, keys, values, 1.0, erase=erase, decay_order="with_step", **options), expected)
    undo = np.stack([1 / given["w"], 0 * ones], 1)
    same(general_write(x.q, keys, values, 1.0, erase=undo, **options), expected)
    same(older.dplr(x.q, replacement, x.v, -removal, given["a"] * removal, given["w"]), expected)
    assert given["w"].min() > np.exp(-np.exp(-0.5))


def test_the_closed_loop_is_a_scalar_erase_and_another_query(x):
    expected = older.comba(x.q, x.unit, x.v, x.keep, x.lr, 0.7, 0.4)
    query, inputs = x.q - 0.4 * 0.7 * x.unit, one(x.unit, x.v, x.lr)
    same(general_write(query, *inputs, erase=0.7, retain=x.keep[:, None]), expected)
    rescaled = one(x.unit, x.v / 0.7, 0.7 * x.lr)
    same(general_write(query, *rescaled, retain=x.keep[:, None]), expected)


@pytest.mark.parametrize("retain", ["keep", "channels"])
def test_preconditioned_deltas_are_write_gates(x, retain):
    alpha = getattr(x, retain)
    inputs, wide = (x.q, *one(x.unit, x.v)), alpha if alpha.ndim == 2 else alpha[:, None]
    factor = newer.curvature(x.unit, x.gate, x.carry)
    expected = newer.preconditioned_delta(x.q, x.unit, x.v, factor, x.lr, alpha)
    same(general_write(*inputs, x.lr[:, None], write=factor[:, None], retain=wide), expected)
    assert np.all((1 / 1.5 < factor) & (factor < 1.5))


def test_kalman_gains_are_write_gates(x):
    omega, r = x.channels, x.gate
    gain = newer.kalman_gain(x.unit, x.channels, omega, r)
    expected = newer.kalman_delta(x.q, x.unit, x.v, gain, x.channels)
    same(general_write(x.q, *one(x.unit, x.v), 1.0, write=(gain / x.unit)[:, None], retain=x.channels), expected)
    # The exact filter of one channel: where info is 1 the diagonal loses nothing.
    k, alpha = x.k[:, :1], x.channels[:, :1]
    gain, p = newer.kalman_gain(k, alpha, omega[:, :1], r, info=1.0), 1.0
    for t in range(x.length):
        p = alpha[t] * p * alpha[t] + omega[t, :1]
        exact = p * k[t] / (r[t] + k[t] * p * k[t])
        close(gain[t], exact, RTOL)
        p = (1 - exact * k[t]) * p
    # One precision for all channels is that of channels that are equal.
    equal, level = np.ones_like(x.k), x.keep[:, None] * np.ones((1, KEYS))
    beta = newer.kalman_gain_isotropic(equal, level, x.lr, r)
    close(newer.kalman_gain(equal, level, x.lr[:, None] * equal, r), beta[:, None] * equal, RTOL)


def test_a_hypergradient_is_the_gradient_of_one_step(x):
    """d/dd of (f(M') - f(M)) / |e|^2 for lr = 1 is -(1 - d.(k o k)) k o k whatever M and v."""
    k, d = x.k[0], x.channels[0]
    m = torch.as_tensor(x.start)
    key, scale, value = torch.as_tensor(k), torch.as_tensor(d).requires_grad_(), torch.as_tensor(x.v[0])
    e = m @ key - value
    after = (m - torch.outer(e, scale * key)) @ key - value
    (after.square().sum() / 2 / e.square().sum()).backward()
    close(-scale.grad, (1 - d @ k**2) * k**2, RTOL)
    factor = newer.hypergradient(x.unit, x.keep, start=1.0)
    # With unit keys, without forgetting and at d = 1 the preconditioner never moves: it is the delta rule.
    close(newer.hypergradient(x.unit, np.ones(x.length), start=1.0), np.ones_like(x.k), RTOL)
    # Without clipping d is a gated delta memory of one value channel, key k o k and value 1.
    square = x.unit**2
    m, seen = np.ones((1, KEYS)), []
    for t in range(x.length):
        seen.append(m[0])
        m = x.keep[t] * m - (m @ square[t] - 1)[:, None] * square[t]
    close(factor, np.array(seen), RTOL)


def test_momentum_delta_is_the_general_write_with_a_slot(x):
    mu, eta, beta = x.carry, 1 + x.gate, x.lr
    momentum = mu * beta / np.append(beta[0], beta[:-1])
    for decayed, order in ((True, "before_gradient"), (False, "with_step")):
        y, s, m = newer.momentum_delta(x.q, x.unit, x.v, x.keep, beta, mu, eta, decayed=decayed)
        inputs = (x.q, *one(x.unit, x.v, beta * eta))
        options = {"retain": x.keep[:, None], "momentum": momentum, "decay_order": order}
        same(general_write(*inputs, **options), (y, s, beta[-1] * m))


def test_q_delta_erases_at_another_address(x):
    expected = newer.q_delta(x.q, x.unit, x.v, x.keep, x.lr, x.gate)
    erase = 1 + x.gate[:, None] * x.q / x.unit
    same(general_write(x.q, *one(x.unit, x.v, x.lr), erase=erase[:, None], retain=x.keep[:, None]), expected)


def test_oja_is_kda_with_keys_and_values_exchanged(x):
    y, s = older.gated_oja(x.q, x.k, older.unit(x.v), x.lr, x.value_channels)
    _, transposed = papers.kda(x.v, older.unit(x.v), x.k, x.value_channels, x.lr)
    close(s.T, transposed, RTOL)
    close(y[-1], transposed.T @ x.q[-1], RTOL)


# Two forms of one rule.


def test_efla_is_the_exact_flow(x):
    same(older.efla_flow(x.q, x.k, x.v, x.lr), older.efla(x.q, x.k, x.v, x.lr))
    # A key of length 0 writes nothing; a small one is the delta rule, a long time the projection.
    flow, delta = (rule(1e6 * x.q, 1e-6 * x.k, x.v, x.lr) for rule in (older.efla, papers.fast_weights))
    same(flow[0], delta[0], 1e-10)
    same(older.efla(x.q, 0 * x.k, x.v, x.lr)[1], np.zeros((VALUES, KEYS)))
    same(older.efla(x.q, x.k, x.v, 1e9 * x.lr), papers.fast_weights(x.q, x.k, x.v, 1 / (x.k**2).sum(1)))


def test_ridge_read_outs(x):
    ridge = heads.mesa_ridge(x.q[0])
    expected = older.mesa(x.q, x.k, x.v, x.keep, x.lr, ridge)
    same(older.mesa_least_squares(x.q, x.k, x.v, x.keep, x.lr, ridge), expected[0], 1e-11)
    # KalmaNet weighs a token by beta^2: with a mix of 0 it is a linear attention, with 1 a ridge read-out.
    y, u, h = older.gated_kalmanet(x.q, x.k, x.v, x.keep, x.lr, np.zeros(x.length))
    weighed = papers.gla(x.q, x.k, x.lr[:, None] ** 2 * x.v, np.broadcast_to(x.keep[:, None], x.k.shape))
    same((y, u), weighed)
    last = older.gated_kalmanet(x.q, x.k, x.v, x.keep, x.lr, np.ones(x.length))[0][-1]
    level = 0.02 * np.linalg.norm(h)
    close(older.mesa_least_squares(x.q, x.k, x.v, x.keep, x.lr**2, np.full(KEYS, level))[-1], last, 1e-11)
    exact = np.linalg.solve(h + level * np.eye(KEYS), x.q[0])
    errors = [np.linalg.norm(older.chebyshev(h, level, x.q[0], n) - exact) for n in (5, 15, 30, 120)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] <= RTOL * np.linalg.norm(exact)


def test_mlstm_in_three_forms(x):
    i, f = 3 * x.q[:, 0], heads.sigmoid(2 + x.q[:, 1])
    y, c, n = older.mlstm(x.q, x.k, x.v, i, f)
    stable, scaled, count, m = older.mlstm_stabilised(x.q, x.k, x.v, i, f)
    same((stable, np.exp(m) * scaled, np.exp(m) * count), (y, c, n))
    same(older.mlstm_parallel(x.q, x.k, x.v, i, f), y)
    # The logit 800 is past float64's exp, and the stabilised gates stay in [0, 1].
    assert np.isfinite(older.mlstm_stabilised(x.q, x.k, x.v, i + 800, f)[0]).all()


def test_abc_is_gated_slot_attention_with_cumulated_gates(x):
    slots = 2 * x.rng.normal(size=(x.length, 5))
    written, kept = older.abc_gates(slots)
    same(older.gsa(x.q, x.k, x.v, written, kept)[0], older.abc(x.q, x.k, x.v, slots))
    close(written[1:], 1 - kept[1:], RTOL)


@pytest.mark.parametrize("length", [1, 8, LENGTH])
@pytest.mark.parametrize("delta", [False, True])
def test_log_linear_attention_as_carries_and_as_masks(length, delta):
    x = Draw(length)
    scale = heads.log_linear(x.rng.normal(size=(length, 5)), np.ones(5))
    inputs = (x.q, x.unit, x.v, x.keep)
    beta = x.lr if delta else None
    same(older.log_linear_masks(*inputs, scale, beta), older.log_linear(*inputs, scale, beta)[0])
    y, levels = older.log_linear(*inputs, np.ones_like(scale), beta)
    plain = papers.gated_delta(*inputs, x.lr) if delta else papers.gla(*inputs[:3], x.keep[:, None] + 0 * x.k)
    same((y, levels.sum(0)), plain)


def mamba3_inputs(x: Draw, pairs: int = KEYS // 2) -> tuple[Array, ...]:
    logits = x.rng.normal(size=(3, x.length))
    return heads.mamba3(*logits, x.rng.normal(size=(x.length, pairs)), -1.0)


def test_mamba3_in_three_forms(x):
    inputs = (x.q, x.k, x.v, *mamba3_inputs(x), 0.3)
    y, s = newer.mamba3(*inputs)
    same(newer.mamba3_complex(*inputs), y)
    same(newer.mamba3_quadratic(*inputs), y)
    one_pair = (x.q, x.k, x.v, *mamba3_inputs(x, 1))
    same(newer.mamba3_quadratic(*one_pair), newer.mamba3(*one_pair)[0])
    rank_one = (x.q[:, None], x.k[:, None], x.v, np.ones((1, VALUES)), np.ones((1, VALUES)))
    same(newer.mamba3_mimo(*rank_one, *inputs[3:], halves=False), (y, s))


def test_mamba3_is_hebbian_writes(x):
    a, dt, trapezoid, angle = mamba3_inputs(x)
    theta = np.cumsum(angle, 0)
    q, k = newer.rotate(x.q, theta), newer.rotate(x.k, theta)
    early, own = (1 - trapezoid) * dt * a, trapezoid * dt

    def shifted(item: Array) -> Array:
        return np.concatenate([0 * item[:1], item[:-1]])

    writes = np.stack([shifted(k), k], 1), np.stack([shifted(x.v), x.v], 1), np.stack([early, own], 1)
    expected = newer.mamba3(x.q, x.k, x.v, a, dt, trapezoid, angle)
    same(general_write(q, *writes, erase=0.0, retain=a[:, None]), expected)
    # Rank r: 2 r writes, r reads.
    queries, keys = x.rng.normal(size=(2, x.length, 2, KEYS))
    m_in, m_out, gate = x.rng.normal(size=(3, 2, VALUES))
    expected = newer.mamba3_mimo(
        queries, keys, x.v, m_in, m_out, a, dt, trapezoid, angle, 0.3, gate[None] + 0 * x.vs[:, :2]
    )
    wide = np.repeat(theta[:, None], 2, 1)
    queries, keys = (newer.rotate(item, wide, halves=True) for item in (queries, keys))
    values = x.v[:, None] * m_in
    writes = np.concatenate([shifted(keys), keys], 1), np.concatenate([shifted(values), values], 1)
    rates = np.stack([early, early, own, own], 1)
    reads = [general_write(queries[:, j], *writes, rates, erase=0.0, retain=a[:, None]) for j in range(2)]
    y = sum(m_out[j] * (reads[j][0] + 0.3 * values[:, j]) * gate[j] for j in range(2))
    same((y, reads[0][1]), expected)


def test_kalman_attention_is_a_delta_rule_per_entry(x):
    a, noise = x.rng.uniform(0.6, 1.0, size=(2, VALUES, KEYS))
    y, mean = newer.kalman_attention(x.q, x.k, x.v, a, noise, x.value_channels)
    m, info, out = np.zeros_like(a), np.ones_like(a), []
    for t in range(x.length):
        info = info / (a**2 + noise * info) + np.outer(x.value_channels[t], x.k[t] ** 2)
        gain = np.outer(x.value_channels[t], x.k[t]) / info
        m = a * m + gain * (x.v[t][:, None] - x.k[t] * a * m)
        out.append(m @ x.q[t])
    same((np.array(out), m), (y, mean))


# Reductions.


def test_gated_delta_2_with_one_gate_is_kda_and_with_one_decay_gated_delta(x):
    gate, level = x.lr[:, None], x.keep[:, None] + 0 * x.k
    same(newer.gated_delta_2(x.q, x.unit, x.v, x.channels, gate, gate), papers.kda(x.q, x.unit, x.v, x.channels, x.lr))
    expected = papers.gated_delta(x.q, x.unit, x.v, x.keep, x.lr)
    same(newer.gated_delta_2(x.q, x.unit, x.v, level, gate, gate), expected)
    same(older.gated_delta_product(x.q, *one(x.unit, x.v, x.lr), x.keep), expected)
    same(older.comba(x.q, x.unit, x.v, x.keep, x.lr), expected)
    same(newer.q_delta(x.q, x.unit, x.v, x.keep, x.lr, 0 * x.lr), expected)
    factor = newer.curvature(x.unit, x.gate, x.carry, x=1.0)
    same(newer.preconditioned_delta(x.q, x.unit, x.v, factor, x.lr, x.keep), expected)
    none = 0 * x.lr
    same(newer.momentum_delta(x.q, x.unit, x.v, x.keep, x.lr / 1.3, none, none + 1.3), expected)
    same(newer.erase_then_delta(x.q, x.unit, x.v, x.unit_e, level, x.lr, none), expected)
    gain = x.lr[:, None] * x.unit
    same(newer.kalman_delta(x.q, x.unit, x.v, gain, level), expected)


def test_other_reductions(x):
    same(older.efla(x.q, x.unit, x.v, x.lr), papers.fast_weights(x.q, x.unit, x.v, 1 - np.exp(-x.lr)))
    # Mamba-3 without an angle and at trapezoid 1 is Mamba-2.
    a, dt, still, whole = -0.7, x.lr, np.zeros((x.length, 1)), np.ones(x.length)
    same(newer.mamba3(x.q, x.k, x.v, np.exp(a * dt), dt, whole, still), papers.mamba2(x.v, x.k, x.q, dt, -a))
    # An erase address that is the key is a stronger write there.
    expected = newer.erase_then_delta(x.q, x.unit, 0 * x.v, x.unit, x.channels, x.lr, x.gate)
    both = 1 - (1 - x.lr) * (1 - x.gate)
    same(papers.kda(x.q, x.unit, 0 * x.v, x.channels, both), expected)
    # HGRN2 is gated linear attention with keys 1 - f, RWKV-7 without removal too, one slot mLSTM's sum.
    same(older.hgrn2(x.q, x.channels, x.v), papers.gla(x.q, 1 - x.channels, x.v, x.channels))
    given = rwkv7_inputs(x) | {"a": np.zeros_like(x.k), "alpha": np.zeros(KEYS)}
    same(older.rwkv7(x.q, k=x.k, v=x.v, **given), papers.gla(x.q, x.k, x.v, given["w"]))
    # Mesa with its gates at 1, and retention in the paper's parallel form.
    full = np.ones(x.length)
    same(older.mesa(x.q, x.k, x.v, full, full, np.full(KEYS, 0.8))[0], papers.mesa(x.q, x.k, x.v, 0.8)[0])
    gamma = heads.retnet(2)
    y, s = older.retention(*(np.stack([item, item[::-1]]) for item in (x.q, x.k, x.v)), gamma)
    same((y[1], s[1]), papers.retnet(x.q[::-1], x.k[::-1], x.v[::-1], gamma[1]))


def test_chunked_memories_reduce_to_plain_ones(x):
    """TNT of one local chunk per token steps as the delta rule; a slot table of full codes is a batch step."""
    zero, none = np.zeros((VALUES, KEYS)), 0 * x.lr
    y, weight, w = older.tnt(x.q, x.unit, x.v, none, x.lr, 4, 1, x.length, zero, zero)
    # The query is projected on the only key of its local chunk.
    projected = x.unit * (x.unit * x.q).sum(1, keepdims=True)
    same((y, w), papers.fast_weights(projected, x.unit, x.v, x.lr))
    close(weight, zero, RTOL)
    codes, table = heads.softplus(x.q), x.start.T
    y, after = newer.product_key_memory(codes, x.v, x.gate, table, x.length)
    gradient = (x.gate[:, None] * (codes @ table - x.v)).T @ codes
    same((y, after), (codes @ table, table - gradient.T / x.length))
    first, second = x.rng.normal(size=(2, 3, 2))
    code = newer.product_key_code(x.q[0], first, second, 2)
    assert (code > 0).sum() == 2
    close(code.sum(), 1.0, RTOL)


def test_gates(x):
    bias = heads.inverse_softplus(np.array([1e-3, 0.1]))
    close(heads.softplus(bias), [1e-3, 0.1], RTOL)
    logits = 20 * x.rng.normal(size=(4, x.length))
    eta, beta, alpha, mu = heads.momentum_delta(*logits, 1.7, 0.3, 0.2, 0.1, -0.1, 64)
    assert np.all(beta + alpha <= 1 + 1e-15) and np.all((0 <= eta) & (eta <= 2)) and np.all(np.exp(-2) <= mu)
    bounded = heads.bounded_decay(logits[0], 0.4, 0.1)
    assert np.all((np.exp(-5) <= bounded) & (bounded <= 1))
    small = np.full(1, -30.0)
    close(heads.bounded_decay(small, 0.4, 0.0), heads.mamba_decay(small, 0.4, 0.0), RTOL)
    bounds = heads.hgrn2_bounds(x.q)
    assert np.all(bounds[0] == 0) and np.all(np.diff(bounds, axis=0) > 0) and np.all(bounds < 1)
    alpha = heads.raven(x.q, -x.lr, 2)
    assert np.all((alpha < 1).sum(1) == 2)
    close(np.log(alpha).sum(1), -x.lr, RTOL)
    close(heads.mesa_ridge(heads.inverse_softplus(0.75)), 1.0, RTOL)


# Values of the public API today.

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


# fla-core's plain programs, which compute in float32 whatever they are given: here every type they name is float64.


@functools.cache
def widened(operation: str) -> dict[str, Any]:
    path = importlib.metadata.distribution("fla-core").locate_file(f"fla/ops/{operation}/naive.py")
    source = Path(str(path)).read_text(encoding="utf-8").replace(".float()", ".double()")
    space: dict[str, Any] = {"__name__": "widened"}
    exec(compile(re.sub(r"torch\.float(32)?\b", "torch.float64", source), str(path), "exec"), space)  # its own source
    return space


def fla(operation: str, function: str, *inputs: Array, heads_first: bool = False, **options: Any) -> tuple[Array, ...]:
    """Outputs, and states with keys and values as here."""
    rows = [torch.as_tensor(np.ascontiguousarray(item))[None] for item in inputs]
    found = widened(operation)[function](
        *(item[:, None] if heads_first else item[:, :, None] for item in rows), **options
    )
    y, *states = found if isinstance(found, tuple) else (found,)
    y = y[0, 0] if heads_first else y[0, :, 0]
    return (y.numpy(), *(s[0, 0].T.numpy() for s in states if isinstance(s, torch.Tensor) and s.ndim == 4))


def fla_gated_delta_2(x: Draw) -> Any:
    gates = (np.log(x.channels), x.channels[::-1], x.value_channels)
    expected = newer.gated_delta_2(x.q, x.unit, x.v, x.channels, *gates[1:])
    for name in ("naive_recurrent_gdn2", "naive_chunk_gdn2"):
        yield fla("gdn2", name, x.q, x.unit, x.v, *gates, scale=1.0, output_final_state=True), expected


def fla_delta_product(x: Draw) -> Any:
    flat = x.ks.reshape(-1, KEYS) / 2, x.vs.reshape(-1, VALUES), np.log(x.keep), x.lrs.ravel()
    options = {"scale": 1.0, "num_householder": 3, "output_final_state": True}
    got = fla("gated_delta_product", "naive_recurrent_gated_delta_product", x.q, *flat, **options)
    yield got, older.gated_delta_product(x.q, x.ks / 2, x.vs, x.lrs, x.keep)


def fla_dplr(x: Draw) -> Any:
    a, b, w = 0.5 * x.unit_e, 0.5 * x.unit, x.channels
    expected, q = older.dplr(x.q, x.k, x.v, a, b, w), np.sqrt(KEYS) * x.q
    inputs = (q, x.k, x.v, a, b, np.log(w))
    yield fla("generalized_delta_rule/dplr", "dplr_recurrence", *inputs, heads_first=True), expected
    expected = older.dplr(x.q, x.k, x.v, a, b, np.ones_like(w))
    yield fla("generalized_delta_rule/iplr", "iplr_recurrence", *inputs[:5], heads_first=True), expected


def fla_comba(x: Draw) -> Any:
    inputs, options = (x.q, x.unit, x.v, 0.7 * x.unit), {"scale": 1.0, "output_final_state": True}
    got = fla("comba", "naive_recurrent_comba", *inputs, x.lr, np.log(x.keep), **options)
    yield got, older.comba(x.q, x.unit, x.v, x.keep, x.lr, 0.7)
    # Its chunked program reads the memory before the decay.
    got = fla("comba", "naive_chunk_comba", *inputs, np.log(x.keep), x.lr, **options)
    erase = np.broadcast_to(0.7 / x.keep[:, None, None], (x.length, 1, KEYS))
    yield got, general_write(x.q, *one(x.unit, x.v, x.lr), erase=erase, retain=x.keep[:, None])


def fla_preconditioned(x: Draw) -> Any:
    factor = newer.curvature(x.unit, x.gate, x.carry, center=-0.3)
    options = {"scale": 1.0, "output_final_state": True, "log_atk_scale": -0.3}
    inputs = (x.q, x.unit, x.v, np.log(x.gate), np.log(x.keep), x.carry, x.lr)
    got = fla("precond_gated_delta_rule", "naive_recurrent_precond_gated_delta_rule", *inputs, **options)
    yield got, newer.preconditioned_delta(x.unit_q, x.unit, x.v, factor, x.lr, x.keep)
    inputs = (x.q, x.unit, x.v, np.log(x.channels), np.log(x.gate), x.carry, x.lr)
    got = fla("precond_kda", "naive_recurrent_precond_kda", *inputs, **options)
    yield got, newer.preconditioned_delta(x.q, x.unit, x.v, factor, x.lr, x.channels)


def fla_mesa(x: Draw) -> Any:
    v, ridge = x.e, heads.mesa_ridge(x.q[0])
    program = widened("mesa_net")["naive_mesa_net_exact"]
    rows = [torch.as_tensor(item)[None, :, None] for item in (x.q, x.k, v, np.log(x.keep), x.lr)]
    y, h, g = program(*rows[:4], torch.as_tensor(ridge)[None], rows[4])
    yield (y[0, :, 0], g[0, 0].T, h[0, 0]), older.mesa(x.q, x.k, v, x.keep, x.lr, ridge)


def fla_momentum_delta(x: Draw) -> Any:
    alpha, mu, eta = x.keep, x.carry, 1 + x.gate
    inputs = (x.q, x.unit, x.v, np.log(alpha), np.log(mu), alpha[:, None] * x.unit, x.lr, eta)
    y, both = widened("momentum_delta_rule")["recurrent_momentum_delta_rule_ref"](
        *(torch.as_tensor(item)[None, :, None] for item in inputs), scale=1.0, output_final_state=True
    )
    expected = newer.momentum_delta(x.q, x.unit, x.v, alpha, x.lr, mu, eta)
    yield (y[0, :, 0], both[0, 0, 0].T, -both[1, 0, 0].T), expected


def fla_log_linear(x: Draw) -> Any:
    scale = heads.log_linear(x.rng.normal(size=(x.length, 5)), np.ones(5))
    got = fla("log_linear_attn", "naive_log_linear_attn", x.q, x.k, x.v, np.log(x.keep), scale)
    yield got, older.log_linear(x.q, x.k, x.v, x.keep, scale)[0]


def fla_slots(x: Draw) -> Any:
    slots = 2 * x.rng.normal(size=(x.length, 5))
    written, kept = heads.gsa(slots)
    inputs = (x.q, x.k, x.v)
    options = {"scale": 1.0, "heads_first": True}
    got = fla("gsa", "naive_recurrent_gsa", *inputs, written, np.log(kept), scale=1.0)
    yield got, older.gsa(x.q, x.k, x.v, written, kept)[0]
    yield fla("abc", "naive_recurrent_abc", *inputs, slots, **options)[0], older.abc(x.q, x.k, x.v, slots)
    root = np.sqrt(KEYS) * x.q
    got = fla("abc", "naive_cumsum_abc", root, x.k, x.v, slots, heads_first=True)
    yield got[0], older.abc(x.q, x.k, x.v, slots)


def fla_retention(x: Draw) -> Any:
    rows = [np.stack([item, item[::-1]]) for item in (x.q, x.k, x.v)]
    y = widened("retention")["naive_retention"](*(torch.as_tensor(item)[None] for item in rows))
    yield y[0], older.retention(*rows, heads.retnet(2))[0]


PROGRAMS = [
    fla_gated_delta_2,
    fla_delta_product,
    fla_dplr,
    fla_comba,
    fla_preconditioned,
    fla_mesa,
    fla_momentum_delta,
    fla_log_linear,
    fla_slots,
    fla_retention,
]


@pytest.mark.oracle
@pytest.mark.skipif(
    not (peers.installed("fla-core") and peers.installed("einops")),
    reason="fla-core is not installed; pip install 'hecate[oracle]'",
)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_fla(x, program):
    for got, expected in program(x):
        same(got, expected)
