"""Shifted GELU features."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from hecate.phi.base import Traits
from hecate.phi.elementwise import Elementwise
from hecate.tape.ops import activate, activate_vjp

_DEPTH = 0.1699712075  # -min of x Phi(x) = 0.16997120747990..., at x = -0.75179, rounded up


class GELUShifted(Elementwise):
    """gelu_shifted: phi(x) = x Phi(x) + shift, Phi the standard normal distribution function.

    GELU in its exact erf form, lifted by a constant. Its minimum is shift - 0.16997 at x = -0.7518, so the default
    shift keeps every feature positive; a smaller one than 0.16997 is allowed and declares no sign.

    Shapes: x `[..., D]` -> `[..., D]`.
    VJP: gx = (Phi(x) + x density(x)) g.
    Traits: non_negative and kernel_non_negative when shift >= 0.16997121.
    Cost: O(D).
    Warning: not monotone: it falls until x = -0.7518 and rises after it.
    References: Gaussian Error Linear Units (Hendrycks and Gimpel, 2016, arXiv 1606.08415). [PHI-GELU-D1]
    """

    kind: Literal["gelu_shifted"] = "gelu_shifted"
    shift: float = Field(default=0.2)

    def traits(self) -> Traits:
        positive = self.shift >= _DEPTH
        return Traits(non_negative=positive, kernel_non_negative=positive)

    def value(self, x: Tensor) -> Tensor:
        return activate("gelu", x, 0) + self.shift

    def derivative(self, x: Tensor) -> Tensor:
        return activate("gelu", x, 1)

    def pull(self, x: Tensor, value: Tensor, g: Tensor) -> Tensor:
        return activate_vjp("gelu", x, g)
