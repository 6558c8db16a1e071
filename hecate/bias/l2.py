"""Squared error."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from hecate.bias.base import ErrorBias, KernelForm


class L2(ErrorBias):
    """l2: ell = 1/2 |e|^2, e = pred - v.

    The delta rule's bias: a write corrects what the memory already predicts. The factor 1/2 is kept, so that one step
    with lr |phi|^2 = 1 stores v exactly; papers that write |e|^2 print the same gradient.

    Shapes: e `[..., V]`.
    VJP: u = e, g_pred = g, g_v = -g.
    Traits: curvature 1.
    Cost: O(V).
    References: Linear Transformers Are Secretly Fast Weight Programmers (Schlag et al., 2021,
    arXiv 2102.11174); Titans (Behrouz et al., 2025, arXiv 2501.00663). [BIAS-L2-D1]
    """

    kind: Literal["l2"] = "l2"

    @property
    def curvature(self) -> float:
        return 1.0

    @property
    def linear(self) -> bool:
        return True

    @property
    def kernel(self) -> KernelForm:
        return KernelForm("error")

    def rho(self, error: Tensor) -> Tensor:
        return 0.5 * error.square().sum(-1)

    def psi(self, error: Tensor) -> Tensor:
        return error

    def psi_jvp(self, error: Tensor, tangent: Tensor) -> Tensor:
        return tangent
