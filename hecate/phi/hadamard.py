"""Products of two learned projections."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from hecate.phi.base import Params, Traits, project_vjp
from hecate.phi.learned import Learned, learned
from hecate.phi.random import project_precisely
from hecate.sizes import Size


class Hadamard(Learned):
    """hadamard: phi(x) = (x W_1) * (x W_2), both matrices learned per head.

    d_phi learned quadratic forms: a polynomial map of degree 2 that chooses its features instead of keeping all D (D +
    1) / 2. The rank of the features is that of d_phi independent products, not
    D as with `linear`.

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

    def output_dim(self, d: int) -> int:
        return self.d_phi

    def traits(self) -> Traits:
        return Traits(parity="even", degree=2)

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
