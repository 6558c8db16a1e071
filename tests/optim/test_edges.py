"""Of all optimisers: options that go bad later, parameters without numbers, huge gradients."""

from __future__ import annotations

import math
import re
from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch

from hecate import phi
from hecate.errors import ConfigError, NonFiniteError
from hecate.optim import DGD, M3, DeepMomentum, DeltaMomentum, KernelMomentum, Leveled, Muon, PhiMomentum

RFF = phi.RandomFourier(d_phi=16, sigma=1.0)
KINDS = {
    "identity": (PhiMomentum, {}),
    "random fourier": (PhiMomentum, {"feature_map": RFF}),
    "phi space": (PhiMomentum, {"feature_map": RFF, "lift": "vjp", "space": "phi"}),
    "polynomial": (PhiMomentum, {"feature_map": phi.Polynomial(degree=2)}),
    "learned": (PhiMomentum, {"feature_map": phi.Linear(d_phi=3), "lift": "learned"}),
    "trained": (PhiMomentum, {"feature_map": phi.MLP(d_hidden=3), "phi_lr": 0.1}),
    "diagonal": (PhiMomentum, {"precondition": "diagonal"}),
    "kronecker": (PhiMomentum, {"precondition": "kronecker"}),
    "orthogonal": (PhiMomentum, {"orthogonalize": {"rescale": True}}),
    "kernel": (KernelMomentum, {}),
    "kernel rows": (KernelMomentum, {"keys": "rows", "feature_map": RFF}),
    "delta": (DeltaMomentum, {}),
    "delta rows": (DeltaMomentum, {"reading": "rows"}),
    "delta scalar": (DeltaMomentum, {"reading": "scalar"}),
    "deep": (DeepMomentum, {}),
    "deep shared": (DeepMomentum, {"shared": True}),
    "m3": (M3, {"slow_period": 2}),
    "m3 row": (M3, {"vectors": "row", "second_moment": "after"}),
    "muon": (Muon, {}),
    "dgd": (DGD, {"unattached": "sgd"}),
    "leveled": (Leveled, {"factory": PhiMomentum, "period": 2}),
}
every = pytest.mark.parametrize("name", KINDS)
SHAPES = [(), (0,), (0, 5), (5, 0), (1,), (3, 0, 2)]


def built(name: str, *params: torch.nn.Parameter, lr: float = 0.1, **more):
    cls, options = KINDS[name]
    return cls(params, **{"lr": lr, **options, **more})


def moved(optimizer: torch.optim.Optimizer, *params: torch.nn.Parameter, steps: int = 4):
    for _ in range(steps):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()


@pytest.mark.spec("OPT-BASE-D5")
@every
def test_numbers_that_go_bad_are_refused_before_anything_moves(name):
    p, q = (torch.nn.Parameter(torch.ones(2, 3)) for _ in range(2))
    optimizer = built(name, p, lr=0.1)
    optimizer.add_param_group({"params": [q]})
    moved(optimizer, p, q, steps=2)
    late = optimizer.param_groups[1]  # the first group would have moved by then
    numbers = getattr(optimizer, "inner", optimizer).numbers
    assert {"lr", "weight_decay"} <= numbers.keys()
    bad = [math.nan, math.inf, -0.1, "0.1", None, torch.tensor(math.nan)]
    for number, (option, high) in enumerate(numbers.items()):
        kept = late[option]
        few = bad if option == "lr" else [bad[number % len(bad)]]  # of the others one each: they go one way
        for value in [*few, 1.5] if high == 1 else few:
            if isinstance(optimizer, Leveled):
                moved(optimizer, p, q, steps=1)  # commits are every second step
            before = deepcopy((p.data, q.data, list(optimizer.state.values())))
            late[option] = value
            with pytest.raises(ConfigError, match=rf"^{option} must be a finite number .* got"):
                moved(optimizer, p, q, steps=1)
            assert str(before) == str((p.data, q.data, list(optimizer.state.values())))
            late[option] = kept
    moved(optimizer, p, q)
    assert p.isfinite().all() and q.isfinite().all()


@pytest.mark.spec("OPT-BASE-D5")
def test_rounding_of_a_scheduler_is_no_negative_rate():
    p = torch.nn.Parameter(torch.ones(2, 3))
    optimizer = built("identity", p)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / 3, 0.0, 4)
    for _ in range(4):
        moved(optimizer, p, steps=1)
        scheduler.step()
    assert -1e-17 < optimizer.param_groups[0]["lr"] < 0
    moved(optimizer, p, steps=1)


@pytest.mark.spec("OPT-BASE-D1")
@every
def test_parameters_without_numbers_are_no_trouble(name):
    view = ("flatten", "last")[list(KINDS).index(name) % 2]
    shapes = [s for s in SHAPES if len(s) > 1 or name != "muon"] + [(2, 3)]
    options = {} if name == "leveled" else {"matrix": view}
    alone = [torch.nn.Parameter(torch.ones(s)) for s in shapes]
    together = [torch.nn.Parameter(torch.ones(s)) for s in shapes]
    for p in alone:
        moved(built(name, p, **options), p)
    optimizer = built(name, *together, **options)
    moved(optimizer, *together)
    for p in (*alone, *together):
        assert p.isfinite().all() and bool((p != 1).all())  # true of none
    optimizer.load_state_dict(optimizer.state_dict())
    moved(optimizer, *together)


@pytest.mark.spec("OPT-BASE-D1")
@pytest.mark.parametrize(
    "around", [torch.autocast("cpu", torch.bfloat16), torch.device("meta")], ids=["autocast", "meta"]
)
@every
@pytest.mark.filterwarnings("ignore::hecate.errors.StabilityWarning")
def test_a_step_is_the_same_whatever_is_set_around_it(name, around):
    ends = []
    for context in (nullcontext(), around):
        p = torch.nn.Parameter(torch.linspace(-1, 1, 36).reshape(6, 6).sin())
        grads = [torch.linspace(-1, 2, 36).mul(n).cos().reshape(6, 6) for n in (1, 2, 3)]
        with context:
            optimizer = built(name, p)
            for p.grad in grads:
                optimizer.step()
            optimizer.state_dict()
        ends.append(p.detach())
    assert torch.equal(*ends)


SQUARES = {"diagonal", "m3", "m3 row"}  # their state holds squares, as Adam's does


@pytest.mark.spec("OPT-BASE-I5")
@pytest.mark.parametrize("size", [1e20, 1e30])
@every
def test_gradients_whose_squares_leave_float32(name, size):
    """The same steps as in float64, to the rounding of float32."""
    weights = []
    for dtype in (torch.float32, torch.float64):
        w = torch.nn.Parameter(torch.zeros(3, 5, dtype=dtype))
        optimizer = built(name, w)
        for step in range(2):
            draws = torch.Generator().manual_seed(step)
            w.grad = (size * torch.randn(3, 5, generator=draws, dtype=torch.float32)).to(dtype)
            if name == "kronecker" and dtype == torch.float32:
                with pytest.raises(NonFiniteError, match="squares of an update left torch.float32"):
                    optimizer.step()
                return
            optimizer.step()
        weights.append(w.detach().double())
    assert weights[0].isfinite().all()
    if name not in SQUARES:
        assert (weights[0] - weights[1]).norm() <= 1e-4 * weights[1].norm()


@pytest.mark.spec("OPT-BASE-D4")
@pytest.mark.parametrize("cls", [DGD, M3, DeepMomentum, DeltaMomentum, KernelMomentum, Muon, PhiMomentum])
@pytest.mark.parametrize(
    ("word", "value", "said"),
    [
        ("weight_dcay", 0.1, "has no option 'weight_dcay'. Did you mean 'weight_decay'? Known: lr, "),
        ("ns_step", 3, "has no option 'ns_step'. Did you mean 'ns_steps'? Known: lr, "),
        ("slow_from", "close", "has no option 'slow_from'. Known: lr, "),  # of M3 alone
        ("phi_params", {}, "has no option 'phi_params'. "),  # of the constructor alone
        ("capturable", True, "capturable=True is not offered"),
        ("fused", True, "fused=True is not offered"),
    ],
)
def test_what_a_group_cannot_use_is_refused_by_name(cls, word, value, said):
    p, q = (torch.nn.Parameter(torch.ones(2, 2)) for _ in range(2))
    optimizer = cls([p], lr=0.1)
    if word in optimizer.defaults or (word == "ns_step" and "ns_steps" not in optimizer.defaults):
        return
    with pytest.raises(ConfigError, match=re.escape(said)):
        optimizer.add_param_group({"params": [q], word: value})
    assert len(optimizer.param_groups) == 1 and q not in optimizer.state
    with pytest.raises(ConfigError, match=re.escape(said)):
        cls([{"params": [q], word: value}])


@pytest.mark.spec("OPTIM-LEVEL-D3")
@pytest.mark.parametrize("word", ["priod", "periods", "reduc"])
def test_a_misspelt_setting_of_a_level_is_refused_by_name(word):
    p = torch.nn.Parameter(torch.ones(2, 2))
    for factory in (torch.optim.SGD, PhiMomentum):
        with pytest.raises(ConfigError, match=rf"a group of Leveled has no option '{word}'. Did you mean '[pr]e"):
            Leveled([{"params": [p], word: 4}], factory, lr=0.1)


@pytest.mark.spec("OPT-BASE-D4")
@every
def test_labels_of_groups_are_nobody_s_business(name):
    """Those of torch, of its schedulers and of users; also where a group serves another optimiser."""
    p = torch.nn.Parameter(torch.ones(2, 3))
    labels = {"name": "all", "layer": 3, "lr_scale": 0.5, "use_muon": True, "kind": "weights", "index": 0, "heads": 4}
    cls, options = KINDS[name]
    optimizer = cls([{"params": [("weight", p)], **labels}], **options, lr=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.1, total_steps=9, cycle_momentum="momentum" in optimizer.defaults
    )
    moved(optimizer, p)
    scheduler.step()
    group = optimizer.param_groups[0]
    assert {"initial_lr", "max_lr", "min_lr", "param_names", *labels} <= group.keys()
    again = cls([group], **options)
    again.load_state_dict(optimizer.state_dict())
    moved(deepcopy(again), p)
