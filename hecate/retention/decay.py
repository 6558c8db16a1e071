"""Exponential decay."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import Tensor

from hecate.retention.base import GateForm, Retention, StepForm
from hecate.sizes import Size
from hecate.tape.ops import over, sum_to_gate


class Decay(Retention):
    """decay: M' = retain M + D, retain in [0, 1] the kept fraction.

    A stored item halves every log(1/2)/log(retain) tokens. Per token and head as in Titans and gated DeltaNet (whose
    papers write 1 - alpha and alpha for it), or per phi channel as in GLA. `memory_scan` takes whatever gate it is
    given; how a layer makes its own from the token x:

        channels: a logit per phi channel, s = w.x + b with a w and b each, instead of per head.
        rank: w = w_2 W_1 with so many rows in W_1, which all heads share; "head": as many as a key
            is wide; None: w as it is.
        gate: "sigmoid": sigmoid(s), "root": sigmoid(s)^(1/16) as in GLA, both starting at `retain`;
            "softplus": exp(-A softplus(s)) as in KDA, A per head starting in U(1, 16), softplus(b) log-uniform in
            [1e-3, 1e-1], and `retain` but the default of a scan without gates.

    Shapes: M, D `[N, ..., P]`; retain `[N]` or `[N, P]`.
    VJP: g_M = retain g, g_D = g, g_retain = <g, M>.
    Traits: linear.
    Cost: one multiply-add.
    References: Titans (Behrouz et al., 2025, arXiv 2501.00663); Gated Linear Attention Transformers (Yang et al., 2024,
    arXiv 2312.06635); Kimi Linear (Kimi Team, 2025, arXiv 2510.26692). [RET-DECAY-D1]
    """

    kind: Literal["decay"] = "decay"
    retain: float = Field(0.99, ge=0, le=1)
    channels: bool = False
    rank: Annotated[Size, Field(ge=1)] | Literal["head"] | None = None
    gate: Literal["sigmoid", "root", "softplus"] = "sigmoid"
    uses_retain: ClassVar[bool] = True

    @property
    def linear(self) -> bool:
        return True

    @property
    def default_retain(self) -> float:
        return self.retain

    @property
    def gate_form(self) -> GateForm:
        return GateForm(self.channels, self.rank, self.gate)

    @property
    def kernel(self) -> StepForm:
        return StepForm()

    def step(self, memory: Tensor, direction: Tensor, retain: Tensor) -> Tensor:
        return over(retain, memory) * memory + direction

    def step_vjp(self, memory: Tensor, direction: Tensor, retain: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return over(retain, memory) * g, g, sum_to_gate(g * memory, retain)
