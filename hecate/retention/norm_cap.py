"""A bound on the length of the memory, around any other retention."""

from __future__ import annotations

from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from hecate.errors import ConfigError
from hecate.retention.base import Retention
from hecate.retention.none import NoRetention


class NormCap(Retention):
    """norm_cap: M' = X min(1, norm/|X|_F), X what the inner retention makes of M and D.

    The memory is projected onto a ball after every step: as long as it fits, nothing happens; a
    memory that outgrows it is scaled down as a whole. Each weight of a deep memory has its own
    ball. Bounds what an undecayed or unstable memory can become.

    Shapes: M, D `[N, ...]`; retain as the inner retention takes it.
    VJP: inside gX = g, beyond gX = (norm/|X|)(g - X <X, g>/|X|^2), then the inner VJP of gX. The
    border counts as inside.
    Traits: not linear; takes a retain gate if the inner retention does; starts at the inner start,
    projected. Refuses an inner retention that carries a dual state, whose length is not the
    memory's.
    Cost: one norm per weight.
    Origin: ours; projected gradient descent. [RET-CAP-D1]
    """

    kind: Literal["norm_cap"] = "norm_cap"
    norm: float = Field(1.0, gt=0)
    retention: Retention = NoRetention()

    @model_validator(mode="after")
    def _carries_memories(self) -> Self:
        if self.retention.dual:
            raise ConfigError(
                f"{self.retention.kind!r} carries a dual state, whose length is not that of the "
                "memory that retention 'norm_cap' would bound; use it without 'norm_cap' (scale, "
                "low and high of kl and bounded bound a memory), or cap another retention",
                ("retention",),
            )
        return self

    @property
    def uses_retain(self) -> bool:  # type: ignore[override]
        return self.retention.uses_retain

    @property
    def default_retain(self) -> float:
        return self.retention.default_retain

    def start(self, weights: Tensor) -> Tensor:
        return self._project(self.retention.start(weights))

    def step(self, memory: Tensor, direction: Tensor, retain: Tensor) -> Tensor:
        return self._project(self.retention.step(memory, direction, retain))

    def step_vjp(
        self, memory: Tensor, direction: Tensor, retain: Tensor, g: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        free = self.retention.step(memory, direction, retain)
        length, beyond = self._length(free)
        unit = free / length
        along = (unit * g).sum(_inner(g), keepdim=True)
        gfree = torch.where(beyond, (self.norm / length) * (g - unit * along), g)
        return self.retention.step_vjp(memory, direction, retain, gfree)

    def _project(self, free: Tensor) -> Tensor:
        length, beyond = self._length(free)
        return torch.where(beyond, free * (self.norm / length), free)

    def _length(self, free: Tensor) -> tuple[Tensor, Tensor]:
        """|X|_F beyond the ball, `norm` within, where a root of 0 would have no derivative."""
        square = free.square().sum(_inner(free), keepdim=True)
        beyond = square > self.norm**2
        return torch.where(beyond, square, self.norm**2).sqrt(), beyond


def _inner(weight: Tensor) -> tuple[int, ...]:
    return tuple(range(1, weight.dim()))
