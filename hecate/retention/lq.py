"""Moneta's retention: a memory whose dual is its lq gradient."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hecate.retention.links import Link, LqLink
from hecate.retention.mirror import MirrorRetention


class Lq(MirrorRetention):
    """lq: M = sign(A) |A|^(p-1) / |A|_p^(p-2) with A' = retain A + D and p = q/(q-1).

    A sums the steps and the memory is the gradient of 1/2 |A|_p^2 at it. q > 2 evens weights out: at q = 4 they are
    cube roots of the evidence. `form="paper"` computes A / |A|_q^(q-2), as MIRAS prints it.

    Shapes: A, D `[N, ...]`; retain `[N]` or `[N, P]`.
    VJP: of the step as `decay`, of M the link's; the chord below eps has a kink at eps, which counts as beyond.
    Traits: carries A, whose steps are linear; M = A for q = 2, which is `decay`; starts where M is the initial weights,
    `paper` n^(-1/q) beside them.
    Cost: a multiply-add, and two powers per weight where the memory is used.
    Warning: the norm is over a whole weight tensor: the exact memory is up to n^(1/p - 1/q) times as long as A, for q =
    4 the square root of the number of weights.
    References: It's All Connected (Behrouz et al., 2025, arXiv 2504.13173), Moneta. [RET-LQ-D1]
    """

    kind: Literal["lq"] = "lq"
    q: float = Field(4.0, gt=1)
    form: Literal["exact", "paper"] = "exact"
    eps: float = Field(1e-6, gt=0, lt=1)

    def build_link(self) -> Link:
        return LqLink(q=self.q, form=self.form, eps=self.eps)
