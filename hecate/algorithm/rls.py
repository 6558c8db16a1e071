"""Recursive least squares."""

from __future__ import annotations

import math
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from hecate.algorithm.base import Descent, InnerLoss, Token
from hecate.tape import Block, Tensors


class RLS(Descent):
    """rls: D = -lr u (C' phi)^T, C' the inverse of sum_i discount^(t-i) phi_i phi_i^T + ridge.

    With l2, lr = 1, retention none and a memory that starts at zero, M is the minimiser of
    sum_i discount^(t-i) |M phi_i - v_i|^2 + discount^t ridge |M|^2 after every token: what Mesa layers solve for. C' =
    (C - C phi (C phi)^T / (discount + phi.C phi)) / discount. With another bias u is its gradient and C a
    preconditioner.

    Shapes: context `inverse` `[N, P, P]`, C minus its start I / ridge.
    VJP: through C' by the reverse of the rank-one update, written out in the code.
    Traits: no slots; stable for lr < 2 with l2. Needs a structure linear in its weights: phi is their only input.
    Cost: 4 P^2 and a state of P^2 more than gd.
    Warning: with discount < 1, C grows as discount^-t in directions that no key visits (wind-up).
    References: MesaNet (von Oswald et al., 2025, arXiv 2506.05233); Adaptive Filter Theory (Haykin, 2002). [ALG-RLS-D1]
    """

    kind: Literal["rls"] = "rls"
    ridge: float = Field(1.0, gt=0, description="weight of |M|^2 at the start")
    discount: float = Field(1.0, gt=0, le=1, description="weight of the past, per token")

    @property
    def weighted_sum(self) -> bool:
        return True

    @property
    def stable_step(self) -> float:
        return math.inf

    def refusal(self, *, linear: bool, diagonal: bool, curvature: float | None) -> str | None:
        if diagonal:
            return "each coordinate is a regression of its own, with no inverse to share"
        return None if linear else "least squares has a recursive solution for linear models only"

    def context_shapes(self, d_phi: int, d_v: int) -> dict[str, tuple[int, ...]]:
        return {"inverse": (d_phi, d_phi)}

    def gradient(
        self, loss: InnerLoss, token: Token, context: tuple[Tensor, ...]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        gain, inverse = loss.run(self._update(), token.phi_k, *context)
        return loss.pullback(gain, loss.error(token.phi_k, token.v)), (inverse,)

    def _update(self) -> Block:
        """(phi, C - I/ridge) -> (C' phi, C' - I/ridge)."""

        def parts(phi: Tensor, change: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            start = torch.eye(phi.shape[-1], dtype=phi.dtype, device=phi.device) / self.ridge
            inverse = start + change
            mapped = (inverse @ phi.unsqueeze(-1)).squeeze(-1)
            total = self.discount + (phi * mapped).sum(-1, keepdim=True)
            return start, mapped, total

        def forward(phi: Tensor, change: Tensor) -> tuple[Tensors, Tensors]:
            start, mapped, total = parts(phi, change)
            rank_one = (mapped / total).unsqueeze(-1) * mapped.unsqueeze(-2)
            new = (start + change - rank_one) / self.discount - start
            # C' phi = C phi / (discount + phi.C phi): the gain of the filter.
            return (mapped / total, new), (phi, change)

        def vjp(inputs: tuple[Tensor, Tensor], ggain: Tensor, gnew: Tensor) -> Tensors:
            phi, change = inputs
            start, mapped, total = parts(phi, change)
            gain, g = mapped / total, gnew / self.discount
            both = ((g + g.mT) @ mapped.unsqueeze(-1)).squeeze(-1)
            # rank_one = mapped mapped^T / total, gain = mapped / total.
            gmapped = (ggain - both) / total
            gtotal = (-ggain * gain + 0.5 * both * gain).sum(-1, keepdim=True) / total
            gmapped = gmapped + gtotal * phi
            gphi = gtotal * mapped + ((start + change).mT @ gmapped.unsqueeze(-1)).squeeze(-1)
            return gphi, g + gmapped.unsqueeze(-1) * phi.unsqueeze(-2)

        return Block("algorithm.rls.update", forward, vjp)
