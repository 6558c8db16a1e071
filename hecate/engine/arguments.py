"""Checks of what a caller passes to a scan: shapes, dtypes, devices, gates, states."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hecate.engine.finite import can_inspect
from hecate.engine.gates import complete_gates
from hecate.engine.given import check_mask, check_tokens
from hecate.engine.prepare import Sequence
from hecate.errors import ConfigError, ShapeError, shorten
from hecate.rule import Gates, MemoryConfig, MemoryState
from hecate.rule.state import initial_state, map_state
from hecate.tape import is_traced


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
    config: MemoryConfig, q: Tensor, k: Tensor, v: Tensor, state: MemoryState | None, initial: dict[str, Tensor] | None
) -> torch.dtype:
    """In what a state is held: the highest precision among the config, the inputs and the state to go on from or to
    start at."""
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
        raise ConfigError("give cu_seqlens or reset_mask, not both: both mark where documents start")
    return _borders(cu_seqlens, k)


def _borders(cu_seqlens: Tensor, k: Tensor) -> Tensor:
    length = k.shape[1]
    if not isinstance(cu_seqlens, Tensor):
        raise ShapeError(
            f"cu_seqlens must be an integer tensor [documents + 1], got {shorten(cu_seqlens)}; wrap it in torch.tensor"
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
                f"cu_seqlens must rise from 0 to T = {length}, the borders of every document; got {shorten(borders)}"
            )
    steps = torch.arange(length, device=k.device)
    return torch.isin(steps, cu_seqlens.to(k.device)).unsqueeze(0)


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
    if initial is None and unread and not is_traced(sequence.k):
        return _unread(config, batch, heads, d_phi, d_v, sequence.retain.shape[3:], **place)
    if initial is None and unread:
        initial = {name: torch.zeros(heads, *shape, **place) for name, shape in shapes.items()}
    elif initial is None:
        initial = config.structure.init(d_phi, d_v, heads=heads, **place)
    wanted = {name: (heads, *shape) for name, shape in shapes.items()}
    _check_tensors("initial", initial, wanted, sequence.k.device, batch=batch)
    cast = {name: initial[name].to(dtype) for name in shapes}
    return initial_state(config, cast, batch, sequence.retain, d_phi=d_phi, d_v=d_v)


@lru_cache(maxsize=64)
def _unread(
    config: MemoryConfig,
    batch: int,
    heads: int,
    d_phi: int,
    d_v: int,
    channels: torch.Size,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> MemoryState:
    """Zeros of a state's shapes, one number each: a step that goes on makes none of its own."""
    with torch.inference_mode(False):
        zero = torch.zeros((), dtype=dtype, device=device)
        shapes = config.structure.shapes(d_phi, d_v)
        initial = {name: zero.expand(heads, *shape) for name, shape in shapes.items()}
        retain = zero.expand(batch, 1, heads, *channels)
        state = initial_state(config, initial, batch, retain, d_phi=d_phi, d_v=d_v)
        return map_state(lambda item: item.new_zeros(()).expand(item.shape), state)


def complete_state(
    config: MemoryConfig, state: MemoryState | None, start: MemoryState, sequence: Sequence, dtype: torch.dtype
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
            raise ShapeError(f"{what}[{name!r}] must be {list(shape)}, got {list(given[name].shape)}")
        if given[name].device != device:
            raise ShapeError(f"{what}[{name!r}] is on {given[name].device}, k on {device}; move them together")
