"""Products of the features of several maps."""

from __future__ import annotations

from math import prod
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from hecate.phi.base import FeatureMap, Params, Parity, Traits, compute_dtype
from hecate.phi.monomials import bounded
from hecate.phi.nested import Several, own, prefixed
from hecate.sizes import Count
from hecate.tape.bridge import without_autocast


class TensorProduct(Several):
    """tensor_product: phi(x) = phi_1(x) (x) ... (x) phi_n(x), all products of one feature each.

    The kernel of the result is the product of the kernels: two keys are alike where every map finds them alike. The
    last map's index runs fastest. Parameters are named by position: `0.weight`.

    Shapes: x `[..., D]` -> `[..., product of the widths]`.
    VJP: from the last map to the first, with G the cotangent as a matrix [features so far, width of the map]: g_map =
    G^T features so far, G = G features of the map; gx = sum of the maps' gx.
    Traits: non_negative, kernel_non_negative if all are; odd for an odd number of odd maps among even ones, even for an
    even number; degree the sum, norm_bound the product if all have one; is_random, needs_position if any is.
    Cost: the sum of the maps' costs and O(d_phi).
    References: kernel algebra; Kernel Methods for Pattern Analysis (Shawe-Taylor and Cristianini, 2004).
    [PHI-TENSOR-D1]
    """

    kind: Literal["tensor_product"] = "tensor_product"
    maps: tuple[FeatureMap, ...] = Field(min_length=2, strict=False)
    max_d_phi: Count = Field(default=65_536, gt=0)

    def output_dim(self, d: int) -> int:
        width = prod([map_.output_dim(d) for map_ in self.maps])
        return bounded(width, self.max_d_phi, d, "maps", cure="take fewer or narrower maps, ")

    def traits(self) -> Traits:
        each = [map_.traits() for map_ in self.maps]
        degrees = [t.degree for t in each if t.degree is not None]
        bounds = [t.norm_bound for t in each if t.norm_bound is not None]
        return Traits(
            non_negative=all(t.non_negative for t in each),
            kernel_non_negative=all(t.kernel_non_negative for t in each),
            parity=_parity([t.parity for t in each]),
            degree=sum(degrees) if len(degrees) == len(each) else None,
            norm_bound=prod(bounds) if len(bounds) == len(each) else None,
            is_random=any(t.is_random for t in each),
            needs_position=any(t.needs_position for t in each),
        )

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, Any]:
        self.output_dim(x.shape[-1])
        residuals, factors = [], []
        for index, map_ in enumerate(self.maps):
            features, residual = map_.forward(x, own(params, index))
            factors.append(features.to(compute_dtype(x)))
            residuals.append(residual)
        products = [factors[0]]
        for factor in factors[1:]:
            products.append((products[-1].unsqueeze(-1) * factor.unsqueeze(-2)).flatten(-2))
        return products[-1].to(x.dtype), (tuple(residuals), factors, products[:-1])

    def vjp(self, residuals: Any, g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        each, factors, before = residuals
        carried, cotangents = g.to(factors[0].dtype), []
        for factor, product in zip(factors[:0:-1], before[::-1], strict=True):
            matrix = carried.unflatten(-1, (product.shape[-1], factor.shape[-1]))
            with without_autocast(g.device.type):
                cotangents.append((product.unsqueeze(-2) @ matrix).squeeze(-2))
                carried = (matrix @ factor.unsqueeze(-1)).squeeze(-1)
        gxs, grads = [], {}
        for index, given in enumerate([carried, *cotangents[::-1]]):
            gx, glearned = self.maps[index].vjp(each[index], given.to(g.dtype))
            gxs.append(gx.to(carried.dtype))
            grads.update(prefixed(glearned, index))
        return torch.stack(gxs).sum(0).to(g.dtype), grads

    def exact_kernel(self, x: Tensor, y: Tensor) -> Tensor | None:
        """The product of the maps' kernels; None unless every map has one.

        Maps draw independently, so expectations multiply as well.
        """
        kernels = [map_.exact_kernel(x, y) for map_ in self.maps]
        known = [kernel for kernel in kernels if kernel is not None]
        return torch.stack(known).prod(0) if len(known) == len(kernels) else None


def _parity(parities: list[Parity]) -> Parity:
    if "none" in parities:
        return "none"
    return "odd" if parities.count("odd") % 2 else "even"
