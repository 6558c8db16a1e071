"""No positions."""

from __future__ import annotations

from typing import Literal

from hecate.nn.positions.base import Position


class NoPosition(Position):
    """none: weights phi(q_i).phi(k_j), whatever the distance.

    The feature map itself may depend on positions (`cosformer`).

    References: Transformers are RNNs (Katharopoulos et al., 2020, arXiv 2006.16236). [ATT-POS-D1]"""

    kind: Literal["none"] = "none"

    @property
    def needs_order(self) -> bool:
        return False
