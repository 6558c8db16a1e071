"""Rectified halves."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hecate.phi.base import FeatureMap, Params, Traits
from hecate.tape.ops import activate_vjp


class CReLU(FeatureMap):
    """crelu: phi(x) = [max(x, 0), max(-x, 0)].

    Non-negative without losing anything: x is the difference of the halves, and |phi(x)| = |x|, so unit keys stay unit
    keys.

    Shapes: x `[..., D]` -> `[..., 2 D]`.
    VJP: gx = g_up for x > 0, -g_down for x < 0, 0 at x = 0.
    Traits: non_negative, kernel_non_negative, degree 1.
    Cost: O(D).
    Warning: keys of opposite orthants have a kernel of exactly 0: a sum normaliser may divide by 0.
    References: Understanding and Improving Convolutional Neural Networks via Concatenated Rectified Linear Units (Shang
    et al., 2016, arXiv 1603.05201) for the activation. [PHI-CRELU-D1]
    """

    kind: Literal["crelu"] = "crelu"

    def output_dim(self, d: int) -> int:
        return 2 * d

    def traits(self) -> Traits:
        return Traits(non_negative=True, kernel_non_negative=True, degree=1)

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, Tensor]:
        features = halves(x)
        return features, features

    def vjp(self, residuals: Tensor, g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return halves_vjp(residuals, g), {}


def halves(x: Tensor) -> Tensor:
    """The positive and the negative part, side by side: `[..., 2 D]`."""
    return torch.cat([torch.relu(x), torch.relu(-x)], -1)


def halves_vjp(y: Tensor, g: Tensor) -> Tensor:
    """Cotangent of x from that of `y = halves(x)`; 0 at the kink."""
    up, down = activate_vjp("relu", y, g).chunk(2, -1)
    return up - down
