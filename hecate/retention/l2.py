"""Penalties on the length of the memory and of the step."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from hecate.retention.base import Retention, StepForm
from hecate.tape.ops import over, sum_to_gate


class L2(Retention):
    """l2: M' = retain (M + D), or retain M + D if decoupled, with retain = 1/(1 + penalty).

    A local penalty holds the memory near the last one, a global one near 0; `penalty` is their ratio. The minimiser of
    both shrinks the write with the memory: coupled. Yaad shrinks the past alone, as decoupled weight decay does, which
    is `decay` by another parameter. A retain gate overrides the penalty token by token.

    Shapes: M, D `[N, ...]`; retain `[N]` or `[N, P]`.
    VJP: coupled: g_M = g_D = retain g, g_retain = <g, M + D>; decoupled: as `decay`.
    Traits: linear if decoupled; coupled it scales D too, which the parallel form does not know; a weighted sum either
    way.
    Cost: one multiply-add.
    References: It's All Connected (Behrouz et al., 2025, arXiv 2504.13173), Yaad. [RET-L2-D1]
    """

    kind: Literal["l2"] = "l2"
    penalty: float = Field(0.01, ge=0)
    decoupled: bool = False
    uses_retain: ClassVar[bool] = True

    @property
    def linear(self) -> bool:
        return self.decoupled

    @property
    def weighted_sum(self) -> bool:
        return True

    @property
    def default_retain(self) -> float:
        return 1 / (1 + self.penalty)

    @property
    def kernel(self) -> StepForm | None:
        return StepForm() if self.decoupled else None

    def step(self, memory: Tensor, direction: Tensor, retain: Tensor) -> Tensor:
        kept = over(retain, memory)
        return kept * memory + direction if self.decoupled else kept * (memory + direction)

    def step_vjp(self, memory: Tensor, direction: Tensor, retain: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        kept = over(retain, memory)
        if self.decoupled:
            return kept * g, g, sum_to_gate(g * memory, retain)
        return kept * g, kept * g, sum_to_gate(g * (memory + direction), retain)
