"""The inner algorithm: how a gradient becomes a step."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from hecate.tape import Block, Tensors
from hecate.variant import Variant


class Algorithm(Variant, family="algorithm"):
    """The direction D (sign included) from a gradient G, for one weight tensor at a time.

    State beside the weights lives in `slots`: one tensor of the weight's shape for each name, zero
    at the start. A variant gives `direction` and `direction_vjp`; the latter falls back to
    `torch.func`.

    Shapes: G, D and slots `[N, ...]`; lr and momentum `[N]`.
    """

    lr: float = Field(1.0, ge=0)
    slots: ClassVar[tuple[str, ...]] = ()
    uses_momentum: ClassVar[bool] = False

    @property
    def default_momentum(self) -> float:
        """The momentum gate used when none is given."""
        return 0.0

    @property
    def stable_step(self) -> float:
        """Largest lr times curvature at which repeated writes of one item still contract."""
        return 2.0

    def direction(
        self, grad: Tensor, lr: Tensor, momentum: Tensor, *slots: Tensor
    ) -> tuple[Tensor, ...]:
        """The direction, followed by the new slots."""
        raise NotImplementedError(f"{type(self).__name__} defines no direction")

    def direction_vjp(
        self, inputs: tuple[Tensor, ...], *cotangents: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Cotangents of (grad, lr, momentum, *slots) from those of (direction, *slots)."""
        _, pull = torch.func.vjp(self.direction, *inputs)  # type: ignore[misc]
        return tuple(pull(cotangents))

    @classmethod
    def hand_written(cls) -> bool:
        """Whether the derivative is written by hand."""
        return cls.direction_vjp is not Algorithm.direction_vjp

    def block(self) -> Block:
        """`direction` as a tape block: (grad, lr, momentum, *slots) -> (direction, *slots)."""

        def forward(*inputs: Tensor) -> tuple[Tensors, Tensors]:
            return self.direction(*inputs), inputs

        return Block(
            f"algorithm.{self.kind}", forward, self.direction_vjp if self.hand_written() else None
        )


AlgorithmKind = Algorithm
