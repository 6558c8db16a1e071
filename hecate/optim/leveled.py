"""Parameters that are updated at different rates: the continuum of levels, for a model's own weights.

A level is a parameter group with a period C. Its gradients are collected for C steps while its parameters do not
change; then one step of an ordinary torch optimiser is taken for it alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor

from hecate.checks import expect_count
from hecate.errors import CheckpointError, ConfigError, ShapeError, did_you_mean, shorten
from hecate.optim.base import Group, MatrixOptimizer, name_of, refuse_misspelt
from hecate.optim.memories import DGD
from hecate.optim.tensors import state_dtype


class Leveled(torch.optim.Optimizer):
    """Leveled: theta_l <- step(theta_l, mean of the last C_l gradients) at t = 0 mod C_l.

    Wraps any torch optimiser that needs no closure: `Leveled(groups, torch.optim.AdamW, lr=1e-3)` passes every option
    but its own to AdamW, and a group may have its own value of each. Between commits the wrapped optimiser does not see
    a level, so nothing of it decays and no step is counted: Adam's `step` of a slow level is the number of its commits.
    With period 1 everywhere it is AdamW, bit for bit.

    A step contributes whatever `.grad` holds when `step` is called: clipping clips each of the C gradients, `zero_grad`
    clears `.grad` and never a window, and a step without a gradient adds zero (a parameter without any in the whole
    window is left out, as torch does). Windows of half precision are summed in float32. After a commit `.grad` holds
    the step's own gradient again. The learning rate of a commit is that of its step. If the wrapped step raises, the
    gradients of its window are lost.

    Args:
        params: parameters or groups, as for any torch optimiser.
        factory: the optimiser to wrap, such as `torch.optim.AdamW`.
        period: steps per commit, C; a group may have its own.
        reduce: "mean" keeps learning rates comparable between levels, "sum" is HOPE's (71) under
            SGD; a group may have its own.
        options: for `factory`.

    `inner` is the wrapped optimiser: hooks registered there fire at commits only and see in `.grad` the gradient of the
    window. State (windows included), schedulers, hooks, closures, groups, deepcopy and pickle are those of any torch
    optimiser. Gradients of a window that is incomplete at the end of training are in the state dict; `flush` commits
    them.

    Cost: one tensor per parameter of a level with C > 1, and one addition per step.
    References: A. Behrouz et al., Nested Learning: The Illusion of Deep Learning Architectures, 2025, eq. 71, whose sum
    over t = i - C..i has one term too many. [OPTIM-LEVEL-D1]
    """

    def __init__(
        self,
        params: Iterable[Any],
        factory: Callable[..., torch.optim.Optimizer],
        *,
        period: int = 1,
        reduce: Literal["mean", "sum"] = "mean",
        **options: Any,
    ) -> None:
        self.inner: Any = factory(params, **options) if callable(factory) else None
        if not isinstance(self.inner, torch.optim.Optimizer):
            wanted = "factory must make an optimiser of groups and options, as the class torch.optim.AdamW does"
            raise ConfigError(f"{wanted}, got {shorten(factory)}")
        closure = inspect.signature(self.inner.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            again = "evaluates its loss again within a step, which a window of past gradients cannot do"
            raise ConfigError(f"{type(self.inner).__name__} {again}; use an optimiser whose step needs no closure")
        if isinstance(self.inner, DGD):
            raise ConfigError("DGD steps by the samples of one backward pass, and a window has none; use it alone")
        self._windows: dict[Tensor, Tensor] = {}
        # Whether the wrapped optimiser makes its state in its first step rather than at construction.
        self._lazy = not (isinstance(self.inner, MatrixOptimizer) or self.inner.state)
        settings = {"period": period, "reduce": reduce, "elapsed": 0, "commits": 0}
        for name in settings.keys() & self.inner.defaults.keys():
            clash = f"{type(self.inner).__name__} has a {name!r} of its own, which that of a level would overwrite"
            raise ConfigError(f"{clash}; wrap an optimiser without one")
        super().__init__(list(self.inner.param_groups), {**self.inner.defaults, **settings})
        self.state = self.inner.state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Collects this step's gradients, and commits the levels whose window is complete."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        slow = any(group["period"] > 1 for group in self.param_groups)
        if slow and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            cure = "capture the forward and backward pass only, or use period=1"
            raise ConfigError(f"a CUDA graph would replay one step's choice of levels for ever; {cure}")
        if self._only_makes_state():
            return loss
        self._commit([group for group in self.param_groups if self._collect(group)])
        return loss

    @torch.no_grad()
    def flush(self) -> None:
        """Commits incomplete windows with the gradients they have, at the end of training.

        If training is to continue, do not call it: windows are part of the state dict.
        """
        self._commit([group for group in self.param_groups if group["elapsed"]])

    def add_param_group(self, param_group: Group) -> None:
        """A new level; its first window begins at the next step."""
        if isinstance(param_group, dict):  # torch refuses anything else
            refuse_misspelt(param_group, "Leveled", ("period", "reduce"))
            check_level({**self.defaults, **param_group})
        if not any(group is param_group for group in self.inner.param_groups):
            self.inner.add_param_group(param_group)  # at construction it has the group already
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """torch's state dict, with a `window` in the state of each parameter of a slow level.

        It is zero while no window has begun (`has_window`), so that a fresh state has the same entries as a later
        one."""
        self._make_state()
        with self.register_state_dict_post_hook(add_windows, prepend=True):
            return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state; training continues exactly, also in the middle of a window."""
        windows: dict[Tensor, Tensor] = {}

        def take(_: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
            windows.update(windows_of(state, self.param_groups))
            extras = ("window", "has_window")
            states = {i: {k: v for k, v in each.items() if k not in extras} for i, each in state["state"].items()}
            bare = {i: each for i, each in states.items() if each}
            if isinstance(self.inner, MatrixOptimizer):
                self.inner.examine_state({**state, "state": bare})
            elif type(self.inner).__module__.startswith("torch.optim"):
                refuse_shapes(bare, state["param_groups"], self.param_groups)
            return {**state, "state": bare}

        def put(_: torch.optim.Optimizer) -> None:
            self._windows = windows

        with self.register_load_state_dict_pre_hook(take), self.register_load_state_dict_post_hook(put, prepend=True):
            super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {name: getattr(self, name) for name in ("inner", "_windows", "_lazy")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "inner" not in state:  # from load_state_dict: the wrapped optimiser shares the loaded state
            self.inner.__setstate__({"state": self.state, "param_groups": list(self.param_groups)})
        for group in self.param_groups:
            group.setdefault("commits", 1)  # written by a version that did not count

    def _only_makes_state(self) -> bool:
        """True if this is the step of zero gradients at lr 0 that torch's distributed checkpoints take to create
        missing state. It does not count as a step, because `state_dict` creates the state."""
        if self.state or any(group["commits"] or group.get("lr", 1) != 0 for group in self.param_groups):
            return False
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.requires_grad]
        return not any(grad is None or bool(grad.any()) for grad in grads)

    @torch.no_grad()
    def _make_state(self) -> None:
        """Creates the state of levels before their first commit by a step of zero gradients at lr 0, as torch's
        distributed checkpoints do; the first commit discards it."""
        untouched = (g for g in self.param_groups if self._lazy and not g["commits"])
        fresh = [g for g in untouched if not any(p in self.state for p in g["params"])]
        if not fresh:
            return
        with self._lent([{**g, "lr": 0 * g["lr"]} if "lr" in g else g for g in fresh]):
            for p in (p for group in fresh for p in group["params"]):
                p.grad = torch.zeros_like(p) if p.requires_grad else None
            inspect.unwrap(type(self.inner).step)(self.inner)  # without calling hooks

    @contextmanager
    def _lent(self, groups: list[Group]) -> Iterator[None]:
        """Lends the wrapped optimiser these groups only; afterwards their `.grad` is what it was before."""
        grads = [(p, p.grad) for group in groups for p in group["params"]]
        self.inner.state, self.inner.param_groups = self.state, groups
        try:
            yield
        finally:
            self.inner.param_groups = list(self.param_groups)
            for p, grad in grads:
                p.grad = grad

    def _collect(self, group: Group) -> bool:
        """Adds the step's gradients to the group's window; True if the window is complete."""
        group["elapsed"] += 1
        if not _single(group):
            for parameter in dict.fromkeys(group["params"]):
                if (grad := parameter.grad) is not None:
                    window = self._windows.get(parameter)
                    wide = grad.detach().to(state_dtype(grad, "full"), copy=window is None)  # sums of half in float32
                    if window is not None:
                        wide = wide + window if window.is_sparse else window.add_(wide)
                    self._windows[parameter] = wide
        return group["elapsed"] >= group["period"]

    def _commit(self, due: list[Group]) -> None:
        """One step of the wrapped optimiser for the groups that are due."""
        if not due:
            return
        with self._lent(due):
            for group in due:
                if not _single(group):
                    self._show_windows(group)
                if self._lazy and not group["commits"]:
                    for parameter in group["params"]:
                        self.state.pop(parameter, None)  # made by `_make_state`
                group["elapsed"] = 0
                group["commits"] += 1
            self.inner.step()

    def _show_windows(self, group: Group) -> None:
        """Moves the windows of a group into `.grad`, for the optimiser."""
        for parameter in dict.fromkeys(group["params"]):
            window = self._windows.pop(parameter, None)
            dtype = parameter.dtype if parameter.grad is None else parameter.grad.dtype
            if window is not None and group["reduce"] == "mean":
                window = window / group["elapsed"]
            parameter.grad = None if window is None else window.to(dtype)


def _single(group: Group) -> bool:
    """True if `.grad` is the whole window, so that nothing need be collected."""
    return group["period"] == 1 and group["elapsed"] == 1


def level_groups(
    named_parameters: Iterable[tuple[str, Tensor]], periods: Mapping[str, int], *, default: int = 1
) -> list[Group]:
    """Parameter groups by name: one per period, the fastest first.

    `level_groups(model.named_parameters(), {"*.levels.2.*": 64, "*.levels.1.*": 8})`: the first pattern (shell style)
    that matches a name gives its period, and `default` is for names that match none. Parameters that need no gradient
    are left out. A pattern that gives no parameter its period raises `ConfigError`. [OPTIM-LEVEL-D4]"""
    for period in (*periods.values(), default):
        check_level({"period": period, "reduce": "mean"})
    named = [(name, value) for name, value in named_parameters if value.requires_grad]
    patterns = [next((p for p in periods if fnmatchcase(name, p)), None) for name, _ in named]
    for pattern in periods:
        if pattern not in patterns:
            names = [name for name, _ in named]
            some = ", ".join(names[:4]) + (", ..." if names[4:] else "")
            hint = did_you_mean(pattern, names)
            raise ConfigError(f"the pattern {pattern!r} decides no parameter's level.{hint} Names are {some}.")
    levels: dict[int, list[Tensor]] = {}
    for (_, parameter), decided in zip(named, patterns, strict=True):
        levels.setdefault(default if decided is None else periods[decided], []).append(parameter)
    return [{"params": levels[period], "period": period} for period in sorted(levels)]


def check_level(group: Group) -> None:
    """Refuses a period or a reduction that is not valid."""
    expect_count(group["period"], "period")
    if group["reduce"] not in ("mean", "sum"):
        raise ConfigError(f"reduce must be 'mean' or 'sum', got {shorten(group['reduce'])}")
    if group["period"] > 1 and group.get("differentiable"):
        conflict = f"differentiable=True with period={group['period']}: a window keeps no graph of its steps"
        raise ConfigError(f"{conflict}; use period=1 for this group")


def add_windows(optimizer: Any, state: dict[str, Any]) -> None:
    """Adds the windows of slow levels to the parameters' entries in a state dict."""
    slow = {p for group in optimizer.param_groups if group["period"] > 1 for p in group["params"]}
    for index, p in _indexed(state["param_groups"], optimizer.param_groups):
        window = optimizer._windows.get(p)
        entries = {"has_window": torch.tensor(window is not None, device="cpu")}
        if window is not None or p in slow:
            entries["window"] = torch.zeros_like(p, dtype=state_dtype(p, "full")) if window is None else window
        state["state"][index] = state["state"].get(index, {}) | entries


def windows_of(state: dict[str, Any], groups: list[Group]) -> dict[Tensor, Tensor]:
    """Copies of the windows in a state dict that have begun, in the dtype of the windows, not of the parameters."""
    for number, group in enumerate(state["param_groups"]):
        if "period" not in group or "elapsed" not in group:
            foreign = f"param_groups[{number}] of the state has no period: another optimiser wrote it"
            raise CheckpointError(f"{foreign}; load it into one of that kind")
    entries = {i: e for i, e in state["state"].items() if "window" in e}
    refuse_shapes({i: {"window": e["window"]} for i, e in entries.items()}, state["param_groups"], groups)
    return {
        p: entries[i]["window"].detach().to(p.device, copy=True)
        for i, p in _indexed(state["param_groups"], groups)
        if i in entries and bool(entries[i].get("has_window", True))
    }


def refuse_shapes(state: dict[int, Any], saved: list[Group], groups: list[Group]) -> None:
    """Refuses state without its parameter's shape; Adafactor's factors must have that shape together."""
    for index, p in _indexed(saved, groups):
        shapes = {k: v.shape for k, v in state.get(index, {}).items() if getattr(v, "ndim", 0)}
        dims = [max(sizes) for sizes in zip(*shapes.values(), strict=False)]
        ranks = {len(shape) for shape in shapes.values()}
        if shapes and (ranks != {p.ndim} or dims != list(p.shape)):
            key = next(k for k, shape in shapes.items() if shape != p.shape)
            group = next(g for g in groups if any(q is p for q in g["params"]))
            misfit = f"{list(shapes[key])} in the checkpoint, which does not fit the parameter's {list(p.shape)}"
            raise ShapeError(f"state {key!r} of {name_of(group, p)} is {misfit}; load it into the same model")


def _indexed(saved: list[Group], groups: list[Group]) -> list[tuple[int, Tensor]]:
    """Parameters with their indices in a state dict; empty if groups differ, which torch reports."""
    numbers, params = ([g["params"] for g in each] for each in (saved, groups))
    if [len(each) for each in numbers] != [len(each) for each in params]:
        return []
    return list(zip(chain(*numbers), chain(*params), strict=True))
