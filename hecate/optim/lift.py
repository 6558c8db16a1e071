"""Rows to phi-space and back: centred features of a gradient, and the lift P to weight space.

A gradient of zero must move nothing, so features enter as phi~(g) = phi(g) - phi(0), or as the odd part (phi(g) -
phi(-g)) / 2, which is the map `OddLift`. A lift takes `[rows, d_phi]` back to `[rows, columns]`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from hecate.errors import ConfigError, HealthWarning, ShapeError, StabilityWarning, shorten
from hecate.formula import Text, map_formula
from hecate.late import look, put_off
from hecate.optim.base import Group, MatrixOptimizer, warn
from hecate.optim.tensors import State, largest, tamed
from hecate.phi import FeatureMap, OddLift, Params

Scale = Literal["none", "rms", "unit", "restored"]
Call = Callable[[Tensor, Tensor], Tensor]

PROBE = 67  # no multiple of a vector register: a kernel's main loop and its tail both run
LEAST_COSINE = 0.01  # between gradients and updates; below it there is no descent
GRAM, CROSS, PHI = "lift_gram", "lift_cross", "phi."  # keys in a parameter's state
MADE_OF = ("feature_map", "odd", "center", "input_scale", "lift", "ridge", "seed")  # options that make a row map


@dataclass(frozen=True)
class RowMap:
    """The map u = P phi~(g) of rows g `[n, columns]`, and its two halves.

    `zero` is phi(0), to be subtracted; `mask` makes the features of a zero gradient exactly 0, whatever rounding left.
    """

    feature_map: FeatureMap
    params: Params
    lift: str
    centre: bool = True
    scale: Scale = "none"
    by_number: bool = False
    decoder: Tensor | None = None  # [d_phi, columns]
    call: Call | None = None
    zero: Tensor | None = None
    mask: bool = False
    gain: float = 1.0  # |u| / |g| of Gaussian rows, divided out
    error: float | None = None  # of a decoder fitted to Gaussian rows

    def features(self, g: Tensor) -> tuple[Tensor, Any]:
        """phi~(g) `[n, d_phi]`, and the residuals of phi's VJP."""
        features, residuals = self.feature_map.forward(scaled(g, self.scale), self.params)
        if self.zero is not None:
            features = features - self.zero
        if self.mask:
            moved = g != 0 if self.by_number else (g != 0).any(-1, keepdim=True)
            features = torch.where(moved, features, 0)
        if self.scale == "restored":
            features = features * length(g)
        return features, residuals

    def target(self, g: Tensor) -> Tensor:
        """Target of P phi~(g): g, or g scaled."""
        return g if self.scale == "restored" else scaled(g, self.scale)

    def back(self, features: Tensor, g: Tensor, residuals: Any) -> Tensor:
        """P applied to features, `[n, columns]`; the lift `vjp` takes the Jacobian at g, and `none` is no P."""
        if self.lift in ("none", "identity", "vjp"):
            lifted = self.feature_map.vjp(residuals, features)[0] if self.lift == "vjp" else features
            return lifted if self.gain == 1 else lifted / self.gain
        if self.lift == "prefix":
            first = self.feature_map.traits().linear_at or 0
            return features[..., first : first + g.shape[-1]]
        if self.call is None:
            return features @ self.decoder  # type: ignore[operator]
        lifted = self.call(features, g)
        if lifted.shape != g.shape:
            wanted = f"the lift must return {list(g.shape)} from features {list(features.shape)}"
            raise ShapeError(f"{wanted}, got {list(lifted.shape)}")
        return lifted

    def __call__(self, g: Tensor) -> Tensor:
        """P phi~(g), in the shape of g."""
        features, residuals = self.features(g)
        return self.back(features, g, residuals)

    @cached_property
    def formula(self) -> Text | None:
        """P phi~ of a scaled number, for lift identity or vjp, as text for kernels; None if it has no formula."""
        if any(self.params.values()):
            return None
        centred = self.centre and self.feature_map.parity != "odd"
        printed = map_formula(self.feature_map, centred=centred, pulled=self.lift == "vjp")
        return printed if isinstance(printed, Text) else None

    def lengths(self, width: int) -> tuple[float, float]:
        """Factors a, b: a row of this width is divided by a |row|, its update multiplied by b |row| unless b = 0."""
        return width**-0.5 if self.scale == "rms" else 1.0, 1 / self.gain if self.scale == "restored" else 0.0

    def with_params(self, params: Params, like: Tensor) -> RowMap:
        """The same map with other parameters, for rows in the dtype and on the device of `like` `[*, columns]`."""
        learned, frozen = ({n: value.to(like) for n, value in params[kind].items()} for kind in ("learned", "frozen"))
        params = {"learned": learned, "frozen": frozen}
        if not self.centre or self.feature_map.parity == "odd":
            return replace(self, params=params)
        numbers = self.feature_map.traits().componentwise
        zeros = self.feature_map(like.new_zeros((PROBE,) if numbers else (1, like.shape[-1])), params)
        settled = numbers and bool((zeros == zeros[0]).all())
        nothing = settled and zeros[0].item() == 0
        return replace(self, params=params, zero=None if nothing else zeros[0], mask=not settled)


def of_numbers(group: Group) -> bool:
    """True if P phi~ acts on each number by itself, once its row is scaled; False if phi learns, as it learns from all
    rows of a parameter."""
    return group.get("lift") in ("identity", "vjp") and not group.get("phi_lr") and map_of(group).traits().componentwise


def by_number(group: Group) -> bool:
    """True if P phi~ acts on each number by itself."""
    return group["input_scale"] == "none" and of_numbers(group)


def scaled(g: Tensor, scale: Scale) -> Tensor:
    """Rows as phi gets them: as they are, or divided by their root mean square or their length."""
    if scale == "none":
        return g
    return g / (length(g) / math.sqrt(g.shape[-1]) if scale == "rms" else length(g))


def length(g: Tensor) -> Tensor:
    """|row|, `[..., 1]`, at any size that the dtype has; 1 for a row of zeros."""
    size = largest(g, -1)
    return size * (g / size).norm(dim=-1, keepdim=True).clamp(min=1)


def gaussian(count: int, width: int, seed: int) -> Tensor:
    """Seeded rows for a decoder and a gain, the same on every device."""
    return torch.randn(count, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed), device="cpu")


def checksum(params: Params) -> str:
    """Digest of parameters, 16 hexadecimal digits, which a checkpoint has in their place."""
    digest = hashlib.sha256()
    for group in (params["learned"], params["frozen"]):
        for name, value in sorted(group.items()):
            plain = value.detach().to("cpu", torch.float64).contiguous()
            digest.update(f"{name}{list(plain.shape)}".encode() + plain.numpy().tobytes())
    return digest.hexdigest()[:16]


def learn_lift(state: State, features: Tensor, rows: Tensor, forget: float, ridge: float) -> Tensor:
    """P = argmin sum_s forget^(t-s) |phi~(g_s) P - g_s|^2 + ridge tr(A)/d_phi |P|^2, `[d_phi, c]`.

    Recursive least squares by its normal equations: A <- forget A + Phi^T Phi, B <- forget B + Phi^T G, P = (A + ridge
    tr(A)/d_phi)^(-1) B. A step whose features are all zero forgets nothing. [OPT-LIFT-D4]
    """
    gram, cross = state[GRAM], state[CROSS]
    features, rows = features.to(gram.dtype), rows.to(gram.dtype)
    decay = torch.where((features != 0).any(), forget, 1.0)
    gram.mul_(decay).add_(features.mT @ features)
    cross.mul_(decay).add_(features.mT @ rows)
    damping = ridge * gram.diagonal().sum() / len(gram) + torch.finfo(gram.dtype).tiny
    return torch.linalg.solve(gram + damping * torch.eye(len(gram), device=gram.device).to(gram), cross)


def with_learned_phi(row_map: RowMap, state: State, like: Tensor) -> RowMap:
    """The map with the learned parameters that this state holds."""
    learned = {name.removeprefix(PHI): value for name, value in state.items() if name.startswith(PHI)}
    return row_map.with_params({**row_map.params, "learned": learned}, like)


def learned_map(row_map: RowMap, state: State, g: Tensor, group: Group) -> tuple[RowMap, Tensor, Any]:
    """The map with the phi and lift that a state has learned, the lift also from these rows; and their `features`."""
    if group["phi_lr"]:
        row_map = with_learned_phi(row_map, state, g)
    features, residuals = row_map.features(g)
    if GRAM in state:
        decoder = learn_lift(state, features, row_map.target(g), group["forget"], group["ridge"])
        row_map = replace(row_map, decoder=decoder.to(g))
    return row_map, features, residuals


def learn_phi(row_map: RowMap, state: State, g: Tensor, lr: float) -> None:
    """One step of phi's learned parameters down |P phi~(g) - g|^2 / (2 |g|^2), P held fixed.

    [OPT-PHI-D4]
    """
    target, size = tamed(row_map.target(g), (-2, -1), g.dtype)
    power = target.square().sum()
    power = torch.where(power > 0, power, 1)

    def loss(learned: dict[str, Tensor]) -> Tensor:
        lifted = row_map.with_params({**row_map.params, "learned": learned}, g)(g)
        return (lifted / size - target).square().sum() / (2 * power)

    grads = torch.func.grad(loss)(row_map.params["learned"])
    for name, grad in grads.items():
        state[f"{PHI}{name}"].sub_(grad, alpha=lr)


# A phi that is linear at the gradients it gets does nothing: this is checked in the first steps, with one warning.

STEPS = 10
"""Steps of a group that are watched."""
LINEAR = 2.0**-9
"""Root mean square of the relative error of rounding to bfloat16: a phi that bends updates by less changes them less
than rounding changes most gradients."""


class Bent(NamedTuple):
    """Rows of a parameter as phi gets them, their target (a linear phi's update is a multiple), and the update."""

    inputs: Tensor
    target: Tensor
    update: Tensor


def bend(rows: Iterable[Bent]) -> Tensor:
    """`[2]` in float64: relative distance of updates from the nearest multiple of their targets, and root mean square
    of the inputs of phi. The distance is infinity if updates or targets are all zero, as it is then not known."""
    inputs, x, u = (torch.cat([part.detach().double().flatten() for part in each]) for each in zip(*rows, strict=True))
    power, length = x.square().sum(), u.square().sum()
    multiple = (x * u).sum() / torch.where(power > 0, power, 1.0)
    rest = (u - multiple * x).square().sum() / torch.where(length > 0, length, 1.0)
    telling = (power > 0) & (length > 0)
    return torch.stack([torch.where(telling, rest.sqrt(), torch.inf), inputs.square().mean().sqrt()])


class Watch:
    """The largest bend of a group's updates over its first steps, by device and dtype.

    Measures stay on their device for `STEPS` steps, and are read once their copy has arrived, so no step waits.
    """

    def __init__(self) -> None:
        self._steps: dict[Any, int] = {}
        self._largest: dict[Any, Tensor] = {}
        self._heard: dict[Any, list[float]] = {}

    def over(self, group: Group, like: Tensor, rows: Callable[[], Iterable[Bent]]) -> bool:
        """Watches a step; True if all measures are known, after a warning if phi is linear."""
        key = (like.device, like.dtype)
        steps = self._steps[key] = self._steps.get(key, 0) + 1
        if steps <= STEPS:
            measures = bend(rows())
            self._largest[key] = torch.maximum(measures, self._largest.get(key, measures))
        if steps == STEPS:
            put_off(self._largest[key], lambda value: self._heard.update({key: value.tolist()}))
        if steps < STEPS:
            return False
        look()
        if self._heard.keys() != self._steps.keys():
            return False
        largest, size = (max(values) for values in zip(*self._heard.values(), strict=True))
        if largest < LINEAR:
            warn(_sentence(group, largest, size), HealthWarning)
        return True


def _sentence(group: Group, largest: float, size: float) -> str:
    kind, scale, lift = group["feature_map"]["kind"], group["input_scale"], group.get("lift")
    rows = {"none": "gradients of", "restored": "gradients, brought to rows of length 1, of"}.get(scale, "rows of")
    how = f"{'odd-lifted ' if group['odd'] else ''}{kind!r}{f' with lift {lift!r}' if lift else ''}"
    what = "this is SGD with momentum"
    if scale in ("rms", "unit"):
        what = f"this is momentum of rows scaled by {scale!r}, without phi"
    if "keys" in group:
        what = "the kernel is that of identity"
    cure = "take input_scale='rms' for phi to act" if lift in ("identity", None) else "take another lift or feature_map"
    if scale == "rms" or _always(group):
        cure = "take another feature_map"
    sentence = f"phi sees {rows} {size:.1g}, where {how} is linear to {largest:.0e}: {what}"
    return f"{sentence}; {cure}, or identity, which costs less"


def _always(group: Group) -> bool:
    """True if phi multiplies numbers by a constant, as the odd part of relu does."""
    feature_map = map_of(group)
    if not feature_map.traits().componentwise:
        return False
    x = torch.tensor([0.25, 1.0, 4.0], dtype=torch.float64, device="cpu")
    y = feature_map(x) / x
    return torch.allclose(y, y[:1])


class PhiOptimizer(MatrixOptimizer):
    """An optimiser that reads gradients through a feature map, row by row.

    Frozen parameters are not saved: they are drawn from the group's `seed`, the same on every device and process, and a
    checkpoint holds their checksum. [OPT-PHI-I3]
    """

    structural: ClassVar[tuple[str, ...]] = (*MatrixOptimizer.structural, *MADE_OF[:5])
    carried: ClassVar[tuple[str, ...]] = ("_given", "_call", "_maps")
    # By a group's first parameter; None once nothing is left to check.
    _watches: dict[Tensor, Watch | None] | None = None

    def prepared(self, options: Group) -> Group:
        """Stores what a checkpoint cannot hold: a lift that is a function, and the caller's parameters of phi."""
        self._given: dict[int, Params] = dict(options.pop("phi_params") or {})
        for width, params in self._given.items():
            if type(width) is not int or set(params) != {"learned", "frozen"}:
                wanted = "phi_params must map widths of rows to parameters of phi as its init gives them"
                raise ConfigError(f"{wanted}, got {shorten(width)}: {shorten(params)}")
        self._maps: dict[tuple[Any, ...], RowMap] = {}
        self._call: Call | None = options.get("lift") if callable(options.get("lift")) else None
        if self._call is not None:
            options["lift"] = "callable"
        if isinstance(seed := options["seed"], torch.Generator):
            options["seed"] = int(torch.randint(1 << 62, (), generator=seed))
        return super().prepared(options)

    def learning(self, group: Group, like: Tensor) -> State:
        """State of a learned lift and a learned phi; draws and calibrates the row map now, not in the first step."""
        row_map, state = self.row_map(group, like), State()
        if row_map.lift == "learned":
            d_phi = row_map.feature_map.output_dim(like.shape[-1])
            state[GRAM] = like.new_zeros(d_phi, d_phi, dtype=torch.float64)
            state[CROSS] = like.new_zeros(d_phi, like.shape[-1], dtype=torch.float64)
        if group.get("phi_lr"):
            state |= {f"{PHI}{name}": value.clone() for name, value in row_map.params["learned"].items()}
        return state

    def check(self, group: Group) -> None:
        """Resolves defaults, so that the group says what is computed; refuses maps that need a position."""
        super().check(group)
        plain = _at_unit_scale(FeatureMap.model_validate(group["feature_map"]))
        if plain.needs_position:
            raise ConfigError(f"a gradient's rows have no position, {plain.kind!r} needs one")
        if group["odd"] is None:
            group["odd"] = group["center"] and plain.traits().rising == "odd_part"  # centring would cut it in half
        group["feature_map"] = plain.model_dump()
        if not (group["center"] or group["odd"] or plain.parity == "odd"):
            drift = "a gradient of zero moves weights, by -lr P phi(0) at every step"
            warn(f"center=False with {plain.kind!r}: {drift}; leave center=True unless that is what you study")
        group["phi_checksums"] = {str(width): checksum(self.drawn(group, width)) for width in self.widths(group)}

    def agree(self, group: Group, other: Group) -> None:
        super().agree(group, other)
        theirs = other.get("phi_checksums", {})
        for width, digits in group["phi_checksums"].items():
            if theirs.get(width, digits) != digits:
                raise ConfigError(
                    f"the draws of {group['feature_map']['kind']!r} for rows of {width} have checksum {digits} here "
                    f"and {theirs[width]} in the checkpoint: seed {group['seed']} here, {other.get('seed')} there; "
                    "construct with the checkpoint's seed (or phi_params), and with the torch that wrote it"
                )

    def watch(self, group: Group, rows_of: Callable[[], list[Tensor]]) -> None:
        """Warns, once per group, if phi is linear at the rows of its first steps. [OPT-PHI-I5]"""
        if torch.compiler.is_compiling():
            return
        if self._watches is None:
            self._watches = {}
        first = group["params"][0]  # not an index, as `Leveled` passes only some of the groups
        if first not in self._watches:
            self._watches[first] = Watch() if self.may_be_linear(group) else None
        if (watch := self._watches[first]) is None:
            return
        rows = rows_of()
        if watch.over(group, rows[0], lambda: [self.bent(group, x) for x in rows]):
            self._watches[first] = None

    def may_be_linear(self, group: Group) -> bool:
        """True if a group's phi is not meant to be linear, and nothing about it is learned from gradients."""
        traits = FeatureMap.model_validate(group["feature_map"]).traits()
        meant = traits.parity == "odd" and traits.degree == 1
        learns = group.get("lift") in ("learned", "callable") or group.get("phi_lr") or group["differentiable"]
        return not (meant or learns)

    def bent(self, group: Group, x: Tensor) -> Bent:
        """The rows of a gradient on their way through phi and back."""
        row_map = self.row_map(group, x)
        return Bent(scaled(x, row_map.scale), row_map.target(x), row_map(x))

    def widths(self, group: Group) -> list[int]:
        """The widths of rows in a group."""
        return sorted({self.sides(p, group)[1] for p in group["params"] if p.numel()})

    def decode_errors(self) -> dict[int, float]:
        """Relative error of the lift `pinv` on Gaussian rows, by row width."""
        return {key[1]: row_map.error for key, row_map in self._maps.items() if row_map.error is not None}

    def row_map(self, group: Group, like: Tensor) -> RowMap:
        """The map of rows as wide as those of `like`, in its dtype and on its device."""
        width = like.shape[-1]
        key = (str([group.get(name) for name in MADE_OF]), width, like.dtype, like.device)
        if key not in self._maps:
            self._maps[key] = self._new_row_map(group, like)
        row_map = self._maps[key]
        if group["differentiable"]:  # so that autograd reaches phi's parameters, also through phi(0)
            row_map = row_map.with_params(self.drawn(group, width), like)
        return row_map

    @torch.no_grad()
    def _new_row_map(self, group: Group, like: Tensor) -> RowMap:
        exact = self.drawn(group, like.shape[-1])
        lift, centre, scale = group.get("lift", "none"), group["center"], group["input_scale"]
        row_map = RowMap(map_of(group), exact, lift, centre, scale, by_number(group), call=self._call)
        if lift == "pinv":
            row_map = self._with_decoder(group, row_map, like)
        elif scale == "restored" and lift in ("identity", "vjp"):
            row_map = self._with_gain(group, row_map, like)
        return row_map.with_params(exact, like)

    def _with_decoder(self, group: Group, row_map: RowMap, like: Tensor) -> RowMap:
        """pinv: P = argmin E|phi~(x) P - x|^2 + ridge |P|^2 over seeded Gaussian rows x, and its error.

        In float64. The error, sqrt(E|phi~(x) P - x|^2 / E|x|^2), is taken on rows that the fit has not seen: 0 is
        exact, 1 no better than P = 0. [OPT-LIFT-D3]
        """
        width, d_phi = like.shape[-1], row_map.feature_map.output_dim(like.shape[-1])
        count = max(256, 4 * d_phi)
        rows = gaussian(2 * count, width, group["seed"])
        exact = row_map.with_params(row_map.params, rows)
        features, rows = exact.features(rows)[0], exact.target(rows)
        fit, targets = features[:count], rows[:count]
        gram = fit.T @ fit / count + group["ridge"] * torch.eye(d_phi, dtype=torch.float64, device="cpu")
        decoder = torch.linalg.pinv(gram, hermitian=True) @ (fit.T @ targets / count)
        error = float((features[count:] @ decoder - rows[count:]).norm() / rows[count:].norm())
        missed = f"lift 'pinv' misses {error:.2f} of a Gaussian row of {width} through {row_map.feature_map.kind!r}"
        if error > group["max_decode_error"]:
            first = "input_scale='restored', " if row_map.scale == "none" else ""
            cure = f"use {first}more features, a wider bandwidth, or lift='vjp'"
            raise ConfigError(f"{missed}, more than max_decode_error = {group['max_decode_error']}; {cure}")
        # An error of size e turns an update by up to e: momentum then feeds oscillations if e sqrt(lr curvature) is
        # above its loss per step, 1 - momentum. [OPT-LIFT-I3]
        slack = 1 - float(torch.as_tensor(group["momentum"], device="cpu").detach())
        if error > slack > 0:
            warn(
                f"{missed}: with momentum {1 - slack:.3g} updates may grow where lr times curvature is above "
                f"{(slack / error) ** 2:.2g}; use more features, a wider bandwidth, less momentum or a lower lr",
                StabilityWarning,
            )
        return replace(row_map, decoder=decoder.to(like), error=error)

    def _with_gain(self, group: Group, row_map: RowMap, like: Tensor) -> RowMap:
        """The map with the gain that its updates have on 32 seeded Gaussian rows; warns if they do not descend.

        In the dtype of `like`, as updates may consist of its rounding only. A constant map has no updates: its gain is
        1.
        """
        width = like.shape[-1]
        rows = gaussian(32, width, group["seed"]).to(like.dtype)
        updates, rows = row_map.with_params(row_map.params, rows)(rows).double(), rows.double()
        power = float(updates.norm() * rows.norm())
        cosine = float((updates * rows).sum() / power) if power > 0 else 0.0
        if cosine < LEAST_COSINE:
            warn(
                f"updates of Gaussian rows of {width} by {row_map.feature_map.kind!r} and lift {row_map.lift!r} have "
                f"the cosine {cosine:.3f} with them, so that no step descends; use lift='pinv' or another feature_map"
            )
        return replace(row_map, gain=float(updates.norm() / rows.norm()) if power > 0 else 1.0)

    def drawn(self, group: Group, width: int) -> Params:
        """phi's parameters for rows of a width, in float64 on the CPU, the same for every device; or the caller's."""
        if width in self._given:
            return self._given[width]
        generator = torch.Generator().manual_seed(group["seed"])
        return map_of(group).init(width, generator=generator, dtype=torch.float64, device="cpu")


def _at_unit_scale(feature_map: FeatureMap) -> FeatureMap:
    """With the `unit_scale` of every field that is left out: defaults of maps are for keys of unit length, while the
    entries of rows of gradients are scaled to that size."""
    scales: dict[str, Any] = {n: x for n, x in feature_map.unit_scale.items() if n not in feature_map.model_fields_set}
    for name, value in feature_map:
        if isinstance(value, FeatureMap):
            scales[name] = _at_unit_scale(value)
        elif isinstance(value, list | tuple) and any(isinstance(entry, FeatureMap) for entry in value):
            scales[name] = type(value)(map(_at_unit_scale, value))
    return feature_map.model_copy(update=scales) if scales else feature_map


def map_of(group: Group) -> FeatureMap:
    """The feature map of a group, odd-lifted if `odd` is set."""
    plain = FeatureMap.model_validate(group["feature_map"])
    return OddLift(inner=plain) if group["odd"] else plain
