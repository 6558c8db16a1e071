"""The attentional bias: the inner loss that a write descends."""

from __future__ import annotations

from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from hecate.tape import Block, formula_block
from hecate.tape.ops import torch_vjp
from hecate.variant import Variant


class Bias(Variant, family="bias"):
    """An inner loss `ell(pred, target)`, summed over the value dimension.

    A variant gives `loss`, `grad = d ell / d pred`, and `grad_vjp`, the derivative of `grad`; the last two fall back to
    `torch.func` when left out (`hecate list` says so). There is no hidden factor: what `loss` says is what `grad`
    differentiates. Kernels are printed from these formulas: `hecate.formula`.

    Shapes: pred and target `[..., V]`; loss `[...]`; grad `[..., V]`.
    """

    _derivatives: ClassVar[tuple[str, ...]] = ("grad", "grad_vjp")
    _formulas = ("loss", "grad", "grad_vjp", "rho", "psi", "psi_jvp")
    _follows = MappingProxyType({
        "grad": ("loss",), "grad_vjp": ("loss", "grad"),
        **dict.fromkeys(("linear", "curvature"), ("loss", "grad", "rho", "psi")),
    })  # fmt: skip

    def loss(self, pred: Tensor, target: Tensor) -> Tensor:
        """The loss `[...]`."""
        raise NotImplementedError(f"{type(self).__name__} defines no loss")

    def grad(self, pred: Tensor, target: Tensor) -> Tensor:
        """d loss / d pred `[..., V]`."""
        return torch.func.grad(lambda pred: self.loss(pred, target).sum())(pred)

    def grad_vjp(self, pred: Tensor, target: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Cotangents of pred and target from the cotangent g of `grad`."""
        return torch_vjp(self.grad, (pred, target), g)

    def grad_jvp(self, pred: Tensor, target: Tensor, tangent: Tensor) -> Tensor:
        """Jacobian of `grad` by pred, times a tangent: the Hessian of the loss, hence symmetric."""
        return self.grad_vjp(pred, target, tangent)[0]

    @property
    def curvature(self) -> float | None:
        """Upper bound of the Hessian's eigenvalues, None if unbounded: with it, `lr |phi|^2 curvature < 2`
        keeps a linear memory contractive."""
        return None

    @property
    def linear(self) -> bool:
        """True if grad is a pred + b target, with the same fixed a and b for every coordinate."""
        return False

    def block(self) -> Block:
        """`grad` as a tape block: (pred, target) -> u."""
        return formula_block(f"bias.{self.kind}", self.grad, self.grad_vjp if self.hand_written() else None)


BiasKind = Bias
