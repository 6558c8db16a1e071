"""Memora's retention: rows are distributions."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hecate.retention.links import Link, SignedSoftmaxLink, SoftmaxLink
from hecate.retention.mirror import MirrorRetention


class KL(MirrorRetention):
    """kl: M = scale softmax(A) along the last axis, A' = retain A + D.

    Every row of every weight stays a distribution times `scale`: what one feature gains the others lose, and the pull
    towards the past is a Kullback-Leibler divergence. Rows relax towards uniform as retain falls. Non-negative rows
    cannot answer an arbitrary value: `signed=True` gives each row a positive and a negative bank that share the scale,
    M = P - Q.

    Shapes: A, D `[N, ..., P]`; retain `[N]` or `[N, P]`.
    VJP: of the step as `decay`; of M the softmax's.
    Traits: carries the logits A, whose steps are linear and centred per row under a gate that rows share; starts at the
    initial weights as logits, so uniform (signed: 0) at 0.
    Cost: a multiply-add, and one softmax where the memory is used.
    Warning: D is in units of logits, so an lr that is small for l2 may be far too small here.
    References: It's All Connected (Behrouz et al., 2025, arXiv 2504.13173), Memora; Exponentiated Gradient versus
    Gradient Descent for Linear Predictors (Kivinen and Warmuth, 1997) for the banks. [RET-KL-D1]
    """

    kind: Literal["kl"] = "kl"
    scale: float = Field(1.0, gt=0)
    signed: bool = False

    def build_link(self) -> Link:
        link = SignedSoftmaxLink if self.signed else SoftmaxLink
        return link(scale=self.scale)
