"""elu + 1."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hecate.phi.base import FeatureMap, Params, Traits


class ELU(FeatureMap):
    """elu: phi(x) = x + 1 for x > 0, exp(x) otherwise.

    The map of the linear transformer. Strictly positive down to the underflow of the dtype's exponential: `elu(x) + 1`
    cancels to exactly 0 below about x = -17 in float32 and -6.25 in bfloat16, this form does not. Near zero it is
    almost constant, so kernels of small inputs are close to uniform.

    Shapes: x `[..., D]` -> `[..., D]`.
    VJP: gx = g for x > 0, g exp(x) otherwise; the derivative at 0 is 1 from both sides, the second is not continuous
    there.
    Traits: non_negative, kernel_non_negative.
    Cost: O(D).
    References: Transformers are RNNs (Katharopoulos et al., 2020, arXiv 2006.16236). [PHI-ELU-D1]"""

    kind: Literal["elu"] = "elu"

    def traits(self) -> Traits:
        return Traits(
            non_negative=True, kernel_non_negative=True, componentwise=True, rising="everywhere", bounded_slope=True
        )

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, Tensor]:
        # For x > 0 the tail is 1: no choice between branches, neither here nor in the derivative.
        tail = x.clamp(max=0).exp()
        return torch.relu(x) + tail, tail

    def vjp(self, residuals: Tensor, g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return g * residuals, {}
