"""Losses against numpy, what they mean, and their conventions where they bend."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from hecate import ConfigError, MemoryConfig, bias, memory_scan
from tests.knob_scans import worst_error
from tests.reference import knobs as reference
from tests.reference import memory

KNOBS = [
    bias.L1(),
    bias.L1(eps=0.1),
    bias.Yaad(),
    bias.Yaad(delta=2.0, eps=0.1),
    bias.Robust(),
    bias.Robust(radius=2.0, eps=0.1),
    bias.KL(),
    bias.KL(temperature=0.3),
    bias.KL(target="distribution"),
]
PLAIN = [
    *(bias.Dot(), bias.L2(), bias.Lp(p=1.5, eps=0.1), bias.Lp(p=1.01), bias.Lp(p=2.0), bias.Lp(p=3.0)),
    *(bias.Huber(delta=0.7), bias.Huber(delta=0.7, norm=True)),
]
every_knob = pytest.mark.parametrize("knob", KNOBS, ids=repr)
every_bias = pytest.mark.parametrize("knob", [*KNOBS, *PLAIN], ids=repr)


def loss_of(knob: bias.Bias):
    """Loss and gradient of one row, in numpy."""
    fields = knob.model_dump(exclude={"kind"})
    if knob in PLAIN:
        rule = memory.Rule(bias=knob.kind, **fields)
        return lambda pred, target: (memory.loss(rule, pred, target), memory.loss_gradient(rule, pred, target))
    return partial(reference.LOSSES[knob.kind], **fields)


def draws(generator: torch.Generator, *, distributions: bool = False):
    pred, target = (2 * torch.randn(40, 5, generator=generator) for _ in range(2))
    return pred, target.softmax(-1) if distributions else target


@pytest.mark.spec("BIAS-L1-D1", "BIAS-YAAD-D1", "BIAS-ROBUST-D1", "BIAS-KL-D1")
@pytest.mark.spec("BIAS-DOT-D1", "BIAS-L2-D1", "BIAS-LP-D1", "BIAS-HUBER-D1")
@every_bias
def test_losses_and_gradients_against_numpy(knob, generator):
    pred, target = draws(generator, distributions="distribution" in repr(knob))
    pairs = [loss_of(knob)(p, t) for p, t in zip(pred.numpy(), target.numpy(), strict=True)]
    np.testing.assert_allclose(knob.loss(pred, target), [a for a, _ in pairs], rtol=1e-12)
    np.testing.assert_allclose(knob.grad(pred, target), [b for _, b in pairs], rtol=1e-12, atol=1e-15)


@pytest.mark.spec("BIAS-L1-D1", "BIAS-YAAD-D1", "BIAS-ROBUST-D1", "BIAS-KL-D1")
@pytest.mark.parametrize("structure", ["matrix", "mlp"])
@every_knob
def test_fifty_tokens_against_numpy(knob, structure):
    error = worst_error(
        structure, knob, {"kind": "decay", "towards": "zero"}, loss_of(knob), reference.Decayed(), lr=0.1
    )
    assert error <= 1e-12


@pytest.mark.spec("BIAS-ANY-I1", "BIAS-L1-I1")
@pytest.mark.parametrize("autodiff", ["tape", "torch"])
@every_bias
def test_gradients_stay_finite_at_zero_error(knob, autodiff):
    """An empty memory asked for the value 0, and one that already holds what it is told."""
    config = MemoryConfig(bias=knob, state_dtype="float64")
    k = torch.eye(2).reshape(1, 2, 1, 2).repeat(1, 2, 1, 1).requires_grad_()
    v = torch.zeros(1, 4, 1, 3, requires_grad=True)
    q = torch.ones(1, 4, 1, 2, requires_grad=True)
    y, state = memory_scan(config, q, k, v, autodiff=autodiff)
    total = (y + 1).square().sum() + state.memory["weight"].sum()
    grads = torch.autograd.grad(total, [q, k, v], create_graph=True)
    again = torch.autograd.grad(sum(g.square().sum() for g in grads), [q, k, v], allow_unused=True)
    assert all(bool(torch.isfinite(g).all()) for g in (*grads, *again) if g is not None)


@pytest.mark.spec("BIAS-L1-I1", "BIAS-L1-R1")
def test_l1_at_zero_far_out_and_as_a_limit(generator):
    knob, zero, one = bias.L1(), torch.zeros(1), torch.ones(1)
    assert knob.loss(zero, zero).item() == knob.grad(zero, zero).item() == 0.0
    point = zero.clone().requires_grad_()
    (auto,) = torch.autograd.grad(knob.grad(point, zero).sum(), point)
    assert knob.grad_jvp(zero, zero, one).item() == auto.item() == 0.0
    assert knob.grad_jvp(1e-12 * one, zero, one).item() == pytest.approx(1e6, rel=1e-11)
    assert knob.loss(1e-12 * one, zero).item() == pytest.approx(0.5e-18, rel=1e-9)
    assert knob.grad(1e6 * one, zero).item() == 1.0
    pred, target = draws(generator)
    limit = bias.Lp(p=1 + 1e-9).grad(pred, target)
    torch.testing.assert_close(knob.grad(pred, target), limit, rtol=1e-7, atol=0)


@pytest.mark.spec("BIAS-L1-I1")
@pytest.mark.parametrize("knob", [bias.L1(), bias.Yaad(delta=0.5), bias.Robust()])
def test_an_error_of_exactly_zero_has_no_steep_slope(knob):
    """Of one coordinate, and of all: by hand and by autograd."""
    for error in (torch.tensor([0.0, 2.0]), torch.zeros(2)):
        point = error.clone().requires_grad_()
        (auto,) = torch.autograd.grad(knob.grad(point, torch.zeros(2)).sum(), point)
        torch.testing.assert_close(
            knob.grad_jvp(error, torch.zeros(2), torch.ones(2)), auto, rtol=1e-12, atol=1e-15
        )  # autograd: 1/r - e^2/r^3
        assert float(auto.abs().max()) <= 1.1


@pytest.mark.spec("BIAS-YAAD-I1", "BIAS-YAAD-E1")
def test_yaad_at_its_threshold():
    """Inside counts the sphere itself; beyond it gradient and loss jump, as printed."""
    knob, zero = bias.Yaad(delta=5.0), torch.zeros(2)
    at = torch.tensor([3.0, 4.0])
    beyond = at * (1 + 1e-12)
    assert knob.grad(at, zero).tolist() == [3.0, 4.0] and knob.loss(at, zero).item() == 12.5
    torch.testing.assert_close(knob.grad(beyond, zero), torch.tensor([5.0, 5.0]))
    assert knob.grad_jvp(at, zero, at).tolist() == [3.0, 4.0]
    assert float(knob.grad_jvp(beyond, zero, at).norm()) < 1e-6
    jump = knob.loss(beyond, zero) - knob.loss(at, zero)
    assert float(jump) == pytest.approx(5 * (7 - 5), abs=1e-4)  # delta (|e|_1 - delta)
    for other in (bias.Huber(delta=5.0), bias.Huber(delta=5.0, norm=True)):
        for value in (other.loss, other.grad):
            torch.testing.assert_close(value(beyond, zero), value(at, zero))
    # One coordinate alone: every form is Huber's.
    e = torch.linspace(-9, 9, 40).unsqueeze(-1)
    huber = bias.Huber(delta=5.0)
    torch.testing.assert_close(knob.grad(e, 0 * e), huber.grad(e, 0 * e))
    torch.testing.assert_close(knob.loss(e, 0 * e), huber.loss(e, 0 * e), rtol=0, atol=1e-5)


@pytest.mark.spec("BIAS-ROBUST-I1", "BIAS-ROBUST-R1")
def test_robust_is_the_worst_value_in_the_ball(generator):
    knob = bias.Robust(radius=0.7, eps=1e-9)
    pred, target = draws(generator)
    shift = torch.randn(200, 1, 5, generator=generator)
    shift = 0.7 * shift / shift.norm(dim=-1, keepdim=True)
    worst = bias.L2().loss(pred, target + shift).amax(0)
    assert bool((worst <= knob.loss(pred, target) + 1e-7).all())
    e = pred - target
    attained = bias.L2().loss(pred, target - 0.7 * e / e.norm(dim=-1, keepdim=True))
    torch.testing.assert_close(knob.loss(pred, target), attained, rtol=0, atol=1e-8)
    plain = bias.Robust(radius=0.0)
    for name in ("loss", "grad"):
        got, true = (getattr(item, name)(pred, target) for item in (plain, bias.L2()))
        torch.testing.assert_close(got, true, rtol=1e-15, atol=0)
    assert plain.curvature == 1.0 and knob.curvature is None
    zero = torch.zeros(3)
    assert knob.grad(zero, zero).tolist() == [0, 0, 0]


@pytest.mark.spec("BIAS-KL-I1", "BIAS-KL-R1")
def test_kl_is_a_divergence(generator):
    pred, told = draws(generator, distributions=True)
    knob = bias.KL(target="distribution")
    assert bool((knob.loss(pred, told) > 0).all())
    logits = told.log() + 3.0  # what is predicted exactly, up to a constant
    assert float(knob.loss(logits, told).abs().max()) < 1e-14
    assert float(knob.grad(logits, told).abs().max()) < 1e-15
    torch.testing.assert_close(knob.grad(pred + 7, told), knob.grad(pred, told))
    # v as logits at a temperature is the distribution that they make.
    hot = bias.KL(temperature=2.0)
    torch.testing.assert_close(hot.loss(pred, 2 * told.log()), knob.loss(pred, told))
    # One-hot: the cross entropy of the class.
    classes = torch.arange(40) % 5
    one_hot = torch.nn.functional.one_hot(classes, 5).to(pred.dtype)
    entropy = torch.nn.functional.cross_entropy(pred, classes, reduction="none")
    torch.testing.assert_close(knob.loss(pred, one_hot), entropy)
    assert torch.isinf(knob.loss(pred, -one_hot)).all() and torch.isfinite(knob.grad(pred, -one_hot)).all()


@pytest.mark.spec("BIAS-KL-I2")
def test_kl_in_float32_at_large_logits():
    pred = torch.tensor([1e4, -1e4, 0.0], dtype=torch.float32)
    for knob in (bias.KL(), bias.KL(temperature=1e-3)):
        u = knob.grad(pred, pred.flip(0))
        assert u.tolist() == [1.0, 0.0, -1.0] or torch.isfinite(u).all()
        assert torch.isfinite(knob.loss(pred, pred.flip(0)))


def test_a_temperature_without_a_softmax_is_refused():
    with pytest.raises(ConfigError, match=r"temperature.*target='distribution'"):
        bias.KL(target="distribution", temperature=0.5)


@pytest.mark.spec("BIAS-HUBER-D1")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inside_its_ball_huber_is_half_a_square(dtype):
    """However the root of delta^2 is rounded."""
    error = torch.full((3, 2), 0.01, dtype=dtype)
    for delta in torch.linspace(0.1, 2.0, 50).tolist():
        loss = bias.Huber(norm=True, delta=delta).loss(error, torch.zeros_like(error))
        assert torch.equal(loss, 0.5 * error.square().sum(-1))
