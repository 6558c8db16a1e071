"""Activations with their derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hecate.phi.base import Parity

ActivationName = Literal["gelu", "relu", "silu", "tanh"]


class Activation(NamedTuple):
    """A componentwise function, its derivative and what is known of it."""

    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]
    parity: Parity = "none"
    degree: float | None = None


def gelu(x: Tensor) -> Tensor:
    """x times the standard normal distribution function (the exact form, with erf)."""
    return torch.nn.functional.gelu(x, approximate="none")


def gelu_slope(x: Tensor) -> Tensor:
    """Distribution function plus x times density."""
    density = torch.exp(-0.5 * x.square()) / math.sqrt(2 * math.pi)
    return 0.5 * torch.erfc(-x / math.sqrt(2)) + x * density


def _relu_slope(x: Tensor) -> Tensor:
    return (x > 0).to(x.dtype)


def _silu_slope(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s + x * s * (1 - s)


def _tanh_slope(x: Tensor) -> Tensor:
    return 1 - torch.tanh(x).square()


ACTIVATIONS: dict[str, Activation] = {
    "gelu": Activation(gelu, gelu_slope),
    "relu": Activation(torch.relu, _relu_slope, degree=1.0),
    "silu": Activation(torch.nn.functional.silu, _silu_slope),
    "tanh": Activation(torch.tanh, _tanh_slope, parity="odd"),
}
