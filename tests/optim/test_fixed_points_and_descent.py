"""A gradient of zero moves nothing, and every phi descends: for all maps and legal lifts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
import torch

from hecate import phi
from hecate.errors import ConfigError
from hecate.optim import KernelMomentum, PhiMomentum
from tests.phi.examples import EXAMPLES
from tests.registries import shipped_kinds

C = 5  # DPFP has up to 2 C - 1 = 9 rolls
EVERY = [m for kind in sorted(shipped_kinds(phi.FeatureMap)) for m in EXAMPLES.get(kind, [kind])]
EVERY = [phi.FeatureMap.model_validate(m) for m in EVERY]
EVERY = [m for m in EVERY if not m.needs_position]
FIRST = list({made.kind: made for made in reversed(EVERY)}.values())  # of every kind
LIFTS = ("identity", "vjp", "pinv", "learned", "prefix")


def label(value: object) -> str:
    return f"{value.kind}{EVERY.index(value)}" if isinstance(value, phi.FeatureMap) else str(value)


def opened(params: list[torch.nn.Parameter], lr: float, **options) -> PhiMomentum:
    """For tests of what happens, not of whether it is worth while."""
    try:
        return PhiMomentum(params, lr, max_decode_error=10.0, **options)
    except ConfigError as error:
        if "max_decode_error=10.0 acts" not in str(error):
            raise
        return PhiMomentum(params, lr, **options)


def built(made: phi.FeatureMap, lift: str, *params: torch.nn.Parameter, **options):
    """By operations one by one: kernels are held equal to them, at zeros too, in `test_one_pass`."""
    try:
        return opened(params, 0.1, feature_map=made, lift=lift, foreach=False, **options)
    except ConfigError as error:
        if "lift" not in str(error):
            raise
        return None  # no such lift


def weights(seed: int = 0, *shape: int) -> torch.nn.Parameter:
    draw = torch.Generator().manual_seed(seed)
    return torch.nn.Parameter(torch.randn(shape or (5, C), generator=draw))


@pytest.mark.spec("OPT-PHI-I1")
@pytest.mark.parametrize("made", EVERY, ids=label)
def test_zero_gradient_moves_nothing(made):
    """Every kind by every lift, and both of these in either space."""
    ways = [*product(LIFTS, [False]), ("vjp", True), ("prefix", None)] if made in FIRST else []
    for at, (lift, odd) in enumerate([*ways, ("vjp", None)], EVERY.index(made)):
        space = ("weight", "phi")[at % 2]
        w, wide = weights(), weights(1, 3, 5, 1)
        if odd and made.parity == "even":  # which has no odd part
            continue
        optimizer = built(made, lift, w, wide, odd=odd, space=space, input_scale="unit")
        start = [w.detach().clone(), wide.detach().clone()]
        for _ in range(2 if optimizer else 0):
            w.grad, wide.grad = torch.zeros_like(w), torch.zeros_like(wide)
            optimizer.step()
        assert torch.equal(start[0], w) and torch.equal(start[1], wide)
        for state in optimizer.state.values() if optimizer else ():
            assert not state["momentum"].any()


@pytest.mark.spec("OPT-PHI-I1", "OPT-KERNEL-I1")
@pytest.mark.parametrize("made", FIRST, ids=label)
def test_zero_rows_move_nothing_and_kernels_rest_and_descend(made):
    w = weights()
    optimizer = built(made, "auto", w)
    start = w.detach().clone()
    w.grad = weights(2).detach() * torch.tensor([1.0, 0, 1, 0, 0])[:, None]
    optimizer.step()
    assert torch.equal(start[[1, 3, 4]], w.detach()[[1, 3, 4]])
    for keys in ("rows", "columns"):
        w = weights()
        optimizer = KernelMomentum([w], 1.0, feature_map=made, keys=keys)
        w.grad = torch.zeros_like(w)
        optimizer.step()
        assert torch.equal(start, w)
        w.grad = weights(3).detach()
        optimizer.step()
        along = ((start - w.detach()) * w.grad).sum()
        assert along >= -1e-9 * (start - w.detach()).norm() * w.grad.norm()


def quadratic(w: torch.Tensor) -> torch.Tensor:
    scales = torch.linspace(0.5, 2, w.numel()).view_as(w)
    return (scales * (w - 1).square()).sum() / 2


def rosenbrock(w: torch.Tensor) -> torch.Tensor:
    x, y = w[..., :-1], w[..., 1:]
    return (100 * (y - x.square()).square() + (1 - x).square()).sum()


SIX = [
    phi.Identity(),
    phi.Linear(d_phi=6),
    phi.RandomFourier(d_phi=64, sigma=4.0),
    phi.Polynomial(degree=2),
    phi.MLP(d_hidden=8),
    phi.ELU(),
    phi.Tanh(),
    phi.ReLU(),
    phi.Favor(num_features=64),
]


def gains(loss, start: torch.Tensor, *ways: tuple[float, int], **options) -> Iterator[float]:
    """How many times smaller the loss gets, by each of some rates in so many steps."""
    for rate, steps in ways:
        w = torch.nn.Parameter(start.clone())
        optimizer = opened([w], rate, **options)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _ in range(steps):
            optimizer.zero_grad()
            value = loss(w)
            value.backward()
            torch.nn.utils.clip_grad_norm_([w], 1.0)
            optimizer.step()
            schedule.step()
        end = loss(w).item()
        yield loss(start).item() / end if end == end else 0.0


@pytest.mark.spec("OPT-PHI-I2")
@pytest.mark.parametrize("made", SIX, ids=lambda m: m.kind)
def test_a_quadratic_falls_a_hundredfold_and_rosenbrock_s_function(made):
    for lift in LIFTS:
        if built(made, lift, weights()):
            found = gains(quadratic, weights(4).detach() * 2, (1.0, 50), (0.03, 150), feature_map=made, lift=lift)
            assert any(gain > 100 for gain in found), lift
    (gain,) = gains(rosenbrock, torch.tensor([[-1.0, 1.2, -0.8, 0.5]]), (0.01, 200), feature_map=made)
    assert gain > 20, gain
