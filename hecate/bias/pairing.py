"""Losses through the product <pred, v>: the dot product alone, and the Kullback-Leibler divergence."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from hecate.bias.base import Bias, KernelForm
from hecate.errors import ConfigError


class Dot(Bias):
    """dot: ell = -<pred, v>.

    The Hebbian bias of linear attention: every write adds `lr v phi(k)^T`, whatever the memory holds.

    Shapes: pred, v `[..., V]`.
    VJP: u = -v, so g_pred = 0 and g_v = -g.
    Traits: curvature 0; unbounded below, so only retention bounds the memory.
    Cost: O(V).
    References: Transformers are RNNs (Katharopoulos et al., 2020, arXiv 2006.16236); MIRAS (Behrouz et al., 2025, arXiv
    2504.13173). [BIAS-DOT-D1]
    """

    kind: Literal["dot"] = "dot"
    curvature: ClassVar[float] = 0.0
    linear: ClassVar[bool] = True
    kernel: ClassVar[KernelForm] = KernelForm("target")

    def loss(self, pred: Tensor, target: Tensor) -> Tensor:
        return -(pred * target).sum(-1)

    def grad(self, pred: Tensor, target: Tensor) -> Tensor:
        return -target

    def grad_vjp(self, pred: Tensor, target: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(g), -g


class KL(Bias):
    """kl: ell = log sum exp(pred) - <pred, t> + sum t log t, t = softmax(v/temperature) or t = v.

    The memory predicts logits and is told a distribution: KL(t || softmax(pred)) whenever t sums to 1.
    `target="softmax"` makes one of any value; `"distribution"` takes v as it is, one-hot included, for memories of
    classes or tokens. A v that sums to something else is not rescaled.

    Shapes: pred, v `[..., V]`.
    VJP: u = s - t with s = softmax(pred); J g = s (g - s.g), g_v = -t (g - t.g)/temperature for softmax and -g for a
    distribution.
    Traits: curvature 1/2; infinite loss, but the same u, where v has negative entries. No kernel: a coordinate needs
    the sum over all.
    Cost: O(V).
    References: It's All Connected (Behrouz et al., 2025, arXiv 2504.13173) for the choice of a loss; Learning with
    Fenchel-Young Losses (Blondel et al., 2020, arXiv 1901.02324) for its form. [BIAS-KL-D1]
    """

    kind: Literal["kl"] = "kl"
    target: Literal["softmax", "distribution"] = "softmax"
    temperature: float = Field(1.0, gt=0)
    curvature: ClassVar[float] = 0.5

    @model_validator(mode="after")
    def _temperature_of_a_softmax(self) -> Self:
        if self.target == "distribution" and self.temperature != 1:
            raise ConfigError(
                f"{self.temperature:g} has no effect with target='distribution', which takes v as "
                "it is; leave it at 1 or set target='softmax'",
                ("temperature",),
            )
        return self

    def loss(self, pred: Tensor, target: Tensor) -> Tensor:
        t = self._told(target)
        return pred.logsumexp(-1) - (pred * t).sum(-1) - torch.special.entr(t).sum(-1)

    def grad(self, pred: Tensor, target: Tensor) -> Tensor:
        return pred.softmax(-1) - self._told(target)

    def grad_vjp(self, pred: Tensor, target: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        gpred = _softmax_jvp(pred.softmax(-1), g)
        if self.target == "distribution":
            return gpred, -g
        return gpred, -_softmax_jvp(self._told(target), g) / self.temperature

    def _told(self, target: Tensor) -> Tensor:
        if self.target == "distribution":
            return target
        return (target / self.temperature).softmax(-1)


def _softmax_jvp(share: Tensor, tangent: Tensor) -> Tensor:
    return share * (tangent - (share * tangent).sum(-1, keepdim=True))
