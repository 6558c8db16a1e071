"""Weights between two bounds."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hecate.retention.links import Link, SigmoidLink
from hecate.retention.mirror import MirrorRetention


class Bounded(MirrorRetention):
    """bounded: M' = low + (high - low) sigmoid(retain logit(s) + D), s = (M - low)/(high - low).

    No write, however large, takes a weight out of its bounds; near them it moves less and less.
    Weights relax towards the middle as retain falls. MIRAS keeps them in (0, 1).

    Shapes: M, D `[N, ...]`; retain `[N]` or `[N, P]`.
    VJP: the sigmoid's, then the logit's, which is 0 where s is within eps of 0 or 1.
    Traits: not linear; starts at the link of the initial weights, so half-way between at 0.
    Cost: one logarithm and one exponential per weight.
    References: It's All Connected (Behrouz et al., 2025, arXiv 2504.13173). [RET-BOUNDED-D1]
    """

    kind: Literal["bounded"] = "bounded"
    low: float = 0.0
    high: float = 1.0
    eps: float = Field(1e-6, gt=0, lt=0.5)

    def build_link(self) -> Link:
        return SigmoidLink(low=self.low, high=self.high, eps=self.eps)
