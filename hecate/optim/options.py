"""The options of a group: their defaults, checks, and how a parameter is called in errors."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from hecate.errors import ConfigError
from hecate.optim.sharding import is_sharded
from hecate.tape.bridge import can_inspect

Group = dict[str, Any]
OnNonfinite = Literal["raise", "skip", "propagate"]
MatrixView = Literal["flatten", "last"]
StateDtype = Literal["full", "parameter"]
FLAGS = {"center", "decoupled", "differentiable", "maximize", "nesterov", "shared"}


def common_options(**given: Any) -> Group:
    """The defaults of a group, from the arguments of a constructor: its `locals()` will do."""
    for name in ("self", "params", "phi_params", "__class__"):
        given.pop(name, None)
    known: Group = {
        "lr": 1e-3,
        "weight_decay": 0.0,
        "maximize": False,
        "foreach": None,
        "differentiable": False,
        "on_nonfinite": "raise",
        "state_dtype": "full",
        "matrix": "flatten",
    }
    for name in ("capturable", "fused"):
        if given.pop(name, None):
            raise ConfigError(
                f"{name}=True is not offered: this optimiser has no kernel for it; "
                "leave it out, foreach is the fast path"
            )
    return known | given


def check_common(group: Group) -> None:
    """Refuses values of the common options that mean nothing."""
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ConfigError(f"Tensor lr must be 1-element, got shape {list(lr.shape)}")
    for name in sorted(FLAGS & group.keys()):
        check_choice(group, name, (True, False))
    check_choice(group, "foreach", (None, True, False))
    check_choice(group, "on_nonfinite", ("raise", "skip", "propagate"))
    check_choice(group, "state_dtype", ("full", "parameter"))
    check_choice(group, "matrix", ("flatten", "last"))
    if group["foreach"] and group["differentiable"]:
        raise ConfigError("foreach and differentiable exclude each other; set one of them")


def check_used(
    cls: type, given: Group, groups: list[Group], only_with: Mapping[str, tuple[str, Sequence[Any]]]
) -> None:
    """Refuses options set to what is not their default where no group has what they act with.

    Only of the constructor: a group that lacks it may have inherited them from there.
    """
    for name, (option, values) in only_with.items():
        default = inspect.signature(cls).parameters[name].default
        set_ = isinstance(given[name], Tensor) or given[name] != default
        if set_ and not any(group[option] in values for group in groups):
            raise ConfigError(
                f"{name}={given[name]} acts with {option} {' or '.join(map(repr, values))} alone, "
                f"which no group has; leave {name} out or set {option}"
            )


def check_number(group: Group, name: str, low: float = 0.0, high: float = math.inf) -> None:
    """Refuses what is not a number in [low, high], or a tensor that holds one; low is about 0."""
    value = group[name]
    if isinstance(value, Tensor) and not can_inspect(value):
        return
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    fits = isinstance(number, int | float) and not isinstance(number, bool)
    if not fits or not low <= number <= high or number == math.inf:
        bound = "" if high == math.inf else f" and at most {high:g}"
        raise ConfigError(f"{name} must be a finite number of at least 0{bound}, got {value!r}")


def check_count(group: Group, name: str, most: int | None = None) -> None:
    """Refuses what is not an integer of at least 1."""
    value = group[name]
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < 1 or (most is not None and value > most):
        bound = "" if most is None else f" and at most {most}"
        raise ConfigError(f"{name} must be an integer of at least 1{bound}, got {value!r}")


def check_choice(group: Group, name: str, choices: tuple[Any, ...]) -> None:
    """Refuses what is not one of the choices."""
    if group[name] not in choices:
        raise ConfigError(f"{name} must be one of {list(choices)}, got {group[name]!r}")


def refuse_parameter(owner: str, p: Tensor, group: Group) -> None:
    """Refuses parameters that no optimiser here can update, by name."""
    if not p.is_floating_point() or p.layout != torch.strided:
        what = f"{p.dtype}" if p.layout == torch.strided else f"{p.layout}"
        raise ConfigError(
            f"{owner} updates dense real parameters, got {what} for {name_of(group, p)}; "
            "give it to another optimiser (complex ones as torch.view_as_real)"
        )
    if is_sharded(p) and group["differentiable"]:
        raise ConfigError(f"differentiable=True takes whole parameters, {name_of(group, p)} is not")


def name_of(group: Group, p: Tensor) -> str:
    """The parameter's name, or its place in the group and its shape."""
    place = next(i for i, other in enumerate(group["params"]) if other is p)
    if "param_names" in group:
        return f"parameter {group['param_names'][place]!r}"
    return f"parameter {place} {list(p.shape)}"
