"""Momenta that are more than a running mean: orthogonalised, or memories of gradients themselves."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from hecate.algorithm.base import AlgorithmForm, Carrying, GramForm
from hecate.checks import Size
from hecate.tape import Block, Tensors
from hecate.tape.ops import over, sum_to_gate
from hecate.variant import Conflicts, still_declared

_TANH_BACK = torch.ops.aten.tanh_backward  # (g, tanh x) -> g (1 - tanh^2 x)
Coefficients = tuple[float, float, float]
POLYNOMIALS: dict[str, tuple[Coefficients, ...]] = {
    "quintic": ((3.4445, -4.7750, 2.0315),),
    "cubic": ((1.5, -0.5, 0.0),),
    "schedule": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}


def polynomials(name: str, steps: int) -> tuple[Coefficients, ...]:
    """Coefficients of each step: one polynomial for all steps, or the first `steps` of a schedule."""
    schedule = POLYNOMIALS[name]
    return schedule * steps if len(schedule) == 1 else schedule[:steps]


def too_many_steps(name: str, steps: int) -> str | None:
    """Reason why a schedule does not have so many steps; None if it has."""
    most = len(POLYNOMIALS[name])
    reason = f"polynomial {name!r} is {most} steps, got {steps}; use at most {most}, or 'quintic'"
    return reason if steps > most > 1 else None


class NewtonSchulz(Carrying):
    r"""newton_schulz: S' = momentum S + G, D = -lr NS(S').

    NS pushes every singular value of S' towards 1: X_0 = S' / sqrt(|S'|_F^2 + eps^2), then `steps` times X <- a X + (b
    A + c A^2) X with A = X X^T. `quintic` (Muon's coefficients) is fast and ends with singular values in about [0.68,
    1.13]; `cubic` (1.5, -0.5, 0) converges to 1, slowly from small ones; `schedule`, a quintic of its own for each of
    at most five steps as in large-chunk TTT, takes values of X_0 from 0.01 on to [0.97, 1.04]. `rescale` multiplies by
    |S'|_F / sqrt(min(V, P)): the step then has about the length of the momentum. A weight that is a vector counts as
    one row.

    Formula: $S_t = \mu_t S_{t-1} + G_t,\quad D_t = -\eta_t \mathrm{NS}(S_t)$
    $X_0 = \frac{S_t}{\sqrt{\Vert S_t \Vert_F^2 + \varepsilon^2}},\quad X_{j+1} = a X_j + (b A_j + c A_j^2) X_j,\quad
    A_j = X_j X_j^\top,\quad \mathrm{NS}(S_t) = X_n,\quad n = \mathrm{steps}$
    Shapes: G, S `[N, ..., P]`; lr, momentum `[N]`.
    VJP: the iterations backwards; with B = b A + c A^2 and Y = a X + B X: g_B = g X^T,
    g_A = b g_B + c (A g_B + g_B A), g_X = a g + B g + (g_A + g_A^T) X. At S' = 0, where NS is 0, its slope of up to
    a^steps / eps is taken as 0.
    Traits: one slot; a step is never longer than about 1.2 lr sqrt(min(V, P)) without `rescale`, so no lr diverges at
    once.
    Cost: steps x 3 products of min(V, P)^2 max(V, P).
    Warning: without `rescale` even a tiny gradient makes a full step; retention alone bounds |M|. Texts that write S' =
    momentum S - G with M' = M - lr NS(S') ascend.
    References: ATLAS (Behrouz et al., 2025, arXiv 2505.23735); Muon (Jordan et al., 2024); the schedule: Test-Time
    Training Done Right (Zhang et al., 2025, arXiv 2505.23884), released code. [ALG-NS-D1]
    """

    kind: Literal["newton_schulz"] = "newton_schulz"
    polynomial: Literal["quintic", "cubic", "schedule"] = "quintic"
    steps: int = Field(5, ge=1, le=50)
    rescale: bool = False
    eps: float = Field(1e-7, gt=0)

    def conflicts(self) -> Conflicts:
        if (beyond := too_many_steps(self.polynomial, self.steps)) is not None:
            yield ("steps",), beyond

    @property
    def _steps(self) -> tuple[Coefficients, ...]:
        return polynomials(self.polynomial, self.steps)

    @property
    def stable_step(self) -> float:
        return math.inf if not self.rescale else 2.0

    def direction(self, grad: Tensor, lr: Tensor, momentum: Tensor, *slots: Tensor) -> tuple[Tensor, ...]:
        return self._direction(grad, lr, momentum, *slots)[0]

    def direction_vjp(self, inputs: tuple[Tensor, ...], *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        return self._direction_vjp(self._direction(*inputs)[1], *cotangents)

    def block(self) -> Block:
        """`direction` as a tape block, which keeps the iterations for the derivative."""
        declared = still_declared(self, "block", self._formulas)
        return Block(f"algorithm.{self.kind}", self._direction, self._direction_vjp) if declared else super().block()

    def _direction(self, grad: Tensor, lr: Tensor, momentum: Tensor, *slots: Tensor) -> tuple[tuple[Tensor, ...], Any]:
        carried = torch.addcmul(grad, over(momentum, grad), slots[0])
        iteration = self._orthogonal(carried)
        return (-over(lr, grad) * iteration[0], carried), ((grad, lr, momentum, slots[0]), iteration)

    def _direction_vjp(self, residuals: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        (grad, lr, momentum, slot), (orthogonal, iterates, length, moved) = residuals
        gdirection, gcarried = cotangents
        glr = -sum_to_gate(orthogonal * gdirection, lr)
        g = self._orthogonal_vjp(gcarried, iterates, length, moved, -over(lr, grad) * gdirection)
        return g, glr, sum_to_gate(slot * g, momentum), over(momentum, grad) * g

    def gram_form(self) -> GramForm | None:
        """NS(S) = Q S: a polynomial of S S^T, `[N, V, V]` however wide S is."""
        return GramForm(self._gain) if still_declared(self, "gram_form", self._formulas) else None

    def _gain(self, shape: tuple[int, ...]) -> Block:
        """gram = S S^T -> Q with NS(S) = Q S for a weight of this shape. [ALG-NS-I3]

        With A = gram / (tr gram + eps^2) every iteration multiplies X by P = a I + b A + c A^2, hence Q by P, and turns
        A into P A P. The VJP reverses these products, with their factors transposed: A is symmetric only up to
        rounding, and cotangents that are symmetrised on the way lose three digits in float32.
        """
        steps, rows = self._steps, min(shape)

        def forward(gram: Tensor) -> tuple[Tensors, Any]:
            square = _trace(gram)
            moved = square > 0
            square = square + self.eps**2
            x, q = gram / square, torch.empty(0)
            iterations: list[tuple[Tensor, Tensor, Tensor | None, Tensor | None]] = []
            for step, coefficients in enumerate(steps):
                p = _polynomial(x, coefficients)
                before, q = (q, torch.bmm(p, q)) if step else (None, p)
                half = torch.bmm(p, x) if step + 1 < len(steps) else None
                iterations.append((x, p, before, half))
                x = x if half is None else torch.bmm(half, p)
            scale = torch.full_like(square, 1 / math.sqrt(rows)) if self.rescale else square.rsqrt()
            return (torch.where(moved, scale * q, 0.0),), (iterations, q, square, scale, moved)

        def vjp(residuals: Any, g: Tensor) -> tuple[Tensor]:
            iterations, gain, square, scale, moved = residuals
            g = torch.where(moved, g, 0.0)
            gx, gq = None, scale * g
            for (x, p, q, half), coefficients in zip(reversed(iterations), reversed(steps), strict=True):
                gp, gq = (gq, None) if q is None else (torch.bmm(gq, q.mT), torch.bmm(p.mT, gq))
                ghalf = None if gx is None else torch.bmm(gx, p.mT)
                if ghalf is not None:
                    gp = torch.baddbmm(gp, half.mT, gx).baddbmm_(ghalf, x.mT)
                gx = _polynomial_vjp(x, gp, coefficients)
                gx = gx if ghalf is None else gx.baddbmm_(p.mT, ghalf)
            gsquare = -(gx * iterations[0][0]).sum((-2, -1), keepdim=True) / square
            if not self.rescale:
                gsquare = gsquare - 0.5 * scale / square * (g * gain).sum((-2, -1), keepdim=True)
            eye = torch.eye(g.shape[-1], dtype=g.dtype, device=g.device)
            return (gx / square + gsquare * eye,)

        return Block("algorithm.newton_schulz.gain", forward, vjp)

    def _orthogonal(self, s: Tensor) -> tuple[Tensor, list[tuple[Tensor, ...]], Tensor, Tensor]:
        """NS(s); X, A and P = a I + b A + c A^2 of every iteration and the last X, as matrices; the regularised norm of
        s; and a mask, True where s is not 0."""
        rows = _rows(s)
        gram = _inner(rows, rows)
        square = _trace(gram)
        moved = square > 0
        square = square + self.eps**2
        length = square.sqrt()
        x, gram = rows / length, gram / square
        iterates: list[tuple[Tensor, ...]] = []
        for step, coefficients in enumerate(self._steps):
            gram = _inner(x, x) if step else gram
            through = _polynomial(gram, coefficients)
            iterates.append((x, gram, through))
            x = _through(through, x)
        iterates.append((x,))
        if self.rescale:
            x = x * (length / math.sqrt(min(x.shape[-2:])))
        # At S' = 0 a token would multiply cotangents by a^steps / eps, and the next one again.
        return torch.where(moved, x, 0.0).reshape(s.shape), iterates, length, moved

    def _orthogonal_vjp(
        self, known: Tensor, iterates: list[tuple[Tensor, ...]], length: Tensor, moved: Tensor, g: Tensor
    ) -> Tensor:
        """Cotangent of s from that of NS(s), added to the `known` one."""
        g, glength = torch.where(moved, _rows(g), 0.0), torch.zeros_like(length)
        if self.rescale:
            root = math.sqrt(min(g.shape[-2:]))
            glength = (g * iterates[-1][0]).sum((-2, -1), keepdim=True) / root
            g = g * (length / root)
        for (x, gram, through), (_, b, c) in zip(reversed(iterates[:-1]), reversed(self._steps), strict=True):
            outer = _inner(g, x)
            inner = torch.baddbmm(outer, gram, outer, beta=b, alpha=c).baddbmm_(outer, gram, alpha=c)
            g = _through(through, g, inner + inner.mT, x)
        unit = iterates[0][0]
        glength = glength - (g * unit).sum((-2, -1), keepdim=True) / length
        return torch.addcmul(torch.addcmul(_rows(known), glength, unit), g, 1 / length).reshape(known.shape)


def _polynomial(x: Tensor, coefficients: Coefficients) -> Tensor:
    """a I + b X + c X^2."""
    a, b, c = coefficients
    p = torch.baddbmm(x, x, x, beta=b, alpha=c) if c else b * x
    p.diagonal(dim1=-2, dim2=-1).add_(a)
    return p


def _polynomial_vjp(x: Tensor, g: Tensor, coefficients: Coefficients) -> Tensor:
    _, b, c = coefficients
    return torch.baddbmm(g, g, x.mT, beta=b, alpha=c).baddbmm_(x.mT, g, alpha=c) if c else b * g


def _inner(a: Tensor, b: Tensor) -> Tensor:
    """Inner products of the rows of two wide matrices, a b^T, or of the columns of two tall ones, a^T b."""
    return torch.bmm(a.mT, b) if a.shape[-2] > a.shape[-1] else torch.bmm(a, b.mT)


def _through(p: Tensor, x: Tensor, q: Tensor | None = None, y: Tensor | None = None) -> Tensor:
    """P X, and Q Y added to it, of wide matrices, or X P and Y Q of tall ones; P and Q are symmetric."""
    tall = x.shape[-2] > x.shape[-1]
    product = torch.bmm(x, p) if tall else torch.bmm(p, x)
    if q is None or y is None:
        return product
    return product.baddbmm_(y, q) if tall else product.baddbmm_(q, y)


class DeltaMomentum(Carrying):
    r"""delta_momentum: S' = S (momentum I - c G^T G) - lr G, D = S'.

    The momentum as a delta-rule memory of gradients: along the rows of G the old content is erased before the new one
    is added. `form="stable"` takes c = erase / (1 + erase |G|_F^2), for which the bracket never has an eigenvalue
    outside [momentum - 1, momentum]; `form="paper"` takes c = 1 as printed, which diverges while |G|^2 > 1 + momentum.

    Formula: $S_t = S_{t-1} (\mu_t I - c_t G_t^\top G_t) - \eta_t G_t,\quad D_t = S_t$
    $c_t = \frac{\mathrm{erase}}{1 + \mathrm{erase}\, \Vert G_t \Vert_F^2},\quad c_t = 1 \ \text{if form is paper}$
    Shapes: G, S `[N, ..., P]`, a vector counts as one row; lr, momentum `[N]`.
    VJP: with d = g_D + g_S', W = S G^T, H = d G^T: g_S = momentum d - c H G, g_G = -lr d -
    c (W^T d + H^T S) + 2 c^2 <d, W G> G (the last term for `stable` only), g_momentum = <S, d>, g_lr = -<G, d>.
    Traits: one slot.
    Cost: two products of V^2 P.
    References: Nested Learning (Behrouz et al., 2025, arXiv 2512.24695), Eq 49, whose G^T G lacks a factor.
    [ALG-DMOM-D1]
    """

    kind: Literal["delta_momentum"] = "delta_momentum"
    erase: float = Field(1.0, ge=0)
    form: Literal["stable", "paper"] = "stable"

    @property
    def returning_step(self) -> float:
        return 2.0 * (1.0 - self.momentum)

    @property
    def token(self) -> AlgorithmForm:
        return AlgorithmForm(momentum=True, erase=self.erase, bounded=self.form == "stable")

    def direction(self, grad: Tensor, lr: Tensor, momentum: Tensor, *slots: Tensor) -> tuple[Tensor, ...]:
        g, s = _rows(grad), _rows(slots[0])
        erased = self._factor(g) * ((s @ g.mT) @ g)
        carried = over(momentum, grad) * slots[0] - over(lr, grad) * grad - erased.reshape(grad.shape)
        return carried, carried

    def direction_vjp(self, inputs: tuple[Tensor, ...], *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        grad, lr, momentum, slot = inputs
        both = cotangents[0] + cotangents[1]
        g, s, d = _rows(grad), _rows(slot), _rows(both)
        c, w, h = self._factor(g), s @ g.mT, d @ g.mT
        gg = c * (w.mT @ d + h.mT @ s)
        if self.form == "stable":
            gg = gg - 2 * c.square() * (d * (w @ g)).sum((-2, -1), keepdim=True) * g
        return (
            -over(lr, grad) * both - gg.reshape(grad.shape),
            -sum_to_gate(grad * both, lr),
            sum_to_gate(slot * both, momentum),
            over(momentum, grad) * both - (c * (h @ g)).reshape(grad.shape),
        )

    def _factor(self, g: Tensor) -> Tensor:
        if self.form == "paper":
            return torch.ones_like(g[:, :1, :1])
        return self.erase / (1 + self.erase * _square(g))


class DeepMomentum(Carrying):
    r"""deep_momentum: D = lr m'(G), m' = momentum m - c grad_m ell(m; G), m(g) = W_2 tanh(W_1 g).

    The momentum is a memory of gradients: a network that maps the rows of G to the rows of a step and is itself trained
    at every write. `objective="descent"` teaches it the step of gradient descent, ell = |m(g) + g|^2 / 2, which past
    gradients shape as far as the network generalises, with c = rate / (1 + rate B), B = |H|_F^2 + |W_2|_F^2 |G|_F^2
    with H = tanh(G W_1^T): B bounds the curvature of ell along the network, so however large G is, the network never
    steps past its target. `"paper"` is the printed ell = <m(g), 1>, whose direction does not depend on the sign of g,
    with c = rate. One network per weight, shared by its rows. It starts at a fixed draw for W_1 and at W_2 = 0, and
    `momentum` decays its distance from that start.

    Formula: $D_t = \eta_t\, m_t(G_t),\quad m(g) = W_2 \tanh(W_1 g),\quad \ell(m; g) = \frac{1}{2} \Vert m(g) + g
    \Vert^2$
    $W_{i,t} = W_{i,0} + \mu_t (W_{i,t-1} - W_{i,0}) - c_t \nabla_{W_i} \ell(m_{t-1}; G_t)$
    $c_t = \frac{\mathrm{rate}}{1 + \mathrm{rate} \left(\Vert H \Vert_F^2 + \Vert W_2 \Vert_F^2 \Vert G_t
    \Vert_F^2\right)},\quad H = \tanh(G_t W_1^\top)$
    Shapes: G `[N, ..., P]`, a vector counts as one row; slots W_1 minus its start `[N, width, P]`, W_2 `[N, P, width]`;
    lr, momentum `[N]`.
    VJP: by torch.func through the network and its gradient.
    Traits: two slots.
    Cost: 10 V P width per weight.
    References: Nested Learning (Behrouz et al., 2025, arXiv 2512.24695), Eq 50. [ALG-DEEP-D1]
    """

    kind: Literal["deep_momentum"] = "deep_momentum"
    width: Size = Field(16, ge=1, description="hidden units")
    rate: float = Field(0.1, gt=0, description="step size of the network's own descent")
    objective: Literal["descent", "paper"] = "descent"
    slots: ClassVar[tuple[str, ...]] = ("w_in", "w_out")
    stable_step: ClassVar[float] = math.inf

    def slot_shapes(self, weight: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        return {"w_in": (self.width, weight[-1]), "w_out": (weight[-1], self.width)}

    def direction(self, grad: Tensor, lr: Tensor, momentum: Tensor, *slots: Tensor) -> tuple[Tensor, ...]:
        rows = _rows(grad)
        start, (change, w_out) = self._start(grad), slots
        hidden = torch.tanh(rows @ (start + change).mT)
        answer = hidden @ w_out.mT
        error, rate = torch.ones_like(rows), torch.full_like(change[:, :1, :1], self.rate)
        if self.objective == "descent":
            error = answer + rows
            rate = rate / (1 + rate * (_square(hidden) + _square(w_out) * _square(rows)))
        pushed = (error @ w_out) * (1 - hidden.square())
        keep = over(momentum, change)
        change = keep * change - rate * (pushed.mT @ rows)
        w_out = keep * w_out - rate * (error.mT @ hidden)
        step = torch.tanh(rows @ (start + change).mT) @ w_out.mT
        return over(lr, grad) * step.reshape(grad.shape), change, w_out

    def factored_form(self) -> Block | None:
        """With G = u p^T all rows of G are multiples of p, so H = tanh(u z^T) with z = W_1 p, and only products of
        answers with W_2 and H are needed: matrices of sides V, P and `width` by `width`. [ALG-DEEP-I2]"""
        if self.objective != "descent" or not still_declared(self, "factored_form", self._formulas):
            return None
        return Block("algorithm.deep_momentum.factored", self._factored, self._factored_vjp)

    def _factored(self, u: Tensor, p: Tensor, lr: Tensor, momentum: Tensor, *slots: Tensor) -> tuple[Tensors, Any]:
        # Vectors are rows: to `bmm` on a CPU two to three times as fast as columns.
        u, p, keep, lr = u.unsqueeze(1), p.unsqueeze(1), momentum[:, None, None], lr[:, None, None]
        (change, w_out), bmm, column = slots, torch.bmm, u.mT
        start = self._start(p)
        w_in = start + change
        z = bmm(p, w_in.mT)
        hidden = torch.tanh(column * z)
        square, met = bmm(w_out.mT, w_out), bmm(p, w_out)  # W_2^T W_2 and W_2^T p
        error = torch.addcmul(bmm(hidden, square), column, met)  # (answer + G) W_2
        second, along = bmm(hidden.mT, hidden), bmm(u, hidden)
        sizes = _trace(second), _trace(square), bmm(u, column), bmm(p, p.mT)
        rate = self.rate / (1 + self.rate * (sizes[0] + sizes[1] * sizes[2] * sizes[3]))
        pushed = bmm(u, _TANH_BACK(error, hidden))
        back = torch.addcmul(bmm(w_out, second), p.mT, along)
        new = torch.addcmul(keep * change, (rate * pushed).mT, p, value=-1)
        out = torch.addcmul(keep * w_out, rate, back, value=-1)
        w_new = start + new
        new_z = bmm(p, w_new.mT)
        step = torch.tanh(column * new_z)
        inputs = u, p, lr, keep, change, w_out, w_in
        network = z, hidden, (square, met), error, sizes, rate, pushed, second, along
        return (lr * step, out, new, out), (inputs, network, (back, w_new, new_z, step))

    def _factored_vjp(self, residuals: Any, gleft: Tensor, gright: Tensor, gnew: Tensor, gout: Tensor) -> Tensors:
        inputs, network, (back, w_new, new_z, step) = residuals
        u, p, lr, keep, change, w_out, w_in = inputs
        z, hidden, (square, met), error, sizes, rate, pushed, second, along = network
        bmm, add, plus = torch.bmm, torch.baddbmm, torch.addcmul
        glr = _along(gleft, step)
        pulled = _TANH_BACK(lr * gleft, step)
        gu, gz = bmm(new_z, pulled.mT), bmm(u, pulled)
        gout, gnew = gout + gright, plus(gnew, gz.mT, p)
        gmomentum = _along(gnew, change) + _along(gout, w_out)
        # W_1' = keep W_1 - rate pushed p^T, W_2' = keep W_2 - rate back
        reached = bmm(p, gnew.mT)
        grate = -_along(reached, pushed) - _along(gout, back)
        gpushed, gback = -rate * reached, -rate * gout
        gp = add(bmm(gz, w_new), rate * pushed, gnew, alpha=-1)
        gw, gsecond, galong = add(keep * gout, gback, second), bmm(w_out.mT, gback), bmm(p, gback)
        gp = add(gp, along, gback.mT)
        # rate, whose bound is |H|^2 + |W_2|^2 |u|^2 |p|^2
        gbound = -2 * rate.square() * grate[:, None, None]
        ghidden = add(gbound * hidden, hidden, gsecond + gsecond.mT)
        gw = plus(gw, gbound * sizes[2] * sizes[3], w_out)
        gbound = gbound * sizes[1]
        gu, gp = plus(gu, gbound * sizes[3], u), plus(gp, gbound * sizes[2], p)
        # pushed = (error (1 - H^2))^T u, error = H W_2^T W_2 + u (W_2^T p)^T, along = H^T u
        spread = u.mT * gpushed
        gu = add(add(gu, gpushed, _TANH_BACK(error, hidden).mT), galong, hidden.mT)
        gerror = _TANH_BACK(spread, hidden)
        ghidden = plus(plus(ghidden, spread * error, hidden, value=-2), u.mT, galong)
        ghidden = add(ghidden, gerror, square)
        gsquare, gmet = bmm(hidden.mT, gerror), bmm(u, gerror)
        gu = add(gu, met, gerror.mT)
        gw = plus(add(gw, w_out, gsquare + gsquare.mT), p.mT, gmet)
        gp = add(gp, gmet, w_out.mT)
        # H = tanh(u z^T), z = W_1 p
        pulled = _TANH_BACK(ghidden, hidden)
        gu, gz = add(gu, z, pulled.mT), bmm(u, pulled)
        gp, gchange = add(gp, gz, w_in), plus(keep * gnew, gz.mT, p)
        return gu.squeeze(1), gp.squeeze(1), glr, gmomentum, gchange, gw

    def _start(self, grad: Tensor) -> Tensor:
        return (_traced_draw if torch.compiler.is_compiling() else _draw)(self.width, grad.shape[-1]).to(grad)


@lru_cache(maxsize=16)
def _draw(rows: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    draw = torch.randn((rows, width), generator=generator, dtype=torch.float64, device="cpu")
    return draw / math.sqrt(width)


@torch.library.custom_op("hecate::momentum_draw", mutates_args=())
def _traced_draw(rows: int, width: int) -> Tensor:
    """The draw as an operator, since torch.compile traces no generator."""
    return _draw(rows, width).clone()


@_traced_draw.register_fake
def _(rows: int, width: int) -> Tensor:
    return torch.empty(rows, width, dtype=torch.float64)


def _trace(matrix: Tensor) -> Tensor:
    """Trace, `[N, 1, 1]`."""
    return matrix.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]


def _along(a: Tensor, b: Tensor) -> Tensor:
    """<a, b> `[N]`."""
    return (a * b).sum((1, 2))


def _rows(weight: Tensor) -> Tensor:
    """`[N, ..., P]` as matrices; a vector is one row."""
    return weight.reshape(weight.shape[0], -1, weight.shape[-1])


def _square(matrix: Tensor) -> Tensor:
    return matrix.square().sum((-2, -1), keepdim=True)
