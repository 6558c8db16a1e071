"""Retention, the part of the memory that a step keeps; and the retentions that carry the memory itself: unchanged,
shrunk in proportion or by a constant, on spheres, or any of the others within a ball."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field, ValidationError, WrapValidator
from torch import Tensor

from hecate.checks import Size
from hecate.errors import ConfigError, shorten
from hecate.tape import Block, Tensors, formula_block
from hecate.tape.ops import floored_root, inner_axes, onto_ball, onto_ball_vjp, over, sum_to_gate, torch_vjp
from hecate.variant import Conflicts, Variant, delegating, still_declared

LinkAt = Literal["token", "chunk", "linear"]


class GateForm(NamedTuple):
    """Form of a layer's retain gate: a logit per head or per phi channel, by a linear map of the token or one of low
    `rank` ("head": the width of a key), and a squashing function; `lowest` is the least log retain of "bounded"."""

    channels: bool = False
    rank: int | Literal["head"] | None = None
    squash: Literal["sigmoid", "root", "softplus", "bounded"] = "sigmoid"
    lowest: float = -5.0


class Retention(Variant, family="retention"):
    """The new memory from the old one and a direction D (the step, sign included).

    A variant defines `step` and `step_vjp` for one weight tensor; the latter falls back to `torch.func`. The state
    carried from step to step is the memory itself. If the variant defines `weights`, which computes the memory from the
    state, it is a dual state, as in mirror descent.

    Shapes: memory and direction `[N, ...]`; retain `[N]`, or `[N, P]` per phi channel (the last axis).
    """

    _derivatives = ("step_vjp",)
    _formulas = ("step", "step_vjp", "weights", "weights_vjp", "centred", "through")
    _follows = MappingProxyType({
        "step_vjp": ("step",), "weights_vjp": ("weights",),
        **dict.fromkeys(("linear", "weighted_sum"), ("step", "start", "weights")),
    })  # fmt: skip
    uses_retain: ClassVar[bool] = False

    @property
    def dual(self) -> bool:
        """True if a dual state is carried, of which the memory is the function `weights`."""
        return type(self).weights is not Retention.weights

    @property
    def links(self) -> LinkAt:
        """The dual state in a chunk at which `weights` are taken; see `MirrorRetention`."""
        return "token"

    @property
    def linear(self) -> bool:
        """True if the step is `a M + D` with a fixed by the gates, and M itself is carried: the parallel form."""
        return False

    @property
    def additive(self) -> bool:
        """True if the step is `a X + D` of the carried X, with a fixed by the gates and D as `centred` returns it,
        whatever function of X the memory is."""
        return self.linear

    @property
    def anchored(self) -> bool:
        """True if memories decay towards the weights that they started at: (1 - retain) of these are added to every
        step. [RET-START-D2]"""
        return False

    def settled(self, *, deep: bool) -> Retention:
        """This retention, with the fields set that depend on whether the structure is `deep`."""
        return self

    @property
    def weighted_sum(self) -> bool:
        """True if memories stay weighted sums of what was written, with weights fixed by the gates, which a sum of
        weights can normalise."""
        return self.linear

    @property
    def default_retain(self) -> float:
        """The retain gate used when none is given: the field `retain` if there is one, else 1."""
        return vars(self).get("retain", 1.0)

    @property
    def per_head(self) -> bool:
        """True if the default retain differs between heads: then `default_retain` is that of the first."""
        return False

    def default_retains(self, heads: int) -> tuple[float, ...]:
        """The retain gate of each head when none is given."""
        return (self.default_retain,) * heads

    @property
    def gate_form(self) -> GateForm:
        """Form of a layer's retain gate; a sigmoid per head by default."""
        return GateForm()

    @property
    def needs_weights(self) -> bool:
        """True if memories whose initial weights are zero would stay zero."""
        return False

    def start(self, weights: Tensor) -> Tensor:
        """The state that a memory with these initial weights `[N, ...]` carries at first: the weights by default.

        A retention that keeps memories in a set maps every tensor into it, smoothly, and zero to a constant from which
        gradients flow. It is called on initial weights, never on a later state. [RET-START-D1]
        """
        return weights

    def weights(self, carried: Tensor) -> Tensor:
        """The memory M of a carried state: it predicts, is descended and is read. [RET-MIRROR-D1]"""
        return carried

    def weights_vjp(self, carried: Tensor, g: Tensor) -> Tensor:
        """Cotangent of the carried state from that of the memory."""
        return torch_vjp(self.weights, (carried,), g)[0]

    @property
    def centring(self) -> bool:
        """True if `centred` changes steps under a gate that rows share."""
        return False

    def centred(self, direction: Tensor, retain: Tensor) -> Tensor:
        """The direction of an additive step, without the part that never changes a memory.

        An orthogonal projection along the last axis.
        """
        return direction

    def step(self, memory: Tensor, direction: Tensor, retain: Tensor) -> Tensor:
        """The next carried state: the new memory, or its dual state."""
        raise NotImplementedError(f"{type(self).__name__} defines no step")

    def step_vjp(self, memory: Tensor, direction: Tensor, retain: Tensor, g: Tensor) -> Tensors:
        """Cotangents of memory, direction and retain from the cotangent g of the new memory."""
        return torch_vjp(self.step, (memory, direction, retain), g)

    def block(self) -> Block:
        """`step` as a tape block: (memory, direction, retain) -> memory."""
        vjp = self.step_vjp if self.hand_written() else None
        return formula_block(f"retention.{self.kind}", self.step, vjp, alike=self)

    def weights_block(self) -> Block:
        """`weights` as a tape block: (carried) -> memory."""
        vjp = self.weights_vjp if type(self).weights_vjp is not Retention.weights_vjp else None
        return formula_block(f"retention.{self.kind}.weights", self.weights, vjp, alike=self)


RetentionKind = Retention


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
    """Helper for steps retain X + D of the carried state X, with D as `centred` returns it."""

    uses_retain: ClassVar[bool] = True

    def step(self, memory: Tensor, direction: Tensor, retain: Tensor) -> Tensor:
        return over(retain, memory) * memory + self.centred(direction, retain)

    def step_vjp(self, memory: Tensor, direction: Tensor, retain: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return over(retain, memory) * g, self.centred(g, retain), sum_to_gate(g * memory, retain)


class Forgetting(Decaying):
    """Helper for retentions that forget towards zero or towards the start of the memory."""

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
        rank: w = w_2 W_1 with this many rows in W_1, which all heads share; "head": as many as a key is wide; None: w
            as it is.
        gate: "sigmoid": sigmoid(s), "root": sigmoid(s)^(1/16) as in GLA, both starting at `retain`;
            "softplus": exp(-A softplus(s)) as in KDA, A per head starting in U(1, 16), softplus(b) log-uniform in
            [1e-3, 1e-1], and `retain` only the gate of a scan without gates; "bounded": exp(lowest sigmoid(A s)), A
            per head starting at 1, as in GLM-5 and Ling, at `retain` at first.
        lowest: least log retain of the gate "bounded".
        towards: the weights left when all is forgotten: "zero", or "start", the weights M0 of the memory's start. None
            is "start" if the structure is deep, else "zero". All weights at zero are a point where every gradient of a
            deep memory vanishes: one that forgets to zero, as printed for Titans (Eq 13 and 14), cannot be written
            after some 300 tokens at retain .99. [RET-START-D2]

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
        chosen = self.retain != type(self).model_fields["retain"].default
        if self.gate == "bounded" and chosen and min(starts) <= least:
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
    Traits: linear if decoupled; coupled it scales D too, which the parallel form does not cover; a weighted sum either
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


class Sphere(Decaying):
    r"""sphere: M' = X / |X| with X = retain M + D - M (M.D), slot by slot.

    A step along the sphere on which each slot lives: the part of D that would only lengthen it is dropped, and the rest
    turns it. Directions are kept, lengths are not: this is Lattice's update, where slots compete by angle.
    `form="divide"` takes the whole of D, X = retain M + D and M' = X |M| / |X|: every slot keeps the length it starts
    with, as large-chunk TTT's weights do. A slot is a column of a weight (one phi channel, as Lattice has it) or a row
    (one output); a weight with a single axis is one slot. The smaller retain, the further a step turns.

    Formula: $m_{i,t} = \frac{x_i}{\Vert x_i \Vert},\quad x_i = \alpha_t m_i + d_i - m_i (m_i^\top d_i),\quad m_i =
    m_{i,t-1}$
    $m_{i,t} = \Vert m_i \Vert \frac{x_i}{\Vert x_i \Vert},\quad x_i = \alpha_t m_i + d_i \quad \text{if form is
    divide}$
    Shapes: M, D `[N, V, P]`; retain `[N]` or `[N, P]`.
    VJP: with U = X/|X| and h = (g - U (U.g)) s/|X|, s = 1 or |M|: `tangent`: g_D = h - M (M.h), g_M = retain h - h
    (M.D) - D (M.h); `divide`: g_D = h, g_M = retain h + M (U.g)/|M|; g_retain = <h, M>.
    Traits: not linear; starts at the identity pattern (slot i along coordinate i) plus the initial weights, or with
    `pattern=False` at these alone, which `tangent` normalises.
    Cost: three sums over slots.
    References: Lattice (Karami and Mirrokni, 2025, arXiv 2504.05646); `divide`: Test-Time Training Done Right (Zhang et
    al., 2025, arXiv 2505.23884). [RET-SPHERE-D1]
    """

    kind: Literal["sphere"] = "sphere"
    slot: Literal["column", "row"] = "column"
    form: Literal["tangent", "divide"] = "tangent"
    retain: float = Field(1.0, ge=0, le=1)
    eps: float = Field(1e-6, gt=0)
    pattern: bool = Field(True, description="whether the identity pattern is added to the initial weights")

    @property
    def needs_weights(self) -> bool:
        return not self.pattern

    def start(self, weights: Tensor) -> Tensor:
        moved = weights + self._pattern(weights) if self.pattern else weights
        return moved if self.form == "divide" else moved / self._length(moved)[0]

    def _pattern(self, weights: Tensor) -> Tensor:
        """Slot i along coordinate i."""
        column, device = self._axis(weights) == -2, weights.device
        slots = weights.mT if column else weights
        width, count = slots.shape[-1], slots.shape[-2] if weights.dim() > 2 else 1
        places = torch.arange(count, device=device).unsqueeze(-1) % max(width, 1)
        pattern = (torch.arange(width, device=device) == places).to(weights.dtype)
        return pattern.mT if column else pattern if weights.dim() > 2 else pattern[0]

    def step(self, memory: Tensor, direction: Tensor, retain: Tensor) -> Tensor:
        return self._step(memory, direction, retain)[0][0]

    def step_vjp(self, memory: Tensor, direction: Tensor, retain: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self._step_vjp(self._step(memory, direction, retain)[1], g)

    def block(self) -> Block:
        """`step` as a tape block, which keeps X and its lengths for the derivative."""
        declared = still_declared(self, "block", self._formulas)
        return Block(f"retention.{self.kind}", self._step, self._step_vjp) if declared else super().block()

    def _step(self, memory: Tensor, direction: Tensor, retain: Tensor) -> tuple[tuple[Tensor], Any]:
        inner = self._dot(memory, direction) if self.form == "tangent" else None
        onto = direction if inner is None else torch.addcmul(direction, memory, inner, value=-1)
        moved = torch.addcmul(onto, over(retain, memory), memory)
        of_moved, of_memory = self._length(moved), None if inner is not None else self._length(memory)
        scale = (1 if of_memory is None else of_memory[0]) / of_moved[0]
        return (moved * scale,), ((memory, direction, retain), inner, moved, scale, of_moved, of_memory)

    def _step_vjp(self, residuals: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (memory, direction, retain), inner, moved, scale, (length, beyond), of_memory = residuals
        outward, keep = self._dot(moved, g) / length, over(retain, memory)
        h = torch.addcmul(scale * g, moved, scale * torch.where(beyond, outward / length, 0.0), value=-1)
        gretain = sum_to_gate(h * memory, retain)
        if of_memory is None:
            along = self._dot(memory, h)
            gmemory = torch.addcmul((keep - inner) * h, direction, along, value=-1)
            return gmemory, torch.addcmul(h, memory, along, value=-1), gretain
        size, live = of_memory
        return torch.addcmul(keep * h, memory, torch.where(live, outward / size, 0.0)), h, gretain

    def _length(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        return floored_root(self._dot(slots, slots), self.eps)

    def _dot(self, a: Tensor, b: Tensor) -> Tensor:
        return (a * b).sum(self._axis(a), keepdim=True)

    def _axis(self, weight: Tensor) -> int:
        return -2 if self.slot == "column" and weight.dim() > 2 else -1


@delegating("retention", "uses_retain", "default_retain", "per_head", "default_retains", "gate_form", "dual", "centred")
@delegating("retention", "needs_weights", "centring")
class NormCap(Retention):
    r"""norm_cap: M' = X min(1, norm/|X|_F), X the inner retention's step from M and D.

    The memory is projected onto a ball after every step: inside it nothing happens; a memory that outgrows it is scaled
    down as a whole. Each weight of a deep memory has its own ball. It bounds memories without decay, and unstable ones.
    Around a retention that carries a dual state A, X is the memory of A and A goes on as it is: the projection is lazy,
    as in dual averaging, and bounds the memory that predicts and is read, while A keeps every step.

    Formula: $M_t = X \min\left(1, \frac{\mathrm{norm}}{\Vert X \Vert_F}\right),\quad X = \mathrm{retention}(M_{t-1},
    D_t)$
    Shapes: M, D `[N, ...]`; retain as the inner retention takes it.
    VJP: inside gX = g, beyond gX = (norm/|X|)(g - X <X, g>/|X|^2), then the inner VJP of gX. The border counts as
    inside.
    Traits: not linear; takes a retain gate if the inner retention does; starts at the inner start, projected; carries a
    dual state if the inner retention does.
    Cost: one norm per weight.
    Origin: ours; projected gradient descent. [RET-CAP-D1]
    """

    kind: Literal["norm_cap"] = "norm_cap"
    norm: float = Field(1.0, gt=0)
    retention: Retention = NoRetention()

    @property
    def additive(self) -> bool:
        return self.dual and self.retention.additive

    def start(self, weights: Tensor) -> Tensor:
        start = self.retention.start(weights)
        return start if self.dual else self._project(start)

    def weights(self, carried: Tensor) -> Tensor:
        return self._project(self.retention.weights(carried)) if self.dual else carried

    def weights_vjp(self, carried: Tensor, g: Tensor) -> Tensor:
        if not self.dual:
            return g
        gfree = self._project_vjp(self.retention.weights(carried), g)
        return self.retention.weights_vjp(carried, gfree)

    def step(self, memory: Tensor, direction: Tensor, retain: Tensor) -> Tensor:
        new = self.retention.step(memory, direction, retain)
        return new if self.dual else self._project(new)

    def step_vjp(self, memory: Tensor, direction: Tensor, retain: Tensor, g: Tensor) -> Tensors:
        if not self.dual:
            g = self._project_vjp(self.retention.step(memory, direction, retain), g)
        return self.retention.step_vjp(memory, direction, retain, g)

    def _project(self, free: Tensor) -> Tensor:
        return onto_ball(free, self.norm, inner_axes(free))

    def _project_vjp(self, free: Tensor, g: Tensor) -> Tensor:
        return onto_ball_vjp(free, self.norm, inner_axes(free), g)
