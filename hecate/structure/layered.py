"""Structures made of linear layers: a matrix, perceptrons, and what they share."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

import hecate.structure.graph as graphs
from hecate.activation import GELU, ActivationKind, SiLU
from hecate.checks import Depth, Size
from hecate.errors import ConfigError
from hecate.structure.base import Memory, Structure
from hecate.structure.graph import INPUT, ONE, Act, Add, Apply, Graph, Linear, Multiply, Normalise
from hecate.tape import Block, Tensors
from hecate.variant import Conflicts


class Layered(Structure):
    """Helper for structures of linear layers: a variant gives `graph` and `shapes`.

    Both derivatives follow from the graph, and so does the dual form of the chunk engine, which reads the state of
    every token without building its weights. Not a variant itself: it has no kind.
    """

    @property
    def factored(self) -> bool:  # type: ignore[override]
        """True if no subclass overrides what the graph gives."""
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

        def vjp(kept: Any, g: Tensor) -> Tensors:
            gmemory, gp = graphs.traced(graph, *kept).backpropagated(g.unsqueeze(1))
            return gp.squeeze(1), *gmemory

        return Block(f"structure.{self.kind}.predict", forward, vjp)

    def gradient(self, bias: Block, memory: Memory, p: Tensor, target: Tensor) -> tuple[Memory, Any]:
        if not self.factored:
            return super().gradient(bias, memory, p, target)
        found = graphs.descent(self.graph(), bias, memory, p, target)
        return _products(found.d, found.h), found

    def gradient_vjp(self, bias: Block, kept: Any, cotangents: Memory) -> tuple[Tensors, Tensors]:
        if not self.factored:
            return super().gradient_vjp(bias, kept, cotangents)
        gmemory, *ginputs = kept.vjp(bias, *_products_vjp(kept.d, kept.h, cotangents))
        return tuple(gmemory), tuple(ginputs)


def _one_width(structure: Any) -> Conflicts:
    """Refuses a hidden width beside another expansion than the default."""
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
    and the answer to a query is M^T phi(q). What decays per channel are its columns, one for each value channel, by the
    gate retain_value; writes stay bounded where lr |v|^2 does, so values are to have unit length. [STR-MATRIX-D2]

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
    memory that says little before it was written takes its first writes whole.

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

    def conflicts(self) -> Conflicts:
        yield from _one_width(self)

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

    def conflicts(self) -> Conflicts:
        yield from _one_width(self)

    def shapes(self, d_phi: int, d_v: int) -> dict[str, tuple[int, ...]]:
        hidden = self.expansion * max(d_phi, d_v) if self.d_hidden is None else self.d_hidden
        return {"w1": (hidden, d_phi), "w2": (d_v, hidden), "w3": (hidden, d_phi)}

    def graph(self) -> Graph:
        gate, product = Apply(Act(self.activation), (1,)), Apply(Multiply(), (2, 3))
        return Graph((Linear(0, INPUT), gate, Linear(2, INPUT), product, Linear(1, 4)))
