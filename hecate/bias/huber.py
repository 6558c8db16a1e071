"""Huber's loss."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from hecate.bias.base import ErrorBias, KernelForm


class Huber(ErrorBias):
    """huber: ell = 1/2 e^2 for |e| <= delta, delta |e| - delta^2/2 beyond, per coordinate or of the norm.

    Quadratic near zero and linear far out: a single outlier moves the memory by a bounded amount. `norm=True` applies
    the same function to |e|_2, which keeps the direction of the error.

    Shapes: e `[..., V]`.
    VJP: coordinate u = clip(e, -delta, delta), J = 1[|e| <= delta]; norm u = e min(1, delta/|e|),
    J g = g inside, (delta/|e|)(g - e (e.g)/|e|^2) outside. The threshold itself counts as inside.
    Traits: curvature 1.
    Cost: O(V).
    References: MIRAS (Behrouz et al., 2025, arXiv 2504.13173). [BIAS-HUBER-D1]
    """

    kind: Literal["huber"] = "huber"
    delta: float = Field(1.0, gt=0)
    norm: bool = False

    @property
    def curvature(self) -> float:
        return 1.0

    @property
    def kernel(self) -> KernelForm | None:
        return None if self.norm else KernelForm("clip", self.delta)

    def rho(self, error: Tensor) -> Tensor:
        size = self._norm(error).squeeze(-1) if self.norm else error.abs()
        linear = self.delta * size - 0.5 * self.delta**2
        square = 0.5 * (error.square().sum(-1) if self.norm else error.square())
        value = torch.where(size <= self.delta, square, linear)
        return value if self.norm else value.sum(-1)

    def psi(self, error: Tensor) -> Tensor:
        if not self.norm:
            return error.clamp(-self.delta, self.delta)
        size = self._norm(error)
        return torch.where(size <= self.delta, error, error * (self.delta / size))

    def psi_jvp(self, error: Tensor, tangent: Tensor) -> Tensor:
        if not self.norm:
            return torch.where(error.abs() <= self.delta, tangent, 0.0)
        size = self._norm(error)
        unit = error / size
        along = (unit * tangent).sum(-1, keepdim=True)
        return torch.where(size <= self.delta, tangent, (self.delta / size) * (tangent - unit * along))

    def _norm(self, error: Tensor) -> Tensor:
        square = error.square().sum(-1, keepdim=True)
        # Inside the ball the norm is only compared: a constant keeps its derivative finite at 0.
        inside = square <= self.delta**2
        return torch.where(inside, self.delta, torch.where(inside, 1.0, square).sqrt())
