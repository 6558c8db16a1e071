"""Checks of what a caller passes to a scan: shapes, dtypes, devices, gates, states."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hecate.engine.finite import can_inspect
from hecate.engine.prepare import Sequence
from hecate.errors import ConfigError, ShapeError, shorten
from hecate.phi import FeatureMap, Params
from hecate.rule import Gates, MemoryConfig, MemoryState
from hecate.rule.state import initial_state, map_state

# What is drawn to learn a map's parameter names is thrown away; made here, because torch.compile
# cannot make a generator.
_UNREAD = torch.Generator()


def complete(
    config: MemoryConfig,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates | None,
    write_mask: Tensor | None,
    reset_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    *,
    going_on: bool = False,
) -> Sequence:
    """The checked inputs with every gate as a tensor."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ShapeError(f"{name} must be [B, T, H, width], got {list(tensor.shape)}")
        if not tensor.is_floating_point():
            raise ShapeError(f"{name} must be floating point, got {tensor.dtype}")
        if tensor.device != k.device:
            raise ShapeError(f"{name} is on {tensor.device}, k on {k.device}; move them together")
    if q.shape != k.shape or v.shape[:3] != k.shape[:3]:
        raise ShapeError(
            f"q and k must be [B, T, H, D] and v [B, T, H, V] with equal B, T, H; got q "
            f"{list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
        )
    reset_mask = document_starts(reset_mask, cu_seqlens, k, going_on=going_on)
    lead = k.shape[:2]
    for name, mask in (("write_mask", write_mask), ("reset_mask", reset_mask)):
        if mask is not None and (mask.shape != lead or mask.dtype != torch.bool):
            raise ShapeError(
                f"{name} must be bool [B, T] = {list(lead)}, got {mask.dtype} {list(mask.shape)}"
            )
        if mask is not None and mask.device != k.device:
            raise ShapeError(f"{name} is on {mask.device}, k on {k.device}; move them together")
    lr, retain, momentum = _gates(config, gates or Gates(), k)
    return Sequence(q, k, v, lr, retain, momentum, write_mask, reset_mask)


def document_starts(
    reset_mask: Tensor | None, cu_seqlens: Tensor | None, k: Tensor, *, going_on: bool
) -> Tensor | None:
    """Where documents start, `[B, T]`, from whichever of the two is given."""
    if cu_seqlens is None:
        return reset_mask
    if going_on:
        raise ConfigError(
            "give cu_seqlens or state, not both: the first border restarts the memory, so the "
            "state would never be read; mark the later documents with reset_mask"
        )
    if reset_mask is not None:
        raise ConfigError(
            "give cu_seqlens or reset_mask, not both: both mark where documents start"
        )
    return _borders(cu_seqlens, k)


def _gates(config: MemoryConfig, gates: Gates, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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
    if isinstance(gates.lr, int | float):
        config.check_step(float(gates.lr))
    if isinstance(gates.retain, Tensor) and gates.retain.dim() == 4:
        _check_channels(config, gates.retain, k)
    return (
        _gate("lr", gates.lr, config.algorithm.lr, k, math.inf),
        _gate("retain", gates.retain, config.retention.default_retain, k, 1.0),
        _gate("momentum", gates.momentum, config.algorithm.default_momentum, k, 1.0),
    )


def _gate(name: str, given: Tensor | float | None, default: float, k: Tensor, top: float) -> Tensor:
    shape = k.shape[:3]
    if isinstance(given, Tensor):
        if given.shape[:3] != shape or given.dim() > 4 or (given.dim() == 4 and name != "retain"):
            raise ShapeError(
                f"gates.{name} must be a number or [B, T, H] = {list(shape)}, got "
                f"{list(given.shape)}"
            )
        if not given.is_floating_point():
            raise ShapeError(f"gates.{name} must be floating point, got {given.dtype}")
        if given.device != k.device:
            raise ShapeError(
                f"gates.{name} is on {given.device}, k on {k.device}; move them together"
            )
        return given
    value = default if given is None else float(given)
    # No math.isinf: to torch.compile the defaults of a second config are symbols.
    if not 0 <= value <= top or value == math.inf:
        limit = "a finite number >= 0" if top == math.inf else "in [0, 1]"
        raise ConfigError(f"gates.{name} must be {limit}, got {value:g}")
    return torch.full(
        shape, value, dtype=torch.promote_types(k.dtype, torch.float32), device=k.device
    )


def _check_channels(config: MemoryConfig, retain: Tensor, k: Tensor) -> None:
    width = config.feature_map.output_dim(k.shape[-1])
    if not config.structure.linear:
        raise ConfigError(
            "gates.retain has one value per phi channel, but structure "
            f"{config.structure.kind!r} has weights without a phi axis; pass [B, T, H] or use "
            "structure 'matrix' or 'vector'"
        )
    if retain.shape[-1] != width:
        raise ShapeError(
            f"gates.retain per phi channel must be [B, T, H, {width}], got {list(retain.shape)}"
        )


def _borders(cu_seqlens: Tensor, k: Tensor) -> Tensor:
    length = k.shape[1]
    if not isinstance(cu_seqlens, Tensor):
        raise ShapeError(
            f"cu_seqlens must be an integer tensor [documents + 1], got {shorten(cu_seqlens)}; "
            "wrap it in torch.tensor"
        )
    if k.shape[0] != 1 or cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point():
        raise ShapeError(
            f"cu_seqlens must be integer [documents + 1] with B = 1, got {cu_seqlens.dtype} "
            f"{list(cu_seqlens.shape)} and B = {k.shape[0]}"
        )
    if can_inspect(cu_seqlens):
        borders = [int(border) for border in cu_seqlens]
        if borders[:1] != [0] or borders[-1:] != [length] or borders != sorted(borders):
            raise ShapeError(
                f"cu_seqlens must rise from 0 to T = {length}, the borders of every document; got "
                f"{shorten(borders)}"
            )
    steps = torch.arange(length, device=k.device)
    return torch.isin(steps, cu_seqlens.to(k.device)).unsqueeze(0)


def check_params(feature_map: FeatureMap, params: Params | None, k: Tensor) -> Params:
    """The feature map's parameters; an error when it needs some and none are given."""
    if params is not None:
        if not isinstance(params, dict) or not {"learned", "frozen"} <= params.keys():
            raise ConfigError(
                "phi_params must be what feature_map.init returns, a mapping with 'learned' and "
                f"'frozen', got {shorten(params)}"
            )
        if "position" in params:
            raise ConfigError("leave 'position' out of phi_params: a scan counts its tokens itself")
        for group in ("learned", "frozen"):
            for name, tensor in params[group].items():
                if tensor.shape[0] not in (1, k.shape[2]):
                    raise ShapeError(
                        f"phi parameter {name!r} is for {tensor.shape[0]} heads, k has {k.shape[2]}"
                    )
        return params
    empty = feature_map.init(k.shape[-1], generator=_UNREAD)
    if empty["learned"] or empty["frozen"]:
        names = ", ".join([*empty["learned"], *empty["frozen"]])
        raise ConfigError(
            f"feature_map {feature_map.kind!r} has parameters ({names}); pass as phi_params what "
            f"feature_map.init({k.shape[-1]}, heads=..., generator=...) returns"
        )
    return empty


def complete_initial(
    config: MemoryConfig,
    initial: dict[str, Tensor] | None,
    sequence: Sequence,
    dtype: torch.dtype,
    *,
    unread: bool = False,
) -> MemoryState:
    """The state at which memories start and restart; zeros for the structure's own if `unread`."""
    batch, _, heads, d = sequence.k.shape
    d_phi, d_v = config.feature_map.output_dim(d), sequence.v.shape[-1]
    shapes = config.structure.shapes(d_phi, d_v)
    place: dict[str, Any] = {"dtype": dtype, "device": sequence.k.device}
    if initial is None and unread:
        initial = {name: torch.zeros(heads, *shape, **place) for name, shape in shapes.items()}
    elif initial is None:
        initial = config.structure.init(d_phi, d_v, heads=heads, **place)
    wanted = {name: (heads, *shape) for name, shape in shapes.items()}
    _check_tensors("initial", initial, wanted, sequence.k.device, batch=batch)
    cast = {name: initial[name].to(dtype) for name in shapes}
    return initial_state(config, cast, batch, sequence.retain, d_phi=d_phi, d_v=d_v)


def complete_state(
    config: MemoryConfig,
    state: MemoryState | None,
    start: MemoryState,
    sequence: Sequence,
    dtype: torch.dtype,
) -> MemoryState:
    """The state to go on from, checked against what this config carries."""
    if state is None:
        return start
    if (state.normalizer is None) != (config.normalizer == "none"):
        held = "nothing" if state.normalizer is None else "a state"
        raise ShapeError(
            f"state.normalizer holds {held}, but the config has normalizer={config.normalizer!r}; "
            "was it made with another config?"
        )
    if "retain" in state.pending and "retain" in start.pending:
        kept = state.pending["retain"]
        if kept.dim() < start.pending["retain"].dim():
            kept = kept.unsqueeze(-1).expand(*kept.shape, start.pending["retain"].shape[-1])
            state = state._replace(pending={**state.pending, "retain": kept})
    device = start.position.device
    for field in ("memory", "slots", "anchor", "pending"):
        shapes = {name: tuple(item.shape) for name, item in getattr(start, field).items()}
        _check_tensors(f"state.{field}", getattr(state, field), shapes, device)
    if state.position.shape != start.position.shape or state.position.device != device:
        raise ShapeError(
            f"state.position must be {list(start.position.shape)} on {device}, got "
            f"{list(state.position.shape)} on {state.position.device}"
        )
    cast = map_state(lambda t: t.to(dtype) if t.is_floating_point() else t, state)
    order = {
        field: {name: getattr(cast, field)[name] for name in getattr(start, field)}
        for field in ("memory", "slots", "anchor", "pending")
    }
    return cast._replace(**order)  # type: ignore[arg-type]


def as_wide_as(state: MemoryState | None, sequence: Sequence) -> Sequence:
    """The sequence with retain per phi channel where an unfinished chunk has kept it so."""
    kept = state.pending.get("retain") if state is not None else None
    if kept is None or kept.dim() < 3 or sequence.retain.dim() == 4:
        return sequence
    retain = sequence.retain.unsqueeze(-1)
    return sequence._replace(retain=retain.expand(*retain.shape[:-1], kept.shape[-1]))


def _check_tensors(
    what: str,
    given: dict[str, Tensor],
    expected: dict[str, tuple[int, ...]],
    device: torch.device,
    *,
    batch: int | None = None,
) -> None:
    if set(given) != set(expected):
        raise ShapeError(
            f"{what} must hold {sorted(expected) or 'nothing'}, got {sorted(given) or 'nothing'}; "
            "was it made with another config?"
        )
    for name, shape in expected.items():
        allowed = [shape] if batch is None else [shape, (batch, *shape)]
        if tuple(given[name].shape) not in allowed:
            raise ShapeError(
                f"{what}[{name!r}] must be {list(shape)}, got {list(given[name].shape)}"
            )
        if given[name].device != device:
            raise ShapeError(
                f"{what}[{name!r}] is on {given[name].device}, k on {device}; move them together"
            )
