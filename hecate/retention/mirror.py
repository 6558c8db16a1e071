"""Retentions with a link: a dual state evolves linearly, and the memory is a function of it."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from pydantic import Field
from torch import Tensor

from hecate.retention.base import Retention
from hecate.retention.links import Link
from hecate.tape.ops import over, sum_to_gate


class MirrorRetention(Retention):
    """M' = link(retain dual(M) + D): mirror descent with decay. [RET-MIRROR-D1]

    What is carried is the feasible memory; its dual state is recovered from it at every step, so
    engines, reads and states see weights as with any other retention. A variant names its link.
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
        """The link: its `dual` turns a memory into logits or their like, its `memory` back."""
        return self._link  # type: ignore[attr-defined]

    @property
    def linear(self) -> bool:
        return self.through.linear

    @property
    def default_retain(self) -> float:
        return self.retain

    def start(self, weights: Tensor) -> Tensor:
        return self.through.start(weights)

    def step(self, memory: Tensor, direction: Tensor, retain: Tensor) -> Tensor:
        link = self.through
        return link.memory(over(retain, memory) * link.dual(memory) + direction)

    def step_vjp(
        self, memory: Tensor, direction: Tensor, retain: Tensor, g: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        link, kept = self.through, over(retain, memory)
        dual = link.dual(memory)
        gdual = link.memory_vjp(kept * dual + direction, g)
        return link.dual_vjp(memory, kept * gdual), gdual, sum_to_gate(gdual * dual, retain)

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
