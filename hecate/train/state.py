"""A training run as named tensors and plain facts, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hecate.errors import CheckpointError


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Optimiser groups: matrices decay, vectors (scales, biases) do not. [TRAIN-OPTIM-D1]"""
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            # By name as well: norm scales and biases kept per head are matrices.
            vector = parameter.dim() < 2 or name.rsplit(".", 1)[-1] in ("norm", "bias")
            (plain if vector else decayed).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def pack(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by name (`model/...`, `optimizer/<parameter>/...`) and plain values."""
    tensors = {f"model/{name}": value for name, value in model.state_dict().items()}
    names = _names(model, optimizer)
    state = optimizer.state_dict()
    values: dict[str, dict[str, Any]] = {}
    for index, entries in state["state"].items():
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer/{names[index]}/{key}"] = value
            else:
                values.setdefault(names[index], {})[key] = value
    groups = [
        {
            **{k: v for k, v in group.items() if k != "params"},
            "params": [names[i] for i in group["params"]],
        }
        for group in state["param_groups"]
    ]
    return tensors, {"optimizer": type(optimizer).__name__, "groups": groups, "values": values}


def unpack(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tensors: Mapping[str, Tensor],
    facts: Mapping[str, Any],
    where: str,
) -> None:
    """Loads what `pack` gave; `CheckpointError` names the first tensor that does not fit."""
    restore_model(model, tensors, where)
    names = _names(model, optimizer)
    if facts["optimizer"] != type(optimizer).__name__:
        raise CheckpointError(
            f"{where} was trained with {facts['optimizer']}, this run uses "
            f"{type(optimizer).__name__}"
        )
    saved = [name for group in facts["groups"] for name in group["params"]]
    if saved != names:
        raise CheckpointError(
            f"{where} optimises other parameters than this model; use its own config"
        )
    state: dict[int, dict[str, Any]] = {}
    for index, name in enumerate(names):
        prefix = f"optimizer/{name}/"
        entries = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        # clone: optimisers step in place, and the caller's checkpoint must not change
        entries = {key: value.clone() for key, value in entries.items() if "/" not in key}
        entries |= facts["values"].get(name, {})
        if entries:
            state[index] = entries
    order = {name: index for index, name in enumerate(names)}
    groups = [{**group, "params": [order[n] for n in group["params"]]} for group in facts["groups"]]
    for group in groups:  # JSON has no tuples
        if "betas" in group:
            group["betas"] = tuple(group["betas"])
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def restore_model(model: nn.Module, tensors: Mapping[str, Tensor], where: str) -> None:
    """Loads parameters and buffers; names, shapes and dtypes must be those of the model."""
    saved = {k.removeprefix("model/"): v for k, v in tensors.items() if k.startswith("model/")}
    own = model.state_dict()
    for name in sorted(set(own) ^ set(saved)):
        side = "lacks" if name in own else "has an unknown"
        raise CheckpointError(f"{where} {side} tensor {name!r}: it belongs to another model config")
    for name, value in own.items():
        if value.shape != saved[name].shape or value.dtype != saved[name].dtype:
            raise CheckpointError(
                f"{where}: tensor {name!r} is {list(saved[name].shape)} {saved[name].dtype}, the "
                "model "
                f"has {list(value.shape)} {value.dtype}: it belongs to another model config"
            )
    model.load_state_dict(saved)


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Parameter names in the optimiser's order."""
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    return [by_id[id(p)] for group in optimizer.param_groups for p in group["params"]]
