"""Momentum as an associative memory in phi-space, read by the present gradient."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from hecate.optim.base import MatrixOptimizer, State, put
from hecate.optim.lift import PhiOptimizer, map_of
from hecate.optim.options import Group, MatrixView, OptimizerKind, Share
from hecate.optim.sharding import is_spread
from hecate.optim.tensors import Bulk, as_matrix, outline, state_dtype
from hecate.phi import FeatureMap, Identity

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
    References: Nested Learning (Behrouz et al., 2025, arXiv 2512.24695), eqs. 50 and 51. [OPT-KERNEL-D1]
    """

    structural: ClassVar[tuple[str, ...]] = (*PhiOptimizer.structural, "keys")

    class Options(OptimizerKind):
        """Fields of a file, and arguments of the constructor."""

        kind: Literal["kernel_momentum"] = "kernel_momentum"
        momentum: Share = 0.9
        feature_map: FeatureMap = Identity()
        center: bool = True
        keys: Literal["columns", "rows"] = "columns"
        odd: bool | None = None
        input_scale: Literal["none", "rms", "unit"] = "unit"
        seed: int = Field(0, ge=0, lt=1 << 63)
        matrix: MatrixView = "flatten"

    class Extras(MatrixOptimizer.Extras):
        """Arguments of the constructor alone, or of wider types there."""

        phi_params: Any = None

    positional = ("lr", "momentum", "feature_map", "center")

    def rows_of(self, x: Tensor, group: Group) -> Tensor:
        """Keys as rows `[n, key width]`."""
        matrix = as_matrix(x, group["matrix"])
        return matrix.mT if group["keys"] == "columns" else matrix

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
        bulk = Bulk(group, held)
        lr, decay = bulk.number(group["lr"]), group["weight_decay"]
        keys = [self.rows_of(g.to(m.dtype), group) for g, m in zip(grads, held, strict=True)]
        features = [self.row_map(group, rows).features(rows)[0] for rows in keys]
        written = [rows.mT @ phi for rows, phi in zip(keys, features, strict=True)]
        held = bulk.add(bulk.decay(held, bulk.number(group["momentum"])), written)
        read = [phi @ memory.mT for phi, memory in zip(features, held, strict=True)]
        if group["keys"] == "columns":
            read = [u.mT for u in read]
        bulk.move(params, [u.reshape(p.shape) for u, p in zip(read, params, strict=True)], lr, decay)
        put(group, states, MEMORY, held)
