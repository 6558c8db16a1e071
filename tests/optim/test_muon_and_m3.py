"""Muon and M3: references, torch's own Muon, the time scales, refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hecate.errors import ConfigError
from hecate.optim import M3, Muon, PhiMomentum
from tests.reference import optim_memories as reference
from tests.reference.algorithms import SCHEDULE


def parameter(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64):
    draw = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.nn.Parameter(draw.to(dtype))


def follow(w, optimizer, ref, zeros: float = 0.0) -> float:
    """The largest difference from a reference over 30 steps on a noisy quadratic, over the largest weight.

    With a chance of `zeros` a gradient has a row of zeros."""
    rng, plain, worst = np.random.default_rng(7), np.atleast_2d(w.detach().numpy().copy()), 0.0
    for _ in range(30):
        g = 0.3 * (plain - 1) + 0.2 * rng.normal(size=plain.shape)
        if rng.random() < zeros:
            g[rng.integers(len(g))] = 0
        plain = ref.step(plain, g)
        w.grad = torch.tensor(g).reshape(w.shape)
        optimizer.step()
        found = w.detach().numpy().reshape(plain.shape)
        worst = max(worst, np.abs(found - plain).max() / np.abs(plain).max())
    return worst


def side_by_side(steps: int, *pairs) -> None:
    """Steps of optimisers, each with its parameters, on the same gradients."""
    for step in range(steps):
        for params, optimizer in pairs:
            for i, p in enumerate(params):
                p.grad = parameter(*p.shape, seed=100 * step + i, dtype=p.dtype).detach()
            optimizer.step()


@pytest.mark.spec("OPT-MUON-D1", "OPT-ORTH-D1")
@pytest.mark.parametrize("how", ["original", "match_rms_adamw", "none"])
@pytest.mark.parametrize("polynomial", ["quintic", "cubic", "schedule"])
@pytest.mark.parametrize("shape", [(3, 5), (6, 2)])
def test_muon_reference(shape, polynomial, how):
    w, nesterov = parameter(*shape), polynomial == "quintic"
    optimizer = Muon([w], 0.02, ns_coefficients=polynomial, adjust_lr_fn=how, nesterov=nesterov)
    coefficients = {"quintic": reference.QUINTIC, "cubic": reference.CUBIC, "schedule": SCHEDULE}[polynomial]
    ref = reference.Muon(0.02, nesterov=nesterov, coefficients=coefficients, how=how)
    assert follow(w, optimizer, ref) <= 1e-12


@pytest.mark.spec("OPT-MUON-R1")
@pytest.mark.parametrize("how", [None, "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_muon_is_torchs_bit_for_bit(dtype, nesterov, how):
    shapes = [(7, 5), (7, 5), (3, 9), (20, 20), (130, 150)]
    theirs, ours = ([parameter(*s, seed=i, dtype=dtype) for i, s in enumerate(shapes)] for _ in "ab")
    shared = {"lr": 0.02, "weight_decay": 0.05, "nesterov": nesterov, "adjust_lr_fn": how}
    muon = torch.optim.Muon(theirs, **shared)
    mine = Muon(ours, ns_dtype=torch.bfloat16, foreach=False, **shared)
    side_by_side(12, (theirs, muon), (ours, mine))
    for a, b in zip(theirs, ours, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(muon.state[a]["momentum_buffer"], mine.state[b]["momentum"])


@pytest.mark.spec("OPT-MUON-E1")
def test_torchs_muon_overwrites_its_bfloat16_buffer():
    w = parameter(4, 5, dtype=torch.bfloat16)
    theirs = torch.optim.Muon([w], nesterov=False, momentum=0.5)
    w.grad = 8 * torch.ones_like(w)
    theirs.step()
    average = 4 * torch.ones_like(w)
    assert not torch.equal(theirs.state[w]["momentum_buffer"], average)
    ours = Muon([w], nesterov=False, momentum=0.5, ns_dtype="bfloat16", state_dtype="parameter")
    ours.step()
    assert torch.equal(ours.state[w]["momentum"], average)


@pytest.mark.spec("OPT-M3-D1", "OPT-M3-D2")
@pytest.mark.parametrize("since", ["close", "next"])
@pytest.mark.parametrize("second", ["none", "before", "after"])
@pytest.mark.parametrize("how", ["sum", "ema_mean", "ema_last"])
def test_m3_reference(how, second, since):
    w = parameter(3, 5)
    options = {"accumulate": how, "second_moment": second, "slow_period": 3, "slow_from": since}
    optimizer = M3([w], 0.02, weight_decay=0.1, **options)
    assert follow(w, optimizer, reference.M3(0.02, decay=0.1, **options)) <= 1e-12


@pytest.mark.spec("OPT-M3-D3")
@pytest.mark.parametrize("how", ["sum", "ema_mean"])
@pytest.mark.parametrize("vector", ["adam", "row"])
def test_m3_reference_of_vectors(vector, how):
    w = parameter(5)
    optimizer = M3([w], 0.02, accumulate=how, vectors=vector, slow_period=4)
    ref = reference.M3(0.02, accumulate=how, vector=vector, slow_period=4)
    assert follow(w, optimizer, ref) <= 1e-12


@pytest.mark.spec("OPT-M3-R1")
@pytest.mark.parametrize("ns_dtype", [None, "bfloat16"])
@pytest.mark.parametrize("how", ["ema_mean", "ema_last"])
def test_m3_without_its_slow_part_is_muon(how, ns_dtype):
    one, two = parameter(5, 7), parameter(5, 7)
    muon = Muon([one], 0.02, nesterov=False, ns_dtype=ns_dtype)
    m3 = M3([two], 0.02, slow=0.0, weight_decay=0.1, accumulate=how, ns_dtype=ns_dtype)
    side_by_side(20, ([one], muon), ([two], m3))
    assert torch.equal(one, two)


@pytest.mark.spec("OPT-M3-D2")
def test_a_parameter_without_a_gradient_counts_nothing():
    w = parameter(3, 4)
    optimizer = M3([w], slow_period=3)
    for grad in (parameter(3, 4, seed=1).detach(), None):
        w.grad = grad
        optimizer.step()
    assert int(optimizer.state[w]["step"]) == 1


def test_a_state_of_another_period_does_not_load_and_one_without_the_choice_goes_on():
    """Of a version in which the slow part acted in the step that closes."""
    saved, two = M3([parameter(2, 3)], slow_period=4).state_dict(), M3([parameter(2, 3)], slow_period=4)
    with pytest.raises(ConfigError, match="slow_period = 4"):
        M3([parameter(2, 3)], slow_period=5).load_state_dict(saved)
    for group in saved["param_groups"]:
        del group["slow_from"]
    two.load_state_dict(saved)
    assert two.param_groups[0]["slow_from"] == "close"


@pytest.mark.spec("OPT-MUON-D1")
def test_small_matrices_of_one_shape_go_together():
    ours, alone = ([parameter(4, 6, seed=i) for i in range(5)] for _ in "ab")
    side_by_side(5, (ours, Muon(ours, 0.05)), (alone, Muon(alone, 0.05, foreach=False)))
    for a, b in zip(ours, alone, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.spec("OPT-MUON-R1")
def test_orthogonalized_phi_momentum_is_muon_but_for_the_scale_of_its_momentum():
    one, two = parameter(4, 4), parameter(4, 4)
    muon = Muon([one], 0.02, 0.0, 0.9, nesterov=False)
    mine = PhiMomentum([two], 0.02, 0.9, orthogonalize=True)
    side_by_side(10, ([one], muon), ([two], mine))
    torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)
