"""DeltaMomentum and DeepMomentum: references, bounds, sharing, refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hecate import algorithm
from hecate.errors import ConfigError, StabilityWarning
from hecate.optim import M3, DeepMomentum, DeltaMomentum, Muon
from tests.optim.test_fixed_points_and_descent import quadratic
from tests.optim.test_muon_and_m3 import follow, parameter
from tests.reference import optim_memories as reference


@pytest.mark.spec("OPT-DELTA-D1", "OPT-DELTA-D2")
@pytest.mark.parametrize(("form", "erase"), [("stable", 0.7), ("hope", 0.05), ("stable", "lr")])
@pytest.mark.parametrize("reading", ["matrix", "rows", "scalar"])
@pytest.mark.parametrize("shape", [(3, 5), (6, 2)])
def test_delta_reference(shape, reading, form, erase):
    w, options = parameter(*shape), {"reading": reading, "form": form}
    optimizer = DeltaMomentum([w], 0.02, weight_decay=0.1, erase=erase, **options)
    ref = reference.DeltaMomentum(0.02, decay=0.1, erase=0.02 if erase == "lr" else erase, **options)
    assert follow(w, optimizer, ref) <= 1e-12


@pytest.mark.spec("OPT-DELTA-D1")
def test_a_gradient_that_erases_all_leaves_nothing(float32):
    """Nor what rounding momentum to the default dtype would leave."""
    w = parameter(3, 5)
    optimizer = DeltaMomentum([w], 0.02, 0.8, 9.0, reading="scalar")
    assert follow(w, optimizer, reference.DeltaMomentum(0.02, 0.8, 9.0, "scalar")) <= 1e-14


@pytest.mark.spec("OPT-DELTA-I1")
@pytest.mark.parametrize("reading", ["matrix", "rows", "scalar"])
def test_stable_forms_never_grow(reading):
    """However large a gradient is, what m held is not made longer by it."""
    for scale in (1e-6, 1.0, 1e3, 1e8):
        w = parameter(3, 4)
        optimizer = DeltaMomentum([w], 0.0, 1.0, reading=reading)
        before = parameter(3, 4, seed=1).detach()
        optimizer.state[w]["momentum"].copy_(before)
        w.grad = scale * parameter(3, 4, seed=2).detach()
        optimizer.step()
        kept = optimizer.state[w]["momentum"] - w.grad
        assert kept.norm() <= before.norm() + 1e-12 * (1 + scale)


@pytest.mark.spec("OPT-DELTA-D2")
@pytest.mark.parametrize(("reading", "square"), [("matrix", 4.0), ("rows", 4.0), ("scalar", 5.0)])
def test_the_printed_form_stops_at_its_bound(reading, square):
    """Of diag(2, 1) the spectral norm and the longest row are 2, |g|_F^2 is 5."""
    w, other = parameter(2, 2), parameter(3, 3)
    start = [w.detach().clone(), other.detach().clone()]
    w.grad, other.grad = torch.diag(torch.tensor([2.0, 1.0])).double(), torch.zeros(3, 3).double()
    options = {"reading": reading, "form": "hope", "momentum": 0.5}
    with pytest.raises(ConfigError, match=f"= {square:g} for parameter 1 .*clip gradients"):
        DeltaMomentum([other, w], erase=1.0, **options).step()
    assert torch.equal(start[0], w) and torch.equal(start[1], other)
    with pytest.warns(StabilityWarning, match="form 'stable'"):
        DeltaMomentum([other, w], erase=1.0, beyond="warn", **options).step()
    DeltaMomentum([other, w], erase=1.49 / square, **options).step()
    with pytest.raises(ConfigError):
        DeltaMomentum([other, w], erase=1.51 / square, **options).step()


@pytest.mark.spec("OPT-DELTA-R1")
def test_delta_momentum_is_the_memories_algorithm():
    w = parameter(4, 3)
    optimizer = DeltaMomentum([w], 1.0, 0.8, erase=0.5)
    rule, slot = algorithm.DeltaMomentum(erase=0.5), torch.zeros(1, 4, 3)
    one = torch.ones(1)
    for step in range(5):
        w.grad = parameter(4, 3, seed=step).detach()
        start = w.detach().clone()
        optimizer.step()
        direction, slot = rule.direction(w.grad[None], one, 0.8 * one, slot)
        torch.testing.assert_close(w.detach() - start, direction[0], rtol=1e-12, atol=1e-13)


def test_an_orthogonalized_first_step_is_muons():
    a, b = parameter(3, 4), parameter(3, 4)
    a.grad, b.grad = (parameter(3, 4, seed=1).detach() for _ in "ab")
    DeltaMomentum([b], 0.1, orthogonalize=True).step()
    Muon([a], 0.1, 0.0, nesterov=False).step()
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def surface(w: torch.Tensor, k: float, a: float, b: float) -> torch.Tensor:
    """Eq. 53: r^2 + k (r - theta + a sin(b r))^2."""
    r, theta = w[0]
    return r.square() + k * (r - theta + a * torch.sin(b * r)).square()


def steps_to(make, problem: tuple[float, ...], limit: int = 100) -> int:
    """Steps from (-3.5, 2) until the loss is below 1e-3, with the best of six rates."""
    found = [limit]
    for lr in (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2):
        w = torch.nn.Parameter(torch.tensor([[-3.5, 2.0]]))
        optimizer = make([w], lr)
        for step in range(found[-1]):
            optimizer.zero_grad()
            value = surface(w, *problem)
            if value.item() < 1e-3:
                found.append(step)
                break
            value.backward()
            optimizer.step()
    return min(found)


@pytest.mark.spec("OPT-DELTA-R2")
@pytest.mark.parametrize(("problem", "plain", "scalar"), [((1, 0.5, 1), 65, 32), ((10, 0.5, 1), 81, 47)])
def test_erasing_shortens_the_way_on_curved_surfaces(problem, plain, scalar):
    """Two of the 48 surfaces k in 1, 5, 10, 20; a in 0.5, 1, 2; w in 1, 3, 5, 10."""
    assert steps_to(lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9), problem) == plain
    for reading in ("scalar", "rows"):
        found = steps_to(lambda p, lr, r=reading: DeltaMomentum(p, lr, erase="lr", reading=r), problem)
        assert found == scalar if reading == "scalar" else found < plain


# DeepMomentum


def start_of(width: int, columns: int) -> np.ndarray:
    draw = torch.randn(width, columns, generator=torch.Generator().manual_seed(0))
    return draw.numpy() / np.sqrt(columns)


PLAIN = {"input_scale": "none", "orthogonalize": False}  # eq. 50 without what makes it train


@pytest.mark.spec("OPT-DEEP-D1", "OPT-DEEP-D3")
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"objective": "paper"}, {"objective": "paper"}),
        (PLAIN, {}),
        ({"orthogonalize": False}, {"scaled": True}),
        ({}, {"scaled": True, "orthogonal": True}),
    ],
    ids=["paper", "plain", "scaled", "default"],
)
@pytest.mark.parametrize("shape", [(3, 5), (6, 2)])
def test_deep_reference(shape, given, expected):
    w = parameter(*shape)
    optimizer = DeepMomentum([w], 0.05, width=4, weight_decay=0.1, rate=0.5, **given)
    ref = reference.DeepMomentum(0.05, start_of(4, shape[1]), decay=0.1, rate=0.5, **expected)
    assert follow(w, optimizer, ref) <= 1e-12


@pytest.mark.spec("OPT-DEEP-D3")
def test_rows_of_zeros_do_not_count_in_the_scale():
    """An embedding's gradient teaches what its seen rows would alone."""
    tall, short = parameter(6, 4), parameter(2, 4)
    one, two = (DeepMomentum([w], 0.1, orthogonalize=False) for w in (tall, short))
    for step in range(3):
        short.grad = parameter(2, 4, seed=step).detach()
        tall.grad = torch.cat([short.grad, torch.zeros(4, 4, dtype=torch.float64)])
        before = tall.detach()[2:].clone(), (tall - 0).detach()[:2] - short.detach()
        one.step()
        two.step()
        assert torch.equal(tall.detach()[2:], before[0])
        torch.testing.assert_close(tall.detach()[:2] - short.detach(), before[1])


@pytest.mark.spec("OPT-DEEP-D3")
@pytest.mark.parametrize("orthogonalize", [True, False])
def test_what_is_learned_does_not_depend_on_the_length_of_gradients(orthogonalize):
    """Gradients 2^-20 times as long: the same network, to the bit, and the same answer."""
    long, short = parameter(5, 4), parameter(5, 4)
    one, two = (DeepMomentum([w], 0.1, orthogonalize=orthogonalize) for w in (long, short))
    for step in range(5):
        long.grad = parameter(5, 4, seed=step).detach()
        short.grad = long.grad * 2**-20
        starts = long.detach().clone(), short.detach().clone()
        one.step()
        two.step()
        for key, value in one.state[long].items():
            assert torch.equal(value, two.state[short][key])
        moved = [w.detach() - s for w, s in zip((long, short), starts, strict=True)]
        scale = 1 if orthogonalize else 2**20
        torch.testing.assert_close(moved[0], scale * moved[1], rtol=0, atol=1e-8)
    assert two.state[short]["w_out"].abs().max() > 0.01


@pytest.mark.spec("OPT-DEEP-D3")
@pytest.mark.parametrize("exponent", [-120, -60, 60, 120])
def test_no_finite_gradient_is_too_short_or_too_long_for_the_scale(exponent):
    """In float32, where squares of these would be 0 or infinity and eps of NS is 2^-23."""
    plain, far = parameter(5, 4).detach().float(), parameter(5, 4).detach().float()
    one, two = (DeepMomentum([w], 0.1) for w in (plain, far))
    for step in range(5):
        plain.grad = parameter(5, 4, seed=step).detach().float()
        far.grad = plain.grad * 2.0**exponent
        one.step()
        two.step()
    assert torch.equal(plain, far) and plain.isfinite().all()


@pytest.mark.spec("OPT-DEEP-V1")
@pytest.mark.parametrize("objective", ["descent", "paper"])
def test_the_backward_pass_by_hand_is_autograds(objective):
    w, width = parameter(3, 5), 4
    optimizer = DeepMomentum([w], 0.0, 0.0, width, 1e-3, objective=objective, **PLAIN)
    state = optimizer.state[w]
    draws = torch.Generator().manual_seed(2)
    for value in state.values():
        value.copy_(torch.randn(value.shape, generator=draws))
    start = torch.tensor(start_of(width, 5))
    w1 = (start + state["w_in"]).requires_grad_()
    w2 = state["w_out"].clone().requires_grad_()
    w.grad = parameter(3, 5, seed=3).detach()
    found = torch.tanh(w.grad @ w1.T) @ w2.T
    loss = found.sum() if objective == "paper" else 0.5 * (found + w.grad).square().sum()
    g1, g2 = torch.autograd.grad(loss, (w1, w2))
    hidden = torch.tanh(w.grad @ w1.T)
    bound = hidden.square().sum() + w2.square().sum() * w.grad.square().sum()
    c = 1e-3 if objective == "paper" else 1e-3 / (1 + 1e-3 * bound.item())
    optimizer.step()
    torch.testing.assert_close(state["w_in"], -c * g1, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(state["w_out"], -c * g2, rtol=1e-12, atol=1e-15)


@pytest.mark.spec("OPT-DEEP-D2")
def test_a_shared_network_sees_all_rows_of_its_width():
    a, b, other = parameter(3, 5), parameter(2, 5, seed=1), parameter(2, 4, seed=2)
    optimizer = DeepMomentum([a, b, other], 0.05, width=4, rate=0.5, shared=True)
    wide = reference.DeepMomentum(0.05, start_of(4, 5), rate=0.5, scaled=True, orthogonal=True)
    narrow = reference.DeepMomentum(0.05, start_of(4, 4), rate=0.5, scaled=True, orthogonal=True)
    plain = [p.detach().numpy().copy() for p in (a, b, other)]
    for step in range(30):
        grads = [parameter(*p.shape, seed=10 * step + i).detach() for i, p in enumerate(plain)]
        a.grad, b.grad, other.grad = grads
        rows = [g.numpy() for g in grads]
        if step % 3 == 2:  # without a gradient: not read, but its network moves on
            b.grad = None
        present = rows[:2] if b.grad is not None else rows[:1]
        wide.train(np.concatenate(present))
        narrow.train(rows[2])
        plain[0] = wide.read(plain[0], rows[0])
        plain[1] = wide.read(plain[1], rows[1]) if b.grad is not None else plain[1]
        plain[2] = narrow.read(plain[2], rows[2])
        optimizer.step()
        for key, value in optimizer.state[a].items():
            assert torch.equal(value, optimizer.state[b][key])
    for p, q in zip((a, b, other), plain, strict=True):
        np.testing.assert_allclose(p.detach().numpy(), q, rtol=1e-12, atol=1e-12)


@pytest.mark.spec("OPT-DEEP-D1")
def test_large_gradients_do_not_diverge():
    w = parameter(3, 5)
    optimizer = DeepMomentum([w], 1e-3, rate=1.0, **PLAIN)
    for step in range(50):
        w.grad = 1e4 * parameter(3, 5, seed=step).detach()
        optimizer.step()
    assert w.detach().abs().max() < 1e3


# All of them: what depends on lr and momentum can be differentiated.


@pytest.mark.spec("OPT-BASE-V1")
@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (DeltaMomentum, {}),
        (DeltaMomentum, {"reading": "rows"}),
        (DeltaMomentum, {"reading": "scalar", "erase": 0.01}),
        (DeepMomentum, {"width": 3, "rate": 0.5}),
        (DeepMomentum, {"width": 3, "rate": 0.5, "shared": True}),
        (DeepMomentum, {"width": 3, "rate": 0.5, "orthogonalize": False}),
        (Muon, {"ns_steps": 2}),
        (M3, {"ns_steps": 2, "slow_period": 2, "second_moment": "before"}),
        (M3, {"ns_steps": 2, "slow_period": 2, "second_moment": "after", "accumulate": "sum"}),
    ],
    ids=lambda o: o.__name__ if isinstance(o, type) else "-".join(map(str, o.values())),
)
def test_steps_differentiate(cls, options):
    def after(lr: torch.Tensor, momentum: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        w = start.clone()
        optimizer = cls([w], lr, momentum=momentum, differentiable=True, **options)
        for step in range(3):
            w.grad = 0.5 * w + parameter(2, 3, seed=step).detach()
            optimizer.step()
        return w

    lr, momentum = (torch.tensor(value, requires_grad=True) for value in (0.1, 0.8))
    assert torch.autograd.gradcheck(after, (lr, momentum, parameter(2, 3).detach().requires_grad_()))


@pytest.mark.parametrize("options", [{}, {"rate": 1.0, "orthogonalize": False}, {"rate": 1.0, **PLAIN}], ids=str)
def test_a_network_that_has_learned_answers_zero_with_zero(options):
    w = parameter(3, 4)
    optimizer = DeepMomentum([w], 0.1, **options)
    for seed in (None, 1, None):
        w.grad = torch.zeros_like(w) if seed is None else parameter(3, 4, seed=seed).detach()
        before = w.detach().clone()
        optimizer.step()
        assert torch.equal(w, before) == (seed is None)


@pytest.mark.spec("OPT-M3-E1")
@pytest.mark.parametrize("how", ["ema_mean", "ema_last", "sum"])
def test_a_sum_of_gradients_is_an_undamped_spring(how):
    gains = []
    for lr in (0.03, 0.3, 3.0):
        w = torch.nn.Parameter(2 * parameter(5, 4, seed=4).detach())
        first, optimizer = quadratic(w).item(), M3([w], lr, accumulate=how)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 150)
        for _ in range(150):
            optimizer.zero_grad()
            quadratic(w).backward()
            torch.nn.utils.clip_grad_norm_([w], 1.0)
            optimizer.step()
            schedule.step()
        gains.append(first / quadratic(w).item())
    assert max(gains) < 10 if how == "sum" else max(gains) > 100
