"""Rotation of channels in pairs."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from hecate.nn.positions.base import Params, Rotation
from hecate.nn.positions.rotate import BASE, turn_pairs


class Rotary(Rotation):
    """rotary: R_i turns channels (c, c + P) of P = floor(width / 2) pairs by i base^(-c / P).

    (R_i x).(R_j y) depends on i - j alone; of an odd width the last channel stays. With `where` = "numerator" this is
    the rotary form of the linear transformer: y_t = sum_s (R_t phi(q_t)).(R_s phi(k_s)) v_s / sum_s phi(q_t).phi(k_s).

    Shapes: x `[B, T, G, width]`, positions `[B, T]`.
    Cost: O(width) per token; angles in float64.
    Warning: "before" a nonlinear phi the weight is no function of i - j; on the "numerator" it may be negative, and a
    small sum of weights makes y large.
    References: RoFormer: Enhanced Transformer with Rotary Position Embedding (Su et al., 2021, arXiv 2104.09864).
    [ATT-ROT-D2]
    """

    kind: Literal["rotary"] = "rotary"
    base: float = Field(default=BASE, gt=0, description="the slowest pair turns by about 1 / base")

    def refusal(self, width: int) -> str | None:
        return None if width > 1 else f"a width of {width} has no pair of channels to turn"

    def turned(self, x: Tensor, position: Tensor, params: Params) -> Tensor:
        return turn_pairs(x, position.unsqueeze(-1), x.shape[-1] // 2, self.base)
