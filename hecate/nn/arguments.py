"""Checks of the arguments that a layer is built and called with."""

from __future__ import annotations

from typing import Any, NoReturn, TypeGuard, TypeVar, get_args

import torch
from torch import Tensor

from hecate.checks import check_shapes, check_size, described, expect_beside, expect_choice, expect_count, expect_taps
from hecate.engine import EngineName, check_exact
from hecate.errors import ConfigError, ShapeError
from hecate.nn.conv import QKNorm, ShortConv
from hecate.rule import LAYER, LayerOptions, MemoryConfig
from hecate.tape import Autodiff

Mask = Tensor | None  # bool [B, T]; None stands for all tokens written, or none reset
S = TypeVar("S")


def check_sizes(d_model: int, heads: int, d_key: int | None, d_value: int | None, conv_kernel: int) -> tuple[int, int]:
    """d_key and d_value, by default d_model // heads; refuses sizes that are not positive integers or do not fit
    together."""
    sizes: dict[str, Any] = {"d_model": d_model, "heads": heads, "d_key": d_key, "d_value": d_value}
    for name, size in sizes.items():
        if size is not None or name in ("d_model", "heads"):
            expect_count(size, name)
            check_size(size, name, "lower it")
    # Where both are given the heads need not divide d_model.
    if (d_key is None or d_value is None) and d_model % heads:
        raise ConfigError(
            f"d_model={d_model} is not divisible by heads={heads}; change one of them or give d_key and d_value"
        )
    expect_taps(conv_kernel, "conv_kernel")
    key, value = (d_model // heads if size is None else size for size in (d_key, d_value))
    check_shapes({"projection": (d_model, heads * (2 * key + value))}, "lower d_model, heads, d_key or d_value")
    return key, value


def check_options(
    config: MemoryConfig, heads: int, conv_kernel: int, qk_norm: QKNorm, output_gate: bool
) -> LayerOptions:
    """The options of a config's layer; refuses those that would have no effect, or that contradict one another."""
    options = config.layer_options or LAYER

    def refuse(path: str, reason: str) -> NoReturn:
        raise ConfigError(reason, path=("layer_options", *path.split(".")))

    if options.key_heads is not None and heads % options.key_heads:
        refuse("key_heads", f"{options.key_heads} does not divide heads={heads}: each serves as many of them")
    if options.conv != LAYER.conv and not conv_kernel:
        refuse("conv", "conv_kernel=0 leaves the convolution out; give one, or leave its options out")
    if options.qk_eps is not None and qk_norm == "none":
        refuse("qk_eps", f"{options.qk_eps:g} belongs to a norm of queries and keys, and qk_norm is 'none'")
    if not output_gate:
        asked = {"gate": "gate" in options.output.model_fields_set and options.output.gate != "none"}
        for name, needless in (asked | options.output.of_gate()).items():
            if needless:
                refuse(f"output.{name}", "output_gate=False leaves the gate out; set it, or leave this out")
    return options


def check_engine(config: MemoryConfig, engine: EngineName, autodiff: Autodiff) -> None:
    """Refuses, when the layer is built, engine options that every scan of it would refuse; if the engine can run on a
    call's device and tensors is checked in each call."""
    check_exact(config, engine)
    expect_choice(autodiff, "autodiff", get_args(Autodiff))


def check_sequence(weight: Tensor, x: Tensor, what: str = "x", /, **masks: Tensor | None) -> None:
    """Refuses an input that does not fit a layer's first weight `[out, d_model]`, and masks that do not fit the input;
    checks nothing while `torch.compile` traces."""
    if torch.compiler.is_compiling():
        return
    if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[-1] != weight.shape[-1]:
        shape = list(x.shape) if isinstance(x, Tensor) else described(x)
        turn = ""
        if isinstance(x, Tensor) and x.dim() == 2 and x.shape[-1] == weight.shape[-1]:
            turn = f"; one sequence is {what}.unsqueeze(0)"
        elif isinstance(x, Tensor) and x.dim() == 3 and x.shape[1] == weight.shape[-1]:
            turn = f"; of [B, {weight.shape[-1]}, T] give {what}.transpose(1, 2)"
        raise ShapeError(f"{what} must be [B, T, {weight.shape[-1]}], got {shape}{turn}")
    if x.device != weight.device:
        raise ShapeError(f"{what} is on {x.device}, the layer on {weight.device}; move one of them")
    castable = x.is_floating_point() and x.device.type != "meta"  # to torch.autocast
    if x.dtype != weight.dtype and not (castable and torch.is_autocast_enabled(x.device.type)):
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


def check_length(x: Tensor, what: str) -> None:
    """Refuses x `[B, T, ...]` if torch.export leaves T open, for code that loops over tokens in Python.
    [ENG-EXPORT-D1]"""
    if not isinstance(x.shape[1], int):
        program = "an exported program of open length has no such steps; export one token, or a length that stays"
        raise ConfigError(f"{what} steps through a sequence by itself, and {program}")


def check_type(state: Any, kind: type[S], name: str = "") -> TypeGuard[S]:
    """True if there is a state whose tensors can be checked: not for None, nor while `torch.compile` traces. Refuses a
    state of another type than the layer, called `name`, returns."""
    if state is None or torch.compiler.is_compiling():
        return False
    if not isinstance(state, kind):
        layer, got = f"{name}: " if name else "", type(state).__name__
        raise ShapeError(f"{layer}state must be the {kind.__name__} that this layer returned, got {got}")
    return True


def check_state(
    state: Any, x: Tensor, tensors: dict[str, Any], conv: ShortConv | None = None, name: str = "", /, **needed: bool
) -> None:
    """Refuses a state, of the layer's own type, that another layer or batch made, or that is on another device.

    `tensors` are some of the state's, each with the shape that it must have (None: no tensor); to them come those of
    the convolution. `needed` says of the states of `features` and `projection` whether there must be one.
    """
    layer = f"{name}: " if name else ""
    for field, has in needed.items():
        if (getattr(state, field) is not None) != has:
            what = {"features": "feature memory", "projection": "query projection"}[field]
            raise ShapeError(
                f"state.{field} is {'None' if has else 'a state'}, but this layer has {'a' if has else 'no'} {what}; "
                "was it made by another layer?"
            )
    inputs = None if conv is None else (len(x), conv.kernel - 1, conv.weight.shape[1])
    tensors = {**tensors, "conv": (getattr(state, "conv", None), inputs)}
    if (segment := getattr(state, "conv_segment", None)) is not None:  # there since a reset_mask was given
        tensors["conv_segment"] = (segment, None if inputs is None else inputs[:2])
    for field, (tensor, expected) in tensors.items():
        shape, expected = None if tensor is None else list(tensor.shape), None if expected is None else list(expected)
        if shape != expected:
            raise ShapeError(
                f"{layer}state.{field} must be {expected} for this layer and {len(x)} sequences, got {shape}; was it "
                "made by another layer or with another batch?"
            )
        if tensor is not None:
            expect_beside(tensor, x, f"{layer}state.{field}", "x")
