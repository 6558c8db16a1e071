"""Retentions with a link: a dual state evolves linearly, and the memory is a function of it."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from hecate.retention.base import Retention, StepForm
from hecate.retention.links import IdentityLink, Link, LqLink, SigmoidLink, SignedSoftmaxLink, SoftmaxLink
from hecate.tape.ops import over, sum_to_gate
from hecate.variant import Prepared


class MirrorRetention(Prepared, Retention):
    """A' = retain A + D, M = link(A): mirror descent with decay. [RET-MIRROR-D1]

    What is carried is the dual state A, and M is computed from it wherever the memory predicts or is read: the step is
    linear, and what A was told it keeps however close M is to the border of its set. A variant names its link.

    Where the link does not see a constant along a row, D is taken without its own under a gate
    that rows share: M is the same, and no constant grows in A over a million tokens.
    """

    retain: float = Field(0.99, ge=0, le=1)
    uses_retain: ClassVar[bool] = True
    additive: ClassVar[bool] = True

    __slots__ = ("_link",)

    def build_link(self) -> Link:
        """The link of this retention's fields."""
        raise NotImplementedError(f"{type(self).__name__} names no link")

    @property
    def through(self) -> Link:
        """The link: its `memory` turns a dual state, logits or their like, into weights."""
        return self._link  # type: ignore[attr-defined]

    @property
    def dual(self) -> bool:
        return not self.through.linear

    @property
    def linear(self) -> bool:
        return self.through.linear

    def start(self, weights: Tensor) -> Tensor:
        return self.through.start(weights)

    def weights(self, carried: Tensor) -> Tensor:
        return self.through.memory(carried)

    def weights_vjp(self, carried: Tensor, g: Tensor) -> Tensor:
        return self.through.memory_vjp(carried, g)

    def centred(self, direction: Tensor, retain: Tensor) -> Tensor:
        # Channels that decay apart would tell the constant of a row.
        if retain.dim() > 1 or not self.through.row_invariant:
            return direction
        return direction - direction.mean(-1, keepdim=True)

    def step(self, memory: Tensor, direction: Tensor, retain: Tensor) -> Tensor:
        return over(retain, memory) * memory + self.centred(direction, retain)

    def step_vjp(self, memory: Tensor, direction: Tensor, retain: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gmemory = over(retain, memory) * g
        return gmemory, self.centred(g, retain), sum_to_gate(g * memory, retain)

    def model_post_init(self, context: object) -> None:
        """Keeps the link."""
        object.__setattr__(self, "_link", self.build_link())


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
