"""Yaad's loss: squared near, absolute far."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from hecate.bias.base import ErrorBias


class Yaad(ErrorBias):
    """yaad: ell = 1/2 |e|^2 for |e|_2 <= delta, delta (sum_i (r_i - eps) - delta/2) beyond, r = sqrt(e^2 + eps^2).

    The write that MIRAS prints for Yaad: l2's while the error is inside a ball, delta times l1's beyond it. The whole
    vector decides, each coordinate is then followed by its sign. With several coordinates this is no Huber loss: see
    the warning.

    Shapes: e `[..., V]`.
    VJP: u = e, J = 1 inside; u = delta e/r, J = diag(delta eps^2 / r^3) outside. The threshold counts as inside.
    Traits: curvature unbounded. No kernel: a coordinate needs the norm of all.
    Cost: O(V).
    Warning: at |e|_2 = delta u jumps from e to delta sign(e), whose length is up to sqrt(V) times that of e, and the
    loss by delta (|e|_1 - delta). `huber` is continuous, per coordinate and with `norm=True`.
    References: It's All Connected (Behrouz et al., 2025, arXiv 2504.13173), Yaad. [BIAS-YAAD-D1]"""

    kind: Literal["yaad"] = "yaad"
    delta: float = Field(1.0, gt=0)
    eps: float = Field(1e-6, gt=0)

    def rho(self, error: Tensor) -> Tensor:
        far = (error.square() / (self._radius(error) + self.eps)).sum(-1)
        square = error.square().sum(-1)
        linear = self.delta * (far - 0.5 * self.delta)
        return torch.where(self._inside(error).squeeze(-1), 0.5 * square, linear)

    def psi(self, error: Tensor) -> Tensor:
        far = self.delta * error / self._radius(error)
        return torch.where(self._inside(error), error, far)

    def psi_jvp(self, error: Tensor, tangent: Tensor) -> Tensor:
        radius = self._radius(error)
        far = self.delta * (self.eps / radius).square() / radius
        return torch.where(self._inside(error), tangent, far * tangent)

    def _inside(self, error: Tensor) -> Tensor:
        return error.square().sum(-1, keepdim=True) <= self.delta**2

    def _radius(self, error: Tensor) -> Tensor:
        return (error.square() + self.eps**2).sqrt()
