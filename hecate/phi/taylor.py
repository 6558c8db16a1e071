"""Taylor features of softmax."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from hecate.phi.base import FeatureMap, Params, Traits, compute_dtype
from hecate.phi.monomials import Degree, bounded, powers, powers_vjp, widths
from hecate.sizes import Count


class Taylor(FeatureMap):
    """taylor: phi(x) = [1, x', vec(x' x'^T) / sqrt(2), ...] up to order, x' = x / d^(1/4).

    The series of softmax's kernel: phi(x).phi(y) = 1 + z + z^2/2 + ... with z = x.y / sqrt(d). Close to exp(z) while
    |z| is small, which keys of unit norm guarantee. `compact` merges equal products, which nearly halves the width at
    order 2 and leaves the kernel as it is.

    Shapes: x `[..., D]` -> `[..., C(D + order, order)]`; not compact: `[..., 1 + D + ... + D^order]`.
    VJP: that of `polynomial` at x', with gx = gx' / d^(1/4).
    Traits: kernel_non_negative for even order (at order 2 the kernel is at least 1/2; single features are signed).
    Cost: O(order D^order / order!) when compact.
    Warning: the width is quadratic in D at order 2: project keys to about 16 components first.
    References: Simple Linear Attention Language Models Balance the Recall-Throughput Tradeoff (Arora et al., 2024,
    arXiv 2402.18668). [PHI-TAYLOR-D1]
    """

    kind: Literal["taylor"] = "taylor"
    order: Degree = Field(default=2, ge=1)
    compact: bool = True
    max_d_phi: Count = Field(default=65_536, gt=0)

    def output_dim(self, d: int) -> int:
        return bounded(sum(widths(d, self.order, self.compact)), self.max_d_phi, d, "order")

    def traits(self) -> Traits:
        return Traits(kernel_non_negative=self.order % 2 == 0)

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, tuple[Tensor, Sequence[Tensor]]]:
        self.output_dim(x.shape[-1])
        scaled = self._scaled(x)
        blocks = powers(scaled, self.order, self.compact)
        parts = [block * _root(i) for i, block in enumerate(blocks)]
        return torch.cat(parts, -1).to(x.dtype), (scaled, blocks)

    def vjp(self, residuals: tuple[Tensor, Sequence[Tensor]], g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        scaled, blocks = residuals
        sizes = widths(scaled.shape[-1], self.order, self.compact)
        parts = torch.split(g.to(scaled.dtype), sizes, -1)
        given = [part * _root(i) for i, part in enumerate(parts)]
        gscaled = powers_vjp(scaled, blocks, given, self.compact)
        return (gscaled / math.sqrt(math.sqrt(scaled.shape[-1]))).to(g.dtype), {}

    def exact_kernel(self, x: Tensor, y: Tensor) -> Tensor:
        """The series itself, 1 + z + z^2/2 + ..., not the exponential that it approximates."""
        z = (x * y).sum(-1) / math.sqrt(x.shape[-1])
        return torch.stack([z**i / math.factorial(i) for i in range(self.order + 1)]).sum(0)

    def _scaled(self, x: Tensor) -> Tensor:
        return x.to(compute_dtype(x)) / math.sqrt(math.sqrt(x.shape[-1]))


def _root(i: int) -> float:
    return 1 / math.sqrt(math.factorial(i))
