"""The implicit (proximal) step."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from torch import Tensor

from hecate.algorithm.base import Descent, InnerLoss, Token
from hecate.tape import Block, Tensors
from hecate.tape.ops import over, sum_to_gate


class Implicit(Descent):
    """implicit: D = -lr / (1 + lr c |phi|^2) G, c the bias' curvature.

    For l2 (c = 1) the exact proximal step argmin |M' - M|^2 / 2 + lr ell(M'): the error shrinks by 1 / (1 + lr
    |phi|^2), so no lr diverges. For dot (c = 0) the proximal step is that of gd. For another bias it minimises the
    quadratic of curvature c that bounds the loss from above. In a diagonal memory every coordinate has its own phi_j^2.
    The same numbers as `step="implicit"` where c = 1 for a matrix.

    Shapes: G `[N, V, P]`, lr `[N]`, phi_k `[N, P]`.
    VJP: with s = c |phi|^2 and f = 1 / (1 + lr s), G' = f G: g_G = f g, g_lr = -s f^2 <G, g>,
    g_phi = -2 c lr f^2 <G, g> phi; then as gd.
    Traits: no slots; linear; stable for every lr. Needs a structure linear in its weights and a bias of bounded
    curvature: elsewhere no constant bounds the loss.
    Cost: one product of length P more than gd.
    References: Longhorn (Liu et al., 2024, arXiv 2407.14207); Nested Learning (Behrouz et al., 2025, arXiv 2512.24695),
    Eq 57, whose constant holds for |x| = 1 only. [ALG-IMPL-D1]
    """

    kind: Literal["implicit"] = "implicit"
    linear: ClassVar[bool] = True

    @property
    def stable_step(self) -> float:
        return math.inf

    def refusal(self, *, linear: bool, diagonal: bool, curvature: float | None) -> str | None:
        if not linear:
            return "the implicit step has no closed form for weights that act non-linearly"
        if curvature is None:
            return "the loss has unbounded curvature, so no step size bounds it from above"
        return None

    def gradient(
        self, loss: InnerLoss, token: Token, context: tuple[Tensor, ...]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        (grad,) = loss.gradient(token.phi_k, token.v)
        block = _shortened(loss.curvature or 0.0, loss.diagonal)
        return loss.run(block, grad, token.lr, token.phi_k), context


def _shortened(curvature: float, diagonal: bool) -> Block:
    """G / (1 + lr c |phi|^2), coordinate by coordinate if diagonal."""

    def squares(phi: Tensor) -> Tensor:
        return curvature * (phi.square() if diagonal else phi.square().sum(-1, keepdim=True))

    def forward(grad: Tensor, lr: Tensor, phi: Tensor) -> tuple[Tensors, Tensors]:
        factor = 1 / (1 + lr.unsqueeze(-1) * squares(phi))
        return (over(factor, grad) * grad,), (grad, lr, phi)

    def vjp(inputs: tuple[Tensor, Tensor, Tensor], g: Tensor) -> Tensors:
        grad, lr, phi = inputs
        square = squares(phi)
        factor = 1 / (1 + lr.unsqueeze(-1) * square)
        inner = grad * g if diagonal else sum_to_gate(grad * g, lr).unsqueeze(-1)
        along = inner * factor.square()
        gphi = -2 * curvature * lr.unsqueeze(-1) * along * phi
        return over(factor, grad) * g, -(square * along).sum(-1), gphi

    return Block("algorithm.implicit.shorten", forward, vjp)
