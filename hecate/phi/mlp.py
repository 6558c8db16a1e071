"""A learned two-layer map."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator
from torch import Tensor

from hecate.errors import ConfigError
from hecate.phi.base import Params, Traits, project_vjp
from hecate.phi.learned import Learned, learned
from hecate.phi.random import project_precisely
from hecate.sizes import Size
from hecate.tape.ops import Activation, activate


class MLP(Learned):
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

    def output_dim(self, d: int) -> int:
        return d if self.d_phi is None else self.d_phi

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
