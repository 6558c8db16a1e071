"""No positions."""

from __future__ import annotations

from typing import Literal

from hecate.nn.positions.base import Position


class NoPosition(Position):
    """none: every token of the past counts alike, whatever its distance.

    The feature map may still depend on positions (`cosformer`).
    """

    kind: Literal["none"] = "none"

    @property
    def needs_order(self) -> bool:
        return False
