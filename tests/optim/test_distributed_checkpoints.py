"""torch's distributed checkpoints of every optimiser: nothing moves, nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from hecate.errors import ShapeError
from hecate.optim import DGD, Leveled, PhiMomentum
from tests.optim.test_edges import KINDS

Model = torch.nn.Sequential
Made = Callable[[Model], torch.optim.Optimizer]


def model(width: int = 5) -> Model:
    made = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Linear(width, 3))
    with torch.no_grad():
        for i, p in enumerate(made.parameters()):
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
    return made


def plain(name: str) -> Made:
    def make(module: Model) -> torch.optim.Optimizer:
        cls, options = KINDS[name]
        params = [p for p in module.parameters() if p.ndim > 1 or name != "muon"]
        optimizer = cls(params, **{"lr": 0.01, **options})
        if isinstance(optimizer, DGD):
            optimizer.attach(module)
        return optimizer

    return make


def leveled(factory: type[torch.optim.Optimizer], **options) -> Made:
    def make(module: Model) -> torch.optim.Optimizer:
        groups = [{"params": list(m.parameters()), "period": c}
                  for m, c in zip(module, (1, 3), strict=True)]  # fmt: skip
        return Leveled(groups, factory, **{"lr": 0.01, **options})

    return make


MADE: dict[str, Made] = {
    **{name: plain(name) for name in KINDS if name != "leveled"},
    "leveled phi": leveled(PhiMomentum),
    "leveled sgd": leveled(torch.optim.SGD),
    "leveled sgd momentum": leveled(torch.optim.SGD, momentum=0.9, weight_decay=0.1),
    "leveled adamw": leveled(torch.optim.AdamW),
    "leveled adamw tensor lr": leveled(torch.optim.AdamW, lr=torch.tensor(0.01)),
    "leveled rprop": leveled(torch.optim.Rprop),
    "slow adamw": lambda module: Leveled(module.parameters(), torch.optim.AdamW, period=4),
}
every = pytest.mark.parametrize("name", MADE)


def advance(module: Model, optimizer: torch.optim.Optimizer, first: int, steps: int) -> list:
    """The weights after each of some steps."""
    history = []
    for step in range(first, first + steps):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        module(x).square().mean().backward()
        optimizer.step()
        history.append([p.detach().clone() for p in module.parameters()])
    return history


def assert_same(left: list, right: list) -> None:
    for step, (ours, theirs) in enumerate(zip(left, right, strict=True)):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), step


@pytest.mark.spec("OPT-BASE-I1", "OPTIM-LEVEL-I3")
@every
def test_asking_a_fresh_one_for_its_state_changes_no_later_step(name):
    twin, asked, given = (model() for _ in "abc")
    untouched, fresh, other = (MADE[name](module) for module in (twin, asked, given))
    expected = advance(twin, untouched, 0, 7)
    state = deepcopy(get_state_dict(asked, fresh))
    get_state_dict(asked, fresh)  # again, in the state that the first has left
    assert_same(advance(asked, fresh, 0, 7), expected)
    set_state_dict(given, other, model_state_dict=state[0], optim_state_dict=state[1])
    assert_same(advance(given, other, 0, 7), expected)


@pytest.mark.spec("OPT-BASE-I1", "OPTIM-LEVEL-I3")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("name", "cut"), [*((name, 5) for name in MADE), *((name, 1) for name in MADE if "leveled" in name)]
)
def test_a_checkpoint_on_disk_continues_bit_for_bit(name, cut, tmp_path):
    """`dcp.load` reads what a fresh state asks for and no more: windows have to be among it."""
    one, two = model(), model()
    saved, resumed = MADE[name](one), MADE[name](two)
    advance(one, saved, 0, cut)
    saved.zero_grad()  # without gradients torch's helper would step what has no state
    state = dict(zip("mo", get_state_dict(one, saved), strict=True))
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    state = dict(zip("mo", get_state_dict(two, resumed), strict=True))
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    set_state_dict(two, resumed, model_state_dict=state["m"], optim_state_dict=state["o"])
    assert_same(advance(two, resumed, cut, 5), advance(one, saved, cut, 5))


@pytest.mark.spec("OPTIM-LEVEL-D3")
@pytest.mark.parametrize(
    ("factory", "options", "period", "key"),
    [
        (torch.optim.AdamW, {}, 1, "exp_avg"),
        (torch.optim.SGD, {"momentum": 0.9}, 1, "momentum_buffer"),
        (torch.optim.Adafactor, {}, 1, "row_var"),
        (PhiMomentum, {}, 1, "momentum"),
        (torch.optim.SGD, {}, 3, "window"),
        (torch.optim.AdamW, {}, 8, "window"),
    ],
)
@pytest.mark.parametrize("stepped", [False, True], ids=["fresh", "stepped"])
def test_state_of_another_shape_is_refused_at_load(factory, options, period, key, stepped):
    one, two = model(5), model(6)
    saved, other = (Leveled(module.parameters(), factory, lr=0.01, period=period, **options) for module in (one, two))
    advance(one, saved, 0, 4)
    advance(two, other, 0, 4 * stepped)
    before = str(other.state_dict())
    with pytest.raises(ShapeError, match=rf"'{key}' of parameter 0 \[6, 4\] is \[\d, \d\] "):
        other.load_state_dict(saved.state_dict())
    assert str(other.state_dict()) == before
    advance(two, other, 4, 8)


@pytest.mark.spec("OPTIM-LEVEL-D5")
@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_flush_commits_what_a_window_has(reduce):
    fast, slow, never = (torch.nn.Parameter(torch.zeros(1)) for _ in "abc")
    groups = [{"params": [fast]}, {"params": [slow, never], "period": 4}]
    optimizer = Leveled(groups, torch.optim.SGD, lr=1.0, reduce=reduce, weight_decay=0.5)
    optimizer.flush()  # nothing has begun
    for grad in (1.0, 4.0):
        fast.grad, slow.grad = torch.full((1,), grad), torch.full((1,), grad)
        optimizer.step()
    left = fast.clone()
    optimizer.flush()
    assert slow.item() == (-2.5 if reduce == "mean" else -5.0) and torch.equal(fast, left)
    assert slow.grad.item() == 4.0 and never.item() == 0.0 and not optimizer._windows
    optimizer.flush()
    assert optimizer.param_groups[1]["elapsed"] == 0 and slow.item() in (-2.5, -5.0)
