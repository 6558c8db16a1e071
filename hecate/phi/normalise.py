"""Features of bounded length."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator
from torch import Tensor

from hecate.errors import ConfigError
from hecate.phi.base import Params, Traits, compute_dtype
from hecate.phi.nested import Wrapper


class Normalise(Wrapper):
    """normalise: phi(x) = f / sqrt(|f|^2 + eps^2), or f / (sum f + eps), with f = inner(x).

    Bounds |phi(x)|^2 by 1 whatever the keys are, so that a delta-type rule is stable for every lr < 2. `norm="l2"`
    divides by the length, `"sum"` by the sum of features, which must then be non-negative; the sum is what fast weight
    programmers use. eps only matters near 0, where it keeps the map smooth: features that are all 0 stay 0. Parameters
    are the inner map's, under their own names.

    Shapes: x `[..., D]` -> `[..., width of inner]`.
    VJP: with n = phi(x) and s the divisor: gf = (g - n (n.g)) / s for l2, (g - n.g) / s for sum; then inner's VJP of
    gf.
    Traits: norm_bound 1; non_negative, kernel_non_negative, parity, is_random, needs_position of inner.
    Cost: inner's, plus O(d_phi).
    References: Linear Transformers Are Secretly Fast Weight Programmers (Schlag et al., 2021, arXiv 2102.11174) for the
    sum; Parallelizing Linear Transformers with the Delta Rule over Sequence Length (Yang et al., 2024, arXiv
    2406.06484) for the length. [PHI-NORM-D1]
    """

    kind: Literal["normalise"] = "normalise"
    norm: Literal["l2", "sum"] = "l2"
    eps: float = Field(default=1e-6, gt=0)

    @model_validator(mode="after")
    def _a_sum_away_from_zero(self) -> Self:
        if self.norm == "sum" and not self.inner.non_negative:
            raise ConfigError(
                f"must be non-negative when norm is 'sum', got {self.inner.kind!r}, whose features "
                "may sum to 0; take norm 'l2' or a non-negative map such as 'elu'",
                ("inner",),
            )
        return self

    def traits(self) -> Traits:
        inner = self.inner.traits()
        return Traits(
            non_negative=inner.non_negative,
            kernel_non_negative=inner.kernel_non_negative,
            parity=inner.parity,
            norm_bound=1.0,
            is_random=inner.is_random,
            needs_position=inner.needs_position,
            forgets_length=inner.degree is not None or inner.forgets_length,
        )

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, tuple[Tensor, Tensor, Any]]:
        features, residuals = self.inner.forward(x, params)
        wide = features.to(compute_dtype(features))
        divisor = self._divisor(wide)
        normalised = wide / divisor
        return normalised.to(features.dtype), (normalised, divisor, residuals)

    def vjp(self, residuals: tuple[Tensor, Tensor, Any], g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        normalised, divisor, inner = residuals
        wide = g.to(normalised.dtype)
        along = (normalised * wide).sum(-1, keepdim=True)
        across = wide - (normalised * along if self.norm == "l2" else along)
        return self.inner.vjp(inner, (across / divisor).to(g.dtype))

    def exact_kernel(self, x: Tensor, y: Tensor) -> Tensor | None:
        """The cosine of inner's kernel for l2; None for sum, and where inner has none."""
        kernels = [self.inner.exact_kernel(a, b) for a, b in ((x, y), (x, x), (y, y))]
        if self.norm == "sum" or any(kernel is None for kernel in kernels):
            return None
        between, first, second = (kernel for kernel in kernels if kernel is not None)
        return between / ((first + self.eps**2) * (second + self.eps**2)).sqrt()

    def _divisor(self, features: Tensor) -> Tensor:
        if self.norm == "sum":
            return features.sum(-1, keepdim=True) + self.eps
        # Squares of large features overflow; with the largest taken out first they do not.
        # It cancels, so it is a constant to the derivative.
        largest = features.detach().abs().amax(-1, keepdim=True).clamp(min=self.eps)
        relative = (features / largest).square().sum(-1, keepdim=True)
        return largest * (relative + (self.eps / largest).square()).sqrt()
