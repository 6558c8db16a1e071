"""Retentions with a link: a dual state evolves linearly, and the memory is a function of it."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from pydantic import Field
from torch import Tensor

from hecate.retention.base import Retention
from hecate.retention.links import Link
from hecate.tape.ops import over, sum_to_gate


class MirrorRetention(Retention):
    """A' = retain A + D, M = link(A): mirror descent with decay. [RET-MIRROR-D1]

    What is carried is the dual state A, and M is computed from it wherever the memory predicts or is read: the step is
    linear, and what A was told it keeps however close M is to the border of its set. A variant names its link.

    Where the link does not see a constant along a row, D is taken without its own under a gate
    that rows share: M is the same, and no constant grows in A over a million tokens.
    """

    retain: float = Field(0.99, ge=0, le=1)
    uses_retain: ClassVar[bool] = True

    # Built beforehand, because torch.compile cannot trace the building of a model; not a field.
    __slots__ = ("_link",)

    def build_link(self) -> Link:
        """The link of this retention's fields."""
        raise NotImplementedError(f"{type(self).__name__} names no link")

    @property
    def through(self) -> Link:
        """The link: its `memory` turns a dual state, logits or their like, into weights."""
        return self._link  # type: ignore[attr-defined]

    @property
    def dual(self) -> bool:
        return not self.through.linear

    @property
    def linear(self) -> bool:
        return self.through.linear

    @property
    def additive(self) -> bool:
        return True

    @property
    def default_retain(self) -> float:
        return self.retain

    def start(self, weights: Tensor) -> Tensor:
        return self.through.start(weights)

    def weights(self, carried: Tensor) -> Tensor:
        return self.through.memory(carried)

    def weights_vjp(self, carried: Tensor, g: Tensor) -> Tensor:
        return self.through.memory_vjp(carried, g)

    def centred(self, direction: Tensor, retain: Tensor) -> Tensor:
        # Channels that decay apart would tell the constant of a row.
        if retain.dim() > 1 or not self.through.row_invariant:
            return direction
        return direction - direction.mean(-1, keepdim=True)

    def step(self, memory: Tensor, direction: Tensor, retain: Tensor) -> Tensor:
        return over(retain, memory) * memory + self.centred(direction, retain)

    def step_vjp(self, memory: Tensor, direction: Tensor, retain: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gmemory = over(retain, memory) * g
        return gmemory, self.centred(g, retain), sum_to_gate(g * memory, retain)

    def model_post_init(self, context: object) -> None:
        """Keeps the link."""
        object.__setattr__(self, "_link", self.build_link())

    def __setstate__(self, state: dict[Any, Any]) -> None:
        super().__setstate__(state)
        self.model_post_init(None)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        return self.model_copy()

    def __copy__(self) -> Self:
        return self.model_copy()
