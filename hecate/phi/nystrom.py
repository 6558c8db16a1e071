"""Features from the kernel with chosen points."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from hecate.phi.base import Params, Traits, per_head, project_vjp, sum_to_heads
from hecate.phi.learned import learned
from hecate.phi.random import RandomMap, normal, project_precisely


class Nystrom(RandomMap):
    """nystrom: phi(x) = k(x, C) R, R R^T = (K_CC + eps I)^(-1), k Gaussian of bandwidth sigma.

    C holds num_centres points, and K_CC their kernel values. phi(x).phi(y) is the best approximation of k(x, y) =
    exp(-|x - y|^2 / (2 sigma^2)) that the centres allow: nearly exact where x or y is a centre, too small elsewhere,
    close to 0 far from all of them. Few centres in the right place beat many random features. R is the triangular root
    (of Cholesky), the symmetric one rotates features and leaves the kernel as it is.

    Centres are drawn from N(0, spread^2) once, or learned from there on.

    Shapes: x `[..., D]` or `[..., H, D]` -> `[..., num_centres]`; w `[H, D, num_centres]`, a centre per column, frozen
    or learned.
    VJP: with k = k(x, C): gk = g R^T, gR = k^T g; ga = gk k / sigma^2, gx = ga W^T - x sum(ga), gW = x^T ga - W
    sum(ga). Through R: gK_CC = -R low((R^T gR)^T) R^T, low the lower triangle with half the diagonal, then as for x.
    Traits: is_random unless centres are learned; norm_bound 1. The kernel has either sign.
    Cost: O(D num_centres + num_centres^2), and O(num_centres^3) once per call, in float64.
    Warning: eps bounds how far rounding errors grow, by 1 / sqrt(eps): lower it in float64 only. At a centre the kernel
    is too small by up to sqrt(eps) / 2. In float32 kernel values are off by about 1e-7 |x|^2 / sigma^2.
    References: Using the Nystrom Method to Speed Up Kernel Machines (Williams and Seeger, 2001). [PHI-NYSTROM-D1]
    """

    kind: Literal["nystrom"] = "nystrom"
    num_centres: int = Field(gt=0, le=1 << 14, description="d_phi")
    sigma: float = Field(default=1.0, gt=0, description="bandwidth of the Gaussian kernel")
    centres: Literal["drawn", "learned"] = "drawn"
    spread: float = Field(default=1.0, gt=0, description="deviation of a centre's components")
    eps: float = Field(default=1e-4, gt=0, description="ridge; a kernel value of a point is 1")

    def output_dim(self, d: int) -> int:
        return self.num_centres

    def traits(self) -> Traits:
        return Traits(is_random=self.centres == "drawn", norm_bound=1.0)

    def draw(self, d: int, generator: torch.Generator) -> dict[str, Tensor]:
        return {"w": self.spread * normal(d, self.num_centres, generator)}

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, tuple[Tensor, ...]]:
        w = self.drawn(params, "w") if self.is_random else learned(self.kind, params, "w")
        root, between = self._root(w)
        products = project_precisely(x, w)
        wide, half = x.to(products), w.to(products).square().sum(-2) / 2
        exponents = products - wide.square().sum(-1, keepdim=True) / 2 - per_head(half, x)
        kernel = (exponents / self.sigma**2).exp()
        features = project_precisely(kernel, root.to(kernel))
        return features.to(x.dtype), (wide, w, kernel, root, between)

    def vjp(self, residuals: tuple[Tensor, ...], g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        x, w, kernel, root, between = residuals
        centres = w.to(x)
        gkernel, groot = project_vjp(kernel, root.to(x), g.to(x))
        gexponents = gkernel * kernel / self.sigma**2
        gx, gw = project_vjp(x, centres, gexponents)
        gx = (gx - x * gexponents.sum(-1, keepdim=True)).to(g.dtype)
        if self.is_random:
            return gx, {}
        total = sum_to_heads(gexponents, w.shape[0]).unsqueeze(-2)
        return gx, {"w": (gw - centres * total + self._root_vjp(w, between, root, groot)).to(w)}

    def _root(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """R and K_CC `[H, num_centres, num_centres]`, in float64."""
        w = w.double()
        half = w.square().sum(-2) / 2
        exponents = w.mT @ w - half.unsqueeze(-1) - half.unsqueeze(-2)
        between = (exponents / self.sigma**2).exp()
        eye = torch.eye(w.shape[-1], dtype=w.dtype, device=w.device)
        lower = torch.linalg.cholesky(between + self.eps * eye)
        return torch.linalg.solve_triangular(lower.mT, eye, upper=True), between

    def _root_vjp(self, w: Tensor, between: Tensor, root: Tensor, groot: Tensor) -> Tensor:
        """Cotangent of the centres from that of R."""
        inner = (root.mT @ groot.to(root)).mT.tril()
        inner = inner - inner.diagonal(dim1=-2, dim2=-1).diag_embed() / 2
        gbetween = -root @ inner @ root.mT
        weights = (gbetween + gbetween.mT) * between / self.sigma**2
        w = w.double()
        return (w @ weights - w * weights.sum(-2, keepdim=True)).to(groot)
