"""The odd part of a map."""

from __future__ import annotations

from typing import Any, Literal, Self

import torch
from pydantic import model_validator
from torch import Tensor

from hecate.errors import ConfigError
from hecate.phi.base import Params, Traits
from hecate.phi.nested import Wrapper


class OddLift(Wrapper):
    """odd_lift: phi(x) = (inner(x) - inner(-x)) / 2.

    Makes any map admissible where signs must survive, above all for gradients in an optimiser: momentum through a map
    that is not odd drifts. Parameters are the inner map's, under their own names.

    Shapes: x `[..., D]` -> `[..., width of inner]`.
    VJP: gx = (inner^T(x) g + inner^T(-x) g) / 2, parameters (their cotangent at x - at -x) / 2.
    Traits: odd; degree and norm_bound of inner; is_random, needs_position of inner.
    Cost: twice inner, which is taken as it is where it is odd.
    Warning: the odd part of an even map is 0, so even maps are refused.
    Origin: ours; the odd part of a function. [PHI-ODD-D1]
    """

    kind: Literal["odd_lift"] = "odd_lift"

    @model_validator(mode="after")
    def _something_left(self) -> Self:
        if self.inner.parity == "even":
            raise ConfigError(
                f"must not be an even map, got {self.inner.kind!r}: its odd part is 0 everywhere", ("inner",)
            )
        return self

    def traits(self) -> Traits:
        inner = self.inner.traits()
        return Traits(
            parity="odd",
            degree=inner.degree,
            norm_bound=inner.norm_bound,
            is_random=inner.is_random,
            needs_position=inner.needs_position,
            componentwise=inner.componentwise,
            rising="none" if inner.rising == "none" else "everywhere",
            bounded_slope=inner.bounded_slope,
            forgets_length=inner.forgets_length,
            decodes=inner.decodes,
        )

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, tuple[Any, Any]]:
        ahead, residuals = self.inner.forward(x, params)
        if self.inner.parity == "odd":
            return ahead, (residuals, None)
        behind, mirrored = self.inner.forward(-x, params)
        return (ahead - behind) / 2, (residuals, mirrored)

    def vjp(self, residuals: tuple[Any, Any], g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        if residuals[1] is None:
            return self.inner.vjp(residuals[0], g)
        gx, ahead = self.inner.vjp(residuals[0], g)
        gmirrored, behind = self.inner.vjp(residuals[1], g)
        return (gx + gmirrored) / 2, {name: (ahead[name] - behind[name]) / 2 for name in ahead}

    def exact_kernel(self, x: Tensor, y: Tensor) -> Tensor | None:
        """(k(x, y) - k(x, -y) - k(-x, y) + k(-x, -y)) / 4 for inner's kernel k."""
        signs = ((x, y, 1), (x, -y, -1), (-x, y, -1), (-x, -y, 1))
        kernels = [(self.inner.exact_kernel(a, b), sign) for a, b, sign in signs]
        known = [sign * kernel for kernel, sign in kernels if kernel is not None]
        return torch.stack(known).sum(0) / 4 if len(known) == 4 else None
