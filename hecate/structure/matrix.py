"""A matrix."""

from __future__ import annotations

from typing import ClassVar, Literal

from hecate.structure.graph import INPUT, Graph, Linear
from hecate.structure.layered import Layered


class Matrix(Layered):
    """matrix: pred = M p, M in R^(V x P).

    The linear associative memory of linear attention, DeltaNet and Titans with one layer. It starts at zero, from where
    gradients flow at once because the inner gradient u p^T does not vanish with M.

    Shapes: M `[N, V, P]`, p `[N, P]`, u `[N, V]`.
    VJP: predict: g_M = u p^T, g_p = M^T u. Pullback G = u p^T: g_u = C p, g_p = C^T u, g_M = 0.
    Traits: linear.
    Cost: V P per read and per write.
    References: Linear Transformers Are Secretly Fast Weight Programmers (Schlag et al., 2021,
    arXiv 2102.11174). [STR-MATRIX-D1]
    """

    kind: Literal["matrix"] = "matrix"
    drawn: ClassVar[bool] = False

    @property
    def linear(self) -> bool:
        return True

    def graph(self) -> Graph:
        return Graph((Linear(0, INPUT),))

    def shapes(self, d_phi: int, d_v: int) -> dict[str, tuple[int, ...]]:
        return {"weight": (d_v, d_phi)}
