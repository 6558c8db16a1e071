"""Several maps side by side."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from hecate.phi.base import Params, Traits, compute_dtype
from hecate.phi.nested import Several, own, prefixed


class Concat(Several):
    """concat: phi(x) = [phi_1(x), ..., phi_n(x)].

    The kernel of the result is the sum of the kernels. Parameters are named by position: `0.weight`.

    Shapes: x `[..., D]` -> `[..., sum of the widths]`.
    VJP: g is cut at the widths; gx = sum of the maps' gx.
    Traits: non_negative, kernel_non_negative if all are; parity and degree if all agree; norm_bound the sum; is_random,
    needs_position if any is.
    Cost: the sum of the maps' costs.
    References: kernel algebra; Kernel Methods for Pattern Analysis (Shawe-Taylor and Cristianini, 2004).
    [PHI-CONCAT-D1]
    """

    kind: Literal["concat"] = "concat"

    def output_dim(self, d: int) -> int:
        return sum(map_.output_dim(d) for map_ in self.maps)

    def traits(self) -> Traits:
        each = [map_.traits() for map_ in self.maps]
        parities, degrees = {t.parity for t in each}, {t.degree for t in each}
        bounds = [t.norm_bound for t in each if t.norm_bound is not None]
        return Traits(
            non_negative=all(t.non_negative for t in each),
            kernel_non_negative=all(t.kernel_non_negative for t in each),
            parity=parities.pop() if len(parities) == 1 else "none",
            degree=degrees.pop() if len(degrees) == 1 else None,
            norm_bound=sum(bounds) if len(bounds) == len(each) else None,
            is_random=any(t.is_random for t in each),
            needs_position=any(t.needs_position for t in each),
        )

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, Any]:
        parts, residuals = [], []
        for index, map_ in enumerate(self.maps):
            features, residual = map_.forward(x, own(params, index))
            parts.append(features)
            residuals.append(residual)
        return torch.cat(parts, -1), (tuple(residuals), [p.shape[-1] for p in parts])

    def vjp(self, residuals: Any, g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        each, sizes = residuals
        gxs, grads = [], {}
        for index, (residual, part) in enumerate(zip(each, torch.split(g, sizes, -1), strict=True)):
            gx, glearned = self.maps[index].vjp(residual, part)
            gxs.append(gx)
            grads.update(prefixed(glearned, index))
        dtype = compute_dtype(g)
        return torch.stack([gx.to(dtype) for gx in gxs]).sum(0).to(gxs[0].dtype), grads

    def exact_kernel(self, x: Tensor, y: Tensor) -> Tensor | None:
        """The sum of the maps' kernels, None unless every map has one."""
        kernels = [map_.exact_kernel(x, y) for map_ in self.maps]
        known = [kernel for kernel in kernels if kernel is not None]
        return torch.stack(known).sum(0) if len(known) == len(kernels) else None
