"""Componentwise maps: what they share."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from hecate.phi.base import FeatureMap, Params, compute_dtype


class Elementwise(FeatureMap):
    """Helper for maps that act on each component alone: a variant gives `value`, `derivative`.

    Both are called with float32 or better; features and cotangents are rounded once, to the dtype of x. The VJP is gx =
    g derivative(x), or `pull` where x and the value give it at less cost. Not a variant itself: it has no kind.
    """

    @abstractmethod
    def value(self, x: Tensor) -> Tensor:
        """phi, componentwise."""

    @abstractmethod
    def derivative(self, x: Tensor) -> Tensor:
        """The derivative of `value`; at a kink, the side that the docstring names."""

    def pull(self, x: Tensor, value: Tensor, g: Tensor) -> Tensor:
        """The cotangent of x from that of its value."""
        return g * self.derivative(x)

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        wide = x.to(compute_dtype(x))
        value = self.value(wide)
        return value.to(x.dtype), (wide, value)

    def vjp(self, residuals: tuple[Tensor, Tensor], g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return self.pull(*residuals, g.to(residuals[0].dtype)).to(g.dtype), {}
