"""Links: memories as functions of a dual state that evolves linearly.

A link maps every dual state A to a feasible memory M = memory(A), and back: A = dual(M). It is the
gradient of a convex function and its inverse; the step A' = retain A + D is mirror descent. Both
directions are guarded by an eps near the border of the feasible set, where one of them is
singular, and differentiated as computed.
"""

from __future__ import annotations

from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from hecate.errors import ConfigError
from hecate.retention.powers import power, power_vjp, radial, radial_vjp
from hecate.variant import Variant


class Link(Variant, family="link"):
    """A bijection between dual states and feasible memories.

    A variant gives `memory`, `dual` and their VJPs, which fall back to `torch.func`.

    Shapes: dual and memory `[N, ...]`, one weight of N memories.
    """

    @property
    def linear(self) -> bool:
        """Whether `memory` is the identity."""
        return False

    def memory(self, dual: Tensor) -> Tensor:
        """The memory of a dual state."""
        raise NotImplementedError(f"{type(self).__name__} defines no memory")

    def dual(self, memory: Tensor) -> Tensor:
        """The dual state of a memory."""
        raise NotImplementedError(f"{type(self).__name__} defines no dual")

    def memory_vjp(self, dual: Tensor, g: Tensor) -> Tensor:
        """Cotangent of the dual state from that of the memory."""
        _, pull = torch.func.vjp(self.memory, dual)  # type: ignore[misc]
        (gdual,) = pull(g)
        return torch.as_tensor(gdual)

    def dual_vjp(self, memory: Tensor, g: Tensor) -> Tensor:
        """Cotangent of the memory from that of the dual state."""
        _, pull = torch.func.vjp(self.dual, memory)  # type: ignore[misc]
        (gmemory,) = pull(g)
        return torch.as_tensor(gmemory)

    def start(self, weights: Tensor) -> Tensor:
        """Where a memory starts whose initial weights are these: they are read as a dual state."""
        return self.memory(weights)


class IdentityLink(Link):
    """identity: M = A.

    Mirror descent by the squared norm, which is plain decay.

    References: It's All Connected (Behrouz et al., 2025, arXiv 2504.13173). [RET-LINK-D1]
    """

    kind: Literal["identity"] = "identity"

    @property
    def linear(self) -> bool:
        return True

    def memory(self, dual: Tensor) -> Tensor:
        return dual

    def dual(self, memory: Tensor) -> Tensor:
        return memory

    def memory_vjp(self, dual: Tensor, g: Tensor) -> Tensor:
        return g

    def dual_vjp(self, memory: Tensor, g: Tensor) -> Tensor:
        return g


class SoftmaxLink(Link):
    """softmax: M = scale softmax(A) along the last axis, A = log max(M/scale, eps).

    Rows are distributions times `scale`: the gradient of the log-sum-exp, dual to the entropy. The
    dual state is known up to a constant per row, which the softmax forgets.

    VJP: scale s (g - s.g) with s = softmax(A); g/M, 0 where M/scale < eps.
    References: It's All Connected (Behrouz et al., 2025, arXiv 2504.13173), Memora. [RET-LINK-D2]
    """

    kind: Literal["softmax"] = "softmax"
    scale: float = Field(1.0, gt=0)
    # Small enough for any row of sensible logits, large enough for 1/eps^2 in float32.
    eps: float = Field(1e-18, gt=0, lt=1)

    def memory(self, dual: Tensor) -> Tensor:
        return self.scale * dual.softmax(-1)

    def dual(self, memory: Tensor) -> Tensor:
        return (memory / self.scale).clamp(min=self.eps).log()

    def memory_vjp(self, dual: Tensor, g: Tensor) -> Tensor:
        share = dual.softmax(-1)
        return self.scale * share * (g - (share * g).sum(-1, keepdim=True))

    def dual_vjp(self, memory: Tensor, g: Tensor) -> Tensor:
        share = memory / self.scale
        return torch.where(share >= self.eps, g / (self.scale * share.clamp(min=self.eps)), 0.0)


class SignedSoftmaxLink(Link):
    """signed_softmax: M = scale sinh(A) / sum cosh(A) along the last axis.

    A positive and a negative bank that share one simplex: M = P - Q, where P and Q are proportional
    to exp(A) and exp(-A) and sum to `scale` together. What one bank is told the other is told with
    the opposite sign, so M alone remembers both: A = asinh(s/y) with s = M/scale and y the root of
    sum sqrt(y^2 + s^2) = 1, taken as at least eps.

    VJP: scale (c g - s (s.g)) with c = cosh(A)/sum cosh(A); by the implicit function theorem
    for the root, with r = sqrt(y^2 + s^2): (g/r + (s/r) sum(g s/r) / (y^2 sum(1/r))) / scale, no
    second term where y = eps.
    Cost: the root takes 24 Newton steps.
    References: Exponentiated Gradient versus Gradient Descent for Linear Predictors (Kivinen and
    Warmuth, 1997, Information and Computation 132). [RET-LINK-D3]
    """

    kind: Literal["signed_softmax"] = "signed_softmax"
    scale: float = Field(1.0, gt=0)
    eps: float = Field(1e-6, gt=0, lt=1)

    def memory(self, dual: Tensor) -> Tensor:
        return self.scale * dual.tanh() * torch.logaddexp(dual, -dual).softmax(-1)

    def dual(self, memory: Tensor) -> Tensor:
        share = memory / self.scale
        return (share / self._root(share)).asinh()

    def memory_vjp(self, dual: Tensor, g: Tensor) -> Tensor:
        both = torch.logaddexp(dual, -dual).softmax(-1)
        share = dual.tanh() * both
        return self.scale * (both * g - share * (share * g).sum(-1, keepdim=True))

    def dual_vjp(self, memory: Tensor, g: Tensor) -> Tensor:
        share = memory / self.scale
        root = self._root(share)
        radius = (root.square() + share.square()).sqrt()
        slope = share / radius
        moves = (g * slope).sum(-1, keepdim=True) / (root.square() * (1 / radius).sum(-1, True))
        return (g / radius + torch.where(root > self.eps, slope * moves, 0.0)) / self.scale

    def _root(self, share: Tensor) -> Tensor:
        """y `[..., 1]`. The sum is convex and grows with y: from the right Newton only descends."""

        def newton(y: Tensor, share: Tensor) -> Tensor:
            radius = (y.square() + share.square()).sqrt()
            excess = radius.sum(-1, keepdim=True) - 1
            return (y - excess / (y / radius).sum(-1, keepdim=True)).clamp(min=self.eps)

        y = torch.full_like(share[..., :1], max(1 / share.shape[-1], self.eps))
        for _ in range(22):
            y = newton(y, share.detach())
        # At the root one step has the exact first derivative, two have the exact second one too.
        return newton(newton(y.detach(), share), share)


class SigmoidLink(Link):
    """sigmoid: M = low + (high - low) sigmoid(A), A = logit of (M - low)/(high - low).

    Every weight stays between two bounds. The share s = (M - low)/(high - low) is kept within [eps,
    1 - eps] before its logit is taken.

    VJP: (high - low) s (1 - s) g; g / ((high - low) s (1 - s)), 0 where s was moved.
    References: It's All Connected (Behrouz et al., 2025, arXiv 2504.13173), Bregman divergence of
    the logit. [RET-LINK-D4]
    """

    kind: Literal["sigmoid"] = "sigmoid"
    low: float = 0.0
    high: float = 1.0
    eps: float = Field(1e-6, gt=0, lt=0.5)

    @model_validator(mode="after")
    def _low_below_high(self) -> Self:
        if self.low >= self.high:
            raise ConfigError(
                f"must lie above low={self.low:g}, got {self.high:g}; weights stay between the two",
                ("high",),
            )
        return self

    def memory(self, dual: Tensor) -> Tensor:
        return self.low + (self.high - self.low) * dual.sigmoid()

    def dual(self, memory: Tensor) -> Tensor:
        share = self._share(memory).clamp(self.eps, 1 - self.eps)
        return share.log() - (-share).log1p()

    def memory_vjp(self, dual: Tensor, g: Tensor) -> Tensor:
        return (self.high - self.low) * dual.sigmoid() * (-dual).sigmoid() * g

    def dual_vjp(self, memory: Tensor, g: Tensor) -> Tensor:
        share = self._share(memory)
        safe = share.clamp(self.eps, 1 - self.eps)
        kept = (share >= self.eps) & (share <= 1 - self.eps)
        return torch.where(kept, g / ((self.high - self.low) * safe * (1 - safe)), 0.0)

    def _share(self, memory: Tensor) -> Tensor:
        return (memory - self.low) / (self.high - self.low)


class LqLink(Link):
    """lq: M = sign(A) |A|^(p-1) / |A|_p^(p-2) with p = q/(q-1), or A / |A|_q^(q-2) as printed.

    `form="exact"` is the gradient of 1/2 |A|_p^2, dual to 1/2 |M|_q^2; its inverse is the same with
    p and q exchanged. `form="paper"` is what MIRAS prints for Moneta, which leaves the power of the
    coordinates out and takes q for p. Norms are over all of a weight. Numbers below eps, and
    lengths, have the power's chord instead of the power: exactly invertible, with slopes at 0.

    VJP: that of the power per coordinate and of the length, one after the other.
    Warning: `paper` is degree 3 - q in A: beyond q = 3 more evidence makes a smaller memory, and A
    = 0 is a pole. Such memories start at n^(-1/q) in each of the n weights of a tensor, to which
    initial weights are added.
    References: It's All Connected (Behrouz et al., 2025, arXiv 2504.13173), Moneta. [RET-LINK-D5]
    """

    kind: Literal["lq"] = "lq"
    q: float = Field(4.0, gt=1)
    form: Literal["exact", "paper"] = "exact"
    eps: float = Field(1e-6, gt=0, lt=1)

    @model_validator(mode="after")
    def _invertible(self) -> Self:
        if self.form == "paper" and self.q == 3:
            raise ConfigError(
                "3 with form='paper' gives every memory length 1, which forgets the length of what "
                "was written; use another q or form='exact'",
                ("q",),
            )
        return self

    def memory(self, dual: Tensor) -> Tensor:
        if self.form == "paper":
            return radial(dual, 2 - self.q, self.eps, self.q)
        return radial(power(dual, *self._power), *self._radial)

    def dual(self, memory: Tensor) -> Tensor:
        if self.form == "paper":
            return radial(memory, *self._printed)
        m, floor = self._power
        n, far, q = self._radial
        return power(radial(memory, m, floor, q), n, far)

    def memory_vjp(self, dual: Tensor, g: Tensor) -> Tensor:
        if self.form == "paper":
            return radial_vjp(dual, 2 - self.q, self.eps, self.q, g)
        g = radial_vjp(power(dual, *self._power), *self._radial, g)
        return power_vjp(dual, *self._power, g)

    def dual_vjp(self, memory: Tensor, g: Tensor) -> Tensor:
        if self.form == "paper":
            return radial_vjp(memory, *self._printed, g)
        m, floor = self._power
        n, far, q = self._radial
        g = power_vjp(radial(memory, m, floor, q), n, far, g)
        return radial_vjp(memory, m, floor, q, g)

    def start(self, weights: Tensor) -> Tensor:
        """Every memory but a zero one under `paper` is feasible."""
        if self.form == "exact":
            return weights
        return weights + max(weights.shape[1:].numel(), 1) ** (-1 / self.q)

    @property
    def _power(self) -> tuple[float, float]:
        """|A|^(p-1) = A |A|^m."""
        return 1 / (self.q - 1) - 1, self.eps

    @property
    def _radial(self) -> tuple[float, float, float]:
        """Its length |.|_q, raised to q - 1, is that of M."""
        return self.q - 2, self.eps ** (1 / (self.q - 1)), self.q

    @property
    def _printed(self) -> tuple[float, float, float]:
        """The inverse of the printed map."""
        q = self.q
        return (q - 2) / (3 - q), self.eps ** (3 - q if q < 3 else 1), q
