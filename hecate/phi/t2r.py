"""Learned rectified features."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field
from torch import Tensor

from hecate.phi.base import Params, Traits
from hecate.phi.learned import Learned, affine, affine_vjp
from hecate.sizes import Size
from hecate.tape.ops import activate_vjp


class T2R(Learned):
    """t2r: phi(x) = max(x W + b, 0), W and b learned per head.

    One layer of a network as the map: how pretrained transformers are turned into recurrent ones with few features.

    Shapes: x `[..., D]` or `[..., H, D]` -> `[..., d_phi]`; learned weight `[H, D, d_phi]` from N(0, 1/D), bias `[H,
    d_phi]` from 0.
    VJP: with z = x W + b: gz = g for z > 0, else 0; gx = gz W^T, gW = x^T gz and gb = gz summed over tokens.
    Traits: non_negative, kernel_non_negative.
    Cost: O(D d_phi).
    Warning: a feature that is 0 for all inputs receives no gradient again; a kernel can be 0.
    References: Finetuning Pretrained Transformers into RNNs (Kasai et al., 2021, arXiv 2103.13076). [PHI-T2R-D1]
    """

    kind: Literal["t2r"] = "t2r"
    d_phi: Size = Field(gt=0, description="number of features")

    def output_dim(self, d: int) -> int:
        return self.d_phi

    def traits(self) -> Traits:
        return Traits(non_negative=True, kernel_non_negative=True)

    def shapes(self, d: int) -> dict[str, tuple[int, ...]]:
        return {"weight": (d, self.d_phi), "bias": (self.d_phi,)}

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, tuple[Tensor, Tensor, Any]]:
        features = affine(self.kind, x, params).relu_()
        return features.to(x.dtype), (features, x, params)

    def vjp(self, residuals: tuple[Tensor, Tensor, Any], g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        features, x, params = residuals
        return affine_vjp(x, params, activate_vjp("relu", features, g.to(features.dtype)))
