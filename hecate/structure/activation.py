"""Activations of deep memories with their first and second derivatives."""

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


def _silu_slope(x: Tensor) -> Tensor:
    s = x.sigmoid()
    return s + x * s * (1 - s)


def _silu_bend(x: Tensor) -> Tensor:
    s = x.sigmoid()
    return s * (1 - s) * (2 + x * (1 - 2 * s))


def _tanh_bend(x: Tensor) -> Tensor:
    t = x.tanh()
    return -2 * t * (1 - t * t)


def _cdf(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def _pdf(x: Tensor) -> Tensor:
    return torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


_ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], ...]] = {
    "gelu": (
        lambda x: x * _cdf(x),
        lambda x: _cdf(x) + x * _pdf(x),
        lambda x: _pdf(x) * (2 - x * x),
    ),
    "silu": (lambda x: x * x.sigmoid(), _silu_slope, _silu_bend),
    "tanh": (torch.tanh, lambda x: 1 - x.tanh().square(), _tanh_bend),
    "relu": (torch.relu, lambda x: (x > 0).to(x.dtype), torch.zeros_like),
}
