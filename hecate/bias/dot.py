"""Dot product."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from hecate.bias.base import Bias, KernelForm


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
