"""Powers of the absolute error."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from hecate.bias.base import ErrorBias, KernelForm


class Lp(ErrorBias):
    """lp: ell = 1/p sum_i s_i^p with s = |e| for p >= 2 and s = sqrt(e^2 + eps^2) - eps for p < 2.

    p > 2 stresses large errors (Moneta uses 3), p < 2 resists outliers. p = 2 is `l2` exactly. Below 2 the derivative
    of |e|^p is singular at 0, hence the smoothing; what is computed is the exact derivative of the smoothed loss. A
    tanh-smoothed sign, as some write, is another function.

    Shapes: e `[..., V]`.
    VJP: u = s^(p-1) e/r with r = sqrt(e^2 + eps^2) (r = |e| for p >= 2);
    J = diag((p-1) s^(p-2) (e/r)^2 + s^(p-1) eps^2 / r^3). At e = 0 both are 0, save J = 1 for p = 2. Traits: curvature
    1 for p = 2, else unbounded.
    Cost: O(V).
    References: MIRAS (Behrouz et al., 2025, arXiv 2504.13173), Moneta. [BIAS-LP-D1]
    """

    kind: Literal["lp"] = "lp"
    p: float = Field(3.0, gt=1)
    eps: float = Field(1e-6, gt=0)

    @property
    def curvature(self) -> float | None:
        return 1.0 if self.p == 2 else None

    @property
    def linear(self) -> bool:
        return self.p == 2

    @property
    def kernel(self) -> KernelForm:
        return KernelForm("power", self.p, self.eps)

    def rho(self, error: Tensor) -> Tensor:
        size, _, live = self._sizes(error)
        return torch.where(live, size.pow(self.p), 0.0).sum(-1) / self.p

    def psi(self, error: Tensor) -> Tensor:
        size, radius, live = self._sizes(error)
        at_zero = 1.0 if self.p == 2 else 0.0
        return torch.where(live, size.pow(self.p - 1) / radius, at_zero) * error

    def psi_jvp(self, error: Tensor, tangent: Tensor) -> Tensor:
        size, radius, live = self._sizes(error)
        slope = radius if self.p >= 2 else error
        diagonal = (self.p - 1) * size.pow(self.p - 2) * (slope / radius).square()
        if self.p < 2:
            diagonal = diagonal + size.pow(self.p - 1) * self.eps**2 / radius.pow(3)
        return torch.where(live, diagonal, 1.0 if self.p == 2 else 0.0) * tangent

    def _sizes(self, error: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        live = error != 0
        # Where the error is 0 a 1 stands in: a power of 0 has no usable derivative under autograd.
        safe = torch.where(live, error, 1.0)
        if self.p >= 2:
            return safe.abs(), safe.abs(), live
        radius = (safe * safe + self.eps**2).sqrt()
        return safe * safe / (radius + self.eps), radius, live
