"""A run that begins with the parameters of another one, or of a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from hecate.distributed import overwrite
from hecate.distributed.shard import settle
from hecate.errors import CheckpointError
from hecate.train.checkpoint import summary
from hecate.train.export import read_weights
from hecate.train.trainer import Trainer

SHOWN = 5


def begin_from(trainer: Trainer, path: Path) -> list[str]:
    """Overwrites a model's parameters and buffers with those of a run, a checkpoint or a safetensors file, by name;
    what there is to tell of it, in lines. [TRAIN-INIT-D1]

    Names that one of both lacks are told: those of the model stay as they were drawn. A tensor of another shape is
    refused, and so is a file of which nothing fits, and on every rank what is not the same on every rank.
    Floating-point numbers take the model's dtype.
    """
    settle(trainer.model)
    own, found, lines, fault = trainer.model.state_dict(), dict[str, Tensor](), list[str](), None
    try:
        found, lines = _fitting(path, own)
    except CheckpointError as error:
        fault = str(error)
    if told := trainer.world.first_of(fault):  # on every rank, for the others would wait
        raise CheckpointError(f"init_from: {told[1]}")
    if trainer.world.size > 1:  # each has read it where it runs
        trainer.world.agree({"init_from": {name: summary(value)["sha256"] for name, value in found.items()}})
    with torch.no_grad():
        for name, value in found.items():
            overwrite(own[name], value.to(own[name].dtype))
    return lines


def _fitting(path: Path, own: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """The stored tensors that a model takes, and notes on these and on the rest."""
    given = read_weights(path)
    found = {name: value for name, value in given.items() if name in own}
    if not found:
        raise CheckpointError(
            f"no tensor of {path} has a name of this model; there are {_listed(given)} there and {_listed(own)} here"
        )
    for name, value in found.items():
        _check(f"tensor {name!r} of {path}", value, own[name])
    sides = {"not there, and drawn anew": own.keys() - found.keys(), "left over": given.keys() - own.keys()}
    lines = [f"{what}: {_listed(sorted(names))}" for what, names in sides.items() if names]
    return found, [f"began from {path}: {len(found)} tensors", *lines]


def _check(where: str, value: Tensor, own: Tensor) -> None:
    """Refuses another shape, and numbers of another kind."""
    if value.shape != own.shape:
        raise CheckpointError(
            f"{where} is {list(value.shape)}, the model has {list(own.shape)}: they are of other sizes"
        )
    if value.is_floating_point() != own.is_floating_point() or value.is_complex() != own.is_complex():
        raise CheckpointError(f"{where} is {value.dtype}, the model has {own.dtype}")


def _listed(names: Iterable[str]) -> str:
    shown = list(names)
    return ", ".join(shown[:SHOWN]) + (f" and {len(shown) - SHOWN} more" if shown[SHOWN:] else "")
