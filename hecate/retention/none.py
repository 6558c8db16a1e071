"""No retention."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from hecate.retention.base import Retention, StepForm


class NoRetention(Retention):
    """none: M' = M + D.

    Nothing is forgotten except by being overwritten: linear attention, DeltaNet, TTT.

    Shapes: M, D `[N, ...]`.
    VJP: g_M = g_D = g.
    Traits: linear; takes no retain gate.
    Cost: one addition.
    References: Linear Transformers Are Secretly Fast Weight Programmers (Schlag et al., 2021,
    arXiv 2102.11174). [RET-NONE-D1]
    """

    kind: Literal["none"] = "none"

    @property
    def linear(self) -> bool:
        return True

    @property
    def kernel(self) -> StepForm:
        return StepForm()

    def step(self, memory: Tensor, direction: Tensor, retain: Tensor) -> Tensor:
        return memory + direction

    def step_vjp(self, memory: Tensor, direction: Tensor, retain: Tensor, g: Tensor) -> tuple[Tensor, Tensor, None]:
        return g, g, None
