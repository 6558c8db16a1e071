"""Absolute error."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from hecate.bias.base import ErrorBias, KernelForm


class L1(ErrorBias):
    """l1: ell = sum_i (r_i - eps) with r = sqrt(e^2 + eps^2).

    Every coordinate pulls with force at most 1, however far off it is: an outlier weighs no more than any other error,
    and a write says little more than on which side of v the memory was. It is the limit p = 1 of `lp`, smoothed alike;
    a tanh in place of e/r is another function.

    Shapes: e `[..., V]`.
    VJP: u = e/r, J = diag(eps^2 / r^3); at e = 0: u = 0, J = 1/eps.
    Traits: curvature 1/eps at e = 0, which bounds no useful step: declared unbounded.
    Cost: O(V).
    Warning: steps of lr |phi|^2 do not shrink near the target; the memory ends within that of it.
    References: It's All Connected (Behrouz et al., 2025, arXiv 2504.13173), value-less memory. [BIAS-L1-D1]
    """

    kind: Literal["l1"] = "l1"
    eps: float = Field(1e-6, gt=0)

    @property
    def kernel(self) -> KernelForm:
        return KernelForm("sign", b=self.eps)

    def rho(self, error: Tensor) -> Tensor:
        # r - eps without its cancellation.
        return (error.square() / (self._radius(error) + self.eps)).sum(-1)

    def psi(self, error: Tensor) -> Tensor:
        return error / self._radius(error)

    def psi_jvp(self, error: Tensor, tangent: Tensor) -> Tensor:
        radius = self._radius(error)
        return (self.eps / radius).square() / radius * tangent

    def _radius(self, error: Tensor) -> Tensor:
        return (error.square() + self.eps**2).sqrt()
