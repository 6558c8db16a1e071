"""Polynomial features."""

from __future__ import annotations

import math
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from hecate.errors import ConfigError
from hecate.phi.base import Params, Traits, compute_dtype, per_head, sum_to_heads
from hecate.phi.learned import Learned, learned
from hecate.phi.monomials import Degree, bounded, powers, powers_vjp, widths
from hecate.sizes import Count

Coefficients = Literal["exponential", "ones", "learned"]


class Polynomial(Learned):
    """polynomial: phi(x) = [sqrt(a_i multinomial(b)) x^b for |b| = i] for i = 0 .. degree.

    Every monomial up to a degree, so scaled that the kernel is exactly sum_i a_i (x.y)^i: capacity of order d^degree.
    The coefficients are 1/i! (the exponential's series), ones, or learned: softplus of one number per degree and head,
    which keeps them positive, starting at 1/i!. `form="raw"` is [x, vec(x x^T)], of degree 2 without a constant, kernel
    x.y + (x.y)^2.

    Shapes: x `[..., D]` (`[..., H, D]` when learned) -> `[..., C(D + degree, degree)]`; raw `[..., D + D^2]`; learned
    coefficients `[H, degree + 1]`.
    VJP: from degree to degree, g_(i-1) += x.G_i and gx += G_i m_(i-1), G_i the cotangent of all products of m_(i-1)
    with a component of x; coefficient c_i receives sigmoid(c_i) / (2 a_i) times g.phi of its block.
    Traits: kernel_non_negative for even degree with fixed coefficients (symmetric form only).
    Cost: O(degree D^degree / degree!).
    Warning: |phi(x)|^2 grows like |x|^(2 degree); normalise keys for delta-type rules. Components alone (x^p without
    cross terms) have capacity d only, and unscaled monomials do not give powers of x.y.
    References: ATLAS (Behrouz et al., 2025, arXiv 2505.23735). [PHI-POLY-D1]
    """

    kind: Literal["polynomial"] = "polynomial"
    degree: Degree = Field(ge=1)
    form: Literal["symmetric", "raw"] = "symmetric"
    coefficients: Coefficients | None = Field(
        default=None, description="null: exponential when symmetric, ones when raw"
    )
    max_d_phi: Count = Field(default=65_536, gt=0)

    @model_validator(mode="after")
    def _raw_is_quadratic(self) -> Self:
        if self.form == "raw" and self.degree != 2:
            raise ConfigError(
                f"must be 2 when form is 'raw', got {self.degree}; form 'symmetric' takes any degree", ("degree",)
            )
        if self.form == "raw" and self.coefficients not in (None, "ones"):
            raise ConfigError(
                f"must be 'ones' or null when form is 'raw', got {self.coefficients!r}; form 'symmetric' takes all",
                ("coefficients",),
            )
        return self

    def output_dim(self, d: int) -> int:
        width = sum(widths(d, self.degree, self._symmetric)[self._first :])
        return bounded(width, self.max_d_phi, d, "degree")

    def traits(self) -> Traits:
        sure = self._symmetric and self.degree % 2 == 0 and self.coefficients != "learned"
        return Traits(kernel_non_negative=sure, linear_at=1 - self._first)

    def shapes(self, d: int) -> dict[str, tuple[int, ...]]:
        return {"coefficients": (self.degree + 1,)} if self.coefficients == "learned" else {}

    def start(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        # The inverse of softplus at 1/i!, so that training starts at the exponential.
        start = [math.log(math.expm1(1 / math.factorial(i))) for i in range(self.degree + 1)]
        return torch.tensor(start, dtype=torch.float64).repeat(shape[0], 1)

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, tuple[Any, ...]]:
        self.output_dim(x.shape[-1])
        raw = learned(self.kind, params, "coefficients") if self.coefficients == "learned" else None
        roots = self._roots(x, raw)
        blocks = powers(x.to(compute_dtype(x)), self.degree, self._symmetric)
        parts = [roots[i] * blocks[i] for i in range(self._first, self.degree + 1)]
        return torch.cat(parts, -1).to(x.dtype), (x, blocks, raw, roots)

    def vjp(self, residuals: tuple[Any, ...], g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        x, blocks, raw, roots = residuals
        wide = x.to(compute_dtype(x))
        sizes = widths(x.shape[-1], self.degree, self._symmetric)
        missing = [torch.zeros_like(blocks[0])] * self._first
        given = [*missing, *torch.split(g.to(wide.dtype), sizes[self._first :], -1)]
        scaled = [roots[i] * part for i, part in enumerate(given)]
        gx = powers_vjp(wide, blocks, scaled, self._symmetric).to(x.dtype)
        if raw is None:
            return gx, {}
        groots = torch.cat([(b * p).sum(-1, keepdim=True) for b, p in zip(blocks, given, strict=True)], -1)
        factor = raw.sigmoid() / (2 * torch.nn.functional.softplus(raw).sqrt())
        return gx, {"coefficients": sum_to_heads(groots, raw.shape[0]).to(raw.dtype) * factor}

    def exact_kernel(self, x: Tensor, y: Tensor) -> Tensor | None:
        """sum_i a_i (x.y)^i; None with learned a_i, which are not part of the configuration."""
        if self.coefficients == "learned":
            return None
        z, fixed = (x * y).sum(-1), self._fixed()
        powers_of_z = [z**i * fixed[i] for i in range(self._first, self.degree + 1)]
        return torch.stack(powers_of_z).sum(0)

    @property
    def _symmetric(self) -> bool:
        return self.form == "symmetric"

    @property
    def _first(self) -> int:
        return 0 if self._symmetric else 1

    def _fixed(self) -> list[float]:
        if not self._symmetric or self.coefficients == "ones":
            return [1.0] * (self.degree + 1)
        return [1 / math.factorial(i) for i in range(self.degree + 1)]

    def _roots(self, x: Tensor, raw: Tensor | None) -> list[float] | list[Tensor]:
        """sqrt(a_i) by degree: numbers, or `[..., 1]` tensors when they are learned."""
        if raw is None:
            return [math.sqrt(a) for a in self._fixed()]
        roots = torch.nn.functional.softplus(per_head(raw, x).to(compute_dtype(x))).sqrt()
        return list(torch.split(roots, 1, -1))
