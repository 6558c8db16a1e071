"""Rows to phi-space and back: centred features of a gradient, and the lift P to weight space.

A gradient of zero must move nothing, so features enter as phi~(g) = phi(g) - phi(0), or as the odd part (phi(g) -
phi(-g)) / 2, which is the map `OddLift`. A lift takes `[rows, d_phi]` back to `[rows, columns]`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from hecate.errors import ConfigError, ShapeError
from hecate.optim.tensors import largest
from hecate.phi import ELU, Compose, FeatureMap, Identity, Linear, Normalise, OddLift, Params, Polynomial, RandomFourier
from hecate.phi.elementwise import Elementwise

LiftName = Literal["identity", "vjp", "pinv", "learned", "prefix", "callable"]
LIFTS = ("identity", "vjp", "pinv", "learned", "prefix", "callable")
Scale = Literal["none", "rms", "unit", "restored"]
Call = Callable[[Tensor, Tensor], Tensor]

RISING = {"identity", "elu", "exp", "sigmoid", "softplus", "tanh"}  # strictly, in every component
HALVES = {"gelu_shifted", "leaky_relu_squared", "relu", "squared_relu"}  # their odd part rises
STEADY = {"elu", "gelu_shifted", "identity", "relu", "sigmoid", "softplus", "tanh"}  # of bounded slope
PROBE = 67  # no multiple of a vector register: a kernel's main loop and its tail both run


def needs_odd(feature_map: FeatureMap) -> bool:
    """Whether centring alone loses the sign of half of all components, as for relu."""
    return feature_map.kind in HALVES


def on_numbers(feature_map: FeatureMap) -> bool:
    """Whether a map acts on every number alone."""
    if isinstance(feature_map, OddLift):
        return on_numbers(feature_map.inner)
    return isinstance(feature_map, Identity | ELU | Elementwise)


def choose(feature_map: FeatureMap) -> LiftName:
    """What `lift="auto"` means: identity where components keep their sign, pinv where features decode linearly or
    forget lengths, else vjp."""
    inner = feature_map.inner if isinstance(feature_map, OddLift) else feature_map
    rising = RISING | HALVES if isinstance(feature_map, OddLift) else RISING
    if inner.kind in rising:
        return "identity"
    decodes = isinstance(inner, Linear | RandomFourier) or _forgets_length(inner)
    return "pinv" if decodes else "vjp"


def _forgets_length(feature_map: FeatureMap) -> bool:
    """Whether phi(c x) = phi(x), so that J_phi(x) x = 0 and no update of vjp descends."""
    first = feature_map.maps[0] if isinstance(feature_map, Compose) else feature_map
    return isinstance(first, Normalise) and first.inner.traits().degree is not None


def choose_scale(feature_map: FeatureMap, lift: str) -> Scale:
    """What `input_scale="auto"` means: none where updates descend at gradients of any length, which are those of maps
    of degree 1 and, taken as they are, of `STEADY` ones; else restored."""
    inner = feature_map.inner if isinstance(feature_map, OddLift) else feature_map
    steady = lift == "identity" and inner.kind in STEADY
    return "none" if steady or inner.traits().degree == 1 else "restored"


def refuse_lift(feature_map: FeatureMap, lift: str, width: int) -> None:
    """Refuses a lift that this map does not have at this width."""
    d_phi = feature_map.output_dim(width)
    if lift == "identity" and d_phi != width:
        raise ConfigError(
            f"lift 'identity' needs as many features as columns, {feature_map.kind!r} makes {d_phi}"
            f" of {width}; use 'vjp', 'pinv' or 'learned'"
        )
    if lift == "prefix" and not isinstance(feature_map, Polynomial):
        raise ConfigError(
            "lift 'prefix' reads the features of degree 1 of a polynomial, got "
            f"{feature_map.kind!r}; use 'vjp' or 'pinv'"
        )


@dataclass(frozen=True)
class RowMap:
    """u = P phi~(g) for rows g `[n, columns]`, and its two halves.

    `zero` is phi(0), to be subtracted; `mask` clears what rounding leaves of a zero gradient.
    """

    feature_map: FeatureMap
    params: Params
    lift: str
    centre: bool = True
    scale: Scale = "none"
    decoder: Tensor | None = None  # [d_phi, columns]
    call: Call | None = None
    zero: Tensor | None = None
    mask: bool = False
    gain: float = 1.0  # |u| / |g| of Gaussian rows, divided out

    def features(self, g: Tensor) -> tuple[Tensor, Any]:
        """phi~(g) `[n, d_phi]`, and the residuals of phi's VJP."""
        features, residuals = self.feature_map.forward(scaled(g, self.scale), self.params)
        if self.zero is not None:
            features = features - self.zero
        if self.mask:
            moved = g != 0 if self.on_numbers else (g != 0).any(-1, keepdim=True)
            features = torch.where(moved, features, 0)
        if self.scale == "restored":
            features = features * length(g)
        return features, residuals

    def target(self, g: Tensor) -> Tensor:
        """What P phi~(g) ought to be."""
        return g if self.scale == "restored" else scaled(g, self.scale)

    def back(self, held: Tensor, g: Tensor, residuals: Any) -> Tensor:
        """P held `[n, columns]`; the Jacobian of `vjp` is that at g."""
        if self.lift in ("identity", "vjp"):
            lifted = held if self.lift == "identity" else self.feature_map.vjp(residuals, held)[0]
            return lifted if self.gain == 1 else lifted / self.gain
        if self.lift == "prefix":
            first = 0 if getattr(self.feature_map, "form", "") == "raw" else 1
            return held[..., first : first + g.shape[-1]]
        if self.call is not None:
            return called(self.call, held, g)
        if self.decoder is None:
            raise ConfigError(f"lift {self.lift!r} needs a decoder")
        return held @ self.decoder

    def __call__(self, g: Tensor) -> Tensor:
        """P phi~(g), in the shape of g."""
        features, residuals = self.features(g)
        return self.back(features, g, residuals)

    @property
    def on_numbers(self) -> bool:
        """Whether u depends on each number of g alone, so that any shape will do."""
        direct = self.lift in ("identity", "vjp") and self.scale == "none"
        return direct and on_numbers(self.feature_map)

    def decoded(self, decoder: Tensor) -> RowMap:
        """The same map with another decoder `[d_phi, columns]`."""
        return replace(self, decoder=decoder)

    def with_params(self, params: Params, like: Tensor) -> RowMap:
        """The same map with other parameters, for rows like `like` `[*, columns]`."""
        if not self.centre or self.feature_map.parity == "odd":
            return replace(self, params=params)
        numbers = on_numbers(self.feature_map)
        origin = like.new_zeros((PROBE,) if numbers else (1, like.shape[-1]))
        zero = self.feature_map(origin, params)[0]
        settled = numbers and bool((self.feature_map(origin, params) == zero).all())
        nothing = settled and zero.item() == 0
        return replace(self, params=params, zero=None if nothing else zero, mask=not settled)


def scaled(g: Tensor, scale: Scale) -> Tensor:
    """Rows as phi gets them: as they are, or divided by their root mean square or their length."""
    if scale == "none":
        return g
    return g / (length(g) / math.sqrt(g.shape[-1]) if scale == "rms" else length(g))


def length(g: Tensor) -> Tensor:
    """|row|, `[..., 1]`, at any size that the dtype has; 1 for a row of zeros."""
    size = largest(g, -1)
    return size * (g / size).norm(dim=-1, keepdim=True).clamp(min=1)


def called(call: Call, held: Tensor, g: Tensor) -> Tensor:
    """A user's lift of `held` `[n, d_phi]` at g `[n, columns]`, its shape checked."""
    lifted = call(held, g)
    if lifted.shape != g.shape:
        raise ShapeError(
            f"the lift must return {list(g.shape)} from features {list(held.shape)}, got {list(lifted.shape)}"
        )
    return lifted


def initial(feature_map: FeatureMap, width: int, seed: int) -> Params:
    """The map's initial parameters in float64 on the CPU: the same on every device and rank."""
    generator = torch.Generator().manual_seed(seed)
    return feature_map.init(width, generator=generator, dtype=torch.float64, device="cpu")


def placed(params: Params, like: Tensor) -> Params:
    """Parameters in the dtype and on the device of `like`."""
    return {
        "learned": {name: value.to(like) for name, value in params["learned"].items()},
        "frozen": {name: value.to(like) for name, value in params["frozen"].items()},
    }


def checksum(params: Params) -> str:
    """16 hexadecimal digits of parameters: what a checkpoint keeps of them."""
    digest = hashlib.sha256()
    for group in (params["learned"], params["frozen"]):
        for name, value in sorted(group.items()):
            plain = value.detach().to("cpu", torch.float64).contiguous()
            digest.update(f"{name}{list(plain.shape)}".encode() + plain.numpy().tobytes())
    return digest.hexdigest()[:16]


def calibrated(row_map: RowMap, width: int, seed: int, ridge: float) -> tuple[Tensor, float]:
    """pinv: P = argmin E|phi~(x) P - x|^2 + ridge |P|^2 over seeded Gaussian rows x, and its error.

    `row_map` is in float64. The error, sqrt(E|phi~(x) P - x|^2 / E|x|^2), is taken on rows that the fit has not seen: 0
    decodes exactly, 1 tells nothing. [OPT-LIFT-D3]
    """
    d_phi = row_map.feature_map.output_dim(width)
    count = max(256, 4 * d_phi)
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(2 * count, width, dtype=torch.float64, generator=generator)
    with torch.no_grad():
        features = row_map.features(rows)[0]
        rows = row_map.target(rows)
        fit, seen = features[:count], rows[:count]
        gram = fit.T @ fit / count
        if ridge:
            gram = gram + ridge * torch.eye(d_phi, dtype=torch.float64)
        decoder = torch.linalg.pinv(gram, hermitian=True) @ (fit.T @ seen / count)
        missed = features[count:] @ decoder - rows[count:]
    return decoder, float(missed.norm() / rows[count:].norm())


def gauged(row_map: RowMap, like: Tensor, seed: int) -> tuple[float, float]:
    """Of seeded Gaussian rows and their updates u: |u| / |g|, and the cosine <u, g> / (|u| |g|).

    In the dtype of `like`, whose rounding may be all that is left. Without updates (a constant
    map) the gain is 1 and the cosine 0.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = 32, like.shape[-1]
    rows = torch.randn(shape, dtype=torch.float64, generator=generator).to(like.dtype)
    with torch.no_grad():
        updates = row_map(rows).double()
        rows = rows.double()
    gain, power = updates.norm() / rows.norm(), updates.norm() * rows.norm()
    return (float(gain), float((updates * rows).sum() / power)) if power > 0 else (1.0, 0.0)
