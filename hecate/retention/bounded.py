"""Weights between two bounds."""

from __future__ import annotations

from typing import Literal

from hecate.retention.links import Link, SigmoidLink
from hecate.retention.mirror import MirrorRetention


class Bounded(MirrorRetention):
    """bounded: M = low + (high - low) sigmoid(A), A' = retain A + D.

    No write, however large, takes a weight out of its bounds; near them it moves less and less. Weights relax towards
    the middle as retain falls. MIRAS keeps them in (0, 1).

    Shapes: A, D `[N, ...]`; retain `[N]` or `[N, P]`.
    VJP: of the step as `decay`; of M the sigmoid's.
    Traits: carries the logits A, whose steps are linear; starts at the initial weights as logits, so half-way between
    at 0.
    Cost: a multiply-add, and one exponential per weight where the memory is used.
    References: It's All Connected (Behrouz et al., 2025, arXiv 2504.13173). [RET-BOUNDED-D1]
    """

    kind: Literal["bounded"] = "bounded"
    low: float = 0.0
    high: float = 1.0

    def build_link(self) -> Link:
        return SigmoidLink(low=self.low, high=self.high)
