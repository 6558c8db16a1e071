"""The references of the rules of 2025 and 2026 against each other, and as values of the general write."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.memories import close
from tests.reference import gates_2026 as heads
from tests.reference import papers
from tests.reference import papers_2025 as older
from tests.reference import papers_2026 as newer
from tests.reference.general_write import general_write, general_write_products, general_write_solve
from tests.rule.draws import KEYS, LENGTH, RTOL, VALUES, Array, Draw, mamba3_inputs, one, same


@pytest.fixture
def x() -> Draw:
    return Draw()


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
    # The replacement key is a mean of k and a o k, by weights alpha; the bonus reads it before it is stored.
    close(replacement, (1 - given["alpha"]) * x.k + given["alpha"] * given["a"] * x.k, RTOL)
    bonus = [np.outer(x.v[t], replacement[t]) @ (given["xi"] * x.q[t]) for t in range(x.length)]
    close(older.rwkv7_bonus(x.q, replacement, x.v, given["xi"]), np.array(bonus), RTOL)
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
    # What n steps leave of the solution along an eigenvector is a Chebyshev polynomial of its eigenvalue.
    size, (values, vectors) = np.linalg.norm(h), np.linalg.eigh(h)
    for n in (1, 5, 30, 120):
        polynomial = np.polynomial.Chebyshev.basis(n + 1)
        left = polynomial(1 - 2 * values / size) / polynomial(1 + 2 * level / size)
        close(older.chebyshev(h, level, x.q[0], n), exact - vectors @ (left * (vectors.T @ exact)), 1e-11)


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
    same(older.mesa(x.q, x.k, x.v, full, x.lr, np.full(KEYS, 0.8))[0], papers.mesa(x.q, x.k, x.v, 0.8, x.lr)[0])
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
    # A softmax of -log is a mean by inverse products of distances.
    near = [
        [1e-3 + ((half - c) ** 2).sum() for c in book] for half, book in ((x.q[0, :2], first), (x.q[0, 2:], second))
    ]
    weight = 1 / np.outer(*near).ravel()
    weight[np.argsort(weight)[:-2]] = 0
    close(newer.product_key_code(x.q[0], first, second, 2), weight / weight.sum(), RTOL)


def test_gates_by_other_formulas():
    rise, logit, bias = np.array([0.3, -1.2]), np.array([-0.7, 0.9]), 0.2
    half, full = (1 + np.tanh(rise / 2)) / 2, np.log1p(np.exp(rise))  # sigmoid and softplus
    other, soft = (1 + np.tanh(logit / 2)) / 2, np.log1p(np.exp(logit))
    decay = (1 + np.exp(rise + bias)) ** -2.0
    close(heads.mamba_decay(rise, np.log(2), bias), decay, RTOL)
    close(heads.bounded_decay(rise, np.log(2), bias), np.exp(-5) * np.exp(5 * decay ** (1 / 5)), RTOL)
    same(heads.gated_delta_2(rise, logit, reflections=True), (2 * half, other))
    same(heads.gated_delta_2(rise, logit), (half, other))
    same((heads.delta_product(rise), heads.delta_product(rise, reflections=False)), (2 * half, half))
    close(heads.rwkv7_decay(rise) ** np.sqrt(np.e), np.exp(-half), RTOL)
    close(heads.rwkv7_value(rise, logit, rise), half * logit + (1 - half) * rise, RTOL)
    step = 2 * (1 + np.tanh(rise / 4)) / 2  # 1 + tanh(x / 4) at d_model = 16, x twice as large
    z = 1.7 * step
    beta, alpha = z**2 / (1 + z**2) * other, (1 + np.exp(rise + bias)) ** -3.0 / (1 + z**2)
    carry = (1 + np.exp(logit - bias)) ** -0.5
    got = heads.momentum_delta(rise, logit, rise, logit, 1.7, np.log(3), np.log(0.5), bias, -bias, 16)
    same(got, (step, beta, alpha, carry))
    dt = np.log1p(np.exp(rise + bias))
    got = heads.mamba3(rise, logit, rise, logit[:, None], bias)
    same(got, ((1 + np.exp(logit)) ** -dt, dt, half, (np.pi * dt * (2 / (1 + np.exp(-2 * logit)) - 1))[:, None]))
    close(heads.mesa_ridge(rise) - full, [0.25, 0.25], RTOL)
    same(heads.kalmanet(rise, logit), (half + 1e-6, other))
    same(heads.kalman_delta(rise, logit, rise), (full, soft + 0.01, full + 0.1))
    close(heads.q_delta(rise), (1 + np.tanh((rise - 0.9) / 2)) / 2, RTOL)
    close(heads.comba(rise), half, RTOL)
    close(heads.hgrn2(rise, 0.2), 0.2 * (1 - half) + half, RTOL)
    written, kept = heads.gsa(rise)
    same((kept**8, written + kept), (half, np.ones(2)))
    close(heads.log_linear(rise, logit), np.log1p(np.exp(logit * rise)), RTOL)
    close(heads.hgrn2_bounds(np.log([[2.0], [3.0], [5.0]])), [[0.0], [0.3], [0.8]], RTOL)
    close(heads.retnet(3), [31 / 32, 63 / 64, 127 / 128], RTOL)


def test_gates_keep_their_bounds(x):
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
