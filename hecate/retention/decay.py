"""Steps with the memory left as it is, shrunk in proportion, or shrunk by a constant."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationError, WrapValidator
from torch import Tensor

from hecate.checks import Size
from hecate.errors import ConfigError, shorten
from hecate.retention.base import GateForm, Retention
from hecate.tape.ops import over, sum_to_gate
from hecate.variant import Conflicts

Towards = Literal["zero", "start"]
_Share = Annotated[float, Field(ge=0, le=1)]
_Shares = Annotated[tuple[_Share, ...], Field(min_length=1)]


def _in_one_sentence(value: Any, handler: Any) -> Any:
    try:
        return handler(value)
    except ValidationError:
        asked = "must be a number in [0, 1], a list with one for each head, or 'retnet'"
        raise ConfigError(f"{asked}, got {shorten(value)}") from None


class NoRetention(Retention):
    """none: M' = M + D.

    Nothing is forgotten except by being overwritten: linear attention, DeltaNet, TTT.

    Formula: $M_t = M_{t-1} + D_t$
    Shapes: M, D `[N, ...]`.
    VJP: g_M = g_D = g.
    Traits: linear; takes no retain gate.
    Cost: one addition.
    References: Linear Transformers Are Secretly Fast Weight Programmers (Schlag et al., 2021,
    arXiv 2102.11174). [RET-NONE-D1]
    """

    kind: Literal["none"] = "none"
    linear: ClassVar[bool] = True

    def step(self, memory: Tensor, direction: Tensor, retain: Tensor) -> Tensor:
        return memory + direction

    def step_vjp(self, memory: Tensor, direction: Tensor, retain: Tensor, g: Tensor) -> tuple[Tensor, Tensor, None]:
        return g, g, None


class Decaying(Retention):
    """Helper for steps retain X + D of what is carried, D as `centred` leaves it."""

    uses_retain: ClassVar[bool] = True

    def step(self, memory: Tensor, direction: Tensor, retain: Tensor) -> Tensor:
        return over(retain, memory) * memory + self.centred(direction, retain)

    def step_vjp(self, memory: Tensor, direction: Tensor, retain: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return over(retain, memory) * g, self.centred(g, retain), sum_to_gate(g * memory, retain)


class Forgetting(Decaying):
    """Helper for retentions that forget towards zero or towards where the memory started."""

    towards: Towards | None = None

    @property
    def anchored(self) -> bool:
        return self.towards == "start"

    def settled(self, *, deep: bool) -> Retention:
        return self.model_copy(update={"towards": "start"}) if deep and self.towards is None else self


class Decay(Forgetting):
    r"""decay: M' = retain M + D, or M0 + retain (M - M0) + D towards the start M0; retain in [0, 1] the kept fraction.

    A stored item halves every log(1/2)/log(retain) tokens. Per token and head as in Titans and gated DeltaNet (whose
    papers write 1 - alpha and alpha for it), or per phi channel as in GLA. `memory_scan` takes whatever gate it is
    given; how a layer makes its own from the token x:

        retain: where it starts, and the gate of a scan without gates: a number for all heads, one for each, or
            "retnet", 1 - 2^(-5-h) for head h = 0, 1, ...
        channels: a logit per phi channel, s = w.x + b with a w and b each, instead of per head.
        rank: w = w_2 W_1 with so many rows in W_1, which all heads share; "head": as many as a key
            is wide; None: w as it is.
        gate: "sigmoid": sigmoid(s), "root": sigmoid(s)^(1/16) as in GLA, both starting at `retain`;
            "softplus": exp(-A softplus(s)) as in KDA, A per head starting in U(1, 16), softplus(b) log-uniform in
            [1e-3, 1e-1], and `retain` but the default of a scan without gates; "bounded": exp(lowest sigmoid(A s)), A
            per head starting at 1, as in GLM-5 and Ling, at `retain` at first.
        lowest: of the gate "bounded", the log of the least that is kept.
        towards: what is left when all is forgotten: "zero", or "start", the weights M0 that the memory started at.
            None is "start" where the structure is deep, else "zero". All weights at zero are a point where every
            gradient of a deep memory vanishes: one that forgets to zero, as printed for Titans (Eq 13 and 14), can
            not be written after some 300 tokens at retain .99. [RET-START-D2]

    Formula: $M_t = \alpha_t M_{t-1} + D_t$
    $M_t = M_0 + \alpha_t (M_{t-1} - M_0) + D_t \quad \text{if towards the start}$
    Shapes: M, D `[N, ..., P]`; retain `[N]` or `[N, P]`.
    VJP: g_M = retain g, g_D = g, g_retain = <g, M>; towards the start also g_M0 = (1 - retain) g, g_retain -= <g, M0>.
    Traits: linear.
    Cost: one multiply-add, two towards the start.
    References: Titans (Behrouz et al., 2025, arXiv 2501.00663); Gated Linear Attention Transformers (Yang et al., 2024,
    arXiv 2312.06635); Kimi Linear (Kimi Team, 2025, arXiv 2510.26692); Retentive Network (Sun et al., 2023, arXiv
    2307.08621), a rate per head. [RET-DECAY-D1, RET-DECAY-D2]
    """

    kind: Literal["decay"] = "decay"
    retain: Annotated[_Share | _Shares | Literal["retnet"], WrapValidator(_in_one_sentence)] = 0.99
    channels: bool = False
    rank: Annotated[Size, Field(ge=1)] | Literal["head"] | None = None
    gate: Literal["sigmoid", "root", "softplus", "bounded"] = "sigmoid"
    lowest: float = Field(-5.0, lt=0)
    linear: ClassVar[bool] = True

    def conflicts(self) -> Conflicts:
        if self.gate != "bounded" and self.lowest != -5.0:
            yield ("lowest",), f"{self.lowest:g} bounds what gate 'bounded' forgets, and gate is {self.gate!r}"
        starts, least = self.retain if isinstance(self.retain, tuple) else (self.default_retain,), math.exp(self.lowest)
        told = self.retain != type(self).model_fields["retain"].default
        if self.gate == "bounded" and told and min(starts) <= least:
            reason = f"is not above exp(lowest) = {least:g}, the least that gate 'bounded' keeps"
            yield ("retain",), f"{min(starts):g} {reason}; raise it, or lower lowest={self.lowest:g}"

    @property
    def gate_form(self) -> GateForm:
        return GateForm(self.channels, self.rank, self.gate, self.lowest)

    @property
    def default_retain(self) -> float:
        if self.retain == "retnet":
            return 1 - 2.0**-5
        return self.retain if isinstance(self.retain, float) else self.retain[0]

    @property
    def per_head(self) -> bool:
        return not isinstance(self.retain, float)

    def default_retains(self, heads: int) -> tuple[float, ...]:
        if self.retain == "retnet":
            return tuple([1 - 2.0 ** (-5 - head) for head in range(heads)])
        if isinstance(self.retain, float):
            return (self.retain,) * heads
        if len(self.retain) != heads:
            several = f"retention.retain={list(self.retain)} is one number for each of {len(self.retain)} heads"
            raise ConfigError(f"{several}, and there are {heads}; give {heads}, one for all, or 'retnet'")
        return self.retain


class L2(Forgetting):
    r"""l2: M' = retain (M + D), or retain M + D if decoupled, with retain = 1/(1 + penalty).

    A local penalty holds the memory near the last one, a global one near 0; `penalty` is their ratio. The minimiser of
    both shrinks the write with the memory: coupled. Yaad shrinks the past alone, as decoupled weight decay does, which
    is `decay` by another parameter. A retain gate overrides the penalty token by token. `towards` is that of `decay`.

    Formula: $M_t = \alpha_t (M_{t-1} + D_t),\quad \alpha_t = \frac{1}{1 + \mathrm{penalty}}$
    $M_t = \alpha_t M_{t-1} + D_t \quad \text{if decoupled}$
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
    weighted_sum: ClassVar[bool] = True

    @property
    def linear(self) -> bool:
        return self.decoupled

    @property
    def default_retain(self) -> float:
        return 1 / (1 + self.penalty)

    def step(self, memory: Tensor, direction: Tensor, retain: Tensor) -> Tensor:
        if self.decoupled:
            return super().step(memory, direction, retain)
        return over(retain, memory) * (memory + direction)

    def step_vjp(self, memory: Tensor, direction: Tensor, retain: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.decoupled:
            return super().step_vjp(memory, direction, retain, g)
        gboth = over(retain, memory) * g
        return gboth, gboth, sum_to_gate(g * (memory + direction), retain)


class ElasticNet(Decaying):
    r"""elastic_net: M' = sign(X) max(|X| - threshold, 0) with X = retain M + D.

    Decay shrinks weights in proportion, the threshold by a constant: what is not written again becomes exactly 0 after
    finitely many tokens, and a write below the threshold leaves no trace on an empty memory. The exact minimiser of the
    linearised loss under both penalties.

    Formula: $M_t = \mathrm{sign}(X) \odot \max(|X| - \lambda, 0),\quad X = \alpha_t M_{t-1} + D_t,\quad \lambda =
    \mathrm{threshold}$
    Shapes: M, D `[N, ...]`; retain `[N]` or `[N, P]`.
    VJP: with L = 1[|X| > threshold]: g_D = L g, g_M = retain L g, g_retain = <L g, M>. At the threshold itself the
    weight is 0 and so is its derivative.
    Traits: not linear; every start is feasible, and weights below the threshold are dead until a step exceeds it.
    Cost: one multiply-add and a clamp.
    References: It's All Connected (Behrouz et al., 2025, arXiv 2504.13173), elastic net. [RET-ELASTIC-D1]
    """

    kind: Literal["elastic_net"] = "elastic_net"
    retain: float = Field(0.99, ge=0, le=1)
    threshold: float = Field(1e-4, ge=0)

    def step(self, memory: Tensor, direction: Tensor, retain: Tensor) -> Tensor:
        moved = super().step(memory, direction, retain)
        return moved.sign() * (moved.abs() - self.threshold).relu()

    def step_vjp(self, memory: Tensor, direction: Tensor, retain: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        live = super().step(memory, direction, retain).abs() > self.threshold
        return super().step_vjp(memory, direction, retain, g * live)
