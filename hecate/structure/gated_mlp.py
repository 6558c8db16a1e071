"""A gated multilayer perceptron."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hecate.sizes import Size
from hecate.structure.graph import INPUT, Apply, Graph, Linear
from hecate.structure.layered import Layered
from hecate.structure.ops import Act, Multiply
from hecate.tape.ops import Activation


class GatedMLP(Layered):
    """gated_mlp: pred = W_2 (act(W_1 p) * (W_3 p)).

    SwiGLU with silu: the fast weights of large-chunk test-time training, without biases. Hidden width is `expansion`
    times the larger of the input and output widths.

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
    activation: Activation = "silu"

    def shapes(self, d_phi: int, d_v: int) -> dict[str, tuple[int, ...]]:
        hidden = self.expansion * max(d_phi, d_v)
        return {"w1": (hidden, d_phi), "w2": (d_v, hidden), "w3": (hidden, d_phi)}

    def graph(self) -> Graph:
        return Graph(
            (
                Linear(0, INPUT),
                Apply(Act(self.activation), (1,)),
                Linear(2, INPUT),
                Apply(Multiply(), (2, 3)),
                Linear(1, 4),
            )
        )
