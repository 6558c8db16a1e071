"""Steps along the gradient: plain, with momentum, scaled by coordinate, regularised."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from hecate.algorithm.base import Algorithm, AlgorithmForm, Carrying
from hecate.tape.ops import over, sum_to_gate
from hecate.variant import Conflicts


class Descent(Algorithm):
    """An algorithm whose direction is D = -lr G; variants choose the gradient."""

    def direction(self, grad: Tensor, lr: Tensor, momentum: Tensor, *slots: Tensor) -> tuple[Tensor, ...]:
        return (-over(lr, grad) * grad,)

    def direction_vjp(self, inputs: tuple[Tensor, ...], *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        (grad, lr, _), (g,) = inputs, cotangents
        return -over(lr, grad) * g, -sum_to_gate(grad * g, lr), None


class GD(Descent):
    r"""gd: D = -lr G.

    One step of plain gradient descent per write.

    Formula: $D_t = -\eta_t G_t$
    Shapes: G `[N, ...]`, lr `[N]`.
    VJP: g_G = -lr g, g_lr = -<G, g>.
    Traits: no slots; contracts while lr |phi|^2 curvature < 2.
    Cost: one multiplication.
    References: MIRAS (Behrouz et al., 2025, arXiv 2504.13173). [ALG-GD-D1]
    """

    kind: Literal["gd"] = "gd"
    linear: ClassVar[bool] = True
    kernel: ClassVar[AlgorithmForm] = AlgorithmForm()


class Momentum(Carrying):
    r"""momentum: S' = momentum S - lr G, D = S', or with nesterov D = momentum S' - lr G.

    The momentum of Titans: past surprise carries over, without bias correction. `nesterov` looks one step ahead along
    S'. Retention acts on the memory alone; S decays by `momentum` only. (Titans writes eta for momentum and theta for
    lr.) S adds up 1 / (1 - momentum) gradients; with `dampening` lr is lr (1 - momentum) token by token, so that it is
    the length of a whole step whatever the gate of momentum. [ALG-MOM-D2]

    Formula: $S_t = \mu_t S_{t-1} - \eta_t G_t,\quad D_t = S_t$
    $D_t = \mu_t S_t - \eta_t G_t \quad \text{if nesterov}$
    $\eta_t \leftarrow (1 - \mu_t)\, \eta_t \quad \text{if dampening}$
    Shapes: G, S `[N, ...]`; lr, momentum `[N]`.
    VJP: with d = g_D + g_S': g_G = -lr d, g_lr = -<G, d>, g_momentum = <S, d>, g_S = momentum d.
    nesterov: d = momentum g_D + g_S', g_G -= lr g_D, g_lr -= <G, g_D>, g_momentum += <S', g_D>.
    Traits: one slot; one key, written again and again, contracts while lr |phi|^2 curvature < 2 (1 + momentum), with
    nesterov that over 1 + 2 momentum; one that returns among others, which S moves by lr / (1 - momentum) meanwhile,
    only below 2 (1 - momentum). With dampening both are 2, of the lr that is given.
    Cost: one multiply-add and one more tensor of state per weight.
    References: Titans (Behrouz et al., 2025, arXiv 2501.00663). [ALG-MOM-D1, ALG-NEST-D1]
    """

    kind: Literal["momentum"] = "momentum"
    nesterov: bool = False
    bounded: bool = Field(True, description="whether a momentum gate above 1 is refused")
    dampening: bool = Field(False, description="whether lr is lr (1 - momentum)")
    linear: ClassVar[bool] = True

    @property
    def stable_step(self) -> float:
        if self.dampening:
            return 2.0
        limit = 2.0 * (1.0 + self.momentum)
        return limit / (1.0 + 2.0 * self.momentum) if self.nesterov else limit

    @property
    def returning_step(self) -> float:
        return 2.0 if self.dampening else 2.0 * (1.0 - self.momentum)

    @property
    def momentum_top(self) -> float:
        return 1.0 if self.bounded else math.inf

    @property
    def dampens(self) -> bool:
        return self.dampening

    def conflicts(self) -> Conflicts:
        if self.dampening and not self.bounded:
            yield ("dampening",), "lr (1 - momentum) turns its sign where bounded=False lets momentum pass 1; set one"

    @property
    def kernel(self) -> AlgorithmForm:
        return AlgorithmForm(momentum=True, nesterov=self.nesterov)

    def direction(self, grad: Tensor, lr: Tensor, momentum: Tensor, *slots: Tensor) -> tuple[Tensor, ...]:
        keep = over(momentum, grad)
        carried = torch.addcmul(keep * slots[0], over(lr, grad), grad, value=-1)
        if not self.nesterov:
            return carried, carried
        return torch.addcmul(keep * carried, over(lr, grad), grad, value=-1), carried

    def direction_vjp(self, inputs: tuple[Tensor, ...], *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        grad, lr, momentum, slot = inputs
        ahead, carried = cotangents
        keep = over(momentum, grad)
        if self.nesterov:
            g, gstep = carried + keep * ahead, carried + keep * ahead + ahead
            look = sum_to_gate((keep * slot - over(lr, grad) * grad) * ahead, momentum)
        else:
            g = gstep = carried + ahead
            look = torch.zeros_like(momentum)
        return (
            -over(lr, grad) * gstep,
            -sum_to_gate(grad * gstep, lr),
            sum_to_gate(slot * g, momentum) + look,
            keep * g,
        )


class Adaptive(Carrying):
    r"""adaptive: D = -lr S' / sqrt(E' + eps^2), S' and E' running means of G and G^2.

    S' = momentum S + (1 - momentum) G and E' = decay E + (1 - decay) G^2: Adam's diagonal scaling as an inner
    algorithm, without bias correction: an early step is shortened in S and lengthened through E, and the state needs no
    step counter. momentum = 0 is RMSProp.

    Formula: $S_t = \mu_t S_{t-1} + (1 - \mu_t) G_t,\quad E_t = \lambda E_{t-1} + (1 - \lambda) G_t^2,\quad \lambda =
    \mathrm{decay}$
    $D_t = -\eta_t \frac{S_t}{\sqrt{E_t + \varepsilon^2}}$
    Shapes: G, S, E `[N, ...]`; lr, momentum `[N]`.
    VJP: with r = 1/sqrt(E' + eps^2), h = -lr g_D, s = g_S' + h r and e = g_E' - h S' r^3 / 2: g_G = (1 - momentum) s +
    2 (1 - decay) G e, g_S = momentum s, g_E = decay e, g_lr = -<S' r, g_D>, g_momentum = <S - G, s>.
    Traits: two slots; a coordinate's step is at most lr / sqrt(1 - decay) long, so no lr diverges at once.
    Cost: a root and a few multiplications per weight.
    Warning: near gradients of 0 the slope of a step is up to lr (1 - momentum) / eps; where S' and E' are 0, as before
    the first gradient that is not, it is taken as 0.
    References: Adam (Kingma and Ba, 2015, arXiv 1412.6980); MIRAS (Behrouz et al., 2025, arXiv 2504.13173).
    [ALG-ADAPT-D1]
    """

    kind: Literal["adaptive"] = "adaptive"
    decay: float = Field(0.99, ge=0, lt=1)
    eps: float = Field(1e-3, gt=0)
    slots: ClassVar[tuple[str, ...]] = ("momentum", "square")
    stable_step: ClassVar[float] = math.inf

    def direction(self, grad: Tensor, lr: Tensor, momentum: Tensor, *slots: Tensor) -> tuple[Tensor, ...]:
        carried, square, root = self._moments(grad, momentum, *slots)
        return -over(lr, grad) * carried * root, carried, square

    def direction_vjp(self, inputs: tuple[Tensor, ...], *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        grad, lr, momentum, mean, before = inputs
        gdirection, gcarried, gsquare = cotangents
        carried, _, root = self._moments(grad, momentum, mean, before)
        scaled = -over(lr, grad) * gdirection
        s = gcarried + scaled * root
        e = gsquare - 0.5 * scaled * carried * root**3
        keep = over(momentum, grad)
        return (
            (1 - keep) * s + 2 * (1 - self.decay) * grad * e,
            -sum_to_gate(carried * root * gdirection, lr),
            sum_to_gate((mean - grad) * s, momentum),
            keep * s,
            self.decay * e,
        )

    def _moments(self, grad: Tensor, momentum: Tensor, mean: Tensor, square: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        keep = over(momentum, grad)
        carried = keep * mean + (1 - keep) * grad
        square = self.decay * square + (1 - self.decay) * grad.square()
        # A root that counts as 0 there gives no slope, and its product with S' is 0 as before.
        moved = (square != 0) | (carried != 0)
        return carried, square, torch.where(moved, (square + self.eps**2).rsqrt(), 0.0)


class FTRL(Algorithm):
    r"""ftrl: A' = A - lr G, D = W(A') - W(A), W(A) = soft(A, l1) / (1 + l2).

    All steps so far are summed in A and the regulariser |W|^2 / 2 + l2 |W|^2 / 2 + l1 |W|_1 is applied to the sum:
    under retention `none` the memory is its start plus W(A), the minimiser of <-A, W> plus the regulariser. Lazy, where
    retention `elastic_net` thresholds at every token: small steps in one direction add up here and are cut off there.
    l1 = l2 = 0 is gd.

    Formula: $A_t = A_{t-1} - \eta_t G_t,\quad D_t = W(A_t) - W(A_{t-1})$
    $W(A) = \frac{\mathrm{sign}(A) \odot \max(|A| - l_1, 0)}{1 + l_2}$
    Shapes: G, A `[N, ...]`; lr `[N]`.
    VJP: with m = 1[|A| > l1] / (1 + l2), m' that of A', and a = g_A' + m' g_D: g_G = -lr a, g_lr = -<G, a>, g_A = a - m
    g_D. At the threshold |A| = l1 the slope is 0.
    Traits: one slot; contracts while lr |phi|^2 curvature < 2 (1 + l2).
    Cost: two thresholds per weight.
    References: MIRAS (Behrouz et al., 2025, arXiv 2504.13173); Follow-the-Regularized-Leader and Mirror Descent
    (McMahan, 2011). [ALG-FTRL-D1]
    """

    kind: Literal["ftrl"] = "ftrl"
    l1: float = Field(0.01, ge=0)
    l2: float = Field(0.0, ge=0)
    slots: ClassVar[tuple[str, ...]] = ("sum",)

    @property
    def weighted_sum(self) -> bool:
        return self.l1 == 0

    @property
    def stable_step(self) -> float:
        return 2.0 * (1 + self.l2)

    def direction(self, grad: Tensor, lr: Tensor, momentum: Tensor, *slots: Tensor) -> tuple[Tensor, ...]:
        total = slots[0] - over(lr, grad) * grad
        return self._link(total) - self._link(slots[0]), total

    def direction_vjp(self, inputs: tuple[Tensor, ...], *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        grad, lr, _, before = inputs
        gdirection, gtotal = cotangents
        total = before - over(lr, grad) * grad
        a = gtotal + self._slope(total) * gdirection
        gbefore = a - self._slope(before) * gdirection
        return -over(lr, grad) * a, -sum_to_gate(grad * a, lr), None, gbefore

    def _link(self, total: Tensor) -> Tensor:
        return torch.nn.functional.softshrink(total, self.l1) / (1 + self.l2)

    def _slope(self, total: Tensor) -> Tensor:
        return (total.abs() > self.l1).to(total.dtype) / (1 + self.l2)
