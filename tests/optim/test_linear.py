"""Where phi is linear at the gradients it gets: said once, of the group, and of no other."""

from __future__ import annotations

import copy
import warnings
from functools import partial

import pytest
import torch

from hecate import HealthWarning
from hecate.optim import KernelMomentum, Leveled, PhiMomentum, lift
from hecate.optim.lift import LINEAR, STEPS


def parameters(*shapes: tuple[int, ...]) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes or ((4, 6), (5,))]


def steps(optimizer, size: float, count: int = 2 * STEPS, seed: int = 0) -> list[str]:
    """The warnings of so many steps with Gaussian gradients of this size."""
    source = torch.Generator().manual_seed(seed)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(count):
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad = size * group.get("times", 1.0) * torch.randn(p.shape, generator=source)
            optimizer.step()
    assert all(item.category is HealthWarning for item in caught)
    assert all(item.filename == __file__ for item in caught)
    return [str(item.message) for item in caught]


@pytest.mark.spec("OPT-PHI-I5")
@pytest.mark.parametrize(
    ("phi", "foreach"),
    [("tanh", True), ("tanh", False), ("elu", False), ("sigmoid", False), ({"kind": "softplus", "beta": 2.0}, True)],
)
def test_a_phi_that_is_linear_at_small_gradients_is_said_to_be_once(phi, foreach):
    optimizer = PhiMomentum(parameters(), 1e-2, feature_map=phi, foreach=foreach)
    assert steps(optimizer, 1e-3, STEPS - 1) == []
    (text,) = steps(optimizer, 1e-3, 1)
    assert steps(optimizer, 1e-3, 2 * STEPS) == []
    assert text.startswith("phi sees gradients of 0.001, where ") and "this is SGD with momentum" in text
    assert "input_scale='rms'" in text


@pytest.mark.spec("OPT-PHI-I5")
def test_where_it_is_said_the_path_is_that_of_sgd():
    ours, theirs = parameters((6, 8)), parameters((6, 8))
    optimizer, sgd = PhiMomentum(ours, 0.1, 0.9, feature_map="tanh"), torch.optim.SGD(theirs, 0.1, 0.9)
    assert len(steps(optimizer, 0.03)) == 1
    steps(sgd, 0.03)
    # Each update is bent by less than LINEAR about a multiple of the gradient, here 1 - 3 s^2 / 3, and they add up.
    ours, theirs = ours[0].detach(), theirs[0].detach()
    assert float((ours - theirs).norm()) < (LINEAR + 0.03**2) * float(theirs.norm())


@pytest.mark.spec("OPT-PHI-I5")
@pytest.mark.parametrize(
    "fields",
    [
        {}, {"feature_map": "linear"}, {"feature_map": {"kind": "compose", "maps": ["identity", "linear"]}},
        {"feature_map": "tanh", "input_scale": "rms"}, {"feature_map": "leaky_relu"}, {"feature_map": "squared_relu"},
        {"feature_map": "exp"}, {"feature_map": "mlp", "lift": "vjp"},
        {"feature_map": "random_fourier", "lift": "learned"},
        {"feature_map": "elu", "center": False, "input_scale": "none"},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:center=False")
def test_no_false_alarm(fields):
    assert steps(PhiMomentum(parameters((6, 5)), 1e-6, **fields), 1e-4) == []


@pytest.mark.spec("OPT-PHI-I5")
def test_one_step_of_the_first_at_which_phi_acts_is_enough():
    for size, told in ((0.02, 1), (1.0, 0)):
        optimizer = PhiMomentum(parameters(), 1e-6, feature_map="tanh")
        texts = steps(optimizer, 1e-3, 4) + steps(optimizer, size, 1) + steps(optimizer, 1e-3, 2 * STEPS)
        assert len(texts) == told
    assert steps(PhiMomentum(parameters(), 1e-2, feature_map="tanh"), 0.0) == []  # which tells nothing


@pytest.mark.spec("OPT-PHI-I5")
@pytest.mark.parametrize("phi", ["relu", "gelu_shifted", "crelu"])
def test_maps_whose_odd_part_is_linear_act_at_no_size(phi):
    (text,) = steps(PhiMomentum(parameters(), 1e-3, feature_map=phi, odd=True), 10.0)
    assert f"odd-lifted '{phi}'" in text and "this is SGD with momentum" in text
    assert ("take another lift or feature_map" if phi == "crelu" else "take another feature_map") in text


@pytest.mark.spec("OPT-PHI-I5")
def test_of_a_polynomial_at_one_length_nothing_but_the_length_is_left():
    for scale, what in (("restored", "this is SGD with momentum"), ("unit", "rows scaled by 'unit', without phi")):
        (text,) = steps(PhiMomentum(parameters((4, 6)), 1e-3, feature_map="polynomial", input_scale=scale), 1.0)
        assert what in text and "take another lift or feature_map" in text


@pytest.mark.spec("OPT-PHI-I5")
def test_each_group_is_judged_by_itself():
    small, large = parameters(), parameters()
    groups = [{"params": small}, {"params": large, "times": 1e3}, {"params": parameters(), "feature_map": "identity"}]
    (text,) = steps(PhiMomentum(groups, 1e-6, feature_map="tanh"), 1e-3)
    assert "gradients of 0.001" in text
    mixed = PhiMomentum([*small, torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))], 1e-6, feature_map="tanh")
    assert len(steps(mixed, 1e-3)) == 1  # parameters of two dtypes, one group


@pytest.mark.spec("OPT-PHI-I5")
def test_kernels_of_short_keys_are_said_to_be_linear():
    (text,) = steps(KernelMomentum(parameters((1000, 3)), 1e-6, feature_map="tanh"), 1.0)
    assert text.startswith("phi sees rows of 0.03") and "the kernel is that of identity" in text
    assert steps(KernelMomentum(parameters((4, 3)), 1e-6, feature_map="tanh"), 1.0) == []
    assert steps(KernelMomentum(parameters((4, 3)), 1e-6, feature_map="polynomial"), 1.0) == []


@pytest.mark.spec("OPT-PHI-I5")
def test_no_step_waits_for_numbers(monkeypatch):
    waiting = []
    monkeypatch.setattr(lift, "put_off", lambda value, then: waiting.append((value, then)))
    optimizer = PhiMomentum(parameters(), 1e-6, feature_map="tanh")
    assert steps(optimizer, 1e-3) == [] and len(waiting) == 1
    value, then = waiting.pop()
    then(value)
    assert len(steps(optimizer, 1e-3)) == 1 and not waiting


@pytest.mark.spec("OPT-PHI-I5")
def test_levels_of_other_periods_are_watched_apart():
    slow, fast = parameters((4, 6), (4, 6))
    groups = [{"params": [slow], "period": 2}, {"params": [fast], "period": 1, "times": 1e3}]
    optimizer = Leveled(groups, partial(PhiMomentum, lr=1e-6, feature_map="tanh"))
    (text,) = steps(optimizer, 1e-3, 4 * STEPS)  # of the first alone: the second sees numbers about 1
    assert text.startswith("phi sees gradients of 0.001")


@pytest.mark.spec("OPT-PHI-I5")
def test_a_copy_watches_anew_and_a_state_dict_knows_nothing_of_it():
    optimizer = PhiMomentum(parameters(), 1e-6, feature_map="tanh")
    assert len(steps(optimizer, 1e-3)) == 1
    assert len(steps(copy.deepcopy(optimizer), 1e-3)) == 1
    assert set(optimizer.state_dict()["param_groups"][0]) == set(
        PhiMomentum(parameters()).state_dict()["param_groups"][0]
    )
