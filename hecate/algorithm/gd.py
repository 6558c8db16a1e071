"""Gradient descent."""

from __future__ import annotations

from typing import ClassVar, Literal

from hecate.algorithm.base import AlgorithmForm, Descent


class GD(Descent):
    """gd: D = -lr G.

    One step of plain gradient descent per write.

    Shapes: G `[N, ...]`, lr `[N]`.
    VJP: g_G = -lr g, g_lr = -<G, g>.
    Traits: no slots; contracts while lr |phi|^2 curvature < 2.
    Cost: one multiplication.
    References: MIRAS (Behrouz et al., 2025, arXiv 2504.13173). [ALG-GD-D1]
    """

    kind: Literal["gd"] = "gd"
    linear: ClassVar[bool] = True

    @property
    def kernel(self) -> AlgorithmForm:
        return AlgorithmForm()
