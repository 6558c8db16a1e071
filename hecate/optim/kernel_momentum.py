"""Momentum as an associative memory in phi-space, read by the present gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from hecate.optim.base import State
from hecate.optim.options import Group, MatrixView, OnNonfinite, StateDtype, check_choice, common_options
from hecate.optim.phi_rows import PhiOptimizer, map_of
from hecate.optim.sharding import is_spread
from hecate.optim.tensors import Bulk, as_matrix, outline, state_dtype
from hecate.phi import FeatureMap, Identity, Params

MEMORY = "memory"


class KernelMomentum(PhiOptimizer):
    """kernel_momentum: S <- momentum S + sum_j g_j phi~(g_j)^T, w_j <- w_j - lr S phi~(g_j).

    The accumulator is a matrix memory whose keys and values are the columns g_j of the gradient (`keys="rows"`: its
    rows). Each step writes the gradient, then reads with it: u_j = sum_(s, i) momentum^(t-s) k(g_i^s, g_j) g_i^s, so
    that past gradients count by their similarity to the present one, k(x, y) = phi~(x).phi~(y). phi~ is centred or
    odd-lifted as in `PhiMomentum`, of the key scaled by `input_scale`; values keep their length.

    Shapes: gradient `[r, c]`, S `[r, d_phi]` (`keys="rows"`: `[c, d_phi]`).
    Traits: the first step descends, <g, u> >= 0, for every phi: it is the sum of the product of
    two positive semi-definite matrices. A gradient of zero reads nothing.
    Cost: O(r c d_phi) a step.
    Warning: similar columns add up; start from a smaller lr than that of plain momentum. A parameter of one dimension
    is one row: choose `keys="rows"` for it. Sharded parameters are gathered, and every process keeps S.
    References: Nested Learning (Behrouz et al., 2025, arXiv 2512.24695), eqs. 50 and 51: W + m(u). [OPT-KERNEL-D1]
    """

    structural: ClassVar[tuple[str, ...]] = (*PhiOptimizer.structural, "keys")
    numbers: ClassVar[Mapping[str, float]] = {**PhiOptimizer.numbers, "momentum": 1}

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float | Tensor = 0.9,
        feature_map: FeatureMap | Mapping[str, Any] | str = Identity(),  # noqa: B008 - frozen
        center: bool = True,
        *,
        keys: Literal["columns", "rows"] = "columns",
        odd: bool | None = None,
        input_scale: Literal["none", "rms", "unit"] = "unit",
        weight_decay: float = 0.0,
        phi_params: Mapping[int, Params] | None = None,
        seed: int | torch.Generator = 0,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        on_nonfinite: OnNonfinite = "raise",
        state_dtype: StateDtype = "full",
        matrix: MatrixView = "flatten",
        capturable: bool = False,
        fused: bool | None = None,
    ) -> None:
        defaults = common_options(**locals())
        super().__init__(params, defaults, phi_params)

    def rows_of(self, x: Tensor, group: Group) -> Tensor:
        """Keys as rows `[n, key width]`."""
        matrix = as_matrix(x, group["matrix"])
        return matrix.mT if group["keys"] == "columns" else matrix

    def check(self, group: Group) -> None:
        """Refuses options that mean nothing."""
        check_choice(group, "keys", ("columns", "rows"))
        check_choice(group, "input_scale", ("none", "rms", "unit"))
        super().check(group)

    def gathers(self, group: Group, p: Tensor) -> bool:
        """Where it is spread: the memory adds up keys of the whole matrix."""
        return is_spread(p)

    def fresh_state(self, p: Tensor, group: Group) -> State:
        """An empty memory."""
        width = self.rows_of(outline(p), group).shape[-1]
        dtype = state_dtype(p, group["state_dtype"])
        memory = torch.zeros(width, map_of(group).output_dim(width), dtype=dtype, device=p.device)
        self.row_map(group, memory.new_empty(0, width))
        return {MEMORY: memory}

    def update(self, group: Group, params: list[Tensor], grads: list[Tensor], states: list[State]) -> None:
        """Writes each gradient into its memory, reads with it, and moves the weights."""
        held = [state[MEMORY] for state in states]
        bulk = Bulk(group["foreach"], group["differentiable"], held[0].dtype)
        lr, decay = bulk.number(group["lr"]), group["weight_decay"]
        keys = [self.rows_of(g.to(m.dtype), group) for g, m in zip(grads, held, strict=True)]
        features = [self.row_map(group, rows).features(rows)[0] for rows in keys]
        written = [rows.mT @ phi for rows, phi in zip(keys, features, strict=True)]
        held = bulk.add(bulk.decay(held, bulk.number(group["momentum"])), written)
        read = [phi @ memory.mT for phi, memory in zip(features, held, strict=True)]
        if group["keys"] == "columns":
            read = [u.mT for u in read]
        bulk.move(params, read, lr, decay)
        for state, memory in zip(states, held, strict=True):
            state[MEMORY] = memory
