"""An additive bias by distance: every weight is multiplied by exp(b)."""

from __future__ import annotations

from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from hecate.checks import Size
from hecate.errors import ConfigError
from hecate.nn.positions.base import Params, Position


class Relative(Position):
    """relative: weights exp(b_(i-j)) phi(q_i).phi(k_j), in the sum of values and that of weights.

    What adding b_(i-j) to the scores is to softmax. `form` = "table": b is learned for every distance up to
    `max_distance` either way and constant beyond, 0 at the start. The weights are a Toeplitz matrix times a product of
    features, so the sums are convolutions, by FFT. Nothing of fixed size sums up the past: no state can be gone on
    from, and no documents be packed. `form` = "linear": b = -slope |i - j| with a learned slope per head, exp(-slope) =
    sigmoid(logit); then causal sums decay, as a `retain` gate does, with a state and documents as ever. Slopes start at
    2^(-8 g / G) for head g of 1..G.

    Shapes: b `[G, K + 1]` for distances 0..K, `[G, 2 K + 1]` for -K..K if not causal; logit `[G]`.
    Cost: table O(T log T P V) and T P V numbers in float64; linear as without positions, twice if not causal.
    Warning: an FFT mixes rounding errors of all tokens: a later token that changes moves the table form's earlier
    outputs in their last digits, and one that is not finite makes all so. A weight far below the largest is as inexact
    as that one.
    References: Stable, Fast and Accurate: Kernelized Attention with Relative Positional Encoding (Luo et al., 2021,
    arXiv 2106.12566); linear: Train Short, Test Long (Press et al., 2021, arXiv 2108.12409). [ATT-REL-D1, ATT-REL-D2]
    """

    kind: Literal["relative"] = "relative"
    form: Literal["table", "linear"] = "table"
    max_distance: Size = Field(default=128, gt=0, description="K, the largest of the table")

    @model_validator(mode="after")
    def _of_its_form(self) -> Self:
        if self.form == "linear" and self.max_distance != type(self).model_fields["max_distance"].default:
            raise ConfigError(
                f"is the size of a table, got {self.max_distance} with form='linear', whose bias "
                "goes on with any distance; leave it out or use form='table'",
                path=("max_distance",),
            )
        return self

    @property
    def needs_position(self) -> bool:
        return False

    @property
    def weighs_distance(self) -> bool:
        return True

    @property
    def sums_past(self) -> bool:
        return self.form == "linear"

    def start(self, width: int, heads: int, *, causal: bool) -> Params:
        place: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
        if self.form == "linear":
            slope = 2.0 ** (-8 * torch.arange(1, heads + 1, **place) / heads)
            return {"logit": -slope.expm1().log()}
        return {"bias": torch.zeros(heads, (1 if causal else 2) * self.max_distance + 1, **place)}

    def check_past(self, given: str, instead: str) -> None:
        if not self.sums_past:
            raise ConfigError(
                f"positions 'relative' with form='table' and {given}: with a free weight per distance no sum of "
                f"fixed size stands for what lies behind; {instead}, or use form='linear'"
            )

    def retain(self, like: Tensor, params: Params) -> Tensor | None:
        return params["logit"].to(like.dtype).sigmoid().expand(like.shape[:3]) if self.form == "linear" else None

    def factors(self, like: Tensor, params: Params, *, causal: bool) -> Tensor | None:
        if self.form == "linear":
            return None
        length = like.shape[1]
        distance = torch.arange(0 if causal else 1 - length, max(length, 1), device=like.device)
        index = distance.clamp(-self.max_distance, self.max_distance)
        index = index if causal else index + self.max_distance
        return params["bias"].to(like.dtype)[:, index].exp()
