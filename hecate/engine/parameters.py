"""Checks of the parameters of phi that a caller passes: those its `init` makes, where k is."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from hecate.checks import described
from hecate.engine.given import check_named
from hecate.errors import ConfigError, ShapeError
from hecate.phi import FeatureMap, Params

# What is drawn to learn a map's parameter names is thrown away; made here, because torch.compile cannot make a
# generator.
_UNREAD = torch.Generator()


def check_params(feature_map: FeatureMap, params: Params | None, k: Tensor) -> Params:
    """The feature map's parameters; an error when it needs some and none are given, or where they are not those of its
    `init`. [ENG-CALL-I6]"""
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
        tensors = params[group]
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
        held = {group: [*params[group]] for group in ("learned", "frozen")}
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
        for name, tensor in made[group].items()
    }


def _refuse(name: str, tensor: Tensor, wanted: _Expected, k: Tensor) -> None:
    if tensor.device != k.device:
        raise ShapeError(f"phi parameter {name!r} is on {tensor.device}, k on {k.device}; move them together")
    heads = k.shape[2]
    if tensor.dim() and tensor.shape[0] not in (1, heads) and wanted.shape[0] in (1, heads):
        raise ShapeError(f"phi parameter {name!r} is for {tensor.shape[0]} heads, k has {heads}")
    kind = "floating point" if wanted.floating else "of whole numbers"
    raise ShapeError(
        f"phi parameter {name!r} must be {kind} {list(wanted.shape)}, or [1, ...] for all heads, "
        f"got {described(tensor)}; pass what feature_map.init({k.shape[-1]}, heads={heads}) returns"
    )
