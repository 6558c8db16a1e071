"""Rectified features turned by the token's position."""

from __future__ import annotations

import math
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from hecate.errors import ConfigError
from hecate.phi.base import FeatureMap, Params, Traits, compute_dtype, position_of
from hecate.sizes import Count
from hecate.tape.bridge import can_inspect
from hecate.tape.ops import activate_vjp


class CosFormer(FeatureMap):
    """cosformer: phi(x, i) = [max(x, 0) cos(pi i / 2M), max(x, 0) sin(pi i / 2M)], M = max_length.

    The kernel relu(q).relu(k) cos(pi (i - j) / 2M) prefers recent keys: it falls from 1 to 0 as the distance i - j goes
    from 0 to M. Positions 0..M are taken, beyond it the kernel would turn negative; every reset starts again from 0.

    Shapes: x `[..., D]` -> `[..., 2 D]`; position `[...]` or what broadcasts to it.
    VJP: gx = g_cos cos(pi i / 2M) + g_sin sin(pi i / 2M) for x > 0, else 0.
    Traits: non_negative, kernel_non_negative, degree 1, needs_position.
    Cost: O(D).
    Warning: a position beyond M is a ConfigError, and NaN where values cannot be looked at, as while compiling. Keys at
    distance M, and keys without a common positive entry, have a kernel of exactly 0.
    References: cosFormer: Rethinking Softmax in Attention (Qin et al., 2022, arXiv 2202.08791). [PHI-COSFORMER-D1]
    """

    kind: Literal["cosformer"] = "cosformer"
    max_length: Count = Field(default=2048, gt=0, description="M, the largest position")

    def output_dim(self, d: int) -> int:
        return 2 * d

    def traits(self) -> Traits:
        return Traits(non_negative=True, kernel_non_negative=True, degree=1, needs_position=True)

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        cos, sin = self._turn(position_of(self.kind, x, params), compute_dtype(x))
        rectified = torch.relu(x).to(cos.dtype)
        features = torch.cat([rectified * cos, rectified * sin], -1)
        return features.to(x.dtype), (x, cos, sin)

    def vjp(self, residuals: tuple[Tensor, Tensor, Tensor], g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        x, cos, sin = residuals
        g_cos, g_sin = g.to(cos.dtype).chunk(2, -1)
        rectified = torch.addcmul(g_cos * cos, g_sin, sin).to(x.dtype)
        return activate_vjp("relu", x, rectified), {}

    def _turn(self, position: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        inside = (position >= 0) & (position <= self.max_length)
        if can_inspect(inside) and not bool(inside.all()):
            raise ConfigError(
                f"feature map 'cosformer' has max_length={self.max_length} and takes the positions "
                f"0..{self.max_length}, got {int(position.min())}..{int(position.max())}; raise "
                "max_length or reset the memory earlier"
            )
        step = 0.5 * math.pi / self.max_length
        ahead, behind = (
            torch.where(inside, steps.to(dtype) * step, math.nan).unsqueeze(-1)
            for steps in (position, self.max_length - position)
        )
        # cos(a) as sin(pi/2 - a): no rounding makes it negative at the end of the quarter turn.
        return behind.sin(), ahead.sin()
