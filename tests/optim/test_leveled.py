"""`Leveled`: levels commit on their own windows, and are torch optimisers in every respect."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hecate.errors import CheckpointError, ConfigError
from hecate.optim import DGD, M3, Leveled, PhiMomentum, level_groups
from hecate.train.state import OptimizerFacts, pack, unpack
from tests.reference import leveled as reference

PERIODS = [1, 3, 8]
STEPS = 17  # the slowest level commits twice
BARE: dict[str, tuple[type[torch.optim.Optimizer], dict]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.1}),
    "adamw_foreach": (torch.optim.AdamW, {"lr": 0.05, "foreach": True}),
    "adamw_fused": (torch.optim.AdamW, {"lr": 0.05, "fused": True}),
    "adamw_maximize": (torch.optim.AdamW, {"lr": 0.05, "maximize": True, "amsgrad": True}),
    "adam_tensor_lr": (torch.optim.Adam, {"lr": torch.tensor(0.05)}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    "nadam": (torch.optim.NAdam, {"lr": 0.01}),
    "radam": (torch.optim.RAdam, {"lr": 0.01}),
    "adadelta": (torch.optim.Adadelta, {}),
    "adamax": (torch.optim.Adamax, {}),
    "asgd": (torch.optim.ASGD, {}),
    "rprop": (torch.optim.Rprop, {}),
    "adafactor": (torch.optim.Adafactor, {}),
    "muon": (torch.optim.Muon, {}),
}


def weights() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [0.5 * torch.randn(4, 4, generator=generator) for _ in PERIODS]


def loss(params: list[Tensor], t: int) -> Tensor:
    """A deep net on a batch of its own for every step."""
    x, y = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(t))
    for weight in params:
        x = torch.tanh(x @ weight)
    return (x - y).square().mean()


def model() -> nn.ParameterList:
    return nn.ParameterList([nn.Parameter(weight) for weight in weights()])


def leveled(params: nn.ParameterList, name: str = "adamw", **options: object) -> Leveled:
    factory, chosen = BARE[name]
    groups = [{"params": [p], "period": c} for p, c in zip(params, PERIODS, strict=True)]
    return Leveled(groups, factory, **{**copy.deepcopy(chosen), **options})


def advance(optimizer: torch.optim.Optimizer, params: nn.ParameterList, first: int, last: int) -> list[list[Tensor]]:
    """Runs steps first..last; the weights after each."""
    history = []
    for t in range(first, last + 1):
        optimizer.zero_grad()
        loss(list(params), t).backward()
        optimizer.step()
        history.append([p.detach().clone() for p in params])
    return history


def assert_same(left: list[list[Tensor]], right: list[list[Tensor]]) -> None:
    assert len(left) == len(right)
    for t, (mine, theirs) in enumerate(zip(left, right, strict=True), start=1):
        for level, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            assert torch.equal(a, b), f"level {level} differs after step {t}"


@pytest.mark.spec("OPTIM-LEVEL-D1")
@pytest.mark.parametrize("reduce", ["mean", "sum"])
@pytest.mark.parametrize(
    ("name", "rule"),
    [("sgd", reference.sgd(0.1, 0.9, 0.01)), ("adamw", reference.adamw(0.05, 0.9, 0.999, 1e-8, 0.1))],
    ids=["sgd", "adamw"],
)
def test_equals_the_loop_written_out(name: str, rule: reference.Rule, reduce: str):
    params = model()
    optimizer = leveled(params, name, reduce=reduce)
    expected = reference.train(loss, weights(), PERIODS, rule, STEPS, reduce)
    assert_same(advance(optimizer, params, 1, STEPS), expected)
    for level, period in enumerate(PERIODS):  # and the check can see every level move
        assert not torch.equal(expected[-1][level], weights()[level]), period


@pytest.mark.spec("OPTIM-LEVEL-R1")
@pytest.mark.parametrize("period", [1, 3])
@pytest.mark.parametrize("name", BARE)
def test_a_level_is_the_bare_optimiser_on_mean_gradients(name: str, period: int):
    factory, options = BARE[name]
    slow, bare = model(), model()
    ours = Leveled(slow, factory, period=period, **copy.deepcopy(options))
    theirs = factory(bare, **copy.deepcopy(options))
    for t in range(1, 13, period):
        advance(ours, slow, t, t + period - 1)
        grads = [torch.autograd.grad(loss(list(bare), t + i), list(bare)) for i in range(period)]
        for p, parts in zip(bare, zip(*grads, strict=True), strict=True):
            p.grad = sum(parts) / period
        theirs.step()
        assert_same([list(slow)], [list(bare)])
        assert not ours._windows


@pytest.mark.spec("OPTIM-LEVEL-I1")
def test_a_frozen_level_decays_nothing_and_counts_nothing():
    params = model()
    optimizer = leveled(params, lr=0.05, weight_decay=0.5)
    for t in range(1, 25):
        before = [p.detach().clone() for p in params]
        kept = [copy.deepcopy(optimizer.state.get(p, {})) for p in params]
        advance(optimizer, params, t, t)
        for p, period, old, state in zip(params, PERIODS, before, kept, strict=True):
            assert torch.equal(p, old) == (t % period != 0)
            if t % period:
                assert all(torch.equal(optimizer.state[p][key], state[key]) for key in state)
    assert [int(optimizer.state[p]["step"]) for p in params] == [24, 8, 3]


@pytest.mark.spec("OPTIM-LEVEL-I2")
@pytest.mark.parametrize("name", ["sgd", "adamw", "adamw_fused"])
def test_a_checkpoint_at_any_step_continues_bit_for_bit(name: str):
    params = model()
    optimizer = leveled(params, name)
    saved, whole = [], []
    for cut in range(17):
        tensors, facts = pack(params, [optimizer])
        saved.append(({key: value.clone() for key, value in tensors.items()}, json.loads(json.dumps(facts))))
        whole += advance(optimizer, params, cut + 1, cut + 1)
    whole += advance(optimizer, params, 18, 20)
    for cut, (tensors, facts) in enumerate(saved):
        other = model()
        resumed = leveled(other, name)
        advance(resumed, other, 50, 54)  # what was there before is replaced, windows included
        unpack(other, [resumed], tensors, OptimizerFacts.model_validate(facts), "checkpoint")
        assert_same(advance(resumed, other, cut + 1, 20), whole[cut:])


@pytest.mark.spec("OPTIM-LEVEL-I2")
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_go_on_alone(duplicate: Callable):
    params = model()
    optimizer = leveled(params)
    advance(optimizer, params, 1, 5)
    other, twin = duplicate((params, optimizer))
    assert twin.inner.state is twin.state
    left, right = advance(twin, other, 6, 20), advance(optimizer, params, 6, 20)
    assert_same(left, right)


def test_older_states_of_the_wrapped_optimiser_are_brought_up_to_date():
    params = model()
    optimizer = leveled(params)
    advance(optimizer, params, 1, 9)
    state = copy.deepcopy(optimizer.state_dict())
    for group in state["param_groups"]:
        del group["foreach"], group["maximize"]
    for entries in state["state"].values():  # torch kept numbers once
        entries["step"] = float(entries["step"])
    other = nn.ParameterList([p.detach().clone() for p in params])
    resumed = leveled(other)
    resumed.load_state_dict(state)
    assert_same(advance(resumed, other, 10, 20), advance(optimizer, params, 10, 20))


@pytest.mark.spec("OPTIM-LEVEL-D2")
def test_half_precision_windows_are_summed_in_float32():
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    optimizer = Leveled([parameter], torch.optim.SGD, lr=1.0, period=300, reduce="sum")
    for t in range(299):
        if t == 150:
            state = copy.deepcopy(optimizer.state_dict())
            optimizer.load_state_dict(state)
        parameter.grad = torch.ones(1, dtype=torch.bfloat16)
        optimizer.step()
    # bfloat16 itself stops counting at 256.
    window = optimizer.state_dict()["state"][0]["window"]
    assert window.dtype == torch.float32 and window.item() == 299
    optimizer.step()
    assert parameter.dtype == torch.bfloat16 and parameter.item() == -300


@pytest.mark.spec("OPTIM-LEVEL-D2")
def test_what_a_step_contributes_is_its_grad():
    fast, slow, never = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    groups = [{"params": [fast]}, {"params": [slow, never], "period": 4}]
    optimizer = Leveled(groups, torch.optim.SGD, lr=1.0)
    for t, grad in enumerate([8.0, None, 6.0, None], start=1):  # in a window, and at its commit
        optimizer.zero_grad(set_to_none=t != 2)  # clears no window
        slow.grad = None if grad is None else torch.full((2,), grad)
        if grad is not None:
            nn.utils.clip_grad_value_([slow], 6.0)  # clips the step
        given = slow.grad
        optimizer.step()
        assert slow.grad is given and (given is None or given[0] == min(grad, 6.0))
    assert slow.tolist() == [-3.0, -3.0]  # (6 + 0 + 6 + 0) / 4
    assert never.grad is None and not optimizer.state[never]


@pytest.mark.parametrize("second_dense", [False, True])
def test_sparse_gradients(second_dense: bool):
    table = nn.Parameter(torch.zeros(3, 2))
    optimizer = Leveled([table], torch.optim.SGD, lr=1.0, period=2, reduce="sum")
    dense = torch.tensor([[0.0, 0.0], [1.0, 2.0], [0.0, 0.0]])
    table.grad = dense.to_sparse(1)
    optimizer.step()
    table.grad = dense if second_dense else dense.to_sparse(1)
    optimizer.step()
    assert torch.equal(table, -2 * dense)


def test_schedulers_set_the_rate_of_the_commit():
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = Leveled([parameter], torch.optim.SGD, lr=1.0, period=3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 2.0**-t)
    for _ in range(3):
        parameter.grad = torch.ones(1)
        optimizer.step()
        scheduler.step()
    assert parameter.item() == -0.25 and optimizer.param_groups[0]["lr"] == 0.125


def test_hooks_fire_every_step_and_those_of_inner_at_commits():
    parameter, fired = nn.Parameter(torch.zeros(1)), []
    optimizer = Leveled([parameter], torch.optim.SGD, lr=1.0, period=2)
    optimizer.register_step_pre_hook(lambda *_: fired.append("before"))
    optimizer.register_step_post_hook(lambda *_: fired.append("after"))
    optimizer.inner.register_step_pre_hook(lambda *_: fired.append(parameter.grad.item()))
    for grad in (1.0, 4.0):
        parameter.grad = torch.full((1,), grad)
        optimizer.step()
    assert fired == ["before", "after", "before", 2.5, "after"]


def test_state_dict_hooks_see_windows():
    parameter, seen = nn.Parameter(torch.zeros(1)), []
    optimizer = Leveled([parameter], torch.optim.SGD, lr=1.0, period=2)
    parameter.grad = torch.ones(1)
    optimizer.step()
    optimizer.register_state_dict_post_hook(lambda _, state: seen.append("window" in state["state"][0]))
    optimizer.register_load_state_dict_pre_hook(
        lambda _, state: {**state, "state": {0: {"window": torch.full((1,), 3.0)}}}
    )
    optimizer.register_load_state_dict_post_hook(lambda loaded: seen.append(loaded._windows[parameter].item()))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [True, 3.0]
    assert len(optimizer._optimizer_load_state_dict_pre_hooks) == 1


def test_a_level_may_come_later_and_gets_a_whole_window():
    class Prepares(torch.optim.AdamW):
        def add_param_group(self, param_group: dict) -> None:
            super().add_param_group(param_group)
            param_group["prepared"] = len(self.param_groups)

    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = Leveled([first], Prepares, lr=1.0, weight_decay=0.0)
    first.grad = torch.ones(1)
    optimizer.step()
    optimizer.add_param_group({"params": second, "period": 3, "lr": 0.5})
    moved = []
    for _ in range(3):
        first.grad, second.grad = torch.ones(1), torch.ones(1)
        optimizer.step()
        moved.append(second.item() != 0)
    assert moved == [False, False, True] and round(second.item(), 6) == -0.5
    assert len(optimizer.inner.param_groups) == len(optimizer.param_groups) == 2
    assert [group["prepared"] for group in optimizer.param_groups] == [1, 2]  # the wrapped one is told


def test_a_step_skipped_by_the_scaler_is_no_step():
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = Leveled([parameter], torch.optim.SGD, lr=1.0, period=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    for factor in (1.0, float("inf"), 3.0):
        optimizer.zero_grad()
        scaler.scale((factor * parameter).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert parameter.item() == -2.0  # (1 + 3) / 2


def test_a_failing_commit_spends_its_window():
    class Fails(torch.optim.SGD):
        def step(self, closure: None = None) -> None:
            raise ArithmeticError("no")

    parameter = nn.Parameter(torch.zeros(1))
    optimizer = Leveled([parameter], Fails, lr=1.0, period=2)
    parameter.grad = given = torch.ones(1)
    optimizer.step()
    with pytest.raises(ArithmeticError):
        optimizer.step()
    assert parameter.grad is given and not optimizer._windows
    assert optimizer.param_groups[0]["elapsed"] == 0


class Pulsed(torch.optim.SGD):
    def __init__(self, params):
        super().__init__(params, 0.1)
        self.defaults["period"] = 2


SGD, MAKES = torch.optim.SGD, "factory must make an optimiser of groups and options, as the class .* got "
REFUSED = [
    (SGD, {"period": 0}, "period must be an integer >= 1, got 0"),
    (SGD, {"period": True}, "period must be an integer >= 1, got True"),
    (SGD, {"period": 2.0}, "period must be an integer >= 1, got 2.0"),
    (SGD, {"reduce": "max"}, "reduce must be 'mean' or 'sum', got 'max'"),
    (SGD, {"period": 2, "differentiable": True}, "differentiable=True with period=2"),
    (torch.optim.LBFGS, {}, "LBFGS evaluates its loss again"),
    (Pulsed, {}, "Pulsed has a 'period' of its own"),
    (SGD([nn.Parameter(torch.zeros(1))]), {}, MAKES),
    (lambda params: nn.Linear(1, 1), {}, MAKES),
    ("adamw", {}, MAKES),
    (None, {}, MAKES),
    (DGD, {}, "DGD steps by the samples of one backward pass"),
]


@pytest.mark.spec("OPTIM-LEVEL-D3")
@pytest.mark.parametrize(("factory", "options", "message"), REFUSED, ids=[f"{at}" for at in range(len(REFUSED))])
def test_refusals(factory, options, message):
    parameter = nn.Parameter(torch.zeros(2, 3))
    lr = {"lr": 1.0} if factory is SGD else {}
    for groups, own in (([parameter], options), ([{"params": [parameter], **options}], {})):
        with pytest.raises(ConfigError, match=message):
            Leveled(groups, factory, **lr, **own)
    Leveled([parameter], M3, period=2)


@pytest.mark.spec("OPTIM-LEVEL-D3")
def test_a_state_of_another_optimiser_is_refused_and_changes_nothing():
    params = model()
    optimizer = leveled(params)
    advance(optimizer, params, 1, 5)
    before = str(optimizer.state_dict())
    bare = torch.optim.AdamW([{"params": [p]} for p in params])
    with pytest.raises(CheckpointError, match=r"param_groups\[0\] of the state has no period"):
        optimizer.load_state_dict(bare.state_dict())
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict(Leveled(params, torch.optim.AdamW).state_dict())
    assert str(optimizer.state_dict()) == before


@pytest.mark.spec("OPTIM-LEVEL-D4")
def test_groups_by_name():
    net = nn.ModuleDict({"level_0": nn.Linear(2, 2), "level_1": nn.Linear(2, 2), "head": nn.Linear(2, 1)})
    net["head"].bias.requires_grad_(False)
    named = list(net.named_parameters())
    groups = level_groups(named, {"level_1.bias": 2, "level_1.*": 8, "*.weight": 4})
    names = {id(p): name for name, p in named}
    assert [(g["period"], [names[id(p)] for p in g["params"]]) for g in groups] == [
        (1, ["level_0.bias"]),
        (2, ["level_1.bias"]),
        (4, ["level_0.weight", "head.weight"]),
        (8, ["level_1.weight"]),
    ]
    with pytest.raises(ConfigError, match=r"pattern 'lvel_1.bias' decides no.*'level_1.bias'\?"):
        level_groups(named, {"lvel_1.bias": 8})
    with pytest.raises(ConfigError, match="pattern 'head.weight' decides no"):
        level_groups(named, {"*": 8, "head.weight": 1})
    for wrong in (0, 2.5, "x"):
        with pytest.raises(ConfigError, match="period must be an integer >= 1"):
            level_groups(named, {"*": wrong})


@pytest.mark.spec("OPTIM-LEVEL-I2")
def test_a_wrapped_optimiser_keeps_the_dtype_of_its_state():
    weight = torch.nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16))
    one, two = (Leveled([weight], PhiMomentum, period=2) for _ in range(2))
    for _ in range(3):
        weight.grad = torch.full_like(weight, 0.3)
        one.step()
    two.load_state_dict(one.state_dict())
    ours, theirs = one.state[weight]["momentum"], two.state[weight]["momentum"]
    assert theirs.dtype == torch.float32 and torch.equal(ours, theirs) and theirs is not ours
    other = Leveled([weight], PhiMomentum, period=2, matrix="last")
    with pytest.raises(ConfigError, match="written with matrix = 'flatten'"):
        other.load_state_dict(one.state_dict())


def test_a_parameter_without_a_gradient_has_no_window_after_loading_either():
    def built() -> tuple[list[nn.Parameter], Leveled]:
        params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
        return params, Leveled(params, torch.optim.AdamW, lr=0.1, weight_decay=0.5, period=2)

    (moved, still), first = built()
    moved.grad = torch.ones(2)
    first.step()
    (moved, still), second = built()
    second.load_state_dict(first.state_dict())
    moved.grad = torch.ones(2)
    second.step()
    assert not torch.equal(moved, torch.ones(2))
    assert torch.equal(still, torch.ones(2)), "weight decay is for what has a gradient"
