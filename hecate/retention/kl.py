"""Memora's retention: rows are distributions."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hecate.retention.links import Link, SignedSoftmaxLink, SoftmaxLink
from hecate.retention.mirror import MirrorRetention


class KL(MirrorRetention):
    """kl: M' = scale softmax(retain log(M/scale) + D) along the last axis.

    Every row of every weight stays a distribution times `scale`: what one feature gains the others
    lose, and the pull towards the past is a Kullback-Leibler divergence. Rows relax towards uniform
    as retain falls. Non-negative rows cannot answer an arbitrary value: `signed=True` gives each
    row a positive and a negative bank that share the scale, M = P - Q. eps is the link's own unless
    given.

    Shapes: M, D `[N, ..., P]`; retain `[N]` or `[N, P]`.
    VJP: the softmax's, then that of the logarithm, which is cut off below eps.
    Traits: not linear; starts at the link of the initial weights, so uniform (signed: 0) at 0.
    Cost: one softmax; signed: 24 Newton steps for the root per row.
    Warning: D is in units of logits, so an lr that is small for l2 may be far too small here.
    References: It's All Connected (Behrouz et al., 2025, arXiv 2504.13173), Memora; Exponentiated
    Gradient versus Gradient Descent for Linear Predictors (Kivinen and Warmuth, 1997) for the
    banks. [RET-KL-D1]
    """

    kind: Literal["kl"] = "kl"
    scale: float = Field(1.0, gt=0)
    signed: bool = False
    eps: float | None = Field(None, gt=0, lt=1)

    def build_link(self) -> Link:
        link = SignedSoftmaxLink if self.signed else SoftmaxLink
        eps = {} if self.eps is None else {"eps": self.eps}
        return link(scale=self.scale, **eps)
