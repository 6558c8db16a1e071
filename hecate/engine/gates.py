"""Gates as a caller gives them: numbers or tensors, complete and within their range."""

from __future__ import annotations

import math
from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor

from hecate.checks import described
from hecate.engine.tokens import expand_to
from hecate.errors import ConfigError, ShapeError
from hecate.rule import Gates, MemoryConfig
from hecate.tape import can_inspect


def complete_gates(
    config: MemoryConfig, gates: Gates | None, k: Tensor, write: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """lr, retain and momentum of keys `[B, T, H, D]` as tensors.

    Tensors are looked at on a CPU, where values may steer: a number out of range is refused with its place, but at
    tokens that are not written. What is no finite number is left to `on_nonfinite`. [ENG-CALL-I5]
    """
    if gates is None:
        gates = Gates()
    if not isinstance(gates, Gates):
        raise ConfigError(f"gates must be Gates(lr, retain, momentum), got {described(gates)}")
    if gates.retain is not None and not config.retention.uses_retain:
        raise ConfigError(
            f"gates.retain is given, but retention {config.retention.kind!r} takes no retain gate; "
            "leave it None or choose retention 'decay'"
        )
    if gates.momentum is not None and not config.algorithm.uses_momentum:
        raise ConfigError(
            f"gates.momentum is given, but algorithm {config.algorithm.kind!r} takes no momentum "
            "gate; leave it None or choose algorithm 'momentum'"
        )
    if isinstance(gates.lr, Real) and not isinstance(gates.lr, Tensor):
        config.check_step(float(gates.lr))
    if isinstance(gates.retain, Tensor) and gates.retain.dim() == 4:
        _check_channels(config, gates.retain, k)
    return (
        _gate(Range("lr", math.inf), gates.lr, config.algorithm.lr, k, write),
        _gate(Range("retain", 1.0), gates.retain, config.retention.default_retain, k, write),
        _gate(Range("momentum", 1.0), gates.momentum, config.algorithm.default_momentum, k, write),
    )


class Range(NamedTuple):
    """A gate by name and its largest value; the least is 0."""

    name: str
    top: float

    def __str__(self) -> str:
        return "a finite number >= 0" if self.top == math.inf else "in [0, 1]"


def _gate(limits: Range, given: Tensor | float | None, default: float, k: Tensor, write: Tensor | None) -> Tensor:
    shape, (name, top) = k.shape[:3], limits
    if isinstance(given, Tensor):
        if given.shape[:3] != shape or given.dim() > 4 or (given.dim() == 4 and name != "retain"):
            raise ShapeError(f"gates.{name} must be a number or [B, T, H] = {list(shape)}, got {list(given.shape)}")
        if not given.is_floating_point():
            raise ShapeError(f"gates.{name} must be floating point, got {given.dtype}")
        if given.device != k.device:
            raise ShapeError(f"gates.{name} is on {given.device}, k on {k.device}; move them together")
        _check_range(limits, given, write)
        return given
    if given is not None and not isinstance(given, Real):
        raise ShapeError(f"gates.{name} must be a number or a tensor [B, T, H] = {list(shape)}, got {described(given)}")
    value = default if given is None else float(given)
    # No math.isinf: to torch.compile the defaults of a second config are symbols.
    if not 0 <= value <= top or value == math.inf:
        raise ConfigError(f"gates.{name} must be {limits}, got {value:g}")
    return torch.full(shape, value, dtype=torch.promote_types(k.dtype, torch.float32), device=k.device)


def _check_channels(config: MemoryConfig, retain: Tensor, k: Tensor) -> None:
    width = config.feature_map.output_dim(k.shape[-1])
    if not config.structure.linear:
        raise ConfigError(
            "gates.retain has one value per phi channel, but structure "
            f"{config.structure.kind!r} has weights without a phi axis; pass [B, T, H] or use "
            "structure 'matrix' or 'vector'"
        )
    if retain.shape[-1] != width:
        raise ShapeError(f"gates.retain per phi channel must be [B, T, H, {width}], got {list(retain.shape)}")


def _check_range(limits: Range, given: Tensor, write: Tensor | None) -> None:
    if given.numel() == 0 or not can_inspect(given, free=True):
        return
    low, high = given.aminmax()
    if low.item() >= 0 and high.item() <= limits.top:
        return
    bad = given.isfinite() & ((given < 0) | (given > limits.top))
    if write is not None:
        bad = bad & expand_to(write, bad)
    places = bad.nonzero()
    if len(places):
        at = tuple(int(index) for index in places[0])
        channel = f", channel {at[3]}" if len(at) > 3 else ""
        value = float(given[at].detach())
        raise ConfigError(
            f"gates.{limits.name} must be {limits}, got {value:g} at batch row {at[0]}, token "
            f"{at[1]}, head {at[2]}{channel}"
        )
