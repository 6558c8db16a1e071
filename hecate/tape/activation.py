"""Activations with their first and second derivatives, for maps and for deep memories."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Activation = Literal["gelu", "silu", "tanh", "relu"]


def activate(name: Activation, x: Tensor, order: Literal[0, 1, 2]) -> Tensor:
    """act(x), act'(x) or act''(x); gelu is the exact (erf) form, relu'(0) = 0 and relu'' = 0."""
    return _ACTIVATIONS[name][order](x)


def _gelu_slope(x: Tensor) -> Tensor:
    # erfc, not 1 + erf, which cancels where x is far below 0.
    return torch.addcmul(0.5 * torch.erfc(x * -math.sqrt(0.5)), x, _density(x))


def _density(x: Tensor) -> Tensor:
    return torch.exp(-0.5 * x.square() - 0.5 * math.log(2 * math.pi))


def _silu_slope(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s + x * s * (1 - s)


def _silu_bend(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1 - s) * (2 + x * (1 - 2 * s))


def _tanh_bend(x: Tensor) -> Tensor:
    t = torch.tanh(x)
    return -2 * t * (1 - t * t)


_ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], ...]] = {
    "gelu": (torch.nn.functional.gelu, _gelu_slope, lambda x: _density(x) * (2 - x * x)),
    "silu": (torch.nn.functional.silu, _silu_slope, _silu_bend),
    "tanh": (torch.tanh, lambda x: 1 - torch.tanh(x).square(), _tanh_bend),
    "relu": (torch.relu, lambda x: (x > 0).to(x.dtype), torch.zeros_like),
}
