"""Models of linear layers, each described once, as a graph that serves for evaluation and all derivatives.

A graph lists its nodes in the order of evaluation: a linear layer `W h`, or an operation without weights. From the list
come the prediction, the factors of the inner gradient, which is rank one per layer, G_i = d_i h_i^T, and the
derivatives of both, the second order included. [STR-GRAPH-D1]

Shapes: p and every value `[N, C, width]`, C tokens that meet the same weights `[N, out, in]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hecate.activation import Activation
from hecate.errors import ConfigError
from hecate.tape import Block, one

INPUT = 0  # the value p
ONE = -1  # the constant 1 of width 1: a layer with this input is a bias


Pulled = tuple[tuple[Tensor | None, ...], Tensor]


class Op(Protocol):
    """An operation between layers, on the last axis alone; `name` is its name on a tape.

    `slopes` returns what its derivatives need of the output and the inputs, `vjp` gives the inputs' cotangents, linear
    in g, and `vjp_vjp` those of (inputs, g) from those of `vjp`'s result.
    """

    @property
    def name(self) -> str: ...
    def forward(self, *inputs: Tensor) -> Tensor: ...
    def slopes(self, y: Tensor, *inputs: Tensor) -> Any: ...
    def vjp(self, slopes: Any, g: Tensor) -> tuple[Tensor, ...]: ...
    def vjp_vjp(self, slopes: Any, g: Tensor, cotangents: tuple[Tensor, ...]) -> Pulled: ...


class Bounded(Op, Protocol):
    """An operation whose slopes are bounded: `bound` turns bounds a of the squared columns of d pred / d output into
    those for its inputs, and `bound_vjp` gives cotangents of the inputs and of a from those of the result; see
    `hecate.structure.bound`."""

    def bound(self, slopes: Any, a: Tensor) -> tuple[Tensor, ...]: ...
    def bound_vjp(self, slopes: Any, a: Tensor, shares: tuple[Tensor, ...]) -> Pulled: ...


class _Act(NamedTuple):
    act: Activation


class Act(_Act):
    """act(x), componentwise: an activation or its kind."""

    __slots__ = ()

    def __new__(cls, act: Activation | str) -> Act:
        return super().__new__(cls, act if isinstance(act, Activation) else Activation.model_validate(act))

    @property
    def name(self) -> str:
        return self.act.kind

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.act.value(inputs[0])

    def slopes(self, y: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return inputs[0], y, self.act.slope(inputs[0], y)

    def vjp(self, slopes: tuple[Tensor, ...], g: Tensor) -> tuple[Tensor]:
        return (g * slopes[2],)

    def vjp_vjp(self, slopes: tuple[Tensor, ...], g: Tensor, cotangents: tuple[Tensor, ...]) -> Pulled:
        x, y, slope = slopes
        (c,) = cotangents
        return (c * g * self.act.bend(x, y, slope),), c * slope

    def bound(self, slopes: tuple[Tensor, ...], a: Tensor) -> tuple[Tensor]:
        return (a * slopes[2].square(),)

    def bound_vjp(self, slopes: tuple[Tensor, ...], a: Tensor, shares: tuple[Tensor, ...]) -> Pulled:
        x, y, slope = slopes
        pulled = shares[0] * slope
        return (pulled * (2 * a) * self.act.bend(x, y, slope),), (pulled * slope).sum_to_size(a.shape)


class Add(NamedTuple):
    """x + y."""

    name: str = "add"

    def forward(self, *inputs: Tensor) -> Tensor:
        return inputs[0] + inputs[1]

    def slopes(self, y: Tensor, *inputs: Tensor) -> None:
        return None

    def vjp(self, slopes: None, g: Tensor) -> tuple[Tensor, Tensor]:
        return g, g

    def vjp_vjp(self, slopes: None, g: Tensor, cotangents: tuple[Tensor, ...]) -> Pulled:
        return (None, None), cotangents[0] + cotangents[1]

    def bound(self, slopes: None, a: Tensor) -> tuple[Tensor, Tensor]:
        return a, a

    def bound_vjp(self, slopes: None, a: Tensor, shares: tuple[Tensor, ...]) -> Pulled:
        return (None, None), shares[0] + shares[1]


class Multiply(NamedTuple):
    """x y, componentwise."""

    name: str = "multiply"

    def forward(self, *inputs: Tensor) -> Tensor:
        return inputs[0] * inputs[1]

    def slopes(self, y: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        return inputs

    def vjp(self, slopes: tuple[Tensor, ...], g: Tensor) -> tuple[Tensor, Tensor]:
        x, y = slopes
        return g * y, g * x

    def vjp_vjp(self, slopes: tuple[Tensor, ...], g: Tensor, cotangents: tuple[Tensor, ...]) -> Pulled:
        (x, y), (cx, cy) = slopes, cotangents
        return (cy * g, cx * g), cx * y + cy * x

    def bound(self, slopes: tuple[Tensor, ...], a: Tensor) -> tuple[Tensor, Tensor]:
        x, y = slopes
        return a * y.square(), a * x.square()

    def bound_vjp(self, slopes: tuple[Tensor, ...], a: Tensor, shares: tuple[Tensor, ...]) -> Pulled:
        (x, y), (gx, gy) = slopes, shares
        return (2 * a * x * gy, 2 * a * y * gx), (gx * y.square() + gy * x.square()).sum_to_size(a.shape)


class Normalise(NamedTuple):
    """y = (x - mean) / s, s = sqrt(variance + eps), over the last axis of width n; where the deviation is 0, up to the
    rounding of the mean, n ulp |mean|, so is y, and s counts as 1: the inner gradient and its derivative have 1/s and
    1/s^2 in them.

    With J v = (v - mean(v) - y <v, y>/n) / s, symmetric: the VJP is J g, and that of J g is, for the cotangent c, J c
    for g and -(<c, J g> y + <g, y> J c + <c, y> J g) / (n s) for x.
    """

    eps: float
    name: str = "norm"

    def forward(self, *inputs: Tensor) -> Tensor:
        return torch.mul(*self._centre(inputs[0]))

    def slopes(self, y: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        return y, self._centre(inputs[0])[1]

    def _centre(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean = x.mean(-1, keepdim=True)
        centred = x - mean
        variance = centred.square().mean(-1, keepdim=True)
        # Rounded means of equal numbers differ from engine to engine, and by them a variance of 0.
        rounding = (x.shape[-1] * torch.finfo(x.dtype).eps * mean).square()
        scale = torch.where(variance <= rounding, 1.0, variance + self.eps).rsqrt()
        return centred, scale

    def vjp(self, slopes: tuple[Tensor, Tensor], g: Tensor) -> tuple[Tensor]:
        y, scale = slopes
        return (_centred(g - y * (g * y).mean(-1, keepdim=True)) * scale,)

    def vjp_vjp(self, slopes: tuple[Tensor, Tensor], g: Tensor, cotangents: tuple[Tensor, ...]) -> Pulled:
        y, scale = slopes
        (c,) = cotangents
        (jc,), (jg,) = self.vjp(slopes, c), self.vjp(slopes, g)
        along, gy, cy = ((a * b).mean(-1, keepdim=True) for a, b in ((c, jg), (g, y), (c, y)))
        return (-_centred(along * y + gy * jc + cy * jg) * scale,), jc

    def bound(self, slopes: tuple[Tensor, Tensor], a: Tensor) -> tuple[Tensor]:
        return (a.sum(-1, keepdim=True) * slopes[1].square(),)  # 1/s is the largest slope

    def bound_vjp(self, slopes: tuple[Tensor, Tensor], a: Tensor, shares: tuple[Tensor, ...]) -> Pulled:
        y, scale = slopes
        g = shares[0].sum(-1, keepdim=True)
        total = a.sum(-1, keepdim=True)
        return (-2 / y.shape[-1] * g * total * scale**3 * y,), (g * scale.square()).sum_to_size(*a.shape[:-1], 1)


def _centred(x: Tensor) -> Tensor:
    """Without its mean: taken last, as what rounding leaves of it is large where rows of weights are nearly equal."""
    return x - x.mean(-1, keepdim=True)


class Linear(NamedTuple):
    """The layer `W h` of the weight with this index; `source` is the value h."""

    weight: int
    source: int


class Apply(NamedTuple):
    """An operation on earlier values."""

    op: Op
    sources: tuple[int, ...]


class Graph(NamedTuple):
    """Nodes in order. Value 0 is the input p, value i that of the i-th node; the last is pred."""

    nodes: tuple[Linear | Apply, ...]

    @property
    def weights(self) -> int:
        """Number of weights it uses."""
        return len({node.weight for node in self.nodes if isinstance(node, Linear)})


class Cotangents:
    """A sum of cotangents for every value; None where nothing arrived."""

    def __init__(self, values: Sequence[Tensor]) -> None:
        self.values = values
        self.sums: list[Tensor | None] = [None] * len(values)

    def add(self, index: int, g: Tensor | None) -> None:
        """Adds to one value's sum; the constant has none."""
        if index == ONE or g is None:
            return
        known = self.sums[index]
        self.sums[index] = g if known is None else known + g

    def __getitem__(self, index: int) -> Tensor | None:
        return self.sums[index] if index != ONE else None

    def filled(self, index: int) -> Tensor:
        """The sum of one value, zeros where nothing arrived."""
        known = self[index]
        return torch.zeros_like(source(self.values, index)) if known is None else known


def source(values: Sequence[Tensor], index: int) -> Tensor:
    """A value by its index, the constant included."""
    return torch.ones_like(values[INPUT][..., :1]) if index == ONE else values[index]


def outers(total: Tensor | None, d: Tensor, h: Tensor | None) -> Tensor:
    """total + sum_c d_c h_c^T: `[N, C, out], [N, C, in] -> [N, out, in]`; h is None for the constant."""
    if h is None:
        column = d.sum(1, keepdim=True).mT
        return column if total is None else total + column
    if d.shape[1] == 1:  # on a CPU twice as fast as a product of matrices of one row
        return d.mT * h if total is None else torch.addcmul(total, d.mT, h)
    return torch.bmm(d.mT, h) if total is None else torch.baddbmm(total, d.mT, h)


def evaluate(graph: Graph, weights: Sequence[Tensor], p: Tensor) -> list[Tensor]:
    """p and the value of every node."""
    values = [p]
    for node in graph.nodes:
        if isinstance(node, Linear) and node.source == ONE:
            values.append(weights[node.weight].mT.expand(-1, p.shape[1], -1))
        elif isinstance(node, Linear):
            values.append(torch.bmm(values[node.source], weights[node.weight].mT))
        else:
            values.append(node.op.forward(*(values[at] for at in node.sources)))
    return values


class Trace(NamedTuple):
    """One evaluation of a graph at weights: the values of its nodes, and the slopes of its operations."""

    graph: Graph
    weights: Sequence[Tensor]
    values: list[Tensor]
    slopes: list[Any]

    def backward(self, flowing: Cotangents, lowest: int = INPUT) -> None:
        """Backpropagation: completes the cotangents of all values from the lowest on, in place."""
        for index in reversed(range(len(self.graph.nodes))):
            node, g = self.graph.nodes[index], flowing[index + 1]
            if g is None:
                continue
            if isinstance(node, Linear):
                if node.source >= lowest:
                    flowing.add(node.source, torch.bmm(g, self.weights[node.weight]))
            else:
                for at, share in zip(node.sources, node.op.vjp(self.slopes[index], g), strict=True):
                    flowing.add(at, share)

    def factors(self, u: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Cotangents]:
        """d and h of every weight from the cotangent u of the prediction, and the cotangents of values beyond p."""
        nodes = enumerate(self.graph.nodes, 1)
        layers = [(node.weight, at, node.source) for at, node in nodes if isinstance(node, Linear)]
        got = [weight for weight, *_ in layers]
        if sorted(got) != list(range(len(self.weights))):
            wanted = f"a graph must use each of its {len(self.weights)} weights in one layer"
            twice = "a weight used twice has no gradient of rank one: derive from Structure instead of Layered"
            raise ConfigError(f"{wanted}, got layers of the weights {got}; {twice}")
        flowing = Cotangents(self.values)
        flowing.add(len(self.graph.nodes), u)
        self.backward(flowing, lowest=INPUT + 1)
        layers.sort()
        h = tuple(source(self.values, origin) for _, _, origin in layers)
        return tuple(flowing.filled(at) for _, at, _ in layers), h, flowing

    def factors_vjp(
        self, flowed: Cotangents, gd: Sequence[Tensor], gh: Sequence[Tensor], known: Sequence[Tensor | None] = ()
    ) -> tuple[list[Tensor | None], Tensor, Cotangents]:
        """The reverse of `factors`: (weight cotangents, cotangent of u, those of the values).

        The weights' cotangents are added to `known` ones. Backpropagation went down from the prediction, so its reverse
        goes up from the input. Cotangents of the values still have to go through the layers below them: `through`.
        """
        gweights = list(known or [None] * len(self.weights))
        up, values = Cotangents(self.values), Cotangents(self.values)
        for index, node in enumerate(self.graph.nodes):
            g = flowed[index + 1]
            if isinstance(node, Linear):
                up.add(index + 1, gd[node.weight])
                values.add(node.source, gh[node.weight])
                c = up[node.source]
                if c is not None and g is not None:
                    up.add(index + 1, torch.bmm(c, self.weights[node.weight].mT))
                    gweights[node.weight] = outers(gweights[node.weight], g, c)
            elif g is not None and any(up[at] is not None for at in node.sources):
                cotangents = tuple(up.filled(at) for at in node.sources)
                shares, share = node.op.vjp_vjp(self.slopes[index], g, cotangents)
                up.add(index + 1, share)
                for at, gvalue in zip(node.sources, shares, strict=True):
                    values.add(at, gvalue)
        return gweights, up.filled(len(self.graph.nodes)), values

    def through(self, flowing: Cotangents, known: Sequence[Tensor | None] = ()) -> tuple[list[Tensor], Tensor]:
        """Cotangents of the weights, added to `known` ones, and of p, from those of the values."""
        self.backward(flowing)
        sums = list(known or [None] * len(self.weights))
        for index, node in enumerate(self.graph.nodes):
            g = flowing[index + 1]
            if isinstance(node, Linear) and g is not None:
                h = None if node.source == ONE else self.values[node.source]
                sums[node.weight] = outers(sums[node.weight], g, h)
        pairs = zip(sums, self.weights, strict=True)
        return [torch.zeros_like(w) if total is None else total for total, w in pairs], flowing.filled(INPUT)

    def backpropagated(self, u: Tensor) -> tuple[list[Tensor], Tensor]:
        """Cotangents of the weights and of p from that of the prediction."""
        flowing = Cotangents(self.values)
        flowing.add(len(self.graph.nodes), u)
        return self.through(flowing)


def trace(graph: Graph, weights: Sequence[Tensor], p: Tensor, *, whole: bool = True) -> Trace:
    """One evaluation with what its derivatives need; unless `whole`, only up to the last value that a layer or a slope
    needs, with None for later ones."""
    if whole:
        return traced(graph, weights, evaluate(graph, weights, p))
    needed = [node.source for node in graph.nodes if isinstance(node, Linear)]
    needed += [at for at, node in enumerate(graph.nodes, 1) if isinstance(node, Apply) and not isinstance(node.op, Add)]
    last = max(needed)
    values: list[Any] = evaluate(Graph(graph.nodes[:last]), weights, p)
    return traced(graph, weights, values + [None] * (len(graph.nodes) - last))


def traced(graph: Graph, weights: Sequence[Tensor], values: list[Tensor]) -> Trace:
    """The trace of an evaluation for its derivatives, from its values."""
    slopes = [
        node.op.slopes(values[at], *(values[of] for of in node.sources)) if isinstance(node, Apply) else None
        for at, node in enumerate(graph.nodes, 1)
    ]
    return Trace(graph, weights, values, slopes)


class Descent(NamedTuple):
    """The inner gradient d h^T of every layer for one token `[N, 1, width]`, and what its derivative needs."""

    past: Trace
    d: tuple[Tensor, ...]
    h: tuple[Tensor, ...]
    flowed: Cotangents
    of_bias: Any

    def vjp(
        self, bias: Block, gd: Sequence[Tensor], gh: Sequence[Tensor], known: Sequence[Tensor | None] = ()
    ) -> tuple[list[Tensor], Tensor, Tensor | None]:
        """Cotangents of the weights, added to `known` ones, of p and of the target from those of d and h."""
        above, gu, values = self.past.factors_vjp(self.flowed, gd, gh, known)
        gpred, gtarget = bias.pullback(self.of_bias, [gu.squeeze(1)])
        values.add(len(self.past.graph.nodes), None if gpred is None else gpred.unsqueeze(1))
        gweights, gp = self.past.through(values, above)
        return gweights, gp.squeeze(1), gtarget


def descent(graph: Graph, bias: Block, weights: Sequence[Tensor], p: Tensor, target: Tensor) -> Descent:
    """The inner gradient at weights of the loss whose gradient is `bias`: (pred, target) -> u."""
    past = trace(graph, weights, p.unsqueeze(1))
    outputs, of_bias = bias.apply((past.values[-1].squeeze(1), target))
    return Descent(past, *past.factors(one(outputs).unsqueeze(1)), of_bias)
