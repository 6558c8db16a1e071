"""RMS norms as torch computes them, with a slope at 0 that does not grow from layer to layer.

x / sqrt(mean(x^2) + eps) has the slope 1 / sqrt(eps) at x = 0, a thousand for eps = 1e-6. A token whose embedding is
zero, as that of padding, is zero in front of every norm of a model whose layers have no biases: there gradients would
grow by it once per norm. A zero has no direction that a norm could keep, so its slope is that of the weight alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hecate.tape import can_inspect


def rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """`torch.rms_norm` over the last axis, of this shape; where a row is 0 its derivative is the weight. [NN-MEM-D2]

    Shapes: x `[..., D]`, weight `[D]`.
    """
    y = torch.rms_norm(x, shape, weight, eps)
    if not (torch.is_grad_enabled() and x.requires_grad):
        return y
    with torch.no_grad():
        empty = x.square().sum(-1, keepdim=True) == 0
        if can_inspect(empty, free=True) and not empty.any():
            return y
    return torch.where(empty, (x if weight is None else x * weight).to(y.dtype), y)


class RMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm` over one axis, by `rms_norm`.

    Shapes: x `[..., D]`.
    """

    def __init__(self, width: int, **place: Any) -> None:
        super().__init__(width, eps=1e-6, **place)

    def forward(self, x: Tensor) -> Tensor:
        """The rows, at root mean square 1, times the weight."""
        return rms_norm(x, self.normalized_shape, self.weight, 1e-6)
