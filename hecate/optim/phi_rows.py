"""The row maps of an optimiser: built from a group's options, once per width, dtype and device."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from hecate.errors import ConfigError, StabilityWarning, shorten
from hecate.optim.base import MatrixOptimizer
from hecate.optim.lift import Call, RowMap, calibrated, checksum, gauged, initial, needs_odd, placed
from hecate.optim.options import Group, check_choice
from hecate.optim.tensors import as_matrix, outline
from hecate.phi import FeatureMap, OddLift, Params

LEVEL = 0.01  # a cosine below this is no descent
# What a row map is made of.
MADE_OF = ("feature_map", "odd", "center", "input_scale", "lift", "ridge", "seed")


class PhiOptimizer(MatrixOptimizer):
    """An optimiser that reads gradients through a feature map, row by row.

    Frozen draws are not kept: they are drawn from the group's `seed`, the same on every device and process, and a
    checkpoint holds their checksum. [OPT-PHI-I3]
    """

    structural: ClassVar[tuple[str, ...]] = (*MatrixOptimizer.structural, *MADE_OF[:5])
    carried: ClassVar[tuple[str, ...]] = ("_given", "_call", "_maps")

    def __init__(
        self, params: ParamsT, defaults: Group, phi_params: Mapping[int, Params] | None, call: Call | None = None
    ) -> None:
        self._given = dict(phi_params or {})
        for width, given in self._given.items():
            if type(width) is not int or set(given) != {"learned", "frozen"}:
                raise ConfigError(
                    "phi_params must map widths of rows to parameters of phi as its init gives "
                    f"them, got {shorten(width)}: {shorten(given)}"
                )
        self._call = call
        self._maps: dict[tuple[Any, ...], tuple[RowMap, float | None]] = {}
        seed = defaults["seed"]
        if isinstance(seed, torch.Generator):
            defaults["seed"] = int(torch.randint(1 << 62, (), generator=seed))
        super().__init__(params, defaults)

    def rows_of(self, x: Tensor, group: Group) -> Tensor:
        """The matrix whose rows go through phi."""
        return as_matrix(x, group["matrix"])

    def check(self, group: Group) -> None:
        """Resolves what is `auto`, so that the group says what is computed; refuses the rest."""
        super().check(group)
        check_choice(group, "odd", (None, True, False))
        seed = group["seed"]
        if not isinstance(seed, int) or not 0 <= seed < 1 << 63:
            raise ConfigError(f"seed must be an integer from 0 to 2^63 - 1, got {seed!r}")
        plain = FeatureMap.model_validate(group["feature_map"])
        if plain.needs_position:
            raise ConfigError(f"a gradient's rows have no position, {plain.kind!r} needs one")
        if group["odd"] is None:
            group["odd"] = group["center"] and needs_odd(plain)
        group["feature_map"] = plain.model_dump()
        if not (group["center"] or group["odd"] or plain.parity == "odd"):
            warnings.warn(
                f"center=False with {plain.kind!r}: a gradient of zero moves weights, by "
                "-lr P phi(0) at every step; leave center=True unless that is what you study",
                stacklevel=7,
            )
        group["phi_checksums"] = {str(width): checksum(self.drawn(group, width)) for width in self.widths(group)}

    def agree(self, group: Group, other: Group) -> None:
        """Refuses a checkpoint of other options, or whose draws this seed no longer gives."""
        super().agree(group, other)
        theirs = other.get("phi_checksums", {})
        for width, digits in group["phi_checksums"].items():
            if theirs.get(width, digits) != digits:
                raise ConfigError(
                    f"the draws of {group['feature_map']['kind']!r} for rows of {width} have "
                    f"checksum {digits} here and {theirs[width]} in the checkpoint: seed "
                    f"{group['seed']} here, {other.get('seed')} there; construct with the "
                    "checkpoint's seed (or phi_params), and with the torch that wrote it"
                )

    def widths(self, group: Group) -> list[int]:
        """The widths of rows in a group."""
        params = [p for p in group["params"] if p.numel()]
        return sorted({self.rows_of(outline(p), group).shape[-1] for p in params})

    def decode_errors(self) -> dict[int, float]:
        """By row width: what share of a Gaussian row the lift `pinv` misses."""
        return {key[1]: error for key, (_, error) in self._maps.items() if error is not None}

    def row_map(self, group: Group, like: Tensor) -> RowMap:
        """The map of rows as wide as those of `like`, in its dtype and on its device."""
        width = like.shape[-1]
        key = (str([group.get(name) for name in MADE_OF]), width, like.dtype, like.device)
        if key not in self._maps:
            self._maps[key] = self._built(group, like)
        found = self._maps[key][0]
        if group["differentiable"]:  # parameters that autograd follows, phi(0) with them
            found = found.with_params(placed(self.drawn(group, width), like), like)
        return found

    def _built(self, group: Group, like: Tensor) -> tuple[RowMap, float | None]:
        width = like.shape[-1]
        exact = self.drawn(group, width)
        made = RowMap(
            map_of(group),
            exact,
            group.get("lift", "none"),
            centre=group["center"], scale=group["input_scale"], call=self._call,
        )  # fmt: skip
        error = None
        if made.lift == "pinv":
            made, error = self._decoded(group, made, like)
        elif made.scale == "restored" and made.lift in ("identity", "vjp"):
            made = self._gauged(group, made, like)
        with torch.no_grad():
            return made.with_params(placed(exact, like), like), error

    def _decoded(self, group: Group, made: RowMap, like: Tensor) -> tuple[RowMap, float]:
        width = like.shape[-1]
        exact = _on_cpu(made, width, torch.float64)
        decoder, error = calibrated(exact, width, group["seed"], group["ridge"])
        if error > group["max_decode_error"]:
            advice = "input_scale='restored', " if made.scale == "none" else ""
            raise ConfigError(
                f"lift 'pinv' misses {error:.2f} of a Gaussian row of {width} through "
                f"{made.feature_map.kind!r}, more than max_decode_error = "
                f"{group['max_decode_error']}; use {advice}more features, a wider bandwidth, or "
                "lift='vjp'"
            )
        # A wrong part of size e turns an update by up to e: momentum then feeds oscillations where e sqrt(lr curvature)
        # is above what it loses per step, 1 - momentum. [OPT-LIFT-I3]
        slack = 1 - float(torch.as_tensor(group["momentum"]).detach())
        if error > slack > 0:
            warnings.warn(
                f"lift 'pinv' misses {error:.2f} of a Gaussian row of {width} through "
                f"{made.feature_map.kind!r}: with momentum {1 - slack:.3g} updates may grow where "
                f"lr times curvature is above {(slack / error) ** 2:.2g}; use more features, a "
                "wider bandwidth, less momentum or a lower lr",
                StabilityWarning,
                stacklevel=8,
            )
        return made.decoded(decoder.to(like)), error

    def _gauged(self, group: Group, made: RowMap, like: Tensor) -> RowMap:
        """The map with updates as long as Gaussian rows; warns if they do not descend."""
        width = like.shape[-1]
        gain, cosine = gauged(_on_cpu(made, width, like.dtype), like, group["seed"])
        if cosine < LEVEL:
            warnings.warn(
                f"updates of Gaussian rows of {width} by {made.feature_map.kind!r} and lift "
                f"{made.lift!r} have the cosine {cosine:.3f} with them, so that no step descends; "
                "use lift='pinv' or another feature_map",
                stacklevel=8,
            )
        return replace(made, gain=gain)

    def drawn(self, group: Group, width: int) -> Params:
        """phi's parameters for rows of a width, in float64, or those that were given."""
        if width in self._given:
            return self._given[width]
        return initial(map_of(group), width, group["seed"])


def _on_cpu(made: RowMap, width: int, dtype: torch.dtype) -> RowMap:
    """The map where it is calibrated, alike on every device."""
    like = torch.zeros(1, width, dtype=dtype)
    with torch.no_grad():
        return made.with_params(placed(made.params, like), like)


def map_of(group: Group) -> FeatureMap:
    """The feature map of a group, odd-lifted where the group says so."""
    plain = FeatureMap.model_validate(group["feature_map"])
    return OddLift(inner=plain) if group["odd"] else plain
