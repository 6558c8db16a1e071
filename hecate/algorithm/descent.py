"""Steps along a gradient: the token's own, plain, with momentum, scaled by coordinate or regularised; or one that the
algorithm computes, by solving for a linear memory or from a window of tokens."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from hecate.algorithm.base import Algorithm, AlgorithmForm, Carrying, InnerLoss, State, Token, WindowForm
from hecate.checks import Depth
from hecate.tape import Block, Tensors, formula_block
from hecate.tape.ops import over, sum_to_gate
from hecate.variant import Conflicts, delegating, still_declared


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
    only below 2 (1 - momentum). With dampening both are 2, for lr before dampening.
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
        # Where both are 0 the inverse root is set to 0, for a slope of 0; its product with S' is 0 either way.
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


# Gradients that the algorithm itself computes.


class Implicit(Descent):
    r"""implicit: D = -lr / (1 + lr c |phi|^2) G, c the bias' curvature.

    For l2 (c = 1) the exact proximal step argmin |M' - M|^2 / 2 + lr ell(M'): the error shrinks by 1 / (1 + lr
    |phi|^2), so no lr diverges. For dot (c = 0) the proximal step is that of gd. For another bias it minimises the
    quadratic of curvature c that bounds the loss from above. In a diagonal memory every coordinate has its own phi_j^2.
    The same numbers as `step="implicit"` where c = 1 for a matrix.

    Formula: $D_t = -\frac{\eta_t}{1 + \eta_t c \Vert p_t \Vert^2} G_t$
    Shapes: G `[N, V, P]`, lr `[N]`, phi_k `[N, P]`.
    VJP: with s = c |phi|^2 and f = 1 / (1 + lr s), G' = f G: g_G = f g, g_lr = -s f^2 <G, g>,
    g_phi = -2 c lr f^2 <G, g> phi; then as gd.
    Traits: no slots; linear; stable for every lr. Needs a structure linear in its weights and a bias of bounded
    curvature: elsewhere no constant bounds the loss.
    Cost: one product of length P more than gd.
    References: Longhorn (Liu et al., 2024, arXiv 2407.14207); Nested Learning (Behrouz et al., 2025, arXiv 2512.24695),
    Eq 57, whose constant holds for |x| = 1 only. [ALG-IMPL-D1]
    """

    kind: Literal["implicit"] = "implicit"
    linear: ClassVar[bool] = True
    stable_step: ClassVar[float] = math.inf

    def refusal(self, *, linear: bool, diagonal: bool, curvature: float | None) -> str | None:
        if not linear:
            return "the implicit step has no closed form for weights that act non-linearly"
        if curvature is None:
            return "the loss has unbounded curvature, so no step size bounds it from above"
        return None

    def gradient(self, loss: InnerLoss, token: Token, context: State) -> tuple[State, State]:
        (grad,) = loss.gradient(token.phi_k, token.v)
        block = _shortening(loss.curvature or 0.0, loss.diagonal)
        return loss.run(block, grad, token.lr, token.phi_k), context


def _shortening(curvature: float, diagonal: bool) -> Block:
    """G / (1 + lr c |phi|^2), coordinate by coordinate if diagonal."""

    def squares(phi: Tensor) -> Tensor:
        return curvature * (phi.square() if diagonal else phi.square().sum(-1, keepdim=True))

    def shortened(grad: Tensor, lr: Tensor, phi: Tensor) -> Tensor:
        return over(1 / (1 + lr.unsqueeze(-1) * squares(phi)), grad) * grad

    def vjp(grad: Tensor, lr: Tensor, phi: Tensor, g: Tensor) -> Tensors:
        square = squares(phi)
        factor = 1 / (1 + lr.unsqueeze(-1) * square)
        inner = grad * g if diagonal else sum_to_gate(grad * g, lr).unsqueeze(-1)
        along = inner * factor.square()
        gphi = -2 * curvature * lr.unsqueeze(-1) * along * phi
        return over(factor, grad) * g, -(square * along).sum(-1), gphi

    return formula_block("algorithm.implicit.shorten", shortened, vjp)


class RLS(Descent):
    r"""rls: D = -lr u (C' phi)^T, C' the inverse of sum_i discount^(t-i) phi_i phi_i^T + ridge.

    With l2, lr = 1, retention none and a memory that starts at zero, M is the minimiser of sum_i discount^(t-i) |M
    phi_i - v_i|^2 + discount^t ridge |M|^2 after every token: what Mesa layers solve for. C' = (C - C phi (C phi)^T /
    (discount + phi.C phi)) / discount. With another bias u is its gradient and C a preconditioner.

    Formula: $D_t = -\eta_t u_t (C_t p_t)^\top$
    $C_t = \frac{1}{\gamma} \left(C_{t-1} - \frac{C_{t-1} p_t p_t^\top C_{t-1}}{\gamma + p_t^\top C_{t-1}
    p_t}\right),\quad C_0 = \frac{I}{\mathrm{ridge}},\quad \gamma = \mathrm{discount}$
    Shapes: context `inverse` `[N, P, P]`, C minus its start I / ridge.
    VJP: through C' by the reverse of the rank-one update, written out in the code.
    Traits: no slots; stable for lr < 2 with l2. Needs a structure linear in its weights: phi is their only input.
    Cost: 4 P^2 and a state of P^2 more than gd.
    Warning: with discount < 1, C grows as discount^-t in directions that no key visits (wind-up).
    References: MesaNet (von Oswald et al., 2025, arXiv 2506.05233); Adaptive Filter Theory (Haykin, 2002). [ALG-RLS-D1]
    """

    kind: Literal["rls"] = "rls"
    ridge: float = Field(1.0, gt=0, description="weight of |M|^2 at the start")
    discount: float = Field(1.0, gt=0, le=1, description="weight of the past, per token")
    weighted_sum: ClassVar[bool] = True
    stable_step: ClassVar[float] = math.inf

    @property
    def token(self) -> AlgorithmForm:
        return AlgorithmForm(ridge=self.ridge, discount=self.discount)

    def refusal(self, *, linear: bool, diagonal: bool, curvature: float | None) -> str | None:
        if diagonal:
            return "each coordinate is a regression of its own, with no inverse to share"
        return None if linear else "least squares has a recursive solution for linear models only"

    def context_shapes(self, d_phi: int, d_v: int) -> dict[str, tuple[int, ...]]:
        return {"inverse": (d_phi, d_phi)}

    def gradient(self, loss: InnerLoss, token: Token, context: State) -> tuple[State, State]:
        gain, inverse = loss.run(self._update(), token.phi_k, *context)
        return loss.pullback(gain, loss.error(token.phi_k, token.v)), (inverse,)

    def _update(self) -> Block:
        """(phi, C - I/ridge) -> (C' phi, C' - I/ridge)."""

        def parts(phi: Tensor, change: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            start = torch.eye(phi.shape[-1], dtype=phi.dtype, device=phi.device) / self.ridge
            inverse = start + change
            mapped = (inverse @ phi.unsqueeze(-1)).squeeze(-1)
            total = self.discount + (phi * mapped).sum(-1, keepdim=True)
            return start, mapped, total

        def updated(phi: Tensor, change: Tensor) -> tuple[Tensor, Tensor]:
            start, mapped, total = parts(phi, change)
            rank_one = (mapped / total).unsqueeze(-1) * mapped.unsqueeze(-2)
            new = (change - rank_one) / self.discount + (1 / self.discount - 1) * start
            # C' phi = C phi / (discount + phi.C phi): the gain of the filter.
            return mapped / total, new

        def vjp(phi: Tensor, change: Tensor, ggain: Tensor, gnew: Tensor) -> Tensors:
            start, mapped, total = parts(phi, change)
            gain, g = mapped / total, gnew / self.discount
            both = ((g + g.mT) @ mapped.unsqueeze(-1)).squeeze(-1)
            # rank_one = mapped mapped^T / total, gain = mapped / total.
            gmapped = (ggain - both) / total
            gtotal = (-ggain * gain + 0.5 * both * gain).sum(-1, keepdim=True) / total
            gmapped = gmapped + gtotal * phi
            gphi = gtotal * mapped + ((start + change).mT @ gmapped.unsqueeze(-1)).squeeze(-1)
            return gphi, g + gmapped.unsqueeze(-1) * phi.unsqueeze(-2)

        return formula_block("algorithm.rls.update", updated, vjp)


@delegating("inner", "slots", "uses_momentum", "weighted_sum", "default_momentum", "refusal", "slot_shapes")
@delegating("inner", "direction", "direction_vjp", "block")
class Omega(Algorithm):
    r"""omega: G = sum_(a < window) decay^a grad ell(M; phi_(t-a), v_(t-a)), then `inner`'s step.

    Every write descends the loss of the last `window` tokens at the present memory, the token a steps back weighted by
    decay^a, instead of the loss of its own token: the Omega rule of ATLAS. Any algorithm may follow (`inner`); window =
    1 is that algorithm itself. The step size is this algorithm's lr.

    Formula: $G_t = \sum_{a=0}^{n-1} \lambda^a\, \nabla_M \ell(f(M, p_{t-a}), v_{t-a}),\quad n = \mathrm{window},\quad
    \lambda = \mathrm{decay}$
    $D_t = \mathrm{inner}(G_t)$
    Shapes: context `keys` `[N, window, P]`, `values` `[N, window, V]`, `filled` `[N, window]` (0 where no token has
    been), oldest first.
    VJP: that of each token's gradient; the window passes cotangents on to the tokens it holds,
    and none to `filled`, which only marks tokens.
    Traits: those of `inner`, whose stability bound is divided by the sum of weights.
    Cost: window times the gradient of one token, and window (P + V) more state.
    References: ATLAS (Behrouz et al., 2025, arXiv 2505.23735). [ALG-OMEGA-D1]
    """

    kind: Literal["omega"] = "omega"
    window: Depth = Field(4, ge=1, description="tokens of the window")
    decay: float = Field(1.0, gt=0, le=1, description="weight of a token relative to the next one")
    inner: Algorithm = GD()

    def conflicts(self) -> Conflicts:
        inner = self.inner
        if inner.lr != type(inner).model_fields["lr"].default:
            unused = f"would not be used: the step size is algorithm.lr={self.lr:g} of omega"
            yield ("inner", "lr"), f"inner.lr={inner.lr:g} {unused}; set it there and leave inner.lr out"
        if not inner.takes_any_gradient():
            both = f"omega chooses the gradient and so does its inner algorithm {inner.kind!r}"
            cure = "use one that takes the gradient as it comes, such as gd, momentum, newton_schulz"
            yield ("inner",), f"{both}; {cure}"

    @property
    def stable_step(self) -> float:
        return self.inner.stable_step / sum(self.decay**age for age in range(self.window))

    @property
    def returning_step(self) -> float:
        return self.inner.returning_step / sum(self.decay**age for age in range(self.window))

    def context_shapes(self, d_phi: int, d_v: int) -> dict[str, tuple[int, ...]]:
        return {"keys": (self.window, d_phi), "values": (self.window, d_v), "filled": (self.window,)}

    def window_form(self) -> WindowForm | None:
        if not still_declared(self, "window_form", self._formulas):
            return None
        return WindowForm(tuple(self.decay**age for age in range(self.window)), self.inner)

    def gradient(self, loss: InnerLoss, token: Token, context: State) -> tuple[State, State]:
        keys, values, filled = loss.run(_PUSH, token.phi_k, token.v, *context)
        columns = [loss.run(_UNBIND, item) for item in (keys, values, filled)]
        total: tuple[Tensor, ...] = ()
        for age, (p, v, weight) in enumerate(zip(*(reversed(item) for item in columns), strict=True)):
            block = _weighted(self.decay**age)
            grads = [loss.run(block, g, weight)[0] for g in loss.gradient(p, v)]
            total = tuple(loss.run(_ADD, a, b)[0] for a, b in zip(total, grads, strict=True)) if total else tuple(grads)
        return total, (keys, values, filled)


def _push(phi: Tensor, v: Tensor, *window: Tensor) -> tuple[Tensors, None]:
    newest = (phi, v, torch.ones_like(phi[:, 0]))
    pairs = zip(window, newest, strict=True)
    return tuple(torch.cat([old[:, 1:], new.unsqueeze(1)], 1) for old, new in pairs), None


def _push_vjp(_: None, *cotangents: Tensor) -> Tensors:
    gold = [torch.cat([torch.zeros_like(g[:, :1]), g[:, :-1]], 1) for g in cotangents]
    return cotangents[0][:, -1], cotangents[1][:, -1], *gold


def _weighted(factor: float) -> Block:
    """factor w G, w a constant `[N]`."""

    def weighted(grad: Tensor, weight: Tensor) -> Tensor:
        return factor * over(weight.detach(), grad) * grad

    return formula_block("algorithm.omega.weight", weighted, lambda _, weight, g: (weighted(g, weight), None))


_PUSH = Block("algorithm.omega.push", _push, _push_vjp)
_UNBIND = formula_block("algorithm.omega.unbind", lambda x: x.unbind(1), lambda _, *g: torch.stack(g, 1))
_ADD = Block("algorithm.omega.add", lambda a, b: ((a + b,), None), lambda _, g: (g, g))
