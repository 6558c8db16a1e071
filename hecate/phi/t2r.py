"""Learned rectified features."""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from hecate.phi.base import FeatureMap, Params, Traits
from hecate.phi.learned import affine, affine_vjp, scaled_normal, seeded
from hecate.tape.activation import activate_vjp


class T2R(FeatureMap):
    """t2r: phi(x) = max(x W + b, 0), W and b learned per head.

    One layer of a network as the map: how pretrained transformers are turned into recurrent ones
    with few features.

    Shapes: x `[..., D]` or `[..., H, D]` -> `[..., d_phi]`; learned weight `[H, D, d_phi]` from
    N(0, 1/D), bias `[H, d_phi]` from 0.
    VJP: with z = x W + b: gz = g for z > 0, else 0; gx = gz W^T, gW = x^T gz and gb = gz summed
    over tokens.
    Traits: non_negative, kernel_non_negative.
    Cost: O(D d_phi).
    Warning: a feature that is 0 for all inputs receives no gradient again; a kernel can be 0.
    References: Finetuning Pretrained Transformers into RNNs (Kasai et al., 2021, arXiv 2103.13076).
    [PHI-T2R-D1]
    """

    kind: Literal["t2r"] = "t2r"
    d_phi: int = Field(gt=0, description="number of features")

    def output_dim(self, d: int) -> int:
        return self.d_phi

    def traits(self) -> Traits:
        return Traits(non_negative=True, kernel_non_negative=True)

    def init(
        self,
        d: int,
        *,
        heads: int = 1,
        generator: torch.Generator | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> Params:
        weight = scaled_normal((heads, d, self.d_phi), seeded(generator), dtype, device)
        bias = torch.zeros(heads, self.d_phi, dtype=dtype, device=device)
        return {"learned": {"weight": weight, "bias": bias}, "frozen": {}}

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, tuple[Tensor, Tensor, Any]]:
        features = affine(self.kind, x, params).relu_()
        return features.to(x.dtype), (features, x, params)

    def vjp(
        self, residuals: tuple[Tensor, Tensor, Any], g: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        features, x, params = residuals
        return affine_vjp(x, params, activate_vjp("relu", features, g.to(features.dtype)))
