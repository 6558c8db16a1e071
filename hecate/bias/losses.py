"""Attentional biases: the inner losses that writes descend. They depend on the product <pred, v>, or on the error e =
pred - v alone."""

from __future__ import annotations

from types import MappingProxyType
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from hecate.errors import ShapeError
from hecate.tape import Block, formula_block
from hecate.tape.ops import floored_root, onto_ball, onto_ball_vjp, torch_vjp
from hecate.variant import Conflicts, Variant


class Bias(Variant, family="bias"):
    """An inner loss `ell(pred, target)`, summed over the value dimension.

    A variant defines `loss`, `grad = d ell / d pred`, and `grad_vjp`, the derivative of `grad`; the last two fall back
    to `torch.func` if left out (`hecate list` says so). `grad` is exactly the derivative of `loss`, without a hidden
    factor. Kernels are printed from these formulas: `hecate.formula`.

    Shapes: pred and target `[..., V]`; loss `[...]`; grad `[..., V]`.
    """

    _derivatives: ClassVar[tuple[str, ...]] = ("grad", "grad_vjp")
    _formulas = ("loss", "grad", "grad_vjp", "rho", "psi", "psi_jvp")
    _follows = MappingProxyType({
        "grad": ("loss",), "grad_vjp": ("loss", "grad"),
        **dict.fromkeys(("linear", "curvature"), ("loss", "grad", "rho", "psi")),
    })  # fmt: skip

    def loss(self, pred: Tensor, target: Tensor) -> Tensor:
        """The loss `[...]`."""
        raise NotImplementedError(f"{type(self).__name__} defines no loss")

    def grad(self, pred: Tensor, target: Tensor) -> Tensor:
        """d loss / d pred `[..., V]`."""

        def total(pred: Tensor) -> Tensor:
            loss = self.loss(pred, target)
            if loss.shape != pred.shape[:-1]:
                wanted = f"{list(pred.shape)} to {list(pred.shape[:-1])}, got {list(loss.shape)}"
                axis = f"bias {self.kind!r}: loss must take the last axis alone away"
                raise ShapeError(f"{axis}, {wanted}; end it with .sum(-1)")
            return loss.sum()

        return torch.func.grad(total)(pred)

    def grad_vjp(self, pred: Tensor, target: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Cotangents of pred and target from the cotangent g of `grad`."""
        return torch_vjp(self.grad, (pred, target), g)

    def grad_jvp(self, pred: Tensor, target: Tensor, tangent: Tensor) -> Tensor:
        """Jacobian of `grad` by pred, times a tangent: the Hessian of the loss, hence symmetric."""
        return self.grad_vjp(pred, target, tangent)[0]

    @property
    def curvature(self) -> float | None:
        """Upper bound of the Hessian's eigenvalues, None if unbounded: with it, `lr |phi|^2 curvature < 2`
        keeps a linear memory contractive."""
        return None

    @property
    def linear(self) -> bool:
        """True if grad is a pred + b target, with the same fixed a and b for every coordinate."""
        return False

    def block(self) -> Block:
        """`grad` as a tape block: (pred, target) -> u."""
        vjp = self.grad_vjp if self.hand_written() else None
        return formula_block(f"bias.{self.kind}", self.grad, vjp, alike=self)


BiasKind = Bias


class Dot(Bias):
    r"""dot: ell = -<pred, v>.

    The Hebbian bias of linear attention: every write adds `lr v phi(k)^T`, whatever the memory holds.

    Formula: $\ell = -\hat v^\top v,\quad u = -v$
    Shapes: pred, v `[..., V]`.
    VJP: u = -v, so g_pred = 0 and g_v = -g.
    Traits: curvature 0; unbounded below, so only retention bounds the memory.
    Cost: O(V).
    References: Transformers are RNNs (Katharopoulos et al., 2020, arXiv 2006.16236); MIRAS (Behrouz et al., 2025, arXiv
    2504.13173). [BIAS-DOT-D1]
    """

    kind: Literal["dot"] = "dot"
    curvature: ClassVar[float] = 0.0
    linear: ClassVar[bool] = True

    def loss(self, pred: Tensor, target: Tensor) -> Tensor:
        return -(pred * target).sum(-1)

    def grad(self, pred: Tensor, target: Tensor) -> Tensor:
        return -target

    def grad_vjp(self, pred: Tensor, target: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(g), -g


class KL(Bias):
    r"""kl: ell = log sum exp(pred) - <pred, t> + sum t log t, t = softmax(v/temperature) or t = v.

    The memory predicts logits of a distribution t: the loss is KL(t || softmax(pred)) whenever t sums to 1.
    `target="softmax"` makes one of any value; `"distribution"` takes v as it is, one-hot included, for memories of
    classes or tokens. A v that sums to something else is not rescaled.

    Formula: $\ell = \log \sum_i \exp \hat v_i - \hat v^\top \pi + \sum_i \pi_i \log \pi_i,\quad \pi =
    \mathrm{softmax}(v / \tau) \ \text{or } v$
    $u = \mathrm{softmax}(\hat v) - \pi$
    Shapes: pred, v `[..., V]`.
    VJP: u = s - t with s = softmax(pred); J g = s (g - s.g), g_v = -t (g - t.g)/temperature for softmax and -g for a
    distribution.
    Traits: curvature 1/2; infinite loss, but the same u, where v has negative entries. Each u_i depends on the whole
    row.
    Cost: O(V).
    References: It's All Connected (Behrouz et al., 2025, arXiv 2504.13173) for the choice of a loss; Learning with
    Fenchel-Young Losses (Blondel et al., 2020, arXiv 1901.02324) for its form. [BIAS-KL-D1]
    """

    kind: Literal["kl"] = "kl"
    target: Literal["softmax", "distribution"] = "softmax"
    temperature: float = Field(1.0, gt=0)
    curvature: ClassVar[float] = 0.5

    def conflicts(self) -> Conflicts:
        if self.target == "distribution" and self.temperature != 1:
            no_effect = "has no effect with target='distribution', which takes v as it is"
            yield ("temperature",), f"{self.temperature:g} {no_effect}; leave it at 1 or set target='softmax'"

    def loss(self, pred: Tensor, target: Tensor) -> Tensor:
        t = self._distribution(target)
        return pred.logsumexp(-1) - (pred * t).sum(-1) - torch.special.entr(t).sum(-1)

    def grad(self, pred: Tensor, target: Tensor) -> Tensor:
        return pred.softmax(-1) - self._distribution(target)

    def grad_vjp(self, pred: Tensor, target: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        gpred = _softmax_jvp(pred.softmax(-1), g)
        if self.target == "distribution":
            return gpred, -g
        return gpred, -_softmax_jvp(self._distribution(target), g) / self.temperature

    def _distribution(self, target: Tensor) -> Tensor:
        if self.target == "distribution":
            return target
        return (target / self.temperature).softmax(-1)


def _softmax_jvp(share: Tensor, tangent: Tensor) -> Tensor:
    return share * (tangent - (share * tangent).sum(-1, keepdim=True))


class ErrorBias(Bias):
    """A loss of e = pred - target alone; variants define rho, psi = rho' and psi's Jacobian."""

    _derivatives = ("psi", "psi_jvp", "grad", "grad_vjp")
    _follows = MappingProxyType({"psi": ("rho",), "psi_jvp": ("rho", "psi"), **Bias._follows})

    def rho(self, error: Tensor) -> Tensor:
        """The loss `[...]` of an error `[..., V]`."""
        raise NotImplementedError(f"{type(self).__name__} defines no rho")

    def psi(self, error: Tensor) -> Tensor:
        """d rho / d error."""
        return torch.func.grad(lambda error: self.rho(error).sum())(error)

    def psi_jvp(self, error: Tensor, tangent: Tensor) -> Tensor:
        """Jacobian of psi (symmetric) times a tangent."""
        return torch_vjp(self.psi, (error,), tangent)[0]

    def loss(self, pred: Tensor, target: Tensor) -> Tensor:
        return self.rho(pred - target)

    def grad(self, pred: Tensor, target: Tensor) -> Tensor:
        return self.psi(pred - target)

    def grad_vjp(self, pred: Tensor, target: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        gpred = self.psi_jvp(pred - target, g)
        return gpred, -gpred


class L2(ErrorBias):
    r"""l2: ell = 1/2 |e|^2, e = pred - v.

    The delta rule's bias: a write corrects what the memory already predicts. The factor 1/2 is kept, so that one step
    with lr |phi|^2 = 1 stores v exactly; papers that write |e|^2 print the same gradient.

    Formula: $\ell = \frac{1}{2} \Vert e \Vert^2,\quad e = \hat v - v,\quad u = e$
    Shapes: e `[..., V]`.
    VJP: u = e, g_pred = g, g_v = -g.
    Traits: curvature 1.
    Cost: O(V).
    References: Linear Transformers Are Secretly Fast Weight Programmers (Schlag et al., 2021,
    arXiv 2102.11174); Titans (Behrouz et al., 2025, arXiv 2501.00663). [BIAS-L2-D1]
    """

    kind: Literal["l2"] = "l2"
    curvature: ClassVar[float] = 1.0
    linear: ClassVar[bool] = True

    def rho(self, error: Tensor) -> Tensor:
        return 0.5 * error.square().sum(-1)

    def psi(self, error: Tensor) -> Tensor:
        return error

    def psi_jvp(self, error: Tensor, tangent: Tensor) -> Tensor:
        return tangent


class L1(ErrorBias):
    r"""l1: ell = sum_i (r_i - eps) with r = sqrt(e^2 + eps^2).

    Every coordinate pulls with force at most 1, however far off it is: an outlier weighs no more than any other error,
    and a write depends on little more than the side of v on which the prediction lies. It is the limit p = 1 of `lp`,
    smoothed alike; a tanh in place of e/r is another function.

    Formula: $\ell = \sum_i (r_i - \varepsilon),\quad r_i = \sqrt{e_i^2 + \varepsilon^2},\quad u_i = \frac{e_i}{r_i}$
    Shapes: e `[..., V]`.
    VJP: u = e/r, J = diag(eps^2 / r^3); at e = 0 both are taken as 0, as for a sign: nearby, J is 1/eps, and each token
    that the memory answers exactly would multiply cotangents by lr |phi|^2 / eps.
    Traits: curvature 1/eps near e = 0, which bounds no useful step: declared unbounded.
    Cost: O(V).
    Warning: steps of lr |phi|^2 do not shrink near the target; the memory ends within that of it.
    References: It's All Connected (Behrouz et al., 2025, arXiv 2504.13173), value-less memory. [BIAS-L1-D1]
    """

    kind: Literal["l1"] = "l1"
    eps: float = Field(1e-6, gt=0)

    def rho(self, error: Tensor) -> Tensor:
        # r - eps without its cancellation.
        return (error.square() / (_radius(error, self.eps) + self.eps)).sum(-1)

    def psi(self, error: Tensor) -> Tensor:
        return _sign(error, self.eps)

    def psi_jvp(self, error: Tensor, tangent: Tensor) -> Tensor:
        return _sign_slope(error, self.eps) * tangent


class Lp(ErrorBias):
    r"""lp: ell = 1/p sum_i s_i^p with s = |e| for p >= 2 and s = sqrt(e^2 + eps^2) - eps for p < 2.

    p > 2 stresses large errors (Moneta uses 3), p < 2 resists outliers. p = 2 is `l2` exactly. Below 2 the derivative
    of |e|^p is singular at 0, hence the smoothing; what is computed is the exact derivative of the smoothed loss. A
    tanh-smoothed sign, as some write, is another function.

    Formula: $\ell = \frac{1}{p} \sum_i s_i^p,\quad u_i = s_i^{p-1} \frac{e_i}{r_i}$
    $s_i = r_i = |e_i| \quad \text{if } p \geq 2$
    $s_i = r_i - \varepsilon,\quad r_i = \sqrt{e_i^2 + \varepsilon^2} \quad \text{if } p < 2$
    Shapes: e `[..., V]`.
    VJP: u = s^(p-1) e/r with r = sqrt(e^2 + eps^2) (r = |e| for p >= 2); J = diag((p-1) s^(p-2) (e/r)^2 + s^(p-1) eps^2
    / r^3). At e = 0 both are 0, save J = 1 for p = 2.
    Traits: curvature 1 for p = 2, else unbounded.
    Cost: O(V).
    References: MIRAS (Behrouz et al., 2025, arXiv 2504.13173), Moneta. [BIAS-LP-D1]
    """

    kind: Literal["lp"] = "lp"
    p: float = Field(3.0, gt=1)
    eps: float = Field(1e-6, gt=0)

    @property
    def curvature(self) -> float | None:
        return 1.0 if self.p == 2 else None

    @property
    def linear(self) -> bool:
        return self.p == 2

    def rho(self, error: Tensor) -> Tensor:
        size, _, live = self._sizes(error)
        return torch.where(live, size.pow(self.p), 0.0).sum(-1) / self.p

    def psi(self, error: Tensor) -> Tensor:
        size, radius, live = self._sizes(error)
        at_zero = 1.0 if self.p == 2 else 0.0
        return torch.where(live, size.pow(self.p - 1) / radius, at_zero) * error

    def psi_jvp(self, error: Tensor, tangent: Tensor) -> Tensor:
        size, radius, live = self._sizes(error)
        slope = radius if self.p >= 2 else error
        diagonal = (self.p - 1) * size.pow(self.p - 2) * (slope / radius).square()
        if self.p < 2:
            diagonal = diagonal + size.pow(self.p - 1) * self.eps**2 / radius.pow(3)
        return torch.where(live, diagonal, 1.0 if self.p == 2 else 0.0) * tangent

    def _sizes(self, error: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        live = error != 0
        # A 1 replaces errors of 0, as a power of 0 has no usable derivative under autograd.
        safe = torch.where(live, error, 1.0)
        if self.p >= 2:
            return safe.abs(), safe.abs(), live
        radius = _radius(safe, self.eps)
        return safe * safe / (radius + self.eps), radius, live


class Huber(ErrorBias):
    r"""huber: ell = 1/2 e^2 for |e| <= delta, delta |e| - delta^2/2 beyond, per coordinate or of the norm.

    Quadratic near zero and linear far out: a single outlier moves the memory by a bounded amount. `norm=True` applies
    the same function to |e|_2, which keeps the direction of the error.

    Formula: $\ell = \sum_i h(e_i),\quad u_i = \max(-\delta, \min(\delta, e_i))$
    $h(e) = \frac{1}{2} e^2 \ \text{if } |e| \leq \delta,\quad h(e) = \delta |e| - \frac{1}{2} \delta^2 \ \text{beyond}$
    $\ell = h(\Vert e \Vert),\quad u = e \min\left(1, \frac{\delta}{\Vert e \Vert}\right) \quad \text{if norm}$
    Shapes: e `[..., V]`.
    VJP: coordinate u = clip(e, -delta, delta), J = 1[|e| <= delta]; norm u = e min(1, delta/|e|),
    J g = g inside, (delta/|e|)(g - e (e.g)/|e|^2) outside. The threshold itself counts as inside.
    Traits: curvature 1.
    Cost: O(V).
    References: MIRAS (Behrouz et al., 2025, arXiv 2504.13173). [BIAS-HUBER-D1]
    """

    kind: Literal["huber"] = "huber"
    delta: float = Field(1.0, gt=0)
    norm: bool = False
    curvature: ClassVar[float] = 1.0

    def rho(self, error: Tensor) -> Tensor:
        size, square = error.abs(), error.square()
        beyond = size > self.delta
        if self.norm:
            square = square.sum(-1, keepdim=True)
            size, beyond = floored_root(square, self.delta)
        return torch.where(beyond, self.delta * size - 0.5 * self.delta**2, 0.5 * square).sum(-1)

    def psi(self, error: Tensor) -> Tensor:
        return onto_ball(error, self.delta, -1) if self.norm else error.clamp(-self.delta, self.delta)

    def psi_jvp(self, error: Tensor, tangent: Tensor) -> Tensor:
        if self.norm:
            return onto_ball_vjp(error, self.delta, -1, tangent)
        return torch.where(error.abs() <= self.delta, tangent, 0.0)


class Yaad(ErrorBias):
    r"""yaad: ell = 1/2 |e|^2 for |e|_2 <= delta, delta (sum_i (r_i - eps) - delta/2) beyond, r = sqrt(e^2 + eps^2).

    The write that MIRAS prints for Yaad: l2's while the error is inside a ball, delta times l1's beyond it. The norm of
    the whole vector decides; beyond the ball each coordinate is followed by its sign. With several coordinates this is
    no Huber loss: see the warning.

    Formula: $\ell = \frac{1}{2} \Vert e \Vert^2,\quad u = e \quad \text{if } \Vert e \Vert \leq \delta$
    $\ell = \delta \left(\sum_i (r_i - \varepsilon) - \frac{\delta}{2}\right),\quad u_i = \delta \frac{e_i}{r_i},\quad
    r_i = \sqrt{e_i^2 + \varepsilon^2} \quad \text{beyond}$
    Shapes: e `[..., V]`.
    VJP: u = e, J = 1 inside; u = delta e/r, J = diag(delta eps^2 / r^3) outside, 0 at a coordinate e = 0. The threshold
    counts as inside.
    Traits: curvature unbounded. Each u_i depends on the norm of e.
    Cost: O(V).
    Warning: at |e|_2 = delta u jumps from e to delta sign(e), whose length is up to sqrt(V) times that of e, and the
    loss by delta (|e|_1 - delta). `huber` is continuous, per coordinate and with `norm=True`.
    References: It's All Connected (Behrouz et al., 2025, arXiv 2504.13173), Yaad. [BIAS-YAAD-D1]"""

    kind: Literal["yaad"] = "yaad"
    delta: float = Field(1.0, gt=0)
    eps: float = Field(1e-6, gt=0)

    def rho(self, error: Tensor) -> Tensor:
        far = (error.square() / (_radius(error, self.eps) + self.eps)).sum(-1)
        square = error.square().sum(-1)
        linear = self.delta * (far - 0.5 * self.delta)
        return torch.where(self._inside(error).squeeze(-1), 0.5 * square, linear)

    def psi(self, error: Tensor) -> Tensor:
        return torch.where(self._inside(error), error, self.delta * _sign(error, self.eps))

    def psi_jvp(self, error: Tensor, tangent: Tensor) -> Tensor:
        far = self.delta * _sign_slope(error, self.eps)
        return torch.where(self._inside(error), tangent, far * tangent)

    def _inside(self, error: Tensor) -> Tensor:
        return error.square().sum(-1, keepdim=True) <= self.delta**2


class Robust(ErrorBias):
    r"""robust: ell = 1/2 |e|^2 + radius (r - eps) + 1/2 radius^2 with r = sqrt(|e|^2 + eps^2).

    The squared error against the worst value within a ball of the given radius around v, max over |d|_2 <= radius of
    1/2 |pred - v - d|^2 = 1/2 (|e| + radius)^2, whose kink at e = 0 is smoothed by eps. Values that are only known up
    to the radius are written harder than l2 would, by a constant pull towards v.

    Formula: $\ell = \frac{1}{2} \Vert e \Vert^2 + \rho (r - \varepsilon) + \frac{1}{2} \rho^2,\quad r = \sqrt{\Vert e
    \Vert^2 + \varepsilon^2},\quad \rho = \mathrm{radius}$
    $u = e + \rho \frac{e}{r}$
    Shapes: e `[..., V]`.
    VJP: u = e + radius e/r, J g = g + radius (g - e (e.g)/r^2)/r; at e = 0: J g = g.
    Traits: curvature 1 + radius/eps near e = 0, which bounds no useful step: declared unbounded unless radius is 0,
    which is `l2`. Each u_i depends on the norm of e.
    Cost: O(V).
    References: It's All Connected (Behrouz et al., 2025, arXiv 2504.13173), robust optimisation against shifts of
    values. [BIAS-ROBUST-D1]
    """

    kind: Literal["robust"] = "robust"
    radius: float = Field(0.1, ge=0)
    eps: float = Field(1e-6, gt=0)

    @property
    def curvature(self) -> float | None:
        return 1.0 if self.radius == 0 else None

    @property
    def linear(self) -> bool:
        return self.radius == 0

    def rho(self, error: Tensor) -> Tensor:
        square = error.square().sum(-1)
        length = square / (self._radius(error).squeeze(-1) + self.eps)
        return 0.5 * square + self.radius * length + 0.5 * self.radius**2

    def psi(self, error: Tensor) -> Tensor:
        pull = self.radius * error / self._radius(error)
        return error + torch.where(self._is_off(error), pull, 0.0)

    def psi_jvp(self, error: Tensor, tangent: Tensor) -> Tensor:
        radius = self._radius(error)
        unit = error / radius
        across = tangent - unit * (unit * tangent).sum(-1, keepdim=True)
        return tangent + torch.where(self._is_off(error), self.radius * across / radius, 0.0)

    def _is_off(self, error: Tensor) -> Tensor:
        return (error != 0).any(-1, keepdim=True)

    def _radius(self, error: Tensor) -> Tensor:
        return (error.square().sum(-1, keepdim=True) + self.eps**2).sqrt()


def _radius(error: Tensor, eps: float) -> Tensor:
    """sqrt(e^2 + eps^2), a smooth |e|."""
    return (error.square() + eps**2).sqrt()


def _sign(error: Tensor, eps: float) -> Tensor:
    """e/r, a smooth sign whose slope at e = 0 is taken as 0: a memory that answers exactly stays there token after
    token, and each would multiply cotangents by 1/eps."""
    return torch.where(error != 0, error / _radius(error, eps), 0.0)


def _sign_slope(error: Tensor, eps: float) -> Tensor:
    radius = _radius(error, eps)
    return torch.where(error != 0, (eps / radius).square() / radius, 0.0)
