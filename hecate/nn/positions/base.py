"""How attention tells tokens at different distances apart."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hecate.variant import Variant

Params = dict[str, Tensor]


class Position(Variant, family="position"):
    """What the position of a token does to attention; positions count the written tokens of a document. [ATT-POS-D1]

    Every learned parameter has a leading axis of key heads.
    """

    @property
    def needs_order(self) -> bool:
        """Whether queries and keys have to be of the same tokens."""
        return True

    @property
    def needs_position(self) -> bool:
        """Whether tokens have to be counted from call to call."""
        return self.needs_order

    def init(
        self,
        width: int,
        *,
        heads: int = 1,
        causal: bool = True,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> Params:
        """Learned parameters as they start, for vectors of a width; nothing is drawn."""
        return {}

    def refusal(self, width: int) -> str | None:
        """Why vectors of a width cannot be given positions; None if they can."""
        return None


class Rotation(Position):
    """A rotation of vectors by their token's position: (R_i x).(R_j y) depends on i - j alone.

    where: "before" turns q and k ahead of phi, so that the weight phi(R_i q).phi(R_j k) is still positive, but for a
    nonlinear phi no function of the distance; "numerator" turns phi(q) and phi(k) in the sum of values and leaves the
    sum of weights as it is, so that the weight is a function of the distance, but not always positive, and weights do
    not add up to 1.
    """

    where: Literal["before", "numerator"] = "before"

    def turned(self, x: Tensor, position: Tensor, params: Params) -> Tensor:
        """x `[B, T, G, width]` turned by position `[B, T]`, in x's dtype."""
        raise NotImplementedError(f"{type(self).__name__} defines no turned")


PositionKind = Position
