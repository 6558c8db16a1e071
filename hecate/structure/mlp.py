"""A multilayer perceptron."""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from hecate.errors import ConfigError
from hecate.sizes import Depth, Size
from hecate.structure.graph import INPUT, ONE, Apply, Graph, Linear
from hecate.structure.layered import Layered
from hecate.structure.ops import Act, Add, Normalise
from hecate.tape.ops import Activation


class MLP(Layered):
    """mlp: pred = W_L act(W_(L-1) ... act(W_1 p)), normalised if norm, plus p if residual.

    The deep memory of Titans, and with `residual` and `norm="layer"` the p + LN(f(p)) of TTT, one layer for TTT-linear.
    The norm has no gain and no offset; the gradient goes through it. `bias` adds b_i to every layer. Hidden width is
    `expansion` times the larger of the input and output widths.

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
    activation: Activation = "gelu"
    residual: bool = False
    norm: Literal["none", "layer"] = "none"
    norm_eps: float = Field(1e-6, gt=0)
    bias: bool = False

    def shapes(self, d_phi: int, d_v: int) -> dict[str, tuple[int, ...]]:
        if self.residual and d_phi != d_v:
            raise ConfigError(
                f"residual=True adds the input of width d_phi={d_phi} to the output of width "
                f"{d_v}; make them equal or set residual=False",
                path=("residual",),
            )
        hidden = self.expansion * max(d_phi, d_v)
        widths = [d_phi, *[hidden] * (self.layers - 1), d_v]
        shapes: dict[str, tuple[int, ...]] = {}
        for i in range(self.layers):
            shapes[f"w{i + 1}"] = (widths[i + 1], widths[i])
            if self.bias:
                shapes[f"b{i + 1}"] = (widths[i + 1], 1)
        return shapes

    def start(self, name: str, shape: tuple[int, ...], generator: torch.Generator, **place: Any) -> Tensor:
        drawn = super().start(name, shape, generator, **place)
        return torch.zeros_like(drawn) if name.startswith("b") else drawn

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
