"""Learned projections, the maps that are made of them, and softmax over features, with which some of them end."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from hecate.activation import GELU, Activation, ActivationKind, SiLU
from hecate.checks import Size
from hecate.phi.base import FeatureMap, Params, Traits, per_head, project_precisely, project_vjp, sum_to_heads, widened
from hecate.variant import Conflicts


def affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x weight + bias per head, in float32 or better."""
    product = project_precisely(x, weight)
    return product + per_head(bias, x).to(product)


def affine_vjp(x: Tensor, weight: Tensor, bias: Tensor, g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Cotangents of x, weight and bias from the cotangent g of `affine`."""
    gx, gweight = project_vjp(x, weight, g)
    return gx.to(x.dtype), {"weight": gweight, "bias": sum_to_heads(g, len(bias)).to(bias.dtype)}


class Linear(FeatureMap):
    r"""linear: phi(x) = x W, W learned per head.

    Mixes and resizes key space. A d_phi below d saves state; a d_phi above d costs state and buys no capacity, because
    the kernel x W W^T y has rank at most d.

    Formula: $\phi(x) = W^\top x$
    Shapes: x `[..., D]` or `[..., H, D]` -> `[..., d_phi]` (None: D); learned weight `[H, D, d_phi]` from N(0, 1/D).
    VJP: gx = g W^T, gW = x^T g summed over tokens.
    Traits: odd, degree 1.
    Cost: O(D d_phi).
    Origin: the learned projection of any attention layer. [PHI-LINEAR-D1]
    """

    kind: Literal["linear"] = "linear"
    d_phi: Size | None = Field(default=None, gt=0, description="number of features; null: D")
    promises = Traits(parity="odd", degree=1, bounded_slope=True, decodes=True)

    def shapes(self, d: int) -> dict[str, tuple[int, ...]]:
        return {"weight": (d, self.output_dim(d))}

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        (weight,) = self.parameters(params, "weight")
        return project_precisely(x, weight).to(x.dtype), (x, weight)

    def vjp(self, residuals: tuple[Tensor, Tensor], g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        x, weight = residuals
        gx, gweight = project_vjp(x, weight, widened(g, weight))
        return gx.to(x.dtype), {"weight": gweight}


class T2R(FeatureMap):
    r"""t2r: phi(x) = max(x W + b, 0), W and b learned per head.

    One layer of a network as the map, used to turn pretrained transformers into recurrent ones with few features.

    Formula: $\phi(x) = \max(W^\top x + b, 0)$
    Shapes: x `[..., D]` or `[..., H, D]` -> `[..., d_phi]` (None: 4 D); learned weight `[H, D, d_phi]` from N(0, 1/D),
    bias `[H, d_phi]` from 0.
    VJP: with z = x W + b: gz = g for z > 0, else 0; gx = gz W^T, gW = x^T gz and gb = gz summed over tokens.
    Traits: non_negative, kernel_non_negative.
    Cost: O(D d_phi).
    Warning: a feature that is 0 for all inputs receives no gradient again; a kernel can be 0.
    References: Finetuning Pretrained Transformers into RNNs (Kasai et al., 2021, arXiv 2103.13076). [PHI-T2R-D1]
    """

    kind: Literal["t2r"] = "t2r"
    d_phi: Size | None = Field(default=None, gt=0, description="number of features; null: 4 D")
    widening: ClassVar[int] = 4
    promises = Traits(non_negative=True, kernel_non_negative=True)

    def shapes(self, d: int) -> dict[str, tuple[int, ...]]:
        return {"weight": (d, self.output_dim(d)), "bias": (self.output_dim(d),)}

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, tuple[Tensor, ...]]:
        weight, bias = self.parameters(params, "weight", "bias")
        features = affine(x, weight, bias).relu_()
        return features.to(x.dtype), (features, x, weight, bias)

    def vjp(self, residuals: tuple[Tensor, ...], g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        features, x, weight, bias = residuals
        return affine_vjp(x, weight, bias, torch.ops.aten.threshold_backward(g.to(features.dtype), features, 0))


class _Product(FeatureMap):
    """Helper for products act(x W_1) * (x W_2) of two learned projections, or of these themselves."""

    _names: ClassVar[tuple[str, str]]
    _act: ClassVar[Activation | None] = None

    def shapes(self, d: int) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(self._names, (d, self.output_dim(d)))

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, tuple[Tensor, ...]]:
        w_1, w_2 = self.parameters(params, *self._names)
        a, b = project_precisely(x, w_1), project_precisely(x, w_2)
        first = a if self._act is None else self._act.value(a)
        return (first * b).to(x.dtype), (x, a, b, w_1, w_2)

    def vjp(self, residuals: tuple[Tensor, ...], g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        x, a, b, w_1, w_2 = residuals
        g = g.to(a.dtype)
        first, ga = a, g * b
        if self._act is not None:
            first = self._act.value(a)
            ga = self._act.slope(a, first) * ga
        gx_1, gw_1 = project_vjp(x, w_1, ga)
        gx_2, gw_2 = project_vjp(x, w_2, g * first)
        return (gx_1 + gx_2).to(x.dtype), dict(zip(self._names, (gw_1, gw_2), strict=True))


class Hadamard(_Product):
    r"""hadamard: phi(x) = (x W_1) * (x W_2), both matrices learned per head.

    A polynomial map of degree 2 that chooses d_phi features instead of keeping all D (D + 1) / 2; unlike those of
    `linear`, their rank is not bounded by D.

    Formula: $\phi(x) = (W_1^\top x) \odot (W_2^\top x)$
    Shapes: x `[..., D]` or `[..., H, D]` -> `[..., d_phi]` (None: 4 D); learned w_1, w_2 `[H, D, d_phi]`, from N(0,
    1/D).
    VJP: with a = x W_1, b = x W_2: ga = g b, gb = g a; gx = ga W_1^T + gb W_2^T, gW_1 = x^T ga, gW_2 = x^T gb summed
    over tokens.
    Traits: even, degree 2; features and kernel have either sign.
    Cost: O(D d_phi).
    Warning: x and -x have the same features, and |phi(x)|^2 grows with the fourth power of x: normalise features for
    delta-type rules. The library that offers this map adds biases, which make it neither even nor of a degree.
    Origin: gated linear units without the activation; libraries of linear attention. [PHI-HADA-D1]"""

    kind: Literal["hadamard"] = "hadamard"
    d_phi: Size | None = Field(default=None, gt=0, description="number of features; null: 4 D")
    widening: ClassVar[int] = 4
    promises = Traits(parity="even", degree=2)
    _names = ("w_1", "w_2")


class GLU(_Product):
    r"""glu: phi(x) = silu(x W_g) * (x W_u), both matrices learned per head.

    The hidden layer of a gated MLP as the map: a matrix memory behind it is that MLP's last layer, written at test
    time.

    Formula: $\phi(x) = \mathrm{silu}(W_g^\top x) \odot (W_u^\top x)$
    Shapes: x `[..., D]` or `[..., H, D]` -> `[..., d_hidden]` (None: 4 D); learned w_gate, w_up `[H, D, d_hidden]`,
    both from N(0, 1/D).
    VJP: with a = x W_g, b = x W_u: ga = g b silu'(a), gb = g silu(a); gx = ga W_g^T + gb W_u^T, gW_g = x^T ga, gW_u =
    x^T gb summed over tokens.
    Traits: none; features and kernel have either sign.
    Cost: O(D d_hidden).
    Warning: near 0 features are a b / 2, even in x, and far out of degree 2: |phi(x)|^2 grows with the fourth power.
    References: GLU Variants Improve Transformer (Shazeer, 2020, arXiv 2002.05202); In-Place Test-Time Training (2026,
    arXiv 2604.06169). [PHI-GLU-D1]
    """

    kind: Literal["glu"] = "glu"
    d_hidden: Size | None = Field(default=None, gt=0, description="number of features; null: 4 D")
    _names = ("w_gate", "w_up")
    _act = SiLU()

    def output_dim(self, d: int) -> int:
        return 4 * d if self.d_hidden is None else self.d_hidden


class MLP(FeatureMap):
    r"""mlp: phi(x) = x + s(x W_in) W_out, both matrices learned per head; without x if not residual.

    A learned non-linear key space. The residual form keeps the width; the plain one has any d_phi.

    Formula: $\phi(x) = x + W_{out}^\top\, \mathrm{act}(W_{in}^\top x)$
    $\phi(x) = W_{out}^\top\, \mathrm{act}(W_{in}^\top x) \quad \text{if not residual}$
    Shapes: x `[..., D]` or `[..., H, D]` -> `[..., d_phi]`, d_phi = D unless given; learned w_in `[H, D, d_hidden]`
    (None: 4 D) from N(0, 1/D) and w_out `[H, d_hidden, d_phi]` from N(0, 1/d_hidden).
    VJP: with a = x W_in: ga = (g W_out^T) s'(a), gx = ga W_in^T (+ g), gW_in = x^T ga,
    gW_out = s(a)^T g, summed over tokens. relu: s'(0) = 0.
    Traits: degree 1 for relu, odd for tanh, none otherwise.
    Cost: O(D d_hidden + d_hidden d_phi).
    References: Nested Learning (Behrouz et al., 2025, arXiv 2512.24695). [PHI-MLP-D1]
    """

    kind: Literal["mlp"] = "mlp"
    d_hidden: Size | None = Field(default=None, gt=0, description="width of the layer between; null: 4 D")
    activation: ActivationKind = GELU()
    residual: bool = True
    d_phi: Size | None = Field(default=None, gt=0, description="number of features; null: D")

    def conflicts(self) -> Conflicts:
        if self.residual and self.d_phi is not None:
            width = f"is the input width when residual is true, got {self.d_phi}"
            yield ("d_phi",), f"{width}; leave it out, or set residual to false"

    def traits(self) -> Traits:
        return Traits(parity="odd" if self.activation.odd else "none", degree=self.activation.degree)

    def shapes(self, d: int) -> dict[str, tuple[int, ...]]:
        hidden = 4 * d if self.d_hidden is None else self.d_hidden
        return {"w_in": (d, hidden), "w_out": (hidden, self.output_dim(d))}

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, tuple[Tensor, ...]]:
        w_in, w_out = self.parameters(params, "w_in", "w_out")
        before = project_precisely(x, w_in)
        features = project_precisely(self.activation.value(before), w_out)
        if self.residual:
            features = x.to(features.dtype) + features
        return features.to(x.dtype), (x, before, w_in, w_out)

    def vjp(self, residuals: tuple[Tensor, ...], g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        x, before, w_in, w_out = residuals
        g = g.to(before.dtype)
        after = self.activation.value(before)
        gafter, gw_out = project_vjp(after, w_out, g)
        gbefore = gafter * self.activation.slope(before, after)
        gx, gw_in = project_vjp(x, w_in, gbefore)
        if self.residual:
            gx = gx + g
        return gx.to(x.dtype), {"w_in": gw_in, "w_out": gw_out}


# Softmax over the features of one key.


class Softmax(FeatureMap):
    r"""softmax: phi(x) = softmax(x / temperature) over the components of x.

    Positive features that sum to 1: a soft choice of a slot, not the softmax of attention, which runs over keys.
    `half_space` appends softmax(-x / temperature), which sees the smallest components as sharply as the largest.

    Formula: $\phi(x) = \mathrm{softmax}(x / \tau),\quad \tau = \mathrm{temperature}$
    $\phi(x) = [\mathrm{softmax}(x / \tau),\ \mathrm{softmax}(-x / \tau)] \quad \text{with half space}$
    Shapes: x `[..., D]` -> `[..., D]`, with half_space `[..., 2 D]`.
    VJP: with f = phi(x): gx = f (g - f.g) / temperature, minus the same of the other half.
    Traits: non_negative, kernel_non_negative, norm_bound 1 (half_space 2).
    Cost: O(D).
    Warning: a constant added to all components of x changes nothing, in either form.
    References: Efficient Attention: Attention with Linear Complexities (Shen et al., 2018, arXiv 1812.01243) for one
    half; The Hedgehog & the Porcupine (Zhang et al., 2024, arXiv 2402.04347) for both. [PHI-SOFTMAX-D1]
    """

    kind: Literal["softmax"] = "softmax"
    temperature: float = Field(default=1.0, gt=0, description="small: close to an argmax")
    half_space: bool = Field(default=False, description="append softmax(-x / temperature)")

    def output_dim(self, d: int) -> int:
        return 2 * d if self.half_space else d

    def traits(self) -> Traits:
        bound = 2.0 if self.half_space else 1.0
        return Traits(non_negative=True, kernel_non_negative=True, norm_bound=bound)

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, Tensor]:
        z = widened(x) / self.temperature
        features = both_softmax(z) if self.half_space else z.softmax(-1)
        return features.to(x.dtype), features

    def vjp(self, residuals: Tensor, g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        pull = both_softmax_vjp if self.half_space else softmax_vjp
        return (pull(residuals, g.to(residuals.dtype)) / self.temperature).to(g.dtype), {}


def softmax_vjp(features: Tensor, g: Tensor) -> Tensor:
    """Cotangent of z from that of `features = z.softmax(-1)`."""
    return torch.ops.aten._softmax_backward_data(g, features, -1, features.dtype)


def both_softmax(z: Tensor) -> Tensor:
    """`[softmax(z), softmax(-z)]`, each with a sum of 1: `[..., 2 D]`."""
    return torch.cat([z.softmax(-1), (-z).softmax(-1)], -1)


def joint_softmax(z: Tensor) -> Tensor:
    """`softmax([2 z, -2 z])`, both halves with a sum of 1 together: `[..., 2 D]`."""
    return torch.cat([2 * z, -2 * z], -1).softmax(-1)


def joint_softmax_vjp(features: Tensor, g: Tensor) -> Tensor:
    """Cotangent of z from that of `features = joint_softmax(z)`."""
    up, down = softmax_vjp(features, g).chunk(2, -1)
    return 2 * (up - down)


def both_softmax_vjp(features: Tensor, g: Tensor) -> Tensor:
    """Cotangent of z from that of `features = both_softmax(z)`."""
    (up, down), (gup, gdown) = features.chunk(2, -1), g.chunk(2, -1)
    return softmax_vjp(up, gup) - softmax_vjp(down, gdown)


class Hedgehog(FeatureMap):
    r"""hedgehog: phi(x) = [softmax(z), softmax(-z)], z = x W + b, W and b learned per head; joint: softmax([2 z,
    -2 z]).

    Spiky, positive features that can be trained until linear attention mimics softmax attention. W starts as the
    identity and b at 0, where phi is `softmax` with half_space. `joint` is one softmax over both halves, as the library
    flash-linear-attention has it: another kernel, in which the half with the largest component takes what the other
    loses.

    Formula: $\phi(x) = [\mathrm{softmax}(z),\ \mathrm{softmax}(-z)],\quad z = W^\top x + b$
    $\phi(x) = \mathrm{softmax}([2 z,\ -2 z]) \quad \text{if joint}$
    Shapes: x `[..., D]` or `[..., H, D]` -> `[..., 2 D]`; learned weight `[H, D, D]`, bias `[H, D]`.
    VJP: gz = f (g - f.g) of the first half minus that of the second, joint twice that with f.g over both; gx = gz W^T,
    gW = x^T gz and gb = gz summed over tokens.
    Traits: non_negative, kernel_non_negative, norm_bound 2 (joint 1).
    Cost: O(D^2).
    Warning: the paper learns one map for queries and another for keys; here one serves both, so that phi(q).phi(k) is a
    kernel. Give q and k projections of their own before the map.
    References: The Hedgehog & the Porcupine: Expressive Linear Attentions with Softmax Mimicry (Zhang et al., 2024,
    arXiv 2402.04347). [PHI-HEDGEHOG-D1]
    """

    kind: Literal["hedgehog"] = "hedgehog"
    widening: ClassVar[int] = 2
    joint: bool = Field(default=False, description="one softmax over [2 z, -2 z]")

    def traits(self) -> Traits:
        return Traits(non_negative=True, kernel_non_negative=True, norm_bound=1.0 if self.joint else 2.0)

    def shapes(self, d: int) -> dict[str, tuple[int, ...]]:
        return {"weight": (d, d), "bias": (d,)}

    def start(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        if name == "bias":
            return super().start(name, shape, generator)
        return torch.eye(shape[-1], dtype=torch.float64).repeat(shape[0], 1, 1)

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, tuple[Tensor, ...]]:
        weight, bias = self.parameters(params, "weight", "bias")
        features = (joint_softmax if self.joint else both_softmax)(affine(x, weight, bias))
        return features.to(x.dtype), (features, x, weight, bias)

    def vjp(self, residuals: tuple[Tensor, ...], g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        features, x, weight, bias = residuals
        pull = joint_softmax_vjp if self.joint else both_softmax_vjp
        return affine_vjp(x, weight, bias, pull(features, g.to(features.dtype)))
