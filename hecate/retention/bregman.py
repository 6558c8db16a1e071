"""Mirror descent by a link of one's choice."""

from __future__ import annotations

from typing import Literal

from hecate.retention.base import StepForm
from hecate.retention.links import IdentityLink, Link
from hecate.retention.mirror import MirrorRetention


class Bregman(MirrorRetention):
    """bregman: M = link(A), A' = retain A + D, link identity, softmax, signed_softmax, sigmoid or lq.

    The general form behind `kl`, `bounded` and `lq`: a Bregman divergence pulls the memory towards its past, and the
    link is the inverse of its potential's gradient. A subclass of `Link` is a link too: `memory`, and if wanted its VJP
    and where it starts.

    Shapes: A, D `[N, ...]`; retain `[N]` or `[N, P]`.
    VJP: of the step as `decay`, of M the link's.
    Traits: carries A, whose steps are linear; M = A for the identity, which is `decay`; starts where the link says.
    Cost: a multiply-add, and the link where the memory is used.
    References: It's All Connected (Behrouz et al., 2025, arXiv 2504.13173). [RET-BREGMAN-D1]
    """

    kind: Literal["bregman"] = "bregman"
    link: Link = IdentityLink()

    @property
    def kernel(self) -> StepForm | None:
        return StepForm() if type(self.link) is IdentityLink else None

    def build_link(self) -> Link:
        return self.link
