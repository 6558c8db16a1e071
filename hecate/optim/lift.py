"""Rows to phi-space and back: centred features of a gradient, and the lift P to weight space.

A gradient of zero must move nothing, so features enter as phi~(g) = phi(g) - phi(0), or as the odd
part (phi(g) - phi(-g)) / 2, which is the map `OddLift`. A lift takes `[rows, d_phi]` back to
`[rows, columns]`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from hecate.errors import ConfigError, ShapeError
from hecate.phi import ELU, FeatureMap, Identity, Linear, OddLift, Params, Polynomial, RandomFourier
from hecate.phi.elementwise import Elementwise

LiftName = Literal["identity", "vjp", "pinv", "learned", "prefix", "callable"]
LIFTS = ("identity", "vjp", "pinv", "learned", "prefix", "callable")
Scale = Literal["none", "rms", "unit"]
Call = Callable[[Tensor, Tensor], Tensor]

RISING = {"identity", "elu", "exp", "sigmoid", "softplus", "tanh"}  # strictly, in every component
HALVES = {"gelu_shifted", "leaky_relu_squared", "relu", "squared_relu"}  # their odd part rises
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
    """What `lift="auto"` means: identity where components keep their sign, pinv where features
    decode linearly, else vjp."""
    inner = feature_map.inner if isinstance(feature_map, OddLift) else feature_map
    rising = RISING | HALVES if isinstance(feature_map, OddLift) else RISING
    if inner.kind in rising:
        return "identity"
    return "pinv" if isinstance(inner, Linear | RandomFourier) else "vjp"


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

    def features(self, g: Tensor) -> tuple[Tensor, Any]:
        """phi~(g) `[n, d_phi]`, and the residuals of phi's VJP."""
        features, residuals = self.feature_map.forward(scaled(g, self.scale), self.params)
        if self.zero is not None:
            features = features - self.zero
        if self.mask:
            moved = g != 0 if self.on_numbers else (g != 0).any(-1, keepdim=True)
            features = torch.where(moved, features, 0)
        return features, residuals

    def back(self, held: Tensor, g: Tensor, residuals: Any) -> Tensor:
        """P held `[n, columns]`; the Jacobian of `vjp` is that at g."""
        if self.lift == "identity":
            return held
        if self.lift == "vjp":
            return self.feature_map.vjp(residuals, held)[0]
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
    """Rows as they are, divided by their root mean square, or by their norm; zero rows stay."""
    if scale == "none":
        return g
    length = g.square().sum(-1, keepdim=True)
    if scale == "rms":
        length = length / g.shape[-1]
    return g * torch.where(length > 0, length, 1).rsqrt()


def called(call: Call, held: Tensor, g: Tensor) -> Tensor:
    """A user's lift of `held` `[n, d_phi]` at g `[n, columns]`, its shape checked."""
    lifted = call(held, g)
    if lifted.shape != g.shape:
        raise ShapeError(
            f"the lift must return {list(g.shape)} from features {list(held.shape)}, "
            f"got {list(lifted.shape)}"
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

    `row_map` is in float64. The error, sqrt(E|phi~(x) P - x|^2 / E|x|^2), is taken on rows that the
    fit has not seen: 0 decodes exactly, 1 tells nothing. [OPT-LIFT-D3]
    """
    d_phi = row_map.feature_map.output_dim(width)
    count = max(256, 4 * d_phi)
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(2 * count, width, dtype=torch.float64, generator=generator)
    with torch.no_grad():
        features = row_map.features(rows)[0]
        rows = scaled(rows, row_map.scale)
        fit, seen = features[:count], rows[:count]
        gram = fit.T @ fit / count
        if ridge:
            gram = gram + ridge * torch.eye(d_phi, dtype=torch.float64)
        decoder = torch.linalg.pinv(gram, hermitian=True) @ (fit.T @ seen / count)
        missed = features[count:] @ decoder - rows[count:]
    return decoder, float(missed.norm() / rows[count:].norm())
