"""Memories: a matrix and perceptrons, which consist of linear layers; and a vector, unit slots and two passes through
codes, whose derivatives are written out."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

import hecate.structure.graph as graphs
from hecate.activation import GELU, ActivationKind, SiLU
from hecate.checks import Depth, Size
from hecate.errors import ConfigError
from hecate.structure.base import Cascade, Memory, SlotForm, Structure
from hecate.structure.graph import INPUT, ONE, Act, Add, Apply, Graph, Linear, Multiply, Normalise
from hecate.tape import Block, Tensors, formula_block, one
from hecate.tape.ops import torch_vjp
from hecate.variant import Conflicts, still_declared


class Layered(Structure):
    """Helper for structures of linear layers: a variant defines `graph` and `shapes`.

    Both derivatives follow from the graph, and so does the dual form of the chunk engine, which reads the state of
    every token without building its weights. Not a variant itself: it has no kind.
    """

    @property
    def factored(self) -> bool:  # type: ignore[override]
        """True if no subclass overrides methods that follow from the graph."""
        names = ("predict", "predict_vjp", "pullback", "pullback_vjp", "gradient", "gradient_vjp")
        return all(getattr(type(self), name) is getattr(Layered, name) for name in names)

    def predict(self, memory: Memory, p: Tensor) -> Tensor:
        return graphs.evaluate(self.graph(), memory, p.unsqueeze(1))[-1].squeeze(1)

    def predict_vjp(self, memory: Memory, p: Tensor, u: Tensor) -> tuple[Memory, Tensor]:
        gmemory, gp = graphs.trace(self.graph(), memory, p.unsqueeze(1)).backpropagated(u.unsqueeze(1))
        return tuple(gmemory), gp.squeeze(1)

    def pullback(self, memory: Memory, p: Tensor, u: Tensor) -> Memory:
        d, h, _ = graphs.trace(self.graph(), memory, p.unsqueeze(1)).factors(u.unsqueeze(1))
        return _products(d, h)

    def pullback_vjp(self, memory: Memory, p: Tensor, u: Tensor, cotangents: Memory) -> tuple[Tensors, Tensor, Tensor]:
        past = graphs.trace(self.graph(), memory, p.unsqueeze(1))
        d, h, flowed = past.factors(u.unsqueeze(1))
        above, gu, values = past.factors_vjp(flowed, *_products_vjp(d, h, cotangents))
        gmemory, gp = past.through(values, above)
        return tuple(gmemory), gp.squeeze(1), gu.squeeze(1)

    def predict_block(self) -> Block:
        if not self.factored:
            return super().predict_block()
        graph = self.graph()

        def forward(p: Tensor, *memory: Tensor) -> tuple[Tensors, Any]:
            values = graphs.evaluate(graph, memory, p.unsqueeze(1))
            return (values[-1].squeeze(1),), (memory, values)

        def vjp(residuals: Any, g: Tensor) -> Tensors:
            gmemory, gp = graphs.traced(graph, *residuals).backpropagated(g.unsqueeze(1))
            return gp.squeeze(1), *gmemory

        return Block(f"structure.{self.kind}.predict", forward, vjp)

    def gradient(self, bias: Block, memory: Memory, p: Tensor, target: Tensor) -> tuple[Memory, Any]:
        if not self.factored:
            return super().gradient(bias, memory, p, target)
        descent = graphs.descent(self.graph(), bias, memory, p, target)
        return _products(descent.d, descent.h), descent

    def gradient_vjp(self, bias: Block, residuals: Any, cotangents: Memory) -> tuple[Tensors, Tensors]:
        if not self.factored:
            return super().gradient_vjp(bias, residuals, cotangents)
        gmemory, *ginputs = residuals.vjp(bias, *_products_vjp(residuals.d, residuals.h, cotangents))
        return tuple(gmemory), tuple(ginputs)


def _one_width(structure: Any) -> Conflicts:
    """Refuses a hidden width together with an expansion that is not the default."""
    usual, d_hidden = type(structure).model_fields["expansion"].default, structure.d_hidden
    if d_hidden is not None and structure.expansion != usual:
        both = f"expansion={structure.expansion} and d_hidden={d_hidden} both say how wide the hidden layer is"
        yield ("d_hidden",), f"{both}; leave one of them out"


def _products(d: Memory, h: Memory) -> Memory:
    """d h^T of every layer, for one token."""
    return tuple(di.mT * hi for di, hi in zip(d, h, strict=True))


def _products_vjp(d: Memory, h: Memory, cotangents: Memory) -> tuple[list[Tensor], list[Tensor]]:
    """Cotangents of d and h from those of d h^T."""
    gd = [torch.bmm(hi, c.mT) for hi, c in zip(h, cotangents, strict=True)]
    return gd, [torch.bmm(di, c) for di, c in zip(d, cotangents, strict=True)]


class Matrix(Layered):
    r"""matrix: pred = M p, M in R^(V x P).

    The linear associative memory of linear attention, DeltaNet and Titans with one layer. It starts at zero, from where
    gradients flow at once because the inner gradient u p^T does not vanish with M.

    With `learns="key"` it is the memory of Oja's rule, M in R^(P x V): the key is predicted from the value, pred = M v,
    and the answer to a query is M^T phi(q). Its columns, one for each value channel, can decay apart, by the gate
    retain_value; writes are bounded if lr |v|^2 is, so values should have unit length. [STR-MATRIX-D2]

    Formula: $f(M, p) = M p,\quad G = u\, p^\top$
    $\hat p = M v,\quad y = M^\top \phi(q) \quad \text{if it learns keys}$
    Shapes: M `[N, V, P]`, p `[N, P]`, u `[N, V]`; `learns="key"`: M `[N, P, V]`, p `[N, V]`, u `[N, P]`.
    VJP: predict: g_M = u p^T, g_p = M^T u. Pullback G = u p^T: g_u = C p, g_p = C^T u, g_M = 0.
    Traits: linear; transposed instead with `learns="key"`.
    Cost: V P per read and per write.
    References: Linear Transformers Are Secretly Fast Weight Programmers (Schlag et al., 2021,
    arXiv 2102.11174). [STR-MATRIX-D1]
    """

    kind: Literal["matrix"] = "matrix"
    learns: Literal["value", "key"] = "value"
    drawn: ClassVar[bool] = False

    @property
    def linear(self) -> bool:
        return self.learns == "value"

    @property
    def transposed(self) -> bool:
        return self.learns == "key"

    @property
    def named(self) -> str:
        return super().named if self.linear else "structure 'matrix' with learns='key'"

    def graph(self) -> Graph:
        return Graph((Linear(0, INPUT),))

    def shapes(self, d_phi: int, d_v: int) -> dict[str, tuple[int, ...]]:
        return {"weight": (d_v, d_phi) if self.linear else (d_phi, d_v)}


class MLP(Layered):
    r"""mlp: pred = W_L act(W_(L-1) ... act(W_1 p)), normalised if norm, plus p if residual.

    The deep memory of Titans, and with `residual` and `norm="layer"` the p + LN(f(p)) of TTT, one layer for TTT-linear.
    The norm has no gain and no offset; the gradient goes through it. `bias` adds b_i to every layer. Hidden width is
    `expansion` times the larger of the input and output widths, or `d_hidden`. W_L starts at `last` times its draw: a
    memory whose answers are small before the first write takes that in full.

    `tanh` without bias is odd, f(-p) = -f(p): it learns odd maps fastest and even ones not at all; for these take gelu
    and bias. [STR-MLP-D2]

    Formula: $f(M, p) = W_L\, \mathrm{act}(W_{L-1} \cdots \mathrm{act}(W_1 p + b_1) \cdots + b_{L-1}) + b_L,\quad b_i =
    0 \ \text{without bias}$
    $f(M, p) \leftarrow \mathrm{LN}(f(M, p)) \ \text{if norm is layer},\quad f(M, p) \leftarrow p + f(M, p) \ \text{if
    residual}$
    Shapes: W_1 `[N, E, P]`, W_i `[N, E, E]`, W_L `[N, V, E]`, b_i `[N, width, 1]`, p `[N, P]`, u `[N, V]`.
    VJP: predict: backpropagation. Pullback G_i = d_i h_(i-1)^T with d_(i-1) = act'(z_(i-1)) W_i^T d_i: the reverse of
    both passes, with the activation's second derivative.
    Cost: 2 (E P + (L-2) E^2 + V E) per read, three times that per write.
    Warning: all-zero weights are a point where no gradient flows; `init` draws N(0, 1/fan_in), and zero for the b_i.
    Values of width 1 have no layer norm: it is 0 whatever they are.
    References: Titans (Behrouz et al., 2025, arXiv 2501.00663); Learning to (Learn at Test Time) (Sun et al., 2024,
    arXiv 2407.04620). [STR-MLP-D1]
    """

    kind: Literal["mlp"] = "mlp"
    layers: Depth = Field(2, ge=1)
    expansion: Size = Field(4, ge=1)
    d_hidden: Size | None = Field(None, ge=1, description="hidden width; null: expansion times the larger width")
    activation: ActivationKind = GELU()
    residual: bool = False
    norm: Literal["none", "layer"] = "none"
    norm_eps: float = Field(1e-6, gt=0)
    bias: bool = False
    last: float = Field(1.0, gt=0)

    conflicts = _one_width

    def shapes(self, d_phi: int, d_v: int) -> dict[str, tuple[int, ...]]:
        if self.residual and d_phi != d_v:
            ends = f"the input of width d_phi={d_phi} to the output of width {d_v}"
            raise ConfigError(f"residual=True adds {ends}; make them equal or set residual=False", ("residual",))
        hidden = self.expansion * max(d_phi, d_v) if self.d_hidden is None else self.d_hidden
        widths = [d_phi, *[hidden] * (self.layers - 1), d_v]
        shapes: dict[str, tuple[int, ...]] = {}
        for i in range(self.layers):
            shapes[f"w{i + 1}"] = (widths[i + 1], widths[i])
            if self.bias:
                shapes[f"b{i + 1}"] = (widths[i + 1], 1)
        return shapes

    def start(self, name: str, shape: tuple[int, ...], generator: torch.Generator, **place: Any) -> Tensor:
        drawn = super().start(name, shape, generator, **place)
        if name.startswith("b"):
            return torch.zeros_like(drawn)
        return self.last * drawn if self.last != 1 and name == f"w{self.layers}" else drawn

    def graph(self) -> Graph:
        nodes: list[Linear | Apply] = []
        for i in range(self.layers):
            if i:
                nodes.append(Apply(Act(self.activation), (len(nodes),)))
            weight = 2 * i if self.bias else i
            nodes.append(Linear(weight, len(nodes)))
            if self.bias:
                nodes.append(Linear(weight + 1, ONE))
                nodes.append(Apply(Add(), (len(nodes) - 1, len(nodes))))
        if self.norm == "layer":
            nodes.append(Apply(Normalise(self.norm_eps), (len(nodes),)))
        if self.residual:
            nodes.append(Apply(Add(), (len(nodes), INPUT)))
        return Graph(tuple(nodes))


class GatedMLP(Layered):
    r"""gated_mlp: pred = W_2 (act(W_1 p) * (W_3 p)).

    SwiGLU with silu: the fast weights of large-chunk test-time training, without biases. Hidden width is `expansion`
    times the larger of the input and output widths, or `d_hidden`.

    Formula: $f(M, p) = W_2 \left(\mathrm{act}(W_1 p) \odot (W_3 p)\right)$
    Shapes: W_1, W_3 `[N, E, P]`, W_2 `[N, V, E]`, p `[N, P]`, u `[N, V]`.
    VJP: predict: backpropagation. Pullback, a = W_1 p, b = W_3 p, h = act(a) * b, e = W_2^T u: G_2 = u h^T, G_1 = (e b
    act'(a)) p^T, G_3 = (e act(a)) p^T: the reverse of both passes, with the activation's second derivative.
    Cost: 2 E (2 P + V) per read, three times that per write.
    Warning: all-zero weights are a point where no gradient flows; `init` draws N(0, 1/fan_in).
    References: Test-Time Training Done Right (Zhang et al., 2025, arXiv 2505.23884); GLU Variants Improve Transformer
    (Shazeer, 2020, arXiv 2002.05202). [STR-GATED-D1]
    """

    kind: Literal["gated_mlp"] = "gated_mlp"
    expansion: Size = Field(2, ge=1)
    d_hidden: Size | None = Field(None, ge=1, description="hidden width; null: expansion times the larger width")
    activation: ActivationKind = SiLU()

    conflicts = _one_width

    def shapes(self, d_phi: int, d_v: int) -> dict[str, tuple[int, ...]]:
        hidden = self.expansion * max(d_phi, d_v) if self.d_hidden is None else self.d_hidden
        return {"w1": (hidden, d_phi), "w2": (d_v, hidden), "w3": (hidden, d_phi)}

    def graph(self) -> Graph:
        gate, product = Apply(Act(self.activation), (1,)), Apply(Multiply(), (2, 3))
        return Graph((Linear(0, INPUT), gate, Linear(2, INPUT), product, Linear(1, 4)))


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
            apart = f"a vector memory multiplies coordinate by coordinate, but {widths}"
            raise ConfigError(f"{apart}; make them equal or use structure 'matrix'")
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
        along, projection = (c * unit).sum(1), matvec(unit.mT, u)
        b = matvec(c.mT, u) - along * projection
        weight = (p / norm.squeeze(1)).unsqueeze(1)
        gunit = -weight * (c * projection.unsqueeze(1) + outer(u, along))
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
    token; those of phi(q) are not used. The key pass descends |f(W_k w) - a|^2 / 2 through f, the value pass the bias
    at W_v a.

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
            taken = f"codes={self.codes} takes that many of the d_phi={d_phi} coordinates of phi(k)"
            raise ConfigError(f"{taken} and leaves none for the key; make phi wider or codes fewer", path=("codes",))
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

    def gradient_vjp(self, bias: Block, residuals: Any, cotangents: Memory) -> tuple[Tensors, Tensors]:
        def of(memory: Memory, p: Tensor, target: Tensor) -> Memory:
            return self.gradient(bias, memory, p, target)[0]

        gmemory, gp, gtarget = torch_vjp(of, residuals, cotangents)
        return gmemory, (gp, gtarget)

    def gradient_block(self, bias: Block) -> Block:
        # No program inside: it is not the gradient of `predict`.
        return super().gradient_block(bias)._replace(program=None)

    def cascade(self) -> Cascade | None:
        if not still_declared(self, "cascade", ("predict", "gradient", "gradient_vjp", "_code")):
            return None
        link = formula_block("structure.two_pass.code", self._code, self._code_vjp)
        return Cascade(self.codes, link, self._code_gradient, self._code_gradient_vjp)

    def _code_vjp(self, z: Tensor, g: Tensor) -> Tensor:
        """J^T g, J the Jacobian of f at z."""
        if self.link == "identity":
            return g
        if self.link == "softmax":
            code = z.softmax(-1)
            return code * (g - (code * g).sum(-1, keepdim=True))
        code, slope, length = self._parts(z)
        return slope * (g - code * (code * g).sum(-1, keepdim=True)) / length

    def _code_gradient(self, z: Tensor, a: Tensor) -> Tensor:
        """u = J^T (f(z) - a)."""
        return self._code_vjp(z, self._code(z) - a)

    def _code_gradient_vjp(self, z: Tensor, a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
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
        length = torch.where(square == 0, 1.0, square + 1e-6).sqrt()  # z = 0 has no direction to normalise
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
