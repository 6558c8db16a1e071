"""Bounds on lengths: slots that stay on a sphere, and a ball around any other retention."""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from hecate.retention.base import Retention
from hecate.retention.decay import Decaying, NoRetention
from hecate.tape import Block, Tensors
from hecate.tape.ops import floored_root, inner_axes, onto_ball, onto_ball_vjp, over, sum_to_gate
from hecate.variant import delegating, still_declared


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
        axis = self._axis(weights)
        width = weights.shape[axis]
        count = weights.shape[-1] if axis == -2 else weights.shape[-2] if weights.dim() > 2 else 1
        pattern = torch.arange(width, device=weights.device) == (
            torch.arange(count, device=weights.device).unsqueeze(-1) % max(width, 1)
        )
        if weights.dim() == 2:
            pattern = pattern[0]
        return (pattern.mT if axis == -2 else pattern).to(weights.dtype)

    def step(self, memory: Tensor, direction: Tensor, retain: Tensor) -> Tensor:
        return self._stepped(memory, direction, retain)[0][0]

    def step_vjp(self, memory: Tensor, direction: Tensor, retain: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self._stepped_vjp(self._stepped(memory, direction, retain)[1], g)

    def block(self) -> Block:
        """X and its lengths are kept for the derivative."""
        kept = still_declared(self, "block", self._formulas)
        return Block(f"retention.{self.kind}", self._stepped, self._stepped_vjp) if kept else super().block()

    def _stepped(self, memory: Tensor, direction: Tensor, retain: Tensor) -> tuple[tuple[Tensor], Any]:
        inner = self._dot(memory, direction) if self.form == "tangent" else None
        onto = direction if inner is None else torch.addcmul(direction, memory, inner, value=-1)
        moved = torch.addcmul(onto, over(retain, memory), memory)
        of_moved, of_memory = self._length(moved), None if inner is not None else self._length(memory)
        scale = (1 if of_memory is None else of_memory[0]) / of_moved[0]
        return (moved * scale,), ((memory, direction, retain), inner, moved, scale, of_moved, of_memory)

    def _stepped_vjp(self, residuals: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (memory, direction, retain), inner, moved, scale, (length, beyond), of_memory = residuals
        outward, keep = self._dot(moved, g) / length, over(retain, memory)
        h = torch.addcmul(scale * g, moved, scale * torch.where(beyond, outward / length, 0.0), value=-1)
        gretain = sum_to_gate(h * memory, retain)
        if of_memory is None:
            along = self._dot(memory, h)
            gmemory = torch.addcmul((keep - inner) * h, direction, along, value=-1)
            return gmemory, torch.addcmul(h, memory, along, value=-1), gretain
        kept, live = of_memory
        return torch.addcmul(keep * h, memory, torch.where(live, outward / kept, 0.0)), h, gretain

    def _length(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        return floored_root(self._dot(slots, slots), self.eps)

    def _dot(self, a: Tensor, b: Tensor) -> Tensor:
        return (a * b).sum(self._axis(a), keepdim=True)

    def _axis(self, weight: Tensor) -> int:
        return -2 if self.slot == "column" and weight.dim() > 2 else -1


@delegating("retention", "uses_retain", "default_retain", "per_head", "default_retains", "gate_form", "dual", "centred")
@delegating("retention", "needs_weights", "centring")
class NormCap(Retention):
    r"""norm_cap: M' = X min(1, norm/|X|_F), X what the inner retention makes of M and D.

    The memory is projected onto a ball after every step: as long as it fits, nothing happens; a memory that outgrows it
    is scaled down as a whole. Each weight of a deep memory has its own ball. Bounds what an undecayed or unstable
    memory can become. Around a retention that carries a dual state A, X is the memory of A and A goes on as it is: the
    projection is lazy, as in dual averaging, and bounds what predicts and is read while A keeps what it was told.

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
