"""Mirror descent: a dual state A evolves linearly, A' = retain A + D, and the memory is a function of it, its link.

A link maps every dual state to a feasible memory M = link(A); it is the gradient of a convex function. The state
carried is A, so a link is never inverted on the way, and however close M comes to the border of its set, nothing is
forgotten.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from hecate.retention.base import Decaying, LinkAt
from hecate.tape.ops import inner_axes, torch_vjp
from hecate.variant import Conflicts, Variant, delegating

_WITHOUT_EPS = {"eps": "the dual state that is carried needs no floor"}


class Link(Variant, family="link"):
    """A function from dual states to feasible memories.

    A variant defines `memory`; `memory_vjp` falls back to `torch.func`, and initial weights are taken as the dual
    state, unless `start` maps them to the one of which they are the memory.

    Shapes: dual and memory `[N, ...]`, one weight of N memories.
    """

    _formulas = ("memory", "memory_vjp")
    linear: ClassVar[bool] = False  # whether `memory` is the identity
    row_invariant: ClassVar[bool] = False  # whether a constant added along the last axis of A changes nothing

    def memory(self, dual: Tensor) -> Tensor:
        """The memory of a dual state."""
        raise NotImplementedError(f"{type(self).__name__} defines no memory")

    def memory_vjp(self, dual: Tensor, g: Tensor) -> Tensor:
        """Cotangent of the dual state from that of the memory."""
        return torch_vjp(self.memory, (dual,), g)[0]

    def start(self, weights: Tensor) -> Tensor:
        """The dual state with which a memory of these initial weights starts."""
        return weights


class IdentityLink(Link):
    """identity: M = A.

    Mirror descent by the squared norm, which is plain decay.

    Formula: $M = A$
    References: It's All Connected (Behrouz et al., 2025, arXiv 2504.13173). [RET-LINK-D1]
    """

    kind: Literal["identity"] = "identity"
    linear: ClassVar[bool] = True

    def memory(self, dual: Tensor) -> Tensor:
        return dual

    def memory_vjp(self, dual: Tensor, g: Tensor) -> Tensor:
        return g


class SoftmaxLink(Link):
    r"""softmax: M = scale softmax(A) along the last axis.

    Rows are distributions times `scale`: the gradient of the log-sum-exp, dual to the entropy. A constant added to a
    row of A changes nothing.

    Formula: $M = \mathrm{scale}\; \mathrm{softmax}(A)$
    VJP: scale s (g - s.g) with s = softmax(A).
    References: It's All Connected (Behrouz et al., 2025, arXiv 2504.13173), Memora. [RET-LINK-D2]"""

    kind: Literal["softmax"] = "softmax"
    retired: ClassVar = _WITHOUT_EPS
    scale: float = Field(1.0, gt=0)
    row_invariant: ClassVar[bool] = True

    def memory(self, dual: Tensor) -> Tensor:
        return self.scale * dual.softmax(-1)

    def memory_vjp(self, dual: Tensor, g: Tensor) -> Tensor:
        memory = self.memory(dual)
        return memory * (g - (memory * g).sum(-1, keepdim=True) / self.scale)


class SignedSoftmaxLink(Link):
    r"""signed_softmax: M = scale sinh(A) / sum cosh(A) along the last axis.

    A positive and a negative bank that share one simplex: M = P - Q, where P and Q are proportional to exp(A) and
    exp(-A) and sum to `scale` together. A step adds to one bank's logits what it takes from the other's.

    Formula: $M = \mathrm{scale}\, \frac{\sinh A}{\sum_j \cosh A_{\cdot j}}$
    VJP: scale (c g - s (s.g)) with c = cosh(A)/sum cosh(A), s = M/scale.
    References: Exponentiated Gradient versus Gradient Descent for Linear Predictors (Kivinen and Warmuth, 1997,
    Information and Computation 132). [RET-LINK-D3]
    """

    kind: Literal["signed_softmax"] = "signed_softmax"
    retired: ClassVar = _WITHOUT_EPS
    scale: float = Field(1.0, gt=0)

    def memory(self, dual: Tensor) -> Tensor:
        return self.scale * dual.tanh() * self._banks(dual)

    def memory_vjp(self, dual: Tensor, g: Tensor) -> Tensor:
        memory = self.memory(dual)
        return self.scale * self._banks(dual) * g - memory * (memory * g).sum(-1, keepdim=True) / self.scale

    def _banks(self, dual: Tensor) -> Tensor:
        """cosh(A) / sum cosh(A), with exp(max |A|) taken out of both, as it cancels."""
        largest = dual.detach().abs().amax(-1, keepdim=True)
        both = (dual - largest).exp() + (-dual - largest).exp()
        return both / both.sum(-1, keepdim=True)


class SigmoidLink(Link):
    r"""sigmoid: M = low + (high - low) sigmoid(A).

    Every weight stays between two bounds.

    Formula: $M = \mathrm{low} + (\mathrm{high} - \mathrm{low})\, \mathrm{sigmoid}(A)$
    VJP: (high - low) s (1 - s) g with s = sigmoid(A).
    References: It's All Connected (Behrouz et al., 2025, arXiv 2504.13173), Bregman divergence of the logit.
    [RET-LINK-D4]
    """

    kind: Literal["sigmoid"] = "sigmoid"
    retired: ClassVar = _WITHOUT_EPS
    low: float = 0.0
    high: float = 1.0

    def conflicts(self) -> Conflicts:
        if self.low >= self.high:
            yield ("high",), f"must lie above low={self.low:g}, got {self.high:g}; weights stay between the two"

    def memory(self, dual: Tensor) -> Tensor:
        return self.low + (self.high - self.low) * dual.sigmoid()

    def memory_vjp(self, dual: Tensor, g: Tensor) -> Tensor:
        return (self.high - self.low) * dual.sigmoid() * (-dual).sigmoid() * g


class LqLink(Link):
    r"""lq: M = sign(A) |A|^(p-1) / |A|_p^(p-2) with p = q/(q-1), or A / |A|_q^(q-2) as printed.

    `form="exact"` is the gradient of 1/2 |A|_p^2, dual to 1/2 |M|_q^2; its inverse, by which initial weights become a
    dual state, is the same with p and q exchanged. `form="paper"` is what MIRAS prints for Moneta, which leaves the
    power of the coordinates out and takes q for p. Norms are over all of a weight. For numbers and lengths below eps,
    the power's chord takes the place of the power, for a finite slope at 0.

    Formula: $M = \frac{\mathrm{sign}(A) \odot |A|^{p-1}}{\Vert A \Vert_p^{p-2}},\quad p = \frac{q}{q - 1}$
    $M = \frac{A}{\Vert A \Vert_q^{q-2}} \quad \text{if form is paper}$
    VJP: that of the power per coordinate and of the length, one after the other.
    Warning: `paper` is degree 3 - q in A: beyond q = 3 more evidence makes a smaller memory, and A = 0 is a pole. Such
    memories start at n^(-1/q) in each of the n weights of a tensor, to which initial weights are added.
    References: It's All Connected (Behrouz et al., 2025, arXiv 2504.13173), Moneta. [RET-LINK-D5]"""

    kind: Literal["lq"] = "lq"
    q: float = Field(4.0, gt=1)
    form: Literal["exact", "paper"] = "exact"
    eps: float = Field(1e-6, gt=0, lt=1)

    def conflicts(self) -> Conflicts:
        if self.form == "paper" and self.q == 3:
            length = "gives every memory length 1, which forgets the length of what was written"
            yield ("q",), f"3 with form='paper' {length}; use another q or form='exact'"

    def memory(self, dual: Tensor) -> Tensor:
        if self.form == "paper":
            return radial(dual, 2 - self.q, self.eps, self.q)
        return radial(power(dual, *self._power), *self._radial)

    def memory_vjp(self, dual: Tensor, g: Tensor) -> Tensor:
        if self.form == "paper":
            return radial_vjp(dual, 2 - self.q, self.eps, self.q, True, g)
        g = radial_vjp(power(dual, *self._power), *self._radial, g)
        return power_vjp(dual, *self._power, g)

    def start(self, weights: Tensor) -> Tensor:
        """The dual state whose memory the weights are; `paper` first adds its constant to them."""
        q = self.q
        if weights.numel() == 0:
            return weights
        if self.form == "paper":
            moved = weights + max(weights.shape[1:].numel(), 1) ** (-1 / q)
            return radial(moved, (q - 2) / (3 - q), self.eps ** (3 - q if q < 3 else 1), q)
        return power(radial(weights, *self._power, q), *self._radial[:2])

    @property
    def _power(self) -> tuple[float, float]:
        """Exponent m of sign(A) |A|^(p-1) = A |A|^m, and its floor."""
        return 1 / (self.q - 1) - 1, self.eps

    @property
    def _radial(self) -> tuple[float, float, float, bool]:
        """Arguments of `radial`, whose length |.|_q, raised to q - 1, is that of M. It inverts `_power` on coordinates,
        and `_power` inverts it on lengths. The sum of powers is that of |A|^p, which from q = 2 on overflows no sooner
        than a sum of squares."""
        conjugate = self.q / (self.q - 1)
        return self.q - 2, self.eps ** (1 / (self.q - 1)), self.q, conjugate > 2 or self.eps**conjugate < 1e-30


@delegating("through", "linear", "start")
class MirrorRetention(Decaying):
    """A' = retain A + D, M = link(A): mirror descent with decay. [RET-MIRROR-D1]

    The state carried is the dual state A, and M is computed from it wherever the memory predicts or is read: the step
    is linear, and A keeps every step however close M is to the border of its set. A variant names its link.

    With the gradients of a chunk at one state (`chunk` > 1), `link_at` says where the link is taken. With A_0 the dual
    state at the chunk's start and a_t the product of retain since, token t is answered by the weights

        token:  link(A_t), every token's own dual state;
        chunk:  link(A_0), those at which the chunk's gradients are taken;
        linear: W_t = retain_t W_t-1 + D_t from W_0 = link(A_0), which is A_t + a_t (link(A_0) - A_0): within the chunk
            the memory moves in the primal, and at its end A has taken the same steps, as Moneta is trained.
            [RET-MIRROR-D3]

    If a constant along a row of A does not change M, and rows share a gate, D is centred along rows: M is the same, and
    no constant grows in A over a million tokens.
    """

    retain: float = Field(0.99, ge=0, le=1)
    link_at: LinkAt = "token"
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
    def links(self) -> LinkAt:
        return self.link_at

    def weights(self, carried: Tensor) -> Tensor:
        return self.through.memory(carried)

    def weights_vjp(self, carried: Tensor, g: Tensor) -> Tensor:
        return self.through.memory_vjp(carried, g)

    @property
    def centring(self) -> bool:
        return self.through.row_invariant

    def centred(self, direction: Tensor, retain: Tensor) -> Tensor:
        # With a gate per channel, the constant of a row would show in M.
        if retain.dim() > 1 or not self.through.row_invariant:
            return direction
        return direction - direction.mean(-1, keepdim=True)

    def model_post_init(self, context: object) -> None:
        """Builds the link."""
        object.__setattr__(self, "_link", self.build_link())


class Bregman(MirrorRetention):
    r"""bregman: M = link(A), A' = retain A + D, link identity, softmax, signed_softmax, sigmoid or lq.

    The general form behind `kl`, `bounded` and `lq`: a Bregman divergence pulls the memory towards its past, and the
    link is the inverse of its potential's gradient. A subclass of `Link` adds another: it defines `memory` and, if
    wanted, `memory_vjp` and `start`.

    Formula: $A_t = \alpha_t A_{t-1} + D_t,\quad M_t = \mathrm{link}(A_t)$
    Shapes: A, D `[N, ...]`; retain `[N]` or `[N, P]`.
    VJP: of the step as `decay`, of M the link's.
    Traits: carries A, whose steps are linear; M = A for the identity, which is `decay`; starts at the link's `start`.
    Cost: a multiply-add, and the link where the memory is used.
    References: It's All Connected (Behrouz et al., 2025, arXiv 2504.13173). [RET-BREGMAN-D1]
    """

    kind: Literal["bregman"] = "bregman"
    link: Link = IdentityLink()

    def build_link(self) -> Link:
        return self.link


class KL(MirrorRetention):
    r"""kl: M = scale softmax(A) along the last axis, A' = retain A + D.

    Every row of every weight stays a distribution times `scale`: what one feature gains the others lose, and the pull
    towards the past is a Kullback-Leibler divergence. Rows relax towards uniform as retain falls. Non-negative rows
    cannot answer an arbitrary value: `signed=True` gives each row a positive and a negative bank that share the scale,
    M = P - Q.

    Formula: $A_t = \alpha_t A_{t-1} + D_t,\quad M_t = \mathrm{scale}\; \mathrm{softmax}(A_t)$
    $M_t = \mathrm{scale}\, \frac{\sinh A_t}{\sum_j \cosh A_{t,\cdot j}} \quad \text{if signed}$
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
    retired: ClassVar = _WITHOUT_EPS
    scale: float = Field(1.0, gt=0)
    signed: bool = False

    def build_link(self) -> Link:
        link = SignedSoftmaxLink if self.signed else SoftmaxLink
        return link(scale=self.scale)


class Lq(MirrorRetention):
    r"""lq: M = sign(A) |A|^(p-1) / |A|_p^(p-2) with A' = retain A + D and p = q/(q-1).

    A sums the steps and the memory is the gradient of 1/2 |A|_p^2 at it. q > 2 evens weights out: at q = 4 they are
    cube roots of the evidence. `form="paper"` computes A / |A|_q^(q-2), as MIRAS prints it.

    Formula: $A_t = \alpha_t A_{t-1} + D_t,\quad M_t = \frac{\mathrm{sign}(A_t) \odot |A_t|^{p-1}}{\Vert A_t
    \Vert_p^{p-2}},\quad p = \frac{q}{q - 1}$
    $M_t = \frac{A_t}{\Vert A_t \Vert_q^{q-2}} \quad \text{if form is paper}$
    Shapes: A, D `[N, ...]`; retain `[N]` or `[N, P]`.
    VJP: of the step as `decay`, of M the link's; the chord below eps has a kink at eps, which counts as beyond.
    Traits: carries A, whose steps are linear; M = A for q = 2, which is `decay`; starts where M is the initial weights,
    for `paper` n^(-1/q) above them.
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
    r"""bounded: M = low + (high - low) sigmoid(A), A' = retain A + D.

    No write, however large, takes a weight out of its bounds; near them it moves less and less. Weights relax towards
    the middle as retain falls. MIRAS keeps them in (0, 1).

    Formula: $A_t = \alpha_t A_{t-1} + D_t,\quad M_t = \mathrm{low} + (\mathrm{high} - \mathrm{low})\,
    \mathrm{sigmoid}(A_t)$
    Shapes: A, D `[N, ...]`; retain `[N]` or `[N, P]`.
    VJP: of the step as `decay`; of M the sigmoid's.
    Traits: carries the logits A, whose steps are linear; starts at the initial weights as logits, so half-way between
    at 0.
    Cost: a multiply-add, and one exponential per weight where the memory is used.
    References: It's All Connected (Behrouz et al., 2025, arXiv 2504.13173). [RET-BOUNDED-D1]
    """

    kind: Literal["bounded"] = "bounded"
    retired: ClassVar = _WITHOUT_EPS
    low: float = 0.0
    high: float = 1.0

    def build_link(self) -> Link:
        return SigmoidLink(low=self.low, high=self.high)


# Odd powers of numbers and of lengths, linear near 0 so that both they and their inverses have slopes there. The
# inverse of an exponent m is the exponent -m/(1 + m) with the floor floor^(1 + m). The floor itself counts as beyond.


def power(x: Tensor, m: float, floor: float) -> Tensor:
    """x max(|x|, floor)^m."""
    return x * x.abs().clamp(min=floor).pow(m)


def power_vjp(x: Tensor, m: float, floor: float, g: Tensor) -> Tensor:
    """Cotangent of x."""
    size = x.abs()
    # Not a choice between two Python numbers, which would be of torch's default dtype.
    slope = 1 + m * (size >= floor).to(x.dtype)
    return slope * size.clamp(min=floor).pow(m) * g


def radial(x: Tensor, m: float, floor: float, q: float, scaled: bool = True) -> Tensor:
    """x max(|x|_q, floor)^m, the norm over everything but the first axis."""
    return x * _length(x, floor, q, scaled)[0].pow(m)


def radial_vjp(x: Tensor, m: float, floor: float, q: float, scaled: bool, g: Tensor) -> Tensor:
    """Cotangent of x."""
    length, beyond = _length(x, floor, q, scaled)
    # Summed before the division, so that it need not wait for the length; below q = 2 a power of 0 would have a pole.
    along = (g * x).sum(inner_axes(x), keepdim=True) / length
    unit = x / length
    odd = unit * unit.abs().pow(q - 2) if q >= 2 else unit.sign() * unit.abs().pow(q - 1)
    return length.pow(m) * (g + torch.where(beyond, m * along, 0.0) * odd)


def _length(x: Tensor, floor: float, q: float, scaled: bool) -> tuple[Tensor, Tensor]:
    """max(|x|_q, floor), and a mask that is True where the norm is the larger."""
    # With the largest entry factored out, powers neither overflow nor vanish. It cancels, so it is a constant to the
    # derivative.
    largest = x.detach().abs().amax(inner_axes(x), keepdim=True).clamp(min=floor) if scaled else 1.0
    total = (x / largest if scaled else x).abs().pow(q).sum(inner_axes(x), keepdim=True)
    beyond = largest * total.pow(1 / q) >= floor
    # A root of 0 has no derivative, and none is needed.
    length = largest * torch.where(beyond, total, 1.0).pow(1 / q)
    return torch.where(beyond, length, floor), beyond
