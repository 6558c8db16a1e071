"""Biases of a user: of torch's own operations, with derivatives by hand or without."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import softplus

from hecate.bias import Bias


class LossAlone(Bias):
    """printed_loss: ell = scale sum log cosh(e / scale), and nothing else."""

    kind: Literal["printed_loss"] = "printed_loss"
    scale: float = Field(1.5, gt=0)

    def loss(self, pred: Tensor, target: Tensor) -> Tensor:
        size = (pred - target).abs() / self.scale
        return self.scale * (size + softplus(-2 * size)).sum(-1)


class Pinball(Bias):
    """printed_pinball: u = a above v and a - 1 at and below it, of padding, too."""

    kind: Literal["printed_pinball"] = "printed_pinball"
    a: float = 0.3

    def loss(self, pred: Tensor, target: Tensor) -> Tensor:
        error = pred - target
        return torch.maximum(self.a * error, (self.a - 1) * error).sum(-1)

    def grad(self, pred: Tensor, target: Tensor) -> Tensor:
        return torch.where(pred > target, self.a + 0 * pred, self.a - 1)

    def grad_vjp(self, pred: Tensor, target: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(g), torch.zeros_like(g)


class Together(Bias):
    """printed_together: ell = log(1 + |e|^2 / 2) + log sum exp(pred): no coordinate without the others."""

    kind: Literal["printed_together"] = "printed_together"

    def loss(self, pred: Tensor, target: Tensor) -> Tensor:
        return torch.log1p(0.5 * (pred - target).square().sum(-1)) + torch.logsumexp(pred, -1)


class Mean(Bias):
    """printed_mean: ell = mean of e^2 / 2, whose derivative divides by the number of values."""

    kind: Literal["printed_mean"] = "printed_mean"

    def loss(self, pred: Tensor, target: Tensor) -> Tensor:
        return 0.5 * (pred - target).square().mean(-1) + pred.sum(-1) / pred.shape[-1]


class Least(Bias):
    """printed_least: ell = min |e|^2 / 2, found as a maximum of what is below 0."""

    kind: Literal["printed_least"] = "printed_least"

    def loss(self, pred: Tensor, target: Tensor) -> Tensor:
        return 0.5 * (-(pred - target).abs()).amax(-1).square()


class Sorted(Bias):
    """printed_sorted: the largest error alone, found by sorting."""

    kind: Literal["printed_sorted"] = "printed_sorted"

    def loss(self, pred: Tensor, target: Tensor) -> Tensor:
        return (pred - target).sort(-1).values[..., -1].square()


# They are passed as values: tests of all known kinds need not know them.
for own in (LossAlone, Pinball, Together, Mean, Least, Sorted):
    del Bias._registry[own.model_fields["kind"].default]
