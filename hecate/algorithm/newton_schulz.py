"""Orthogonalised momentum."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from hecate.algorithm.base import Algorithm
from hecate.tape.ops import over, sum_to_gate

Coefficients = tuple[float, float, float]
POLYNOMIALS: dict[str, Coefficients] = {"quintic": (3.4445, -4.7750, 2.0315), "cubic": (1.5, -0.5, 0.0)}


def iterated(x: Tensor, coefficients: Coefficients) -> Tensor:
    """One iteration: a X + (b A + c A^2) X with A = X X^T, of a matrix or a batch of them."""
    a, b, c = coefficients
    fused = torch.addmm if x.ndim == 2 else torch.baddbmm
    gram = x @ x.mT
    inner = fused(gram, gram, gram, beta=b, alpha=c) if c else b * gram
    return fused(x, inner, x, beta=a)


class NewtonSchulz(Algorithm):
    """newton_schulz: S' = momentum S + G, D = -lr NS(S').

    NS pushes every singular value of S' towards 1: X_0 = S' / sqrt(|S'|_F^2 + eps^2), then `steps` times X <- a X + (b
    A + c A^2) X with A = X X^T. `quintic` (Muon's coefficients) is fast and ends with singular values in about [0.68,
    1.13]; `cubic` (1.5, -0.5, 0) converges to 1, slowly from small ones. `rescale` multiplies by |S'|_F / sqrt(min(V,
    P)): the step then has about the length of the momentum. A weight that is a vector counts as one row.

    Shapes: G, S `[N, ..., P]`; lr, momentum `[N]`.
    VJP: the iterations backwards; with B = b A + c A^2 and Y = a X + B X: g_B = g X^T,
    g_A = b g_B + c (A g_B + g_B A), g_X = a g + B g + (g_A + g_A^T) X.
    Traits: one slot; a step is never longer than about 1.2 lr sqrt(min(V, P)) without `rescale`, so no lr diverges at
    once.
    Cost: steps x 3 products of min(V, P)^2 max(V, P).
    Warning: without `rescale` even a tiny gradient makes a full step; retention alone bounds |M|. Texts that write S' =
    momentum S - G with M' = M - lr NS(S') ascend.
    References: ATLAS (Behrouz et al., 2025, arXiv 2505.23735); Muon (Jordan et al., 2024). [ALG-NS-D1]
    """

    kind: Literal["newton_schulz"] = "newton_schulz"
    momentum: float = Field(0.9, ge=0, lt=1)
    polynomial: Literal["quintic", "cubic"] = "quintic"
    steps: int = Field(5, ge=1, le=50)
    rescale: bool = False
    eps: float = Field(1e-7, gt=0)
    slots: ClassVar[tuple[str, ...]] = ("momentum",)
    uses_momentum: ClassVar[bool] = True

    @property
    def stable_step(self) -> float:
        return math.inf if not self.rescale else 2.0

    def direction(self, grad: Tensor, lr: Tensor, momentum: Tensor, *slots: Tensor) -> tuple[Tensor, ...]:
        carried = over(momentum, grad) * slots[0] + grad
        return -over(lr, grad) * self._orthogonal(carried)[0], carried

    def direction_vjp(self, inputs: tuple[Tensor, ...], *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        grad, lr, momentum, slot = inputs
        gdirection, gcarried = cotangents
        carried = over(momentum, grad) * slot + grad
        found, iterates, length = self._orthogonal(carried)
        glr = -sum_to_gate(found * gdirection, lr)
        pulled = self._pulled(carried, iterates, length, -over(lr, grad) * gdirection)
        g = gcarried + pulled
        return g, glr, sum_to_gate(slot * g, momentum), over(momentum, grad) * g

    def _orthogonal(self, s: Tensor) -> tuple[Tensor, list[Tensor], Tensor]:
        """NS(s) in the shape of s, the iterates as wide matrices, and the regularised norm of s."""
        rows = _wide(s)
        length = (rows.square().sum((-2, -1), keepdim=True) + self.eps**2).sqrt()
        iterates = [rows / length]
        for _ in range(self.steps):
            iterates.append(iterated(iterates[-1], POLYNOMIALS[self.polynomial]))
        found = iterates[-1]
        if self.rescale:
            found = found * (length / math.sqrt(found.shape[-2]))
        return _back(found, s), iterates, length

    def _pulled(self, s: Tensor, iterates: list[Tensor], length: Tensor, g: Tensor) -> Tensor:
        """Cotangent of s from that of NS(s)."""
        a, b, c = POLYNOMIALS[self.polynomial]
        g, glength = _wide(g), torch.zeros_like(length)
        if self.rescale:
            root = math.sqrt(g.shape[-2])
            glength = (g * iterates[-1]).sum((-2, -1), keepdim=True) / root
            g = g * (length / root)
        for x in reversed(iterates[:-1]):
            gram = x @ x.mT
            outer = g @ x.mT
            inner = b * outer + c * (gram @ outer + outer @ gram)
            g = a * g + (b * gram + c * gram @ gram) @ g + (inner + inner.mT) @ x
        unit = iterates[0]
        glength = glength - (g * unit).sum((-2, -1), keepdim=True) / length
        return _back(g / length + glength * unit, s)


def _wide(weight: Tensor) -> Tensor:
    """`[N, ..., P]` as matrices with at most as many rows as columns."""
    rows = weight.reshape(weight.shape[0], -1, weight.shape[-1])
    return rows.mT if rows.shape[-2] > rows.shape[-1] else rows


def _back(rows: Tensor, like: Tensor) -> Tensor:
    """The inverse of `_wide`."""
    tall = like[0].numel() // like.shape[-1] > like.shape[-1]
    return (rows.mT if tall else rows).reshape(like.shape)
