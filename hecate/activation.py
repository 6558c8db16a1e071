"""Activations: the componentwise functions between layers, with the two derivatives that a deep memory needs.

A write of a deep memory uses the first derivative, so backpropagation through the write uses the second.
"""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch
from pydantic import SerializerFunctionWrapHandler, model_serializer
from torch import Tensor

from hecate.tape.ops import torch_vjp
from hecate.variant import Variant


class Activation(Variant, family="activation"):
    """A function act(x), coordinate by coordinate.

    A variant defines `value`; `slope`, act'(x), and `bend`, act''(x), fall back to `torch.func` if left out. They are
    passed the known y = act(x), and `bend` act'(x) too, to save evaluations. At a kink they return the value by
    convention, such as 0 for relu.

    Shapes: x of any shape; y, slope and bend as x.
    """

    _derivatives = ("slope", "bend")
    _formulas = ("value", "slope", "bend")
    _follows = MappingProxyType(
        {"slope": ("value",), "bend": ("value", "slope"), "odd": ("value",), "degree": ("value",)}
    )
    odd: ClassVar[bool] = False  # act(-x) = -act(x)
    degree: ClassVar[float | None] = None  # act(a x) = a^degree act(x) for a > 0

    def value(self, x: Tensor) -> Tensor:
        """act(x)."""
        raise NotImplementedError(f"{type(self).__name__} defines no value")

    def slope(self, x: Tensor, y: Tensor) -> Tensor:
        """act'(x)."""
        return torch_vjp(self.value, (x,), torch.ones_like(x))[0]

    def bend(self, x: Tensor, y: Tensor, slope: Tensor) -> Tensor:
        """act''(x)."""
        return torch_vjp(lambda x: self.slope(x, self.value(x)), (x,), torch.ones_like(x))[0]

    @model_serializer(mode="wrap")
    def _as_kind(self, handler: SerializerFunctionWrapHandler) -> Any:
        """The kind alone, for an activation without settings; else all fields."""
        return self.kind if len(type(self).model_fields) == 1 else handler(self)


ActivationKind = Activation


class GELU(Activation):
    r"""gelu: act(x) = x (1 + erf(x / sqrt(2))) / 2.

    Formula: $\mathrm{act}(x) = \frac{1}{2} x \left(1 + \mathrm{erf}\left(\frac{x}{\sqrt{2}}\right)\right)$
    VJP: act' = Phi(x) + x density(x), act'' = density(x) (2 - x^2).
    References: Gaussian Error Linear Units (Hendrycks and Gimpel, 2016, arXiv 1606.08415). [STR-MLP-D1]
    """

    kind: Literal["gelu"] = "gelu"

    def value(self, x: Tensor) -> Tensor:
        return torch.nn.functional.gelu(x)

    def slope(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.ops.aten.gelu_backward(torch.ones_like(x), x)

    def bend(self, x: Tensor, y: Tensor, slope: Tensor) -> Tensor:
        square = x.clamp(-40, 40).square()  # beyond 40 act'' is 0, and x^2 could overflow
        return torch.exp(x * -0.5 * x) * (2 - square) / math.sqrt(2 * math.pi)  # exp as in act'


class SiLU(Activation):
    r"""silu: act(x) = x sigmoid(x).

    Formula: $\mathrm{act}(x) = \frac{x}{1 + \exp(-x)}$
    VJP: with s = sigmoid(x), act' = s + x s (1 - s), act'' = s (1 - s) (2 + x - 2 x s).
    References: Gaussian Error Linear Units (Hendrycks and Gimpel, 2016, arXiv 1606.08415). [STR-MLP-D1]
    """

    kind: Literal["silu"] = "silu"

    def value(self, x: Tensor) -> Tensor:
        return torch.nn.functional.silu(x)

    def slope(self, x: Tensor, y: Tensor) -> Tensor:
        s = torch.sigmoid(x)
        return torch.addcmul(s, x * s, 1 - s)  # s + y - y s would lose the digits of s beside a large y

    def bend(self, x: Tensor, y: Tensor, slope: Tensor) -> Tensor:
        s = torch.sigmoid(x)
        return torch.addcmul(s, s, s, value=-1) * (torch.addcmul(x, x, s, value=-2) + 2)


class Tanh(Activation):
    r"""tanh: act(x) = tanh(x).

    Formula: $\mathrm{act}(x) = \tanh(x)$
    VJP: act' = 1 - y^2, act'' = -2 y act'.
    Origin: the classical activation; Titans learn odd maps best with it. [STR-MLP-D1]
    """

    kind: Literal["tanh"] = "tanh"
    odd: ClassVar[bool] = True

    def value(self, x: Tensor) -> Tensor:
        return torch.tanh(x)

    def slope(self, x: Tensor, y: Tensor) -> Tensor:
        return 1 - y.square()

    def bend(self, x: Tensor, y: Tensor, slope: Tensor) -> Tensor:
        return -2 * y * slope


class ReLU(Activation):
    r"""relu: act(x) = max(x, 0).

    Formula: $\mathrm{act}(x) = \max(x, 0)$
    VJP: act' = 1[x > 0], 0 at the kink; act'' = 0.
    References: Rectified Linear Units Improve Restricted Boltzmann Machines (Nair and Hinton, 2010, ICML).
    [STR-MLP-I1]
    """

    kind: Literal["relu"] = "relu"
    degree: ClassVar[float | None] = 1.0

    def value(self, x: Tensor) -> Tensor:
        return torch.relu(x)

    def slope(self, x: Tensor, y: Tensor) -> Tensor:
        return (x > 0).to(x.dtype)

    def bend(self, x: Tensor, y: Tensor, slope: Tensor) -> Tensor:
        return torch.zeros_like(x)
