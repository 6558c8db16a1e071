"""Learned projections, and the maps that are made of them."""

from __future__ import annotations

from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from hecate.checks import Size
from hecate.errors import ConfigError
from hecate.phi.base import FeatureMap, Params, Traits, compute_dtype, per_head, project_vjp, sum_to_heads
from hecate.phi.random import project_precisely
from hecate.tape.activation import Activation, activate, activate_vjp


def learned(kind: str, params: Params, name: str) -> Tensor:
    """A learned parameter, or a ConfigError that says where parameters come from."""
    if name not in params["learned"]:
        raise ConfigError(
            f"feature map {kind!r} needs its learned parameter {name!r}, got "
            f"{sorted(params['learned'])}; pass params=feature_map.init(d, generator=...)"
        )
    return params["learned"][name]


def affine(kind: str, x: Tensor, params: Params) -> Tensor:
    """x weight + bias per head, from the learned parameters of those names; float32 or better."""
    weight, bias = (learned(kind, params, name) for name in ("weight", "bias"))
    product = project_precisely(x, weight)
    return product + per_head(bias, x).to(product)


def affine_vjp(x: Tensor, params: Params, g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Cotangents of x, weight and bias from the cotangent g of `affine`."""
    weight, bias = (params["learned"][name] for name in ("weight", "bias"))
    gx, gweight = project_vjp(x.to(g.dtype), weight.to(g.dtype), g)
    gbias = sum_to_heads(g, bias.shape[0])
    return gx.to(x.dtype), {"weight": gweight.to(weight.dtype), "bias": gbias.to(bias.dtype)}


class Linear(FeatureMap):
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
    promises = Traits(parity="odd", degree=1, bounded_slope=True, decodes=True)

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


class T2R(FeatureMap):
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
    promises = Traits(non_negative=True, kernel_non_negative=True)

    def shapes(self, d: int) -> dict[str, tuple[int, ...]]:
        return {"weight": (d, self.d_phi), "bias": (self.d_phi,)}

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, tuple[Tensor, Tensor, Any]]:
        features = affine(self.kind, x, params).relu_()
        return features.to(x.dtype), (features, x, params)

    def vjp(self, residuals: tuple[Tensor, Tensor, Any], g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        features, x, params = residuals
        return affine_vjp(x, params, activate_vjp("relu", features, g.to(features.dtype)))


class Hadamard(FeatureMap):
    """hadamard: phi(x) = (x W_1) * (x W_2), both matrices learned per head.

    d_phi learned quadratic forms: a polynomial map of degree 2 that chooses its features instead of keeping all D (D +
    1) / 2. The rank of the features is that of d_phi independent products, not D as with `linear`.

    Shapes: x `[..., D]` or `[..., H, D]` -> `[..., d_phi]`; learned w_1, w_2 `[H, D, d_phi]`, both from N(0, 1/D).
    VJP: with a = x W_1, b = x W_2: ga = g b, gb = g a; gx = ga W_1^T + gb W_2^T, gW_1 = x^T ga, gW_2 = x^T gb summed
    over tokens.
    Traits: even, degree 2; features and kernel have either sign.
    Cost: O(D d_phi).
    Warning: x and -x have the same features, and |phi(x)|^2 grows with the fourth power of x: normalise features for
    delta-type rules. The library that offers this map adds biases, which make it neither even nor of a degree.
    Origin: gated linear units without the activation; libraries of linear attention. [PHI-HADA-D1]"""

    kind: Literal["hadamard"] = "hadamard"
    d_phi: Size = Field(gt=0, description="number of features")
    promises = Traits(parity="even", degree=2)

    def shapes(self, d: int) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(("w_1", "w_2"), (d, self.d_phi))

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, tuple[Tensor, ...]]:
        w_1, w_2 = (learned(self.kind, params, name) for name in ("w_1", "w_2"))
        a, b = project_precisely(x, w_1), project_precisely(x, w_2)
        return (a * b).to(x.dtype), (x, a, b, w_1, w_2)

    def vjp(self, residuals: tuple[Tensor, ...], g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        x, a, b, w_1, w_2 = residuals
        wide, g = x.to(a.dtype), g.to(a.dtype)
        gx_1, gw_1 = project_vjp(wide, w_1.to(a.dtype), g * b)
        gx_2, gw_2 = project_vjp(wide, w_2.to(a.dtype), g * a)
        return (gx_1 + gx_2).to(x.dtype), {"w_1": gw_1.to(w_1.dtype), "w_2": gw_2.to(w_2.dtype)}


class MLP(FeatureMap):
    """mlp: phi(x) = x + s(x W_in) W_out, both matrices learned per head; without x if not residual.

    A learned non-linear key space. The residual form keeps the width; the plain one has any d_phi.

    Shapes: x `[..., D]` or `[..., H, D]` -> `[..., d_phi]`, d_phi = D unless given; learned w_in `[H, D, d_hidden]`
    from N(0, 1/D) and w_out `[H, d_hidden, d_phi]` from N(0, 1/d_hidden).
    VJP: with a = x W_in: ga = (g W_out^T) s'(a), gx = ga W_in^T (+ g), gW_in = x^T ga,
    gW_out = s(a)^T g, summed over tokens. relu: s'(0) = 0.
    Traits: degree 1 for relu, odd for tanh, none otherwise.
    Cost: O(D d_hidden + d_hidden d_phi).
    References: Nested Learning (Behrouz et al., 2025, arXiv 2512.24695). [PHI-MLP-D1]
    """

    kind: Literal["mlp"] = "mlp"
    d_hidden: Size = Field(gt=0)
    activation: Activation = "gelu"
    residual: bool = True
    d_phi: Size | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _one_width(self) -> Self:
        if self.residual and self.d_phi is not None:
            raise ConfigError(
                f"is the input width when residual is true, got {self.d_phi}; leave it out, or set residual to false",
                ("d_phi",),
            )
        return self

    def traits(self) -> Traits:
        return Traits(
            parity="odd" if self.activation == "tanh" else "none", degree=1.0 if self.activation == "relu" else None
        )

    def shapes(self, d: int) -> dict[str, tuple[int, ...]]:
        return {"w_in": (d, self.d_hidden), "w_out": (self.d_hidden, self.output_dim(d))}

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, tuple[Tensor, ...]]:
        w_in, w_out = (learned(self.kind, params, name) for name in ("w_in", "w_out"))
        before = project_precisely(x, w_in)
        features = project_precisely(activate(self.activation, before, 0), w_out)
        if self.residual:
            features = x.to(features.dtype) + features
        return features.to(x.dtype), (x, before, w_in, w_out)

    def vjp(self, residuals: tuple[Tensor, ...], g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        x, before, w_in, w_out = residuals
        dtype = before.dtype
        g = g.to(dtype)
        gafter, gw_out = project_vjp(activate(self.activation, before, 0), w_out.to(dtype), g)
        gbefore = gafter * activate(self.activation, before, 1)
        gx, gw_in = project_vjp(x.to(dtype), w_in.to(dtype), gbefore)
        if self.residual:
            gx = gx + g
        grads = {"w_in": gw_in.to(w_in.dtype), "w_out": gw_out.to(w_out.dtype)}
        return gx.to(x.dtype), grads
