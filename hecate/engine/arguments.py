"""Checks of what a caller passes to a scan: tokens, gates, masks, phi's parameters, states."""

from __future__ import annotations

import math
from functools import lru_cache
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from hecate.checks import TURNED, described, expect, expect_beside, heads_for_tokens, swapped
from hecate.engine.tokens import cast, constants, expand_to
from hecate.errors import ConfigError, ShapeError, shorten
from hecate.phi import FeatureMap, Params
from hecate.rule import Gates, MemoryConfig, MemoryState, TokenGates
from hecate.tape import Run, can_inspect, is_traced, one

# For reset masks made from `cu_seqlens`: the borders of documents that are not empty, as numbers on the host.
BORDERS = WeakTensorKeyDictionary()
Named = dict[str, Tensor]
Shapes = dict[str, tuple[int, ...]]
# For each gate that only some rules take: the knob that decides, and a variant that takes it.
TAKEN_BY = {"retain": ("retention", "decay"), "momentum": ("algorithm", "momentum")}
# The gates beside lr, retain and momentum that become tensors, each with its largest number; negative: any number.
FURTHER = {"erase": -math.inf, "write": -math.inf, "retain_value": 1.0, "floor": math.inf}


def check_config(config: MemoryConfig) -> MemoryConfig:
    """The config, validated once per object; refuses anything but a `MemoryConfig`."""
    if not isinstance(config, MemoryConfig):
        raise ConfigError(
            f"config must be a MemoryConfig, got {shorten(config)} ({type(config).__name__}); make one by "
            "MemoryConfig(...) or MemoryConfig.model_validate(...)"
            + (f"; a rule by its name is named_rule({config!r})" if isinstance(config, str) else "")
        )
    return config if torch.compiler.is_compiling() else config.validated()


def check_tokens(q: Tensor, k: Tensor, v: Tensor, axes: str = "B T H width") -> None:
    """Refuses q, k and v unless they are floating point tensors of the right rank, on one device."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        expect(tensor, axes, name=name)
    expect_beside(q, k, "q")
    expect_beside(v, k, "v")


def check_mask(name: str, mask: Tensor | None, k: Tensor) -> None:
    """Refuses a mask that does not fit the tokens of keys `[B, T, H, D]`."""
    if mask is not None:
        batch, length, heads = k.shape[:3]
        if isinstance(mask, Tensor) and mask.shape == (batch, heads) and heads != length:
            raise ShapeError(f"{name} must be bool [B, T] = {[batch, length]}, got {described(mask)}{TURNED}")
        expect(mask, "B T", name=name, sizes=k.shape[:2], dtype=torch.bool, like=k)


def document_starts(
    reset_mask: Tensor | None, cu_seqlens: Tensor | None, k: Tensor, *, going_on: bool
) -> Tensor | None:
    """A mask of the tokens that start a document, `[B, T]`, from a reset mask or from `cu_seqlens`."""
    if cu_seqlens is None:
        return reset_mask
    if going_on:
        raise ConfigError(
            "give cu_seqlens or state, not both: the first border restarts the memory, so the state would never be "
            "read; mark the later documents with reset_mask"
        )
    if reset_mask is not None:
        raise ConfigError("give cu_seqlens or reset_mask, not both: both mark where documents start")
    length = k.shape[1]
    if not isinstance(cu_seqlens, Tensor):
        raise ShapeError(
            f"cu_seqlens must be an integer tensor [documents + 1], got {shorten(cu_seqlens)}; wrap it in torch.tensor"
        )
    # With several rows, the tokens of one would have to follow those of another.
    if k.shape[0] != 1 or cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point():
        raise ShapeError(
            f"cu_seqlens must be integer [documents + 1] with B = 1, got {described(cu_seqlens)} and B = {k.shape[0]}"
        )
    if can_inspect(cu_seqlens):
        borders = cu_seqlens.tolist()
        if borders[:1] != [0] or borders[-1:] != [length] or borders != sorted(borders):
            raise ShapeError(
                f"cu_seqlens must rise from 0 to T = {length}, the borders of every document; got {shorten(borders)}"
            )
    indices = cu_seqlens.to(k.device, torch.int64, non_blocking=True)
    # One place more than there are tokens, as the last border starts no document.
    starts = torch.zeros(length + 1, dtype=torch.bool, device=k.device)
    mask = starts.index_fill(0, indices, True)[:length].unsqueeze(0)
    if can_inspect(cu_seqlens) and not is_traced(mask) and not mask.is_inference():
        BORDERS[mask] = tuple(sorted(set(borders)))
    return mask


# Gates. Their types and shapes are checked once for all calls that look alike, numbers out of range in every call.


def check_gates(config: MemoryConfig, gates: Gates, k: Tensor, v: Tensor) -> None:
    """Refuses gates that the config does not take, or of other shapes than those of keys `[B, T, H, D]` and values."""
    if not isinstance(gates, Gates):
        how = "; write Gates(**gates)" if isinstance(gates, dict) else "; write Gates(lr=...)"
        raise ConfigError(f"gates must be Gates(lr, retain, momentum), got {described(gates)}{how}")
    for name, gate, taken in zip(TokenGates._fields, gates[:3], config.forms.gates, strict=True):
        if gate is not None and not taken:
            knob, other = TAKEN_BY[name]
            raise ConfigError(
                f"gates.{name} is given, but {knob} {getattr(config, knob).kind!r} takes no {name} gate; leave it None "
                f"or choose {knob} {other!r}"
            )
    if not isinstance(gates.lr, Tensor):
        _check_numbers(config, gates)
    if isinstance(gates.retain, Tensor) and gates.retain.dim() == 4:
        _check_channels(config, gates.retain, k)
    if isinstance(gates.lr, Tensor) and gates.lr.dim() == 4:
        _check_rates(config, gates.lr, k, v)
    for name, gate, top in zip(TokenGates._fields, gates[:3], config.forms.tops, strict=True):
        _check_gate(name, gate, k, top)
    if gates.erase is gates.write is gates.retain_value is gates.floor is gates.ridge is gates.mix is None:
        return
    for name, reason in config.gate_refusals():
        if getattr(gates, name) is not None:
            raise ConfigError(f"gates.{name} is given, but {reason}")
    for name, gate in (("erase", gates.erase), ("write", gates.write)):
        if isinstance(gate, Tensor):
            _check_channel_gate(name, gate, k, config.feature_map.output_dim(k.shape[-1]), "phi channel")
        elif gate is not None and (not isinstance(gate, Real) or not math.isfinite(gate)):
            raise ConfigError(f"gates.{name} must be a finite number or a tensor [B, T, H, *], got {described(gate)}")
    retain_value: Any = gates.retain_value
    if retain_value is not None:
        if not isinstance(retain_value, Tensor) or retain_value.dim() != 4:
            each = f"gates.retain_value must be a tensor [B, T, H, V] = {[*k.shape[:3], v.shape[-1]]}"
            raise ShapeError(f"{each}, got {described(retain_value)}; one value for all channels is gates.retain")
        _check_channel_gate("retain_value", retain_value, k, v.shape[-1], "value channel")
    _check_gate("floor", gates.floor, k, math.inf)


def filled_gates(
    config: MemoryConfig, gates: Gates, k: Tensor, write: Tensor | None, looks: bool | None = None
) -> tuple[list[Tensor], list[Tensor | None]]:
    """lr, retain and momentum of keys `[B, T, H, D]` as tensors, in the order of `TokenGates`; and those of `FURTHER`,
    None where they are not given.

    On a CPU, where values can be read without waiting, a number out of range is refused with its place, unless its
    token is not written; NaN and infinity are left to `on_nonfinite`. `looks`: whether values may be read, if known.
    [ENG-CALL-I5]
    """
    forms, filled = config.forms, []
    if forms.per_head and gates.retain is None and k.shape[1]:
        gates = gates._replace(retain=retain_per_head(config, k.shape[:3], k))
    for name, gate, default, top in zip(TokenGates._fields, gates, forms.defaults, forms.tops):  # noqa: B905
        filled.append(_gate_tensor(name, gate, default, k, write, top, looks))
    further: list[Tensor | None] = []
    for name, top in FURTHER.items():
        gate = getattr(gates, name)
        further.append(None if gate is None else _gate_tensor(name, gate, 1.0, k, write, top, looks))
    return filled, further


def _check_numbers(config: MemoryConfig, gates: Gates) -> None:
    """Refuses numbers given for lr, erase and write with which writes diverge; tensors are not checked."""
    numbers = [gate for gate in (gates.lr, gates.erase, gates.write) if gate is not None]
    if numbers and all(isinstance(gate, Real) for gate in numbers):
        erase, write = (1.0 if gate is None else float(gate) for gate in (gates.erase, gates.write))
        config.check_step(config.algorithm.lr if gates.lr is None else float(gates.lr), erase * write)


def retain_per_head(config: MemoryConfig, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """The retain gates `[..., H]` of a config whose heads differ in them."""
    # Constants of a config, cached for each device: a tensor made here would be copied to it in every call.
    retains, dtype = config.retention.default_retains(shape[-1]), torch.promote_types(like.dtype, torch.float32)
    return constants(tuple(retains), dtype, like.device).expand(*shape)


def _check_gate(name: str, gate: Any, k: Tensor, top: float) -> None:
    shape = k.shape[:3]
    if gate is None:
        return
    if isinstance(gate, Tensor):
        if gate.shape[:3] != shape or gate.dim() > 4 or (gate.dim() == 4 and name not in ("lr", "retain")):
            turn = swapped(gate.shape, shape)
            raise ShapeError(
                f"gates.{name} must be a number or [B, T, H] = {list(shape)}, got {list(gate.shape)}{turn}"
            )
        _check_floats(name, gate, k)
    elif not isinstance(gate, Real):
        each = f"gates.{name} must be a number or a tensor [B, T, H] = {list(shape)}"
        raise ShapeError(f"{each}, got {described(gate)}")
    elif not 0 <= float(gate) <= top or float(gate) == math.inf:
        # Not math.isinf: torch.compile makes symbols of the defaults of a second config.
        raise ConfigError(f"gates.{name} must be {_bounds(top)}, got {float(gate):g}")


def _check_channel_gate(name: str, gate: Tensor, k: Tensor, width: int, channel: str) -> None:
    shape = k.shape[:3]
    if gate.shape[:3] != shape or gate.dim() > 4 or (gate.dim() == 4 and gate.shape[-1] != width):
        each = f"[B, T, H, {width}] per {channel}"
        turn = swapped(gate.shape, shape)
        raise ShapeError(f"gates.{name} must be [B, T, H] = {list(shape)} or {each}, got {list(gate.shape)}{turn}")
    _check_floats(name, gate, k)


def _check_floats(name: str, gate: Tensor, k: Tensor) -> None:
    if not gate.is_floating_point():
        raise ShapeError(f"gates.{name} must be floating point, got {gate.dtype}")
    expect_beside(gate, k, f"gates.{name}")


def _gate_tensor(
    name: str, gate: Any, default: float, k: Tensor, write: Tensor | None, top: float, looks: bool | None = None
) -> Tensor:
    """A gate as a tensor; refuses numbers outside [0, top] at written tokens, none at all if top is negative."""
    if not isinstance(gate, Tensor):
        value, dtype = default if gate is None else float(gate), torch.promote_types(k.dtype, torch.float32)
        return torch.full(k.shape[:3], value, dtype=dtype, device=k.device)
    if top >= 0 and gate.numel() and (can_inspect(gate, free=True) if looks is None else looks):
        # One pass for both bounds; the token is searched for only if one is violated.
        low, high = gate.aminmax()
        if not (low.item() >= 0 and high.item() <= top):
            _refuse_range(name, gate, write, top)
    return gate


def _bounds(top: float) -> str:
    return "a finite number >= 0" if top == math.inf else "in [0, 1]"


def _check_channels(config: MemoryConfig, retain: Tensor, k: Tensor) -> None:
    width = config.feature_map.output_dim(k.shape[-1])
    if config.forms.transposed:
        raise ConfigError(
            f"gates.retain has one value per phi channel, but {config.structure.named} decays channels of values; pass "
            "[B, T, H], and gates.retain_value"
        )
    if not config.forms.linear:
        raise ConfigError(
            f"gates.retain has one value per phi channel, but {config.structure.named} has weights without "
            "a phi axis; pass [B, T, H] or use structure 'matrix' or 'vector'"
        )
    if retain.shape[-1] != width:
        raise ShapeError(f"gates.retain per phi channel must be [B, T, H, {width}], got {list(retain.shape)}")


def _check_rates(config: MemoryConfig, lr: Tensor, k: Tensor, v: Tensor) -> None:
    if (reason := config.rates_refusal()) is not None:
        raise ConfigError(f"gates.lr has one value for each weight, but {reason}; pass [B, T, H]")
    weights = config.structure.shapes(config.feature_map.output_dim(k.shape[-1]), v.shape[-1])
    if lr.shape[-1] != len(weights):
        each = f"[B, T, H, {len(weights)}], in the order of {', '.join(weights)}"
        raise ShapeError(f"gates.lr of each weight must be {each}, got {list(lr.shape)}")


def _refuse_range(name: str, gate: Tensor, write: Tensor | None, top: float) -> None:
    """Names the first written token whose gate is out of range, if there is one."""
    bad = gate.isfinite() & ((gate < 0) | (gate > top))
    if write is not None:
        bad = bad & expand_to(write, bad)
    for at in bad.nonzero()[:1].tolist():
        channel = f", {'weight' if name == 'lr' else 'channel'} {at[3]}" if len(at) > 3 else ""
        raise ConfigError(
            f"gates.{name} must be {_bounds(top)}, got {float(gate[tuple(at)].detach()):g} at batch row {at[0]}, "
            f"token {at[1]}, head {at[2]}{channel}"
        )


def readout_gates(
    config: MemoryConfig, gates: Gates, k: Tensor, retain: Tensor, dtype: torch.dtype, run: Run
) -> tuple[Tensor | None, ...]:
    """The gates of a config's readout, in the readout's order, as tensors in `dtype`; None for those not given."""
    tensors: list[Tensor | None] = []
    if retain.dim() == 4 and not config.readout.channels:
        raise ConfigError(
            f"gates.retain has one value per phi channel, but readout {config.readout.kind!r} needs one for all; pass "
            "[B, T, H]"
        )
    for name in config.readout.gates:
        gate, top = getattr(gates, name), 1.0 if name == "mix" else math.inf
        if name != "mix" and isinstance(gate, Tensor):
            _check_channel_gate(name, gate, k, config.feature_map.output_dim(k.shape[-1]), "phi channel")
            gate = _gate_tensor(name, gate, 0.0, k, None, top if name == "ridge" else -1.0)
        elif gate is not None:
            _check_gate(name, gate, k, top)
            gate = _gate_tensor(name, gate, 0.0, k, None, top)
        if isinstance(gate, Tensor) and gate.dtype != dtype:
            gate = one(run(cast(dtype), gate, label="inputs"))
        tensors.append(gate)
    return tuple(tensors)


# Parameters of phi.


def check_params(feature_map: FeatureMap, params: Params | None, k: Tensor) -> Params:
    """The feature map's parameters; an error when it needs some and none are given, or where they are not those of its
    `init`. [ENG-CALL-I6]"""
    if torch.compiler.is_compiling():
        return params or {"learned": {}, "frozen": {}}  # a map that lacks some fails at their names
    width, heads = k.shape[-1], k.shape[2]
    groups = _expected_params(feature_map, width, max(heads, 1))
    if params is None:
        if names := [*groups["learned"], *groups["frozen"]]:
            raise ConfigError(
                f"feature_map {feature_map.kind!r} has parameters ({', '.join(names)}); pass as phi_params what "
                f"feature_map.init({width}, heads=..., generator=...) returns"
            )
        return {"learned": {}, "frozen": {}}
    if not isinstance(params, dict) or not groups.keys() <= params.keys():
        raise ConfigError(
            "phi_params must be what feature_map.init returns, a mapping with 'learned' and 'frozen', got "
            f"{described(params)}"
        )
    if "position" in params:
        raise ConfigError("leave 'position' out of phi_params: a scan counts its tokens itself")
    tensors: dict[str, Named] = params  # type: ignore[assignment]
    for group, expected in groups.items():
        check_named(f"phi_params[{group!r}]", tensors[group])
        if tensors[group].keys() != expected.keys():
            raise ConfigError(
                f"feature_map {feature_map.kind!r} for keys of width {width} has the parameters "
                f"{ {name: each for each in groups for name in groups[each]} }, got "
                f"{ {each: [*tensors[each]] for each in groups} }; were they made by another map?"
            )
        for name, (shape, floating) in expected.items():
            tensor = tensors[group][name]
            if (
                tensor.shape[1:] != shape[1:]
                or tensor.shape[0] not in (1, shape[0], heads)
                or tensor.dtype.is_floating_point != floating
                or tensor.device != k.device
            ):
                _refuse_param(name, tensor, shape, floating, k)
    return params


@lru_cache(maxsize=256)
def _expected_params(
    feature_map: FeatureMap, width: int, heads: int
) -> dict[str, dict[str, tuple[tuple[int, ...], bool]]]:
    """Shape of each of a map's parameters, and whether it is floating point: by group and name."""
    params: dict[str, Named] = feature_map.init(width, heads=heads, device="meta")  # type: ignore[assignment]
    return {
        group: {name: (tuple(tensor.shape), tensor.is_floating_point()) for name, tensor in params[group].items()}
        for group in ("learned", "frozen")
    }


def _refuse_param(name: str, tensor: Tensor, shape: tuple[int, ...], floating: bool, k: Tensor) -> None:
    expect_beside(tensor, k, f"phi parameter {name!r}")
    heads = k.shape[2]
    if tensor.dim() and tensor.shape[0] not in (1, heads) and shape[0] in (1, heads):
        turn = TURNED if tensor.shape[0] == k.shape[1] else ""
        raise ShapeError(f"phi parameter {name!r} is for {tensor.shape[0]} heads, k has {heads}{turn}")
    kind = "floating point" if floating else "of whole numbers"
    raise ShapeError(
        f"phi parameter {name!r} must be {kind} {list(shape)}, or [1, ...] for all heads, got {described(tensor)}; "
        f"pass what feature_map.init({k.shape[-1]}, heads={heads}) returns"
    )


# States.


def check_state(state: MemoryState | None) -> None:
    """Refuses a state that no scan can have returned, by the types in it."""
    if state is None:
        return
    if not isinstance(state, MemoryState):
        raise ShapeError(f"state must be the MemoryState that a scan returned, got {described(state)}")
    for field in ("position", "seen"):
        tensor = getattr(state, field)
        if not isinstance(tensor, Tensor) and not (field == "seen" and tensor is None):
            raise ShapeError(f"state.{field} must be a tensor, got {described(tensor)}")
    for field in state._fields[:4]:
        check_named(f"state.{field}", getattr(state, field))
    if state.readout is not None:
        check_named("state.readout", state.readout)
    check_state(state.normalizer)


def check_held(config: MemoryConfig, state: MemoryState | None) -> None:
    """Refuses a state that no scan can have returned, with a part for a readout or a normaliser that the config does
    not have, or without the part for one that it has."""
    check_state(state)
    if state is None:
        return
    if (state.readout is None) != config.readout.plain:
        contents = "nothing" if state.readout is None else str(sorted(state.readout))
        raise ShapeError(
            f"state.readout holds {contents}, but the config has readout {config.readout.kind!r}; was the state made "
            "with another config?"
        )
    if (state.normalizer is None) != (config.normalizer == "none"):
        contents = "nothing" if state.normalizer is None else "a state"
        raise ShapeError(
            f"state.normalizer holds {contents}, but the config has normalizer={config.normalizer!r}; was it made with "
            "another config?"
        )


def check_position(config: MemoryConfig, state: MemoryState | None, k: Tensor) -> None:
    """Refuses a state that counts tokens though phi needs no positions, or does not though phi needs them."""
    needed, count = config.feature_map.needs_position, None if state is None else state.seen
    if state is not None and (count is not None) != needed:
        raise ShapeError(
            f"state.seen is {'a count' if count is not None else 'None'}, but feature_map {config.feature_map.kind!r} "
            f"needs {'one' if needed else 'none'}; was the state made with another config?"
        )
    if count is not None and (count.shape != k.shape[:1] or count.dtype != torch.int64 or count.device != k.device):
        raise ShapeError(
            f"state.seen must be int64 {list(k.shape[:1])} on {k.device}, got {described(count)} on {count.device}"
        )


def check_named(what: str, tensors: Named) -> None:
    """Refuses anything but a dict of tensors."""
    if not isinstance(tensors, dict):
        raise ShapeError(f"{what} must be a mapping of names to tensors, got {described(tensors)}")
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise ShapeError(f"{what}[{name!r}] must be a tensor, got {described(tensor)}")


def check_tensors(what: str, tensors: Named, expected: Shapes, k: Tensor, *, batch: int | None = None) -> None:
    """Refuses named tensors whose shapes are not those expected; with `batch`, they may have that axis in front."""
    if tensors.keys() != expected.keys():
        raise ShapeError(
            f"{what} must hold {sorted(expected) or 'nothing'}, got {sorted(tensors) or 'nothing'}; was it made with "
            "another config?"
        )
    for name, shape in expected.items():
        actual = tuple(tensors[name].shape)
        if actual != shape and (batch is None or actual != (batch, *shape)):
            turn = heads_for_tokens(actual, shape if batch is None else (batch, *shape)[-len(actual) :], k)
            raise ShapeError(f"{what}[{name!r}] must be {list(shape)}, got {list(actual)}{turn}")
        expect_beside(tensors[name], k, f"{what}[{name!r}]")
