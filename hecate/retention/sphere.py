"""Slots of unit length."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from hecate.retention.base import Retention
from hecate.tape.ops import over, sum_to_gate


class Sphere(Retention):
    """sphere: M' = X / |X| with X = retain M + D - M (M.D), slot by slot.

    A step along the sphere on which each slot lives: the part of D that would only lengthen it is
    dropped, and the rest turns it. Directions are kept, lengths are not: this is Lattice's update,
    where slots compete by angle. A slot is a column of a weight (one phi channel, as Lattice has
    it) or a row (one output); a weight with a single axis is one slot. The smaller retain, the
    further a step turns.

    Shapes: M, D `[N, V, P]`; retain `[N]` or `[N, P]`.
    VJP: with h = (g - U (U.g))/|X|, U = X/|X|: g_D = h - M (M.h), g_M = retain h - h (M.D) - D
    (M.h), g_retain = <h, M>.
    Traits: not linear; starts at the identity pattern (slot i along coordinate i) plus the initial
    weights, normalised.
    Cost: three sums over slots.
    References: Lattice (Karami and Mirrokni, 2025, arXiv 2504.05646). [RET-SPHERE-D1]
    """

    kind: Literal["sphere"] = "sphere"
    slot: Literal["column", "row"] = "column"
    retain: float = Field(1.0, ge=0, le=1)
    eps: float = Field(1e-6, gt=0)
    uses_retain: ClassVar[bool] = True

    @property
    def default_retain(self) -> float:
        return self.retain

    def start(self, weights: Tensor) -> Tensor:
        axis = self._axis(weights)
        width = weights.shape[axis]
        count = weights.shape[-1] if axis == -2 else weights.shape[-2] if weights.dim() > 2 else 1
        pattern = torch.arange(width, device=weights.device) == (
            torch.arange(count, device=weights.device).unsqueeze(-1) % max(width, 1)
        )
        if weights.dim() == 2:
            pattern = pattern[0]
        moved = weights + (pattern.mT if axis == -2 else pattern).to(weights.dtype)
        return moved / self._length(moved)[0]

    def step(self, memory: Tensor, direction: Tensor, retain: Tensor) -> Tensor:
        moved = self._moved(memory, direction, retain)
        return moved / self._length(moved)[0]

    def step_vjp(
        self, memory: Tensor, direction: Tensor, retain: Tensor, g: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        moved = self._moved(memory, direction, retain)
        length, beyond = self._length(moved)
        unit = moved / length
        across = torch.where(beyond, unit * self._dot(unit, g), 0.0)
        h = (g - across) / length
        along = self._dot(memory, h)
        gmemory = over(retain, memory) * h - h * self._dot(memory, direction) - direction * along
        return gmemory, h - memory * along, sum_to_gate(h * memory, retain)

    def _moved(self, memory: Tensor, direction: Tensor, retain: Tensor) -> Tensor:
        tangent = direction - memory * self._dot(memory, direction)
        return over(retain, memory) * memory + tangent

    def _length(self, moved: Tensor) -> tuple[Tensor, Tensor]:
        """max(|X|, eps) and whether the length is the larger."""
        square = self._dot(moved, moved)
        beyond = square > self.eps**2
        return torch.where(beyond, square, self.eps**2).sqrt(), beyond

    def _dot(self, a: Tensor, b: Tensor) -> Tensor:
        return (a * b).sum(self._axis(a), keepdim=True)

    def _axis(self, weight: Tensor) -> int:
        return -2 if self.slot == "column" and weight.dim() > 2 else -1
