"""What a caller gave, in words, and the checks that everybody's tensors and numbers go through.

A check returns nothing and raises a sentence: what was expected, and what was given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hecate.errors import ConfigError, ShapeError, shorten


def described(given: object) -> str:
    """Dtype and shape of a tensor, else what it is, for an error."""
    if isinstance(given, Tensor):
        return f"{given.dtype} {list(given.shape)}"
    return "None" if given is None else f"{shorten(given)} ({type(given).__name__}), no tensor"


def expect(
    given: object,
    axes: str,
    *,
    name: str,
    sizes: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    like: Tensor | None = None,
    other: str = "k",
) -> None:
    """Refuses what is no tensor `[axes]`, such as "B T H D", of a dtype: by default any floating point one.

    `sizes` are those of its axes where they are known; `like` is the tensor on whose device it must be, called `other`.
    """
    shape = "[" + ", ".join(axes.split()) + "]"
    if sizes is not None:
        shape = f"{shape} = {list(sizes)}"
    if dtype is not None:
        shape = f"{str(dtype).removeprefix('torch.')} {shape}"
    if not isinstance(given, Tensor):
        raise ShapeError(f"{name} must be a tensor {shape}, got {described(given)}")
    fits = given.dim() == len(axes.split()) if sizes is None else tuple(given.shape) == tuple(sizes)
    if not fits or (dtype is not None and given.dtype != dtype):
        raise ShapeError(f"{name} must be {shape}, got {list(given.shape) if dtype is None else described(given)}")
    if dtype is None and not given.is_floating_point():
        raise ShapeError(f"{name} must be floating point, got {given.dtype}")
    if like is not None:
        expect_beside(given, like, name, other)


def expect_beside(given: Tensor, like: Tensor, name: str, other: str = "k") -> None:
    """Refuses a tensor on another device."""
    if given.device != like.device:
        raise ShapeError(f"{name} is on {given.device}, {other} on {like.device}; move them together")


def expect_count(given: object, name: str, least: int = 1) -> None:
    """Refuses what is no integer of at least `least`."""
    if type(given) is not int or given < least:
        raise ConfigError(f"{name} must be an integer >= {least}, got {shorten(given)}")


def expect_number(given: object, name: str, low: float = 0.0, high: float = math.inf) -> None:
    """Refuses what is no finite number from `low` to `high`."""
    if type(given) not in (int, float) or not low <= given <= high or given == math.inf:  # type: ignore[operator]
        bounds = f"a finite number >= {low:g}" if high == math.inf else f"in [{low:g}, {high:g}]"
        raise ConfigError(f"{name} must be {bounds}, got {shorten(given)}")


def expect_choice(given: object, name: str, choices: Sequence[object]) -> None:
    """Refuses what is none of the choices."""
    if given not in choices:
        raise ConfigError(f"{name} must be one of {tuple(choices)}, got {shorten(given)}")
