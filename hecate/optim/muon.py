"""Orthogonalised momentum over parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from hecate.errors import ConfigError
from hecate.optim.base import MatrixOptimizer, State, put, zeros_like_state
from hecate.optim.options import Group, MatrixView, OnNonfinite, StateDtype, common_options, name_of
from hecate.optim.orthogonal import AdjustLr, Polynomial, adjustment, check_muon_steps, muon_steps
from hecate.optim.tensors import Bulk, as_matrix

HELD = "momentum"


class Muon(MatrixOptimizer):
    """muon: m <- momentum m + (1 - momentum) g, w <- (1 - lr weight_decay) w - lr a NS(u).

    u is m, or with `nesterov` momentum m + (1 - momentum) g. NS pushes the singular values of u's matrix towards 1, so
    that a step has about the same length along every direction. a, by `adjust_lr_fn`: `original` sqrt(max(1, rows /
    columns)), `match_rms_adamw` 0.2 sqrt(max(rows, columns)), `none` 1. With `ns_dtype="bfloat16"` and
    `state_dtype="parameter"` this is `torch.optim.Muon`, bit for bit on matrices of 2^14 numbers or more, or with
    `foreach=False`; the default iterates in the dtype of the state, float32 or better.

    Shapes: see `MatrixOptimizer`; parameters of fewer than 2 dimensions are refused.
    Cost: ns_steps x 3 products of min(r, c)^2 max(r, c). Sharded parameters are gathered.
    References: Muon (Jordan et al., 2024); Nested Learning (Behrouz et al., 2025, arXiv 2512.24695), eq. 42.
    [OPT-MUON-D1]
    """

    numbers: ClassVar[Mapping[str, float]] = {**MatrixOptimizer.numbers, "momentum": 1}

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float | Tensor = 0.95,
        nesterov: bool = True,
        ns_coefficients: Polynomial = "quintic",
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: AdjustLr | None = "original",
        *,
        ns_dtype: str | torch.dtype | None = None,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        on_nonfinite: OnNonfinite = "raise",
        state_dtype: StateDtype = "full",
        matrix: MatrixView = "flatten",
        capturable: bool = False,
        fused: bool | None = None,
    ) -> None:
        super().__init__(params, common_options(**locals()))

    def check(self, group: Group) -> None:
        """Refuses options that mean nothing, and vectors."""
        super().check(group)
        check_muon_steps(group)
        for p in group["params"]:
            if p.ndim < 2:
                raise ConfigError(
                    f"Muon orthogonalises matrices, {name_of(group, p)} is none; give it a group "
                    "of AdamW, or use M3, which has a rule for vectors"
                )

    def gathers(self, group: Group, p: Tensor) -> bool:
        """Always: the whole matrix has a part in every row."""
        return True

    def fresh_state(self, p: Tensor, group: Group) -> State:
        """Zero momentum."""
        return {HELD: zeros_like_state(p, group)}

    def update(self, group: Group, params: list[Tensor], grads: list[Tensor], states: list[State]) -> None:
        """Averages the gradients, orthogonalises, and moves the weights."""
        held = [state[HELD] for state in states]
        bulk = Bulk(group["foreach"], group["differentiable"], held[0].dtype)
        lr, momentum = bulk.number(group["lr"]), bulk.number(group["momentum"])
        grads = [g.to(m.dtype) for g, m in zip(grads, held, strict=True)]
        held = ahead = bulk.lerp(held, grads, 1 - momentum)
        if group["nesterov"]:
            ahead = [g.lerp(m, momentum) for g, m in zip(grads, held, strict=True)]
        matrices = [as_matrix(u, group["matrix"]) for u in ahead]
        ratios = [adjustment(group["adjust_lr_fn"], *u.shape) for u in matrices]
        bulk.move(params, muon_steps(matrices, group), lr, group["weight_decay"], ratios)
        for state, value in zip(states, held, strict=True):
            put(group, state, HELD, value)
