"""A bound on the length of the memory, around any other retention."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from hecate.retention.base import GateForm, Retention
from hecate.retention.decay import NoRetention


class NormCap(Retention):
    """norm_cap: M' = X min(1, norm/|X|_F), X what the inner retention makes of M and D.

    The memory is projected onto a ball after every step: as long as it fits, nothing happens; a memory that outgrows it
    is scaled down as a whole. Each weight of a deep memory has its own ball. Bounds what an undecayed or unstable
    memory can become. Around a retention that carries a dual state A, X is the memory of A and A goes on as it is: the
    projection is lazy, as in dual averaging, and bounds what predicts and is read while A keeps what it was told.

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
    def uses_retain(self) -> bool:  # type: ignore[override]
        return self.retention.uses_retain

    @property
    def default_retain(self) -> float:
        return self.retention.default_retain

    @property
    def gate_form(self) -> GateForm:
        return self.retention.gate_form

    @property
    def dual(self) -> bool:
        return self.retention.dual

    @property
    def additive(self) -> bool:
        return self.dual and self.retention.additive

    def centred(self, direction: Tensor, retain: Tensor) -> Tensor:
        return self.retention.centred(direction, retain)

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

    def step_vjp(
        self, memory: Tensor, direction: Tensor, retain: Tensor, g: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        if not self.dual:
            g = self._project_vjp(self.retention.step(memory, direction, retain), g)
        return self.retention.step_vjp(memory, direction, retain, g)

    def _project(self, free: Tensor) -> Tensor:
        length, beyond = self._length(free)
        return torch.where(beyond, free * (self.norm / length), free)

    def _project_vjp(self, free: Tensor, g: Tensor) -> Tensor:
        length, beyond = self._length(free)
        unit = free / length
        along = (unit * g).sum(_inner(g), keepdim=True)
        return torch.where(beyond, (self.norm / length) * (g - unit * along), g)

    def _length(self, free: Tensor) -> tuple[Tensor, Tensor]:
        """|X|_F beyond the ball, `norm` within, where a root of 0 would have no derivative."""
        square = free.square().sum(_inner(free), keepdim=True)
        beyond = square > self.norm**2
        return torch.where(beyond, square, self.norm**2).sqrt(), beyond


def _inner(weight: Tensor) -> tuple[int, ...]:
    return tuple(range(1, weight.dim()))
