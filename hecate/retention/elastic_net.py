"""Sparse memories by soft thresholds."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from hecate.retention.base import Retention, StepForm
from hecate.tape.ops import over, sum_to_gate


class ElasticNet(Retention):
    """elastic_net: M' = sign(X) max(|X| - threshold, 0) with X = retain M + D.

    Decay shrinks weights in proportion, the threshold by a constant: what is not written again becomes exactly 0 after
    finitely many tokens, and a write below the threshold leaves no trace on an empty memory. The exact minimiser of the
    linearised loss under both penalties.

    Shapes: M, D `[N, ...]`; retain `[N]` or `[N, P]`.
    VJP: with L = 1[|X| > threshold]: g_D = L g, g_M = retain L g, g_retain = <L g, M>. At the threshold itself the
    weight is 0 and so is its derivative.
    Traits: not linear; every start is feasible, and weights below the threshold are dead until
    a step exceeds it.
    Cost: one multiply-add and a clamp.
    References: It's All Connected (Behrouz et al., 2025, arXiv 2504.13173), elastic net. [RET-ELASTIC-D1]
    """

    kind: Literal["elastic_net"] = "elastic_net"
    retain: float = Field(0.99, ge=0, le=1)
    threshold: float = Field(1e-4, ge=0)
    uses_retain: ClassVar[bool] = True

    @property
    def default_retain(self) -> float:
        return self.retain

    @property
    def kernel(self) -> StepForm:
        return StepForm(self.threshold)

    def step(self, memory: Tensor, direction: Tensor, retain: Tensor) -> Tensor:
        moved = over(retain, memory) * memory + direction
        return moved.sign() * (moved.abs() - self.threshold).relu()

    def step_vjp(self, memory: Tensor, direction: Tensor, retain: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        kept = over(retain, memory)
        live = (kept * memory + direction).abs() > self.threshold
        gmoved = g * live
        return kept * gmoved, gmoved, sum_to_gate(gmoved * memory, retain)
