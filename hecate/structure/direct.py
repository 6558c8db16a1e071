"""Structures whose formulas are written out: a vector, unit slots, and two passes through codes."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from hecate.activation import SiLU
from hecate.checks import Size
from hecate.errors import ConfigError
from hecate.structure.base import Cascade, Memory, SlotForm, Structure
from hecate.tape import Block, Tensors, formula_block, one
from hecate.tape.ops import torch_vjp
from hecate.variant import still_declared

EPS = 1e-6

_SILU = SiLU()


class Vector(Structure):
    r"""vector: pred = w * p, coordinate by coordinate, w in R^P.

    The diagonal memory: P independent memories of one number, with P parameters of state where a matrix has P^2. It
    cannot move anything between coordinates, so phi(k) and v must be equally wide. It starts at zero, from where
    gradients flow because the inner gradient u * p does not vanish with w.

    Formula: $f(w, p) = w \odot p,\quad G = u \odot p$
    Shapes: w `[N, P]`, p and u `[N, P]`.
    VJP: predict: g_w = u * p, g_p = w * u. Pullback G = u * p: g_u = C * p, g_p = C * u, g_w = 0.
    Traits: linear, diagonal.
    Cost: P per read and per write.
    References: MIRAS (Behrouz et al., 2025, arXiv 2504.13173), memories of vector form. [STR-VECTOR-D1]
    """

    kind: Literal["vector"] = "vector"
    drawn: ClassVar[bool] = False
    linear: ClassVar[bool] = True
    diagonal: ClassVar[bool] = True

    def shapes(self, d_phi: int, d_v: int) -> dict[str, tuple[int, ...]]:
        if d_phi != d_v:
            widths = f"phi(k) has width {d_phi} and values width {d_v}"
            raise ConfigError(
                f"a vector memory multiplies coordinate by coordinate, but {widths}; make them equal or use structure "
                "'matrix'"
            )
        return {"weight": (d_phi,)}

    def predict(self, memory: Memory, p: Tensor) -> Tensor:
        return memory[0] * p

    def predict_vjp(self, memory: Memory, p: Tensor, u: Tensor) -> tuple[Memory, Tensor]:
        return (u * p,), memory[0] * u

    def pullback(self, memory: Memory, p: Tensor, u: Tensor) -> Memory:
        return (u * p,)

    def pullback_vjp(self, memory: Memory, p: Tensor, u: Tensor, cotangents: Memory) -> tuple[Memory, Tensor, Tensor]:
        (c,) = cotangents
        return (torch.zeros_like(c),), c * u, c * p


class Slots(Structure):
    r"""slots: pred = sum_i p_i s_i / |s_i|, one slot s_i for each coordinate of phi.

    A matrix whose columns are read by direction: phi says how much of each slot a key asks for. The gradient by a slot
    is orthogonal to it, p_i (u - n_i (n_i.u)) / |s_i| with n_i = s_i / |s_i|: a write turns slots instead of growing
    them. With retention `sphere` every slot also stays on its sphere, which is Lattice's memory. |s| is sqrt(s.s +
    eps^2), eps = 1e-6.

    Formula: $f(M, p) = \sum_i p_i n_i,\quad n_i = \frac{s_i}{\sqrt{\Vert s_i \Vert^2 + \varepsilon^2}},\quad M = [s_1,
    \ldots, s_P]$
    $G_i = \frac{p_i}{\sqrt{\Vert s_i \Vert^2 + \varepsilon^2}} \left(u - n_i (n_i^\top u)\right)$
    Shapes: weight `[N, V, P]`, p `[N, P]`, u `[N, V]`.
    VJP: with c_i the cotangent of G_i, b_i = c_i.u - (c_i.n_i)(n_i.u) and w_i = p_i / |s_i|: g_p = b_i / |s_i|, g_u =
    sum_i w_i (c_i - n_i (c_i.n_i)), g_s from both n_i and |s_i|.
    Cost: 3 V P per read and per write.
    Warning: slots that start alike stay alike; `init` draws unit slots from a fixed seed.
    References: Lattice (2025, arXiv 2504.05646); circulating code divides by the norm of all slots together.
    [STR-SLOTS-D1]
    """

    kind: Literal["slots"] = "slots"
    token: ClassVar[SlotForm] = SlotForm(EPS)

    def shapes(self, d_phi: int, d_v: int) -> dict[str, tuple[int, ...]]:
        return {"weight": (d_v, d_phi)}

    def start(self, name: str, shape: tuple[int, ...], generator: torch.Generator, **place: Any) -> Tensor:
        draw = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
        return (draw / draw.norm(dim=1, keepdim=True)).to(**place)

    def predict(self, memory: Memory, p: Tensor) -> Tensor:
        return matvec(_unit(memory)[0], p)

    def predict_vjp(self, memory: Memory, p: Tensor, u: Tensor) -> tuple[Memory, Tensor]:
        return self.pullback(memory, p, u), matvec(_unit(memory)[0].mT, u)

    def pullback(self, memory: Memory, p: Tensor, u: Tensor) -> Memory:
        unit, norm = _unit(memory)
        return (_across(unit, outer(u, p)) / norm,)

    def pullback_vjp(self, memory: Memory, p: Tensor, u: Tensor, cotangents: Memory) -> tuple[Memory, Tensor, Tensor]:
        unit, norm = _unit(memory)
        (c,) = cotangents
        along, seen = (c * unit).sum(1), matvec(unit.mT, u)
        b = matvec(c.mT, u) - along * seen
        weight = (p / norm.squeeze(1)).unsqueeze(1)
        gunit = -weight * (c * seen.unsqueeze(1) + outer(u, along))
        gweight = _across(unit, gunit) / norm - weight * (b.unsqueeze(1) / norm) * unit
        return (gweight,), b / norm.squeeze(1), matvec(c - along.unsqueeze(1) * unit, weight[:, 0])


def _unit(memory: Memory) -> tuple[Tensor, Tensor]:
    norm = (memory[0].square().sum(1, keepdim=True) + EPS**2).sqrt()
    return memory[0] / norm, norm


def _across(unit: Tensor, slots: Tensor) -> Tensor:
    """Each column without its part along the unit slot."""
    return slots - unit * (unit * slots).sum(1, keepdim=True)


class TwoPass(Structure):
    r"""two_pass: y = W_v f(W_k w), phi = [w; a], written so that f(W_k w) -> a and W_v a -> v.

    A bounded memory of `codes` slots: the key memory W_k learns to answer a key w with its code a, the value memory W_v
    to answer the code with the value. The last `codes` coordinates of phi(k) are the code that the model gives its
    token; those of phi(q) are not looked at. The key pass descends |f(W_k w) - a|^2 / 2 through f, the value pass the
    bias at W_v a.

    Formula: $y = W_v\, \psi(W_k w_q),\quad \phi(k) = [w, a],\quad \psi(z) = \frac{\mathrm{silu}(z)}{\sqrt{\Vert
    \mathrm{silu}(z) \Vert^2 + 10^{-6}}} \ \text{by default}$
    $G_k = J^\top (\psi(W_k w) - a)\, w^\top,\quad G_v = u\, a^\top,\quad J = \frac{\partial \psi}{\partial z},\quad
    \hat v = W_v a$
    Shapes: w_key `[N, codes, P - codes]`, w_value `[N, V, codes]`, p `[N, P]`.
    VJP: by torch.func; at z = 0 the length of silu(z) counts as 1.
    Cost: 2 codes (P + V) per read, three times that per write.
    Warning: reading with the key instead of the query, or leaving out the Jacobian of f, are errors of circulating
    programs.
    References: Trellis (2025, arXiv 2512.23852). [STR-TWO-D1]
    """

    kind: Literal["two_pass"] = "two_pass"
    codes: Size = Field(2, ge=1, description="slots: width of a code")
    link: Literal["silu", "softmax", "identity"] = "silu"
    weighted_sum: ClassVar[bool] = True

    def shapes(self, d_phi: int, d_v: int) -> dict[str, tuple[int, ...]]:
        if d_phi <= self.codes:
            raise ConfigError(
                f"codes={self.codes} takes that many of the d_phi={d_phi} coordinates of phi(k) and leaves none for "
                "the key; make phi wider or codes fewer",
                path=("codes",),
            )
        return {"w_key": (self.codes, d_phi - self.codes), "w_value": (d_v, self.codes)}

    def predict(self, memory: Memory, p: Tensor) -> Tensor:
        keys, values = memory
        return matvec(values, self._code(matvec(keys, p[..., : -self.codes])))

    def gradient(self, bias: Block, memory: Memory, p: Tensor, target: Tensor) -> tuple[Memory, Any]:
        keys, values = memory
        w, a = p[..., : -self.codes], p[..., -self.codes :]
        z = matvec(keys, w)
        code, pull = torch.func.vjp(self._code, z)  # type: ignore[misc]
        (error,) = pull(code - a)
        u = one(bias.forward(matvec(values, a), target)[0])
        return (outer(error, w), outer(u, a)), (memory, p, target)

    def gradient_vjp(self, bias: Block, kept: Any, cotangents: Memory) -> tuple[Tensors, Tensors]:
        def of(memory: Memory, p: Tensor, target: Tensor) -> Memory:
            return self.gradient(bias, memory, p, target)[0]

        gmemory, gp, gtarget = torch_vjp(of, kept, cotangents)
        return gmemory, (gp, gtarget)

    def gradient_block(self, bias: Block) -> Block:
        # No program inside: it is not the gradient of `predict`.
        return super().gradient_block(bias)._replace(program=None)

    def cascade(self) -> Cascade | None:
        if not still_declared(self, "cascade", ("predict", "gradient", "gradient_vjp", "_code")):
            return None
        link = formula_block("structure.two_pass.code", self._code, self._moved)
        return Cascade(self.codes, link, self._told, self._told_vjp)

    def _moved(self, z: Tensor, g: Tensor) -> Tensor:
        """J^T g, J the Jacobian of f at z."""
        if self.link == "identity":
            return g
        if self.link == "softmax":
            code = z.softmax(-1)
            return code * (g - (code * g).sum(-1, keepdim=True))
        code, slope, length = self._parts(z)
        return slope * (g - code * (code * g).sum(-1, keepdim=True)) / length

    def _told(self, z: Tensor, a: Tensor) -> Tensor:
        """u = J^T (f(z) - a)."""
        return self._moved(z, self._code(z) - a)

    def _told_vjp(self, z: Tensor, a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """H g, H the Hessian of |f(z) - a|^2 / 2, and -J g.

        With d the change of a number along g, c = f(z), e = c - a: for softmax u = c (e - <c, e>) and
        du = dc (e - <c, e>) + c (dc - <dc, e> - <c, dc>). For silu, h = silu(z), r = sqrt(h.h + 1e-6): c = h / r,
        dr = <c, h' g>, dc = (h' g - c dr) / r, u = h' x with x = (e - c <c, e>) / r,
        dx = (dc - dc <c, e> - c (<dc, e> + <c, dc>) - x dr) / r and du = h'' g x + h' dx.
        """

        def dot(x: Tensor, y: Tensor) -> Tensor:
            return (x * y).sum(-1, keepdim=True)

        if self.link == "identity":
            return g, -g
        if self.link == "softmax":
            code = z.softmax(-1)
            error, change = code - a, code * (g - dot(code, g))
            bent = change * (error - dot(code, error)) + code * (change - dot(change, error) - dot(code, change))
            return bent, -change
        code, slope, length = self._parts(z)
        error, pushed = code - a, slope * g
        longer = dot(code, pushed)
        change = (pushed - code * longer) / length
        along = dot(code, error)
        x = (error - code * along) / length
        dx = (change * (1 - along) - code * (dot(change, error) + dot(code, change)) - x * longer) / length
        return _SILU.bend(z, z, slope) * g * x + slope * dx, -change

    def _parts(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """f(z), silu'(z) and the length of silu(z)."""
        active = torch.nn.functional.silu(z)
        square = active.square().sum(-1, keepdim=True)
        length = torch.where(square == 0, 1.0, square + 1e-6).sqrt()  # a zero has no direction to be steep in
        return active / length, _SILU.slope(z, active), length

    def _code(self, z: Tensor) -> Tensor:
        if self.link == "softmax":
            return z.softmax(-1)
        if self.link == "identity":
            return z
        return self._parts(z)[0]


def matvec(matrix: Tensor, vector: Tensor) -> Tensor:
    """`[N, V, P] , [N, P] -> [N, V]`, as a row: on a CPU up to ten times faster than a column."""
    return torch.bmm(vector.unsqueeze(1), matrix.mT).squeeze(1)


def outer(a: Tensor, b: Tensor) -> Tensor:
    """`[N, V], [N, P] -> [N, V, P]`."""
    return a.unsqueeze(-1) * b.unsqueeze(-2)
