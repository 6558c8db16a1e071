"""Checks of what a caller builds a layer of and passes to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from hecate.checks import described
from hecate.engine import EngineName, check_exact
from hecate.errors import ConfigError, ShapeError, shorten
from hecate.nn.state import LayerState
from hecate.rule import MemoryConfig
from hecate.sizes import MAX_DEPTH, check_shapes, check_size
from hecate.tape import Autodiff

if TYPE_CHECKING:
    from hecate.nn.memory import Memory

Firing = Literal["always", "learned"]


def check_sizes(d_model: int, heads: int, d_key: int | None, d_value: int | None, conv_kernel: int) -> None:
    """Refuses widths that are no positive integers or that do not fit together."""
    sizes = {"d_model": d_model, "heads": heads, "d_key": d_key, "d_value": d_value}
    for name, size in sizes.items():
        if size is None and name.startswith("d_") and name != "d_model":
            continue
        if type(size) is not int or size < 1:
            raise ConfigError(f"{name} must be an integer >= 1, got {shorten(size)}")
        check_size(size, name, "lower it")
    if (d_key is None or d_value is None) and d_model % heads:
        raise ConfigError(
            f"d_model={d_model} is not divisible by heads={heads}; change one of them or give d_key and d_value"
        )
    if type(conv_kernel) is not int or conv_kernel < 0 or conv_kernel == 1:
        raise ConfigError(f"conv_kernel must be 0 (none) or at least 2, got {shorten(conv_kernel)}")
    check_size(conv_kernel, "conv_kernel", "lower it", MAX_DEPTH)
    key, value = (d_model // heads if size is None else size for size in (d_key, d_value))
    shapes = {"projection": (d_model, heads * (2 * key + value))}
    check_shapes(shapes, "lower d_model, heads, d_key or d_value")


def check_engine(config: MemoryConfig, engine: EngineName, autodiff: Autodiff) -> None:
    """Refuses at build what every scan of the layer would refuse; whether the engine can run here, on this device and
    these tensors, is asked of each."""
    check_exact(config, engine)
    if autodiff not in get_args(Autodiff):
        raise ConfigError(f"autodiff must be one of {get_args(Autodiff)}, got {shorten(autodiff)}")


def check_firing(config: MemoryConfig, firing: Firing) -> None:
    """Refuses a firing gate where an idle token would still change the memory."""
    if firing not in get_args(Firing):
        raise ConfigError(f"firing must be one of {get_args(Firing)}, got {shorten(firing)}")
    if firing == "always":
        return
    if config.algorithm.kind not in ("gd", "momentum"):
        raise ConfigError(
            f"firing='learned' makes the lr of idle tokens 0, but algorithm "
            f"{config.algorithm.kind!r} takes their gradients into its own state whatever lr is; "
            "use algorithm 'gd' or 'momentum', or firing='always'",
            path=("firing",),
        )
    generator = torch.Generator().manual_seed(0)
    draw = torch.randn(1, 4, 4, generator=generator, dtype=torch.float64, device="cpu")
    memory = config.retention.start(draw)
    idle = config.retention.step(memory, torch.zeros_like(memory), memory.new_ones(1))
    if not torch.allclose(idle, memory, rtol=1e-5, atol=1e-7):
        raise ConfigError(
            f"firing='learned' makes the retain of idle tokens 1, but retention "
            f"{config.retention.kind!r} changes a memory even so; use retention 'none' or 'decay', "
            "or firing='always'",
            path=("firing",),
        )


def check_inputs(layer: Memory, x: Tensor, state: LayerState | None, **masks: Tensor | None) -> None:
    """Refuses tensors that do not fit the layer or each other."""
    check_sequence(layer.qkv.weight, x, **masks)
    if state is not None:
        _check_state(layer, x, state)


def check_sequence(weight: Tensor, x: Tensor, what: str = "x", /, **masks: Tensor | None) -> None:
    """Refuses an input that does not fit a layer's first weight `[out, d_model]`, or its masks."""
    if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[-1] != weight.shape[-1]:
        found = list(x.shape) if isinstance(x, Tensor) else described(x)
        raise ShapeError(f"{what} must be [B, T, {weight.shape[-1]}], got {found}")
    if x.device != weight.device:
        raise ShapeError(f"{what} is on {x.device}, the layer on {weight.device}; move one of them")
    if x.dtype != weight.dtype and not _autocast(x):
        raise ShapeError(f"{what} is {x.dtype}, the layer {weight.dtype}; convert one of them, or use torch.autocast")
    for name, mask in masks.items():
        if mask is None:
            continue
        fits = isinstance(mask, Tensor) and mask.shape == x.shape[:2] and mask.dtype == torch.bool
        if not fits or mask.device != x.device:
            raise ShapeError(
                f"{name} must be bool [B, T] = {list(x.shape[:2])} on {x.device}, got "
                f"{described(mask)}" + (f" on {mask.device}" if isinstance(mask, Tensor) else "")
            )


def _check_state(layer: Memory, x: Tensor, state: LayerState) -> None:
    if not isinstance(state, LayerState):
        raise ShapeError(f"state must be the LayerState that this layer returned, got {type(state).__name__}")
    held = {
        "features": ("feature memory", layer.feature_memory is not None),
        "projection": ("query projection", layer.query_projection != "none"),
    }
    for name, (what, has) in held.items():
        given = getattr(state, name)
        if (given is not None) != has:
            raise ShapeError(
                f"state.{name} is {'None' if given is None else 'a state'}, but this layer has "
                f"{'a' if has else 'no'} {what}; was it made by another layer?"
            )
    batch, conv = x.shape[0], layer.conv
    reach = 0 if conv is None else conv.kernel - 1
    shapes = {"conv": (batch, reach, sum(layer.splits)), "conv_segment": (batch, reach)}
    for name, shape in shapes.items():
        given = getattr(state, name)
        if given is None and (conv is None or name == "conv_segment"):
            continue
        expected = "None" if conv is None else f"{list(shape)}"
        if given is None or conv is None or tuple(given.shape) != shape:
            found = None if given is None else list(given.shape)
            raise ShapeError(
                f"state.{name} must be {expected} for this layer and {batch} sequences, got "
                f"{found}; was it made by another layer or with another batch?"
            )


def _autocast(x: Tensor) -> bool:
    """Whether torch converts dtypes by itself here."""
    if not x.is_floating_point() or x.device.type == "meta":
        return False
    return torch.is_autocast_enabled(x.device.type)
