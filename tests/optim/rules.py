"""torch's own rules for optimisers, as checks of any optimiser under any options.

Each check is a function of a `Rule`; `CHECKS` holds them by name. The ideas, and where it can be
imported the list of errors, are those of torch's test suite (`OptimizerInfo`).
"""

from __future__ import annotations

import gc
import io
import pickle
import warnings
import weakref
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter


@dataclass(frozen=True)
class Rule:
    """An optimiser class with options, and what it offers."""

    name: str
    cls: Callable[..., torch.optim.Optimizer]
    options: dict[str, Any] = field(default_factory=dict)
    foreach: bool = True
    maximize: bool = True
    complex: bool = False  # accepts complex parameters
    matrices_only: bool = False
    copies: bool = True  # a loaded state dict is not written to
    stateless: bool = False
    apart: bool = True  # a parameter's step does not depend on the others of its group

    def __call__(self, params: Any, **more: Any) -> torch.optim.Optimizer:
        return self.cls(params, **{**self.options, **more})

    @property
    def lr(self) -> float:
        return self.options["lr"]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def parameters(rule: Rule, seed: int = 0) -> list[Parameter]:
    shapes: list[tuple[int, ...]] = [(4, 5), (3, 5)]
    if not rule.matrices_only:
        shapes += [(5,), (2, 5, 1), ()]
    return [Parameter(draw(*shape, seed=seed + i)) for i, shape in enumerate(shapes)]


def feed(params: list[Parameter], step: int, scale: float = 1.0) -> None:
    """Gradients that depend on the weights and on the step."""
    for i, p in enumerate(params):
        p.grad = scale * (p.detach() + 0.5 * draw(*p.shape, seed=1000 * step + i).to(p))


def run(optimizer: torch.optim.Optimizer, params: list[Parameter], steps: int = 4) -> None:
    for step in range(steps):
        feed(params, step)
        optimizer.step()


def same(a: list[Parameter], b: list[Parameter], exact: bool = True) -> None:
    for x, y in zip(a, b, strict=True):
        if exact:
            assert torch.equal(x, y)
        else:
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-13)


def linear_problem(contiguous: bool) -> tuple[Parameter, Callable[[], Tensor]]:
    weight = draw(10, 5, seed=1)
    if not contiguous:
        weight = torch.stack([weight, weight], -1)[..., 0]
    weight = Parameter(weight)
    x, bias = draw(5, seed=2), draw(10, seed=3)

    def loss() -> Tensor:
        return (weight.mv(x) + bias).square().sum()

    return weight, loss


def closure_of(optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    return closure


def descends(rule: Rule, schedule: Any = None, contiguous: bool = True, **more: Any) -> None:
    weight, loss = linear_problem(contiguous)
    optimizer = rule([weight], **more)
    schedulers = [make(optimizer) for make in schedule or ()]
    closure = closure_of(optimizer, loss)
    first = loss()
    for _ in range(20):
        value = optimizer.step(closure)
        for scheduler in schedulers:
            plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
            scheduler.step(value.item()) if plateau else scheduler.step()
    assert loss() > first if more.get("maximize") else loss() < first


# Direction, schedulers, groups.


def check_descends(rule: Rule) -> None:
    schedulers = torch.optim.lr_scheduler
    descends(rule)
    descends(rule, [lambda o: schedulers.ExponentialLR(o, 0.99)], contiguous=False)
    if rule.maximize:
        descends(rule, maximize=True)
    descends(rule, [lambda o: schedulers.StepLR(o, 10, 0.9), schedulers.ReduceLROnPlateau])
    descends(rule, [lambda o: schedulers.LambdaLR(o, lambda t: 1 / (1 + t))])
    if "momentum" in rule([parameters(rule)[0]]).defaults:
        descends(rule, [lambda o: schedulers.OneCycleLR(o, rule.lr, total_steps=30)])


def check_groups_with_their_own_options(rule: Rule) -> None:
    for more in ({"lr": rule.lr / 2}, {"weight_decay": 0.1}) if rule.apart else ():
        one, two = parameters(rule), parameters(rule)
        run(rule([{"params": one[:1], **more}, {"params": one[1:]}]), one)
        run(rule(two[:1], **more), two[:1])
        other = rule(two[1:])
        for step in range(4):
            feed(two, step)
            other.step()
        same(one, two)


def check_add_param_group(rule: Rule) -> None:
    if not rule.apart:
        return
    one, two = parameters(rule), parameters(rule)
    late = rule(one[:1])
    late.add_param_group({"params": one[1:]})
    run(late, one)
    run(rule(two), two)
    same(one, two)


def check_decay_alone_shrinks(rule: Rule) -> None:
    params = parameters(rule)
    optimizer = rule(params, weight_decay=0.5)
    before = [p.detach().abs().sum() for p in params]
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert all(p.detach().abs().sum() < b for p, b in zip(params, before, strict=True))


# Learning rate, foreach, maximize.


def check_tensor_lr(rule: Rule) -> None:
    one, two = parameters(rule), parameters(rule)
    run(rule(one, lr=torch.tensor(rule.lr), **({"foreach": False} if rule.foreach else {})), one)
    run(rule(two, **({"foreach": False} if rule.foreach else {})), two)
    same(one, two, exact=False)


def check_foreach_matches_loop(rule: Rule) -> None:
    if not rule.foreach:
        return
    sets = [parameters(rule), parameters(rule)]
    made = [rule(p, foreach=f) for p, f in zip(sets, (True, False), strict=True)]
    for params, optimizer in zip(sets, made, strict=True):
        for step in range(7):
            feed(params, step)
            if step == 3:
                params[0].grad = None
            optimizer.step()
    same(*sets, exact=False)
    for p, q in zip(*sets, strict=True):
        for key, value in made[0].state[p].items():
            torch.testing.assert_close(value, made[1].state[q][key], rtol=1e-12, atol=1e-13)


def check_maximize_is_minimize_of_the_negative(rule: Rule) -> None:
    if not rule.maximize:
        return
    one, two = parameters(rule), parameters(rule)
    up, down = rule(one, maximize=True), rule(two)
    for step in range(4):
        feed(one, step)
        feed(two, step, -1.0)
        up.step()
        down.step()
    same(one, two)


# What must not move.


def check_no_gradients_and_zeros_are_noops(rule: Rule) -> None:
    params = parameters(rule)
    optimizer = rule(params)
    run(optimizer, params, 2)
    before, state = [p.detach().clone() for p in params], deepcopy(optimizer.state_dict()["state"])
    optimizer.zero_grad()
    optimizer.step()
    same(params, [Parameter(b) for b in before])
    assert str(state) == str(optimizer.state_dict()["state"])
    optimizer = rule(params, weight_decay=0.0)
    for _ in range(3):
        for p in params:
            p.grad = torch.zeros_like(p)
        optimizer.step()
    same(params, [Parameter(b) for b in before])


def check_only_parameters_with_gradients_move(rule: Rule) -> None:
    params = parameters(rule)
    optimizer = rule(params)
    before = params[0].detach().clone()
    feed(params, 0)
    params[0].grad = None
    optimizer.step()
    assert torch.equal(params[0], before) and not torch.equal(params[1].detach(), draw(3, 5, seed=1))


def check_gradients_are_left_alone(rule: Rule) -> None:
    params = parameters(rule)
    optimizer = rule(params, weight_decay=0.1, **({"maximize": True} if rule.maximize else {}))
    feed(params, 0)
    before = [p.grad.clone() for p in params]
    optimizer.step()
    assert all(torch.equal(p.grad, b) for p, b in zip(params, before, strict=True))


def check_draws_no_random_numbers(rule: Rule) -> None:
    state = torch.get_rng_state()
    params = parameters(rule)
    run(rule(params), params)
    assert torch.equal(state, torch.get_rng_state())


# Errors.


def check_errors(rule: Rule) -> None:
    common = pytest.importorskip("torch.testing._internal.common_optimizers")
    inputs = common.get_error_inputs_for_all_optims("cpu", torch.float64)
    assert len(inputs) >= 5
    for case in inputs:
        given = case.optimizer_error_input
        params = given.params if given.params is not None else parameters(rule)
        if case.error_type is UserWarning:
            with pytest.warns(UserWarning, match=case.error_regex):
                rule(params, **given.kwargs)
        else:
            with pytest.raises(case.error_type, match=case.error_regex):
                rule(params, **given.kwargs)
    for name in ("lr", "weight_decay"):
        with pytest.raises(ValueError, match=r"(?i)" + name.replace("_", ".") + "|learning rate"):
            rule(parameters(rule), **{name: -0.1})
    with pytest.raises(TypeError):
        rule(parameters(rule), no_such_option=1)


def check_complex(rule: Rule) -> None:
    value = torch.complex(draw(3, 5), draw(3, 5, seed=1))
    if not rule.complex:
        with pytest.raises((ValueError, RuntimeError), match=r"(?i)complex"):
            optimizer = rule([Parameter(value)])
            optimizer.param_groups[0]["params"][0].grad = value
            optimizer.step()
        return
    whole, real = Parameter(value.clone()), Parameter(torch.view_as_real(value).clone())
    one, two = rule([whole]), rule([real])
    for step in range(3):
        g = draw(3, 5, 2, seed=step)
        whole.grad, real.grad = torch.view_as_complex(g), g
        one.step()
        two.step()
    torch.testing.assert_close(torch.view_as_real(whole.detach()), real.detach())


# State and copies.


def check_state_exists_after_a_step(rule: Rule) -> None:
    params = parameters(rule)
    optimizer = rule(params)
    run(optimizer, params, 1)
    for p in params:
        moved = any(isinstance(v, Tensor) and v.any() for v in optimizer.state[p].values())
        assert moved != rule.stateless


def check_state_dict(rule: Rule) -> None:
    """Named or not, from a file of tensors alone: what was saved goes on alike, and stays as it was."""
    for named, again_named in ((False, True), (True, False)):
        one, two = parameters(rule), parameters(rule)
        old = rule([(f"a{i}", p) for i, p in enumerate(one)] if named else one)
        run(old, one, 2)
        saved = old.state_dict()
        text = str(saved)
        assert text == str(old.state_dict())
        new = rule([(f"b{i}", p) for i, p in enumerate(two)] if again_named else two)
        with torch.no_grad():
            for p, q in zip(one, two, strict=True):
                q.copy_(p)
        buffer = io.BytesIO()
        torch.save(saved, buffer)
        buffer.seek(0)
        new.load_state_dict(torch.load(buffer, weights_only=True))
        run(old, one)
        run(new, two)
        same(one, two)
    for group in saved["param_groups"]:  # as older versions of torch wrote them
        for flag in ("maximize", "foreach", "fused", "differentiable", "capturable"):
            group.pop(flag, None)
    text = str(saved)
    new.load_state_dict(saved)
    run(new, two)
    assert str(saved) == text or not rule.copies


def check_wrong_state_dict_is_refused(rule: Rule) -> None:
    params = parameters(rule)
    with pytest.raises(ValueError, match="group"):
        rule(params).load_state_dict(rule(params[:1]).state_dict())


def check_copies(rule: Rule) -> None:
    for copied in (deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))):
        optimizer = rule(parameters(rule))
        run(optimizer, optimizer.param_groups[0]["params"], 2)
        copy = copied(optimizer)
        public = {name for name in vars(optimizer) if not name.startswith("_")}
        assert public == {name for name in vars(copy) if not name.startswith("_")}
        run(optimizer, optimizer.param_groups[0]["params"], 2)
        run(copy, copy.param_groups[0]["params"], 2)
        same(optimizer.param_groups[0]["params"], copy.param_groups[0]["params"])


def check_is_collected(rule: Rule) -> None:
    params = parameters(rule)
    optimizer = rule(params)
    run(optimizer, params, 1)
    watched = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert watched() is None, "a reference cycle keeps it"
    finally:
        gc.enable()


# Hooks.


def check_state_dict_hooks(rule: Rule) -> None:
    optimizer, order = rule(parameters(rule)), []
    run(optimizer, optimizer.param_groups[0]["params"], 1)
    optimizer.register_state_dict_pre_hook(lambda o: order.append("pre"))
    optimizer.register_state_dict_pre_hook(lambda o: order.append("first"), prepend=True)
    optimizer.register_state_dict_post_hook(lambda o, s: {**s, "seen": True})
    assert optimizer.state_dict()["seen"] and order == ["first", "pre"]


def check_load_state_dict_hooks(rule: Rule) -> None:
    optimizer, order = rule(parameters(rule)), []
    run(optimizer, optimizer.param_groups[0]["params"], 1)
    saved = optimizer.state_dict()

    def halve(o: torch.optim.Optimizer, s: dict[str, Any]) -> dict[str, Any]:
        groups = [{**group, "lr": group["lr"] / 2} for group in s["param_groups"]]
        return {**s, "param_groups": groups}

    optimizer.register_load_state_dict_pre_hook(halve)
    optimizer.register_load_state_dict_post_hook(lambda o: order.append(o.param_groups[0]["lr"]))
    optimizer.load_state_dict(saved)
    assert order == [rule.lr / 2]


# Closures, scaling, warnings.


def check_closure(rule: Rule) -> None:
    weight, loss = linear_problem(True)
    optimizer, first = rule([weight]), loss().detach()
    assert torch.equal(optimizer.step(closure_of(optimizer, loss)), first)


def check_grad_scaler(rule: Rule) -> None:
    one, two = parameters(rule), parameters(rule)
    scaled, plain = rule(one), rule(two)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(3):
        feed(one, step)
        feed(two, step)
        scaler.scale(torch.zeros(()))
        for p in one:
            p.grad.mul_(8.0)
        scaler.step(scaled)
        scaler.update()
        plain.step()
    same(one, two, exact=False)
    before = [p.detach().clone() for p in one]
    feed(one, 9)
    one[0].grad.fill_(float("inf"))
    scaler.step(scaled)
    same(one, [Parameter(b) for b in before])


def check_no_warnings(rule: Rule) -> None:
    one, two = parameters(rule), parameters(rule)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(rule(p for p in one), one)
    run(rule(two), two)
    same(one, two)


CHECKS: dict[str, Callable[[Rule], None]] = {
    name.removeprefix("check_"): value for name, value in list(globals().items()) if name.startswith("check_")
}
