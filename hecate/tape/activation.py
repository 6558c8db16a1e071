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


def activate_vjp(name: Activation, x: Tensor, g: Tensor) -> Tensor:
    """act'(x) g, in one pass where torch has one that can be differentiated in turn."""
    if name == "gelu":
        return torch.ops.aten.gelu_backward(g, x)
    if name == "relu":
        return torch.ops.aten.threshold_backward(g, x, 0)
    return g * activate(name, x, 1)


def _gelu_slope(x: Tensor) -> Tensor:
    return torch.ops.aten.gelu_backward(torch.ones_like(x), x)


def _gelu_bend(x: Tensor) -> Tensor:
    square = x.clamp(-40, 40).square()  # from there on it is 0, and x^2 may be infinite
    return torch.exp(-0.5 * square - 0.5 * math.log(2 * math.pi)) * (2 - square)


def _silu_slope(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return torch.addcmul(s, x * s, 1 - s)  # s + y - y s would lose s beside a large y


def _silu_bend(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return torch.addcmul(s, s, s, value=-1) * (torch.addcmul(x, x, s, value=-2) + 2)


def _tanh_bend(x: Tensor) -> Tensor:
    t = torch.tanh(x)
    return -2 * t * (1 - t * t)


_ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], ...]] = {
    "gelu": (torch.nn.functional.gelu, _gelu_slope, _gelu_bend),
    "silu": (torch.nn.functional.silu, _silu_slope, _silu_bend),
    "tanh": (torch.tanh, lambda x: 1 - torch.tanh(x).square(), _tanh_bend),
    "relu": (torch.relu, lambda x: (x > 0).to(x.dtype), torch.zeros_like),
}
