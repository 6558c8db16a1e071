"""A learned linear map."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from hecate.phi.base import Params, Traits, compute_dtype, project_vjp
from hecate.phi.learned import Learned, learned
from hecate.phi.random import project_precisely
from hecate.sizes import Size


class Linear(Learned):
    """linear: phi(x) = x W, W learned per head.

    Mixes and resizes key space. A d_phi below d saves state; a d_phi above d costs state and buys no capacity, because
    the kernel x W W^T y has rank at most d.

    Shapes: x `[..., D]` or `[..., H, D]` -> `[..., d_phi]`; learned weight `[H, D, d_phi]`, drawn from N(0, 1/D).
    VJP: gx = g W^T, gW = x^T g summed over tokens.
    Traits: odd, degree 1.
    Cost: O(D d_phi).
    Origin: the learned projection of any attention layer. [PHI-LINEAR-D1]
    """

    kind: Literal["linear"] = "linear"
    d_phi: Size = Field(gt=0)

    def output_dim(self, d: int) -> int:
        return self.d_phi

    def traits(self) -> Traits:
        return Traits(parity="odd", degree=1, bounded_slope=True, decodes=True)

    def shapes(self, d: int) -> dict[str, tuple[int, ...]]:
        return {"weight": (d, self.d_phi)}

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        weight = learned(self.kind, params, "weight")
        return project_precisely(x, weight).to(x.dtype), (x, weight)

    def vjp(self, residuals: tuple[Tensor, Tensor], g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        x, weight = residuals
        dtype = torch.promote_types(compute_dtype(x), weight.dtype)
        gx, gweight = project_vjp(x.to(dtype), weight.to(dtype), g.to(dtype))
        return gx.to(x.dtype), {"weight": gweight.to(weight.dtype)}
