"""A vector: one weight per coordinate."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from hecate.errors import ConfigError
from hecate.structure.base import Memory, Structure


class Vector(Structure):
    """vector: pred = w * p, coordinate by coordinate, w in R^P.

    The diagonal memory: P independent memories of one number, with P parameters of state where a matrix has P^2. It
    cannot move anything between coordinates, so phi(k) and v must be equally wide. It starts at zero, from where
    gradients flow because the inner gradient u * p does not vanish with w.

    Shapes: w `[N, P]`, p and u `[N, P]`.
    VJP: predict: g_w = u * p, g_p = w * u. Pullback G = u * p: g_u = C * p, g_p = C * u, g_w = 0.
    Traits: linear, diagonal.
    Cost: P per read and per write.
    References: MIRAS (Behrouz et al., 2025, arXiv 2504.13173), memories of vector form. [STR-VECTOR-D1]
    """

    kind: Literal["vector"] = "vector"
    drawn: ClassVar[bool] = False
    linear: ClassVar[bool] = True
    diagonal: ClassVar[bool] = True

    def shapes(self, d_phi: int, d_v: int) -> dict[str, tuple[int, ...]]:
        if d_phi != d_v:
            raise ConfigError(
                f"a vector memory multiplies coordinate by coordinate, but phi(k) has width "
                f"{d_phi} and values width {d_v}; make them equal or use structure 'matrix'"
            )
        return {"weight": (d_phi,)}

    def predict(self, memory: Memory, p: Tensor) -> Tensor:
        return memory[0] * p

    def predict_vjp(self, memory: Memory, p: Tensor, u: Tensor) -> tuple[Memory, Tensor]:
        return (u * p,), memory[0] * u

    def pullback(self, memory: Memory, p: Tensor, u: Tensor) -> Memory:
        return (u * p,)

    def pullback_vjp(self, memory: Memory, p: Tensor, u: Tensor, cotangents: Memory) -> tuple[Memory, Tensor, Tensor]:
        (c,) = cotangents
        return (torch.zeros_like(c),), c * u, c * p
