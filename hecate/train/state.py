"""A training run as named tensors and plain facts, and back; and whether a checkpoint is of this run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.optim import Optimizer

from hecate.errors import CheckpointError, ConfigError, HecateError, shorten
from hecate.optim import Leveled
from hecate.optim.base import MatrixOptimizer
from hecate.train.config import ExperimentConfig
from hecate.variant import Config

_MOVING = ("params", "param_names", "lr", "elapsed", "commits")
_MUST_MATCH = ("optim", "seed", "model", "data")
_SHOWN = 8


class OptimizerFacts(Config):
    """What of optimisers is no tensor: their names, groups, and plain state by parameter."""

    optimizer: str
    groups: tuple[dict[str, Any], ...]
    values: dict[str, dict[str, Any]]


class RunFacts(Config):
    """The facts of a run's checkpoint."""

    step: int = Field(ge=0)
    config: dict[str, Any]
    optimizer: OptimizerFacts
    cursor: dict[str, int | str]
    metrics: dict[str, float]
    versions: dict[str, str]


class _Missing:
    def __repr__(self) -> str:
        return "missing"


_MISSING = _Missing()


def run_facts(facts: Mapping[str, Any], where: str) -> RunFacts:
    """The facts of a checkpoint; `CheckpointError` names all that are not a run's."""
    try:
        return RunFacts.model_validate(dict(facts))
    except ConfigError as error:
        raise CheckpointError(f"{where} is not valid: {error}; use an earlier checkpoint") from None


def refuse_other_config(saved: Mapping[str, Any], config: ExperimentConfig, where: str) -> None:
    """Names the settings that differ from those of a checkpoint, with both values."""
    own, fault = config.model_dump(mode="json"), None
    try:
        saved = ExperimentConfig.model_validate(saved).model_dump(mode="json")
    except ConfigError as error:  # a kind that is not registered here, or no config
        fault = error
    for part in _MUST_MATCH:
        lines = differences(saved.get(part, _MISSING), own[part], part)
        if not lines:
            continue
        if any(line.startswith("optim.optimizer.kind ") for line in lines):
            there, here = (settings["optim"]["optimizer"]["kind"] for settings in (saved, own))
            what = f"optimizer {there!r}, this run has {here!r}"
        else:
            more = f"; and {len(lines) - _SHOWN} more" if lines[_SHOWN:] else ""
            what = f"another {part!r} ({'; '.join(lines[:_SHOWN])}{more})"
        raise CheckpointError(f"{where} was trained with {what}; resume with the config of its run folder")
    if fault is not None:
        raise CheckpointError(f"{where} has a config that is not valid: {fault}; use an earlier checkpoint")


def differences(saved: Any, own: Any, path: str) -> list[str]:
    """Where two trees of settings differ: path, the saved value and this run's."""
    if isinstance(saved, Mapping) and isinstance(own, Mapping):
        keys = [*own, *(key for key in saved if key not in own)]
        pairs = [(saved.get(k, _MISSING), own.get(k, _MISSING), f"{path}.{k}") for k in keys]
        return [line for pair in pairs for line in differences(*pair)]
    if saved == own and isinstance(saved, bool) == isinstance(own, bool):
        return []
    return [f"{path} is {shorten(saved)} there and {shorten(own)} here"]


def pack(model: nn.Module, optimizers: Iterable[Optimizer]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by name (`model/...`, `optimizer/<parameter>/...`) and plain values."""
    tensors = {f"model/{name}": value for name, value in model.state_dict().items()}
    values: dict[str, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    optimizers = list(optimizers)
    for optimizer in optimizers:
        names = list(chain(*_parameter_names(model, optimizer)))
        state = optimizer.state_dict()
        for index, entries in state["state"].items():
            for key, value in entries.items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer/{names[index]}/{key}"] = value
                else:
                    values.setdefault(names[index], {})[key] = value
        for group in state["param_groups"]:
            kept = {k: v for k, v in group.items() if k not in ("params", "param_names")}
            groups.append({**kept, "params": [names[i] for i in group["params"]]})
    return tensors, {"optimizer": _called(optimizers), "groups": groups, "values": values}


def unpack(
    model: nn.Module,
    optimizers: Iterable[Optimizer],
    tensors: Mapping[str, Tensor],
    values: Mapping[str, Any],
    where: str,
) -> None:
    """Loads what `pack` gave; `CheckpointError` names the first thing that does not fit."""
    optimizers, facts = list(optimizers), OptimizerFacts.model_validate(dict(values))
    if facts.optimizer != _called(optimizers):
        raise CheckpointError(f"{where} was trained with {facts.optimizer}, this run uses {_called(optimizers)}")
    own = [names for optimizer in optimizers for names in _parameter_names(model, optimizer)]
    if [group.get("params") for group in facts.groups] != own:
        raise CheckpointError(
            f"{where} optimises other parameters than this model, or in other groups; use its own config"
        )
    _refuse_strangers(set(chain(*own)), tensors, facts.values, where)
    saved = model_state(model, tensors, where)
    groups, states = iter(facts.groups), []
    try:
        for optimizer in optimizers:
            mine = [next(groups) for _ in optimizer.param_groups]
            _check_options(mine, optimizer)
            names = list(chain(*_parameter_names(model, optimizer)))
            states.append(_state(names, optimizer, tensors, mine, facts.values))
            _check_state(names, optimizer, states[-1]["state"])
        for optimizer, state in zip(optimizers, states, strict=True):
            optimizer.load_state_dict(state)
    except (HecateError, ValueError) as error:
        raise CheckpointError(f"{where} does not fit this run's optimiser: {error}") from None
    model.load_state_dict(saved)


def _refuse_strangers(known: set[str], tensors: Iterable[str], values: Iterable[str], where: str) -> None:
    """Names of state that nothing here has."""
    for key in [*tensors, *(f"optimizer/{name}/" for name in values)]:
        owner = key.removeprefix("optimizer/").rpartition("/")[0]
        if key.startswith("optimizer/") and owner not in known:
            raise CheckpointError(f"{where} has state {key!r} of a parameter that is not trained")
        if not key.startswith(("model/", "optimizer/", "rng/")):
            raise CheckpointError(f"{where} has an unknown tensor {key!r}")


def _check_options(saved: list[dict[str, Any]], optimizer: Optimizer) -> None:
    """Options are those of the config, but for the rate and where a window stands."""
    for number, (group, own) in enumerate(zip(saved, optimizer.param_groups, strict=True)):
        here = json.loads(json.dumps({k: v for k, v in own.items() if k not in _MOVING}))
        there = {k: v for k, v in group.items() if k not in _MOVING}
        there = {**here, **json.loads(json.dumps(there))}  # older versions had fewer
        lines = differences(there, here, f"groups.{number}")
        lr, elapsed = group.get("lr"), group.get("elapsed", 0)
        if isinstance(lr, bool) or not isinstance(lr, int | float) or not 0 <= lr < math.inf:
            lines.append(f"groups.{number}.lr must be a finite number >= 0, got {shorten(lr)}")
        if type(elapsed) is not int or not 0 <= elapsed < own.get("period", 1):
            lines.append(f"groups.{number}.elapsed must be within a period, got {elapsed!r}")
        if lines:
            raise ConfigError("; ".join(lines))


def _check_state(names: list[str], optimizer: Optimizer, state: Mapping[int, Any]) -> None:
    """Entries are those of a parameter that has stepped, or none."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    stepped = _stepped(optimizer)
    for index, (name, p) in enumerate(zip(names, parameters, strict=True)):
        entries = dict(state.get(index, {}))
        window = None
        if isinstance(optimizer, Leveled):
            entries.pop("has_window", None)
            window = entries.pop("window", None)
        if window is not None and (not isinstance(window, Tensor) or window.shape != p.shape):
            raise ConfigError(f"the window of {name} has not its shape {list(p.shape)}")
        if not entries or stepped is None:
            continue
        found, own = ({k: _kind(v) for k, v in item.items()} for item in (entries, stepped[index]))
        if lines := differences(found, own, f"the state of {name}"):
            raise ConfigError("; ".join(lines))


def _stepped(optimizer: Optimizer) -> list[dict[str, Any]] | None:
    """What a first step leaves as the state of each parameter, without storage; None where only the step itself could
    tell."""
    inner = optimizer.inner if isinstance(optimizer, Leveled) else optimizer
    if isinstance(inner, MatrixOptimizer):
        return [inner.state[p] for group in inner.param_groups for p in group["params"]]
    groups = []
    for group in inner.param_groups:
        params = [nn.Parameter(torch.empty_like(p, device="meta")) for p in group["params"]]
        groups.append({**group, "params": params})
    try:
        kind: Callable[..., Optimizer] = type(inner)
        probe = kind(groups)
        for group in groups:
            for p in group["params"]:
                p.grad = torch.zeros_like(p)
        probe.step()
    except (TypeError, ValueError, RuntimeError, NotImplementedError):
        return None
    return [probe.state[p] for group in groups for p in group["params"]]


def _kind(value: Any) -> str:
    """What of a state's entry must not differ; counts follow torch's default dtype."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    if not value.dim():
        return "a float" if value.is_floating_point() else "an integer"
    return f"{list(value.shape)} {value.dtype}"


def _state(
    names: list[str],
    optimizer: Optimizer,
    tensors: Mapping[str, Tensor],
    saved: list[dict[str, Any]],
    values: Mapping[str, dict[str, Any]],
) -> dict[str, Any]:
    """The state dict of one optimiser."""
    state: dict[int, dict[str, Any]] = {}
    for index, name in enumerate(names):
        prefix = f"optimizer/{name}/"
        entries = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        # clone: optimisers step in place, and the caller's checkpoint must not change
        entries = {key: value.clone() for key, value in entries.items() if "/" not in key}
        entries |= values.get(name, {})
        if entries:
            state[index] = entries
    order = {name: index for index, name in enumerate(names)}
    groups = []
    for group, own in zip(saved, optimizer.param_groups, strict=True):
        names = group["params"]
        moved = {key: group[key] for key in _MOVING if key in group}  # other options are the run's own
        groups.append({**own, **moved, "params": [order[name] for name in names], "param_names": names})
    return {"state": state, "param_groups": groups}


def model_state(model: nn.Module, tensors: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """Parameters and buffers among saved tensors; names, shapes and dtypes must be those of the model."""
    saved = {k.removeprefix("model/"): v for k, v in tensors.items() if k.startswith("model/")}
    own = model.state_dict()
    for name in sorted(set(own) ^ set(saved)):
        side = "lacks" if name in own else "has an unknown"
        raise CheckpointError(f"{where} {side} tensor {name!r}: it belongs to another model config")
    for name, value in own.items():
        if value.shape != saved[name].shape or value.dtype != saved[name].dtype:
            raise CheckpointError(
                f"{where}: tensor {name!r} is {list(saved[name].shape)} {saved[name].dtype}, the model has "
                f"{list(value.shape)} {value.dtype}: it belongs to another model config"
            )
    return saved


def _parameter_names(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Names of the parameters of each group, in the optimiser's order."""
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[by_id[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def _called(optimizers: Iterable[Optimizer]) -> str:
    """Names of the classes: `Muon + AdamW`, `Leveled(AdamW)`."""
    return " + ".join(
        f"Leveled({type(o.inner).__name__})" if isinstance(o, Leveled) else type(o).__name__ for o in optimizers
    )
