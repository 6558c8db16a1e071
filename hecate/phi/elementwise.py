"""Componentwise maps: what they share."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from hecate.phi.base import FeatureMap, Params, compute_dtype


class Elementwise(FeatureMap):
    """Helper for maps that act on each component alone: a variant gives `value`, `derivative`.

    Both are called with float32 or better; features and cotangents are rounded once, to the dtype
    of x. Only x is kept for the VJP, gx = g derivative(x). Not a variant itself: it has no kind.
    """

    @abstractmethod
    def value(self, x: Tensor) -> Tensor:
        """phi, componentwise."""

    @abstractmethod
    def derivative(self, x: Tensor) -> Tensor:
        """The derivative of `value`; at a kink, the side that the docstring names."""

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, Tensor]:
        return self.value(x.to(compute_dtype(x))).to(x.dtype), x

    def vjp(self, residuals: Tensor, g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        derivative = self.derivative(residuals.to(compute_dtype(residuals)))
        return (g * derivative).to(residuals.dtype), {}
