"""Check whether phi acts on gradients, or is linear where they lie: watched over the first steps, and said once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hecate.errors import HealthWarning
from hecate.late import look, put_off
from hecate.optim.options import Group, warn
from hecate.phi import FeatureMap, OddLift

STEPS = 10
"""Steps of a group that are watched."""
LINEAR = 2.0**-9
"""The root mean square of what rounding to bfloat16 changes, relative to a number: a phi that bends updates by less
does less than the rounding of most gradients."""


class Bent(NamedTuple):
    """Rows of a parameter as phi gets them, what the update ought to be a multiple of, and the update."""

    seen: Tensor
    target: Tensor
    update: Tensor


def bend(rows: Iterable[Bent]) -> Tensor:
    """`[2]` in float64: by how much updates differ from one multiple of their targets, relative to them, and the root
    mean square of what phi gets. Updates of no length tell nothing, by infinity."""
    seen, x, u = (torch.cat([part.detach().double().flatten() for part in parts]) for parts in zip(*rows, strict=True))
    power, length = x.square().sum(), u.square().sum()
    multiple = (x * u).sum() / torch.where(power > 0, power, 1.0)
    rest = (u - multiple * x).square().sum() / torch.where(length > 0, length, 1.0)
    told = (power > 0) & (length > 0)
    return torch.stack([torch.where(told, rest.sqrt(), torch.inf), seen.square().mean().sqrt()])


class Watch:
    """The largest bend of a group's updates over its first steps, by device and dtype.

    Numbers stay on their device until `STEPS` are watched, and are looked at when they have come: no step waits.
    """

    def __init__(self) -> None:
        self._steps: dict[Any, int] = {}
        self._largest: dict[Any, Tensor] = {}
        self._heard: dict[Any, list[float]] = {}

    def over(self, group: Group, like: Tensor, rows: Callable[[], Iterable[Bent]]) -> bool:
        """Watches a step; whether all is known, and said if phi is linear."""
        key = (like.device, like.dtype)
        steps = self._steps[key] = self._steps.get(key, 0) + 1
        if steps <= STEPS:
            found = bend(rows())
            self._largest[key] = torch.maximum(found, self._largest.get(key, found))
        if steps == STEPS:
            put_off(self._largest[key], partial(self._hear, key))
        if steps < STEPS:
            return False
        look()
        if self._heard.keys() != self._steps.keys():
            return False
        largest, size = (max(values) for values in zip(*self._heard.values(), strict=True))
        if largest < LINEAR:
            warn(_sentence(group, largest, size), HealthWarning)
        return True

    def _hear(self, key: Any, value: Tensor) -> None:
        self._heard[key] = value.tolist()


def _sentence(group: Group, largest: float, size: float) -> str:
    kind, scale, lift = group["feature_map"]["kind"], group["input_scale"], group.get("lift")
    seen = {"none": "gradients of", "restored": "gradients, brought to rows of length 1, of"}.get(scale, "rows of")
    how = f"{'odd-lifted ' if group['odd'] else ''}{kind!r}{f' with lift {lift!r}' if lift else ''}"
    what = "this is SGD with momentum"
    if scale in ("rms", "unit"):
        what = f"this is momentum of rows scaled by {scale!r}, without phi"
    if "keys" in group:
        what = "the kernel is that of identity"
    cure = "take input_scale='rms' for phi to act" if lift in ("identity", None) else "take another lift or feature_map"
    if scale == "rms" or _always(group):
        cure = "take another feature_map"
    told = f"phi sees {seen} {size:.1g}, where {how} is linear to {largest:.0e}: {what}"
    return f"{told}; {cure}, or identity, which costs less"


def _always(group: Group) -> bool:
    """True if phi of a number is a multiple of it, as the odd part of relu is."""
    plain = FeatureMap.model_validate(group["feature_map"])
    if not plain.traits().componentwise:
        return False
    x = torch.tensor([0.25, 1.0, 4.0], dtype=torch.float64)
    y = (OddLift(inner=plain) if group["odd"] else plain)(x) / x
    return torch.allclose(y, y[:1])
