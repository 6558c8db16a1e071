"""Differentiating through a step, and phi that learns by its own objective."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from hecate import phi
from hecate.optim import KernelMomentum, PhiMomentum
from hecate.optim.lift import with_learned_phi
from tests.optim.rules import draw

C = 3


def linear(weight: torch.Tensor) -> dict:
    return {C: {"learned": {"weight": weight}, "frozen": {}}}


NONE = {"learned": {}, "frozen": {}}
THROUGH = {
    "identity": (phi.Identity(), {}),
    "tanh-coupled-decay": (phi.Tanh(), {"weight_decay": 0.1, "decoupled": False}),
    "elu-nesterov": (phi.ELU(), {"nesterov": True, "weight_decay": 0.1}),
    "hope": (phi.Tanh(), {"form": "hope", "nesterov": True}),
    "diagonal": (phi.Tanh(), {"precondition": "diagonal"}),
    "vjp": (phi.Linear(d_phi=4), {"lift": "vjp"}),
    "vjp-odd-unit": (phi.Linear(d_phi=4), {"lift": "vjp", "odd": True, "input_scale": "unit"}),
    "pinv": (phi.Linear(d_phi=4), {"lift": "pinv"}),
    "phi-space": (phi.Linear(d_phi=4), {"lift": "vjp", "space": "phi"}),
    "orthogonalized": (phi.Tanh(), {"orthogonalize": {"steps": 2}}),
    "kernel": (phi.Linear(d_phi=4), {"keys": "rows"}),
}


def descended(made, options, lr, momentum, weight, start, differentiable=True) -> torch.Tensor:
    """The weights after three steps on a quadratic, as a function of what made the steps."""
    w = start.clone() if differentiable else torch.nn.Parameter(start.detach())
    cls = KernelMomentum if "keys" in options else PhiMomentum
    params = {"phi_params": linear(weight)} if made.kind == "linear" else {}
    optimizer = cls([w], lr, momentum, made, differentiable=differentiable, **options, **params)
    for _ in range(3):
        w.grad = 0.7 * (w.clone() if differentiable else w.detach()) - draw(2, C, seed=5)
        optimizer.step()
    return w


@pytest.mark.spec("OPT-BASE-V1")
@pytest.mark.parametrize("name", THROUGH)
def test_gradients_through_a_step(name):
    made, options = THROUGH[name]
    weight = draw(1, C, 4, seed=2) / 2
    inputs = [torch.tensor(0.1), torch.tensor(0.8), draw(2, C, seed=3)]
    if made.kind == "linear" and name != "pinv":  # its decoder is calibrated once: a constant
        inputs.append(weight)
    inputs = [value.requires_grad_() for value in inputs]

    def loss(lr, momentum, start, weight=weight):
        return descended(made, options, lr, momentum, weight, start * 1.0).square().sum()

    assert torch.autograd.gradcheck(loss, inputs, atol=1e-7)
    slopes = torch.autograd.grad(loss(*inputs), inputs)
    assert all(slope.abs().max() > 1e-6 for slope in slopes)
    if name != "orthogonalized":  # and the steps are the plain ones
        through, plain = (descended(made, options, 0.1, 0.8, weight, draw(2, C, seed=3), how) for how in (True, False))
        torch.testing.assert_close(through, plain, rtol=1e-14, atol=1e-15)


class Bend(phi.FeatureMap):
    """tanh(a x): componentwise, with a number of its own to learn."""

    kind: Literal["a_bend_that_learns"] = "a_bend_that_learns"
    promises = phi.Traits(parity="odd", componentwise=True, rising="everywhere", bounded_slope=True)

    def init(self, d_in, **how):
        how.pop("generator")
        heads = how.pop("heads", 1)
        return {"learned": {"a": torch.full((heads, 1), 3.0, **how)}, "frozen": {}}

    def forward(self, x, params):
        a = params["learned"]["a"]
        y = torch.tanh(a * x)
        return y, (x, a, y)

    def vjp(self, residuals, g):
        x, a, y = residuals
        pulled = g * (1 - y * y)
        return pulled * a, {"a": (pulled * x).sum().expand(a.shape)}


@pytest.mark.spec("OPT-PHI-D4")
@pytest.mark.parametrize("lift", ["identity", "vjp"])
@pytest.mark.parametrize("scale", ["none", "rms", "unit", "restored"])
def test_a_map_of_numbers_learns_as_any_other(lift, scale):
    p, g = torch.nn.Parameter(torch.zeros(6, C)), draw(6, C, seed=5)
    optimizer = PhiMomentum([p], 0.1, 0.0, feature_map=Bend(), lift=lift, input_scale=scale, phi_lr=0.3)
    row_map = optimizer.row_map(optimizer.param_groups[0], g)
    p.grad = g
    optimizer.step()
    length = g.norm(dim=-1, keepdim=True)
    sizes = {"none": torch.ones(6, 1), "rms": length / C**0.5, "unit": length, "restored": length}
    x, back = g / sizes[scale], length / row_map.gain if scale == "restored" else 1.0

    def told(a):
        y = torch.tanh(a * x)
        return (y if lift == "identity" else y * a * (1 - y * y)) * back

    a = torch.tensor(3.0, requires_grad=True)
    target = g if scale == "restored" else x
    missed = (told(a) - target).square().sum() / (2 * target.square().sum())
    (slope,) = torch.autograd.grad(missed, a)
    assert abs(slope) > 1e-3
    torch.testing.assert_close(p.detach(), -0.1 * told(torch.tensor(3.0)), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(optimizer.state[p]["phi.a"].squeeze(), 3.0 - 0.3 * slope, rtol=1e-12, atol=1e-13)


TRAINED = [phi.MLP(d_hidden=8), phi.Linear(d_phi=2), phi.T2R(d_phi=8), phi.Hedgehog()]


@pytest.mark.spec("OPT-PHI-D4")
@pytest.mark.parametrize("lift", ["vjp", "pinv"])
@pytest.mark.parametrize("made", TRAINED, ids=lambda m: m.kind)
def test_phi_learns_to_tell_the_gradient_back(made, lift):
    p = torch.nn.Parameter(draw(64, C))
    limit = {"max_decode_error": 9.0} if lift == "pinv" else {}
    optimizer = PhiMomentum([p], 0.0, feature_map=made, lift=lift, phi_lr=0.1, **limit)
    names = [key for key in optimizer.state[p] if key.startswith("phi.")]
    start = {key: optimizer.state[p][key].clone() for key in names}
    g = draw(64, C, seed=9) * torch.tensor([2.0, 1.0, 0.1])

    def missed() -> float:
        row_map = optimizer.row_map(optimizer.param_groups[0], g)
        return float((with_learned_phi(row_map, optimizer.state[p], g)(g) - g).norm() / g.norm())

    before = missed()
    p.grad = torch.zeros_like(p)
    optimizer.step()
    assert all(torch.equal(start[key], optimizer.state[p][key]) for key in names)
    p.grad = g
    for _ in range(30):
        optimizer.step()
    assert missed() < before, (before, missed())


@pytest.mark.spec("OPT-PHI-D4")
def test_one_step_of_phi_is_the_gradient_of_its_objective():
    p, weight, g = torch.nn.Parameter(draw(5, C)), draw(1, C, 4, seed=2), draw(5, C, seed=3)
    optimizer = PhiMomentum(
        [p], 0.1, feature_map=phi.Linear(d_phi=4), lift="vjp", phi_lr=0.3, phi_params=linear(weight)
    )
    p.grad = g
    optimizer.step()
    w = weight.clone().requires_grad_()
    missed = (g @ w[0] @ w[0].T - g).square().sum() / (2 * g.square().sum())
    expected = weight - 0.3 * torch.autograd.grad(missed, w)[0]
    torch.testing.assert_close(optimizer.state[p]["phi.weight"], expected, rtol=1e-12, atol=1e-13)


@pytest.mark.spec("OPT-LIFT-D4")
def test_a_learned_lift_forgets_nothing_while_gradients_are_zero():
    p = torch.nn.Parameter(draw(5, C))
    optimizer = PhiMomentum([p], feature_map=phi.Linear(d_phi=4), lift="learned", forget=0.5)
    p.grad = draw(5, C, seed=3)
    optimizer.step()
    before = {key: value.clone() for key, value in optimizer.state[p].items() if "lift" in key}
    p.grad = torch.zeros_like(p)
    optimizer.step()
    assert before and all(torch.equal(v, optimizer.state[p][k]) for k, v in before.items())
