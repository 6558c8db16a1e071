"""Squared error against the worst value nearby."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from hecate.bias.base import ErrorBias


class Robust(ErrorBias):
    """robust: ell = 1/2 |e|^2 + radius (r - eps) + 1/2 radius^2 with r = sqrt(|e|^2 + eps^2).

    The squared error against the worst value within a ball of the given radius around v, max over |d|_2 <= radius of
    1/2 |pred - v - d|^2 = 1/2 (|e| + radius)^2, whose kink at e = 0 is smoothed by eps. Values that are only known up
    to the radius are written harder than l2 would, by a constant pull towards v.

    Shapes: e `[..., V]`.
    VJP: u = e + radius e/r, J g = g + radius (g - e (e.g)/r^2)/r.
    Traits: curvature 1 + radius/eps at e = 0, which bounds no useful step: declared unbounded unless radius is 0, which
    is `l2`. No kernel: a coordinate needs the norm of all.
    Cost: O(V).
    References: It's All Connected (Behrouz et al., 2025, arXiv 2504.13173), robust optimisation against shifts of
    values. [BIAS-ROBUST-D1]
    """

    kind: Literal["robust"] = "robust"
    radius: float = Field(0.1, ge=0)
    eps: float = Field(1e-6, gt=0)

    @property
    def curvature(self) -> float | None:
        return 1.0 if self.radius == 0 else None

    @property
    def linear(self) -> bool:
        return self.radius == 0

    def rho(self, error: Tensor) -> Tensor:
        square = error.square().sum(-1)
        length = square / (self._radius(error).squeeze(-1) + self.eps)
        return 0.5 * square + self.radius * length + 0.5 * self.radius**2

    def psi(self, error: Tensor) -> Tensor:
        return error + self.radius * error / self._radius(error)

    def psi_jvp(self, error: Tensor, tangent: Tensor) -> Tensor:
        radius = self._radius(error)
        unit = error / radius
        across = tangent - unit * (unit * tangent).sum(-1, keepdim=True)
        return tangent + self.radius * across / radius

    def _radius(self, error: Tensor) -> Tensor:
        return (error.square().sum(-1, keepdim=True) + self.eps**2).sqrt()
