"""Checks of what a caller passes to a scan: shapes, dtypes, devices, gates, states."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hecate.engine.finite import can_inspect
from hecate.engine.gates import complete_gates
from hecate.engine.given import check_mask, check_named, check_tokens, described
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
    check_tokens(q, k, v)
    if q.shape != k.shape or v.shape[:3] != k.shape[:3]:
        raise ShapeError(
            f"q and k must be [B, T, H, D] and v [B, T, H, V] with equal B, T, H; got q "
            f"{list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
        )
    reset_mask = document_starts(reset_mask, cu_seqlens, k, going_on=going_on)
    check_mask("write_mask", write_mask, k)
    check_mask("reset_mask", reset_mask, k)
    lr, retain, momentum = complete_gates(config, gates, k, write_mask)
    return Sequence(q, k, v, lr, retain, momentum, write_mask, reset_mask)


def state_dtype(
    config: MemoryConfig,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: MemoryState | None,
    initial: dict[str, Tensor] | None,
) -> torch.dtype:
    """In what a state is held: the highest precision among the config, the inputs and the state to
    go on from or to start at."""
    start = initial if state is None else state.memory
    dtype = config.dtype
    for tensor in (q, k, v, *(() if start is None else start.values())):
        if tensor.dtype != dtype:
            dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


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
    """The feature map's parameters; an error when it needs some and none are given, or where they
    are not those of its `init`. [ENG-CALL-I6]"""
    if torch.compiler.is_compiling():
        return params or feature_map.init(k.shape[-1], generator=_UNREAD)
    width, heads = k.shape[-1], k.shape[2]
    expected = _expected(feature_map, width, max(heads, 1))
    if params is None and expected:
        raise ConfigError(
            f"feature_map {feature_map.kind!r} has parameters ({', '.join(expected)}); pass as "
            f"phi_params what feature_map.init({width}, heads=..., generator=...) returns"
        )
    if params is None:
        return {"learned": {}, "frozen": {}}
    if not isinstance(params, dict) or not {"learned", "frozen"} <= params.keys():
        raise ConfigError(
            "phi_params must be what feature_map.init returns, a mapping with 'learned' and "
            f"'frozen', got {described(params)}"
        )
    if "position" in params:
        raise ConfigError("leave 'position' out of phi_params: a scan counts its tokens itself")
    given = 0
    for group in ("learned", "frozen"):
        tensors = params[group]  # type: ignore[literal-required]
        check_named(f"phi_params[{group!r}]", tensors)
        given += len(tensors)
        for name, tensor in tensors.items():
            wanted = expected.get(name)
            if wanted is None or wanted.group != group:
                given = -1
                break
            if (
                tensor.shape[1:] != wanted.shape[1:]
                or tensor.shape[0] not in (1, wanted.shape[0], heads)
                or tensor.dtype.is_floating_point != wanted.floating
                or tensor.device != k.device
            ):
                _refuse(name, tensor, wanted, k)
    if given != len(expected):
        held = {group: [*params[group]] for group in ("learned", "frozen")}  # type: ignore[literal-required]
        raise ConfigError(
            f"feature_map {feature_map.kind!r} for keys of width {width} has the parameters "
            f"{ {name: each.group for name, each in expected.items()} }, got {held}; were they "
            "made by another map?"
        )
    return params


class _Expected(NamedTuple):
    """A parameter as `init` makes it."""

    group: str
    shape: tuple[int, ...]
    floating: bool


@lru_cache(maxsize=256)
def _expected(feature_map: FeatureMap, width: int, heads: int) -> dict[str, _Expected]:
    """A map's parameters by name, made on no device."""
    made = feature_map.init(width, heads=heads, device="meta")
    return {
        name: _Expected(group, tuple(tensor.shape), tensor.is_floating_point())
        for group in ("learned", "frozen")
        for name, tensor in made[group].items()  # type: ignore[literal-required]
    }


def _refuse(name: str, tensor: Tensor, wanted: _Expected, k: Tensor) -> None:
    if tensor.device != k.device:
        raise ShapeError(
            f"phi parameter {name!r} is on {tensor.device}, k on {k.device}; move them together"
        )
    heads = k.shape[2]
    if tensor.dim() and tensor.shape[0] not in (1, heads) and wanted.shape[0] in (1, heads):
        raise ShapeError(f"phi parameter {name!r} is for {tensor.shape[0]} heads, k has {heads}")
    kind = "floating point" if wanted.floating else "of whole numbers"
    raise ShapeError(
        f"phi parameter {name!r} must be {kind} {list(wanted.shape)}, or [1, ...] for all heads, "
        f"got {described(tensor)}; pass what feature_map.init({k.shape[-1]}, heads={heads}) returns"
    )


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
