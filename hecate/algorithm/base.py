"""The inner algorithm: how a gradient becomes a step."""

from __future__ import annotations

from typing import ClassVar, NamedTuple, Protocol

import torch
from pydantic import Field
from torch import Tensor

from hecate.tape import Block, Tensors
from hecate.variant import Variant


class AlgorithmForm(NamedTuple):
    """How kernels and parallel forms take the direction from the token's own gradient G: D = -lr G, or with `momentum`
    S' = momentum S - lr G and D = S', or with `nesterov` too D = momentum S' - lr G.
    """

    momentum: bool = False
    nesterov: bool = False


class Token(NamedTuple):
    """What one token brings to a write: phi_k `[N, P]`, v `[N, V]` and the lr gate `[N]`."""

    phi_k: Tensor
    v: Tensor
    lr: Tensor


class InnerLoss(Protocol):
    """The inner loss at one state of the memory, as an algorithm may ask for it."""

    @property
    def curvature(self) -> float | None:
        """The bias' bound of its Hessian's eigenvalues."""

    @property
    def diagonal(self) -> bool:
        """Whether every weight meets one coordinate of phi alone."""

    def gradient(self, phi_k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Its gradient by the weights for one key and value per memory."""

    def error(self, phi_k: Tensor, v: Tensor) -> Tensor:
        """Its gradient by the prediction, `[N, V]`."""

    def pullback(self, phi_k: Tensor, u: Tensor) -> tuple[Tensor, ...]:
        """The weights' cotangents from that of a prediction."""

    def run(self, block: Block, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Runs a block of the algorithm's own."""


class Algorithm(Variant, family="algorithm"):
    """The direction D (sign included) from a gradient G, for one weight tensor at a time.

    State beside the weights lives in `slots`: one tensor for each name, of the weight's shape unless `slot_shapes` says
    otherwise, zero at the start. A variant gives `direction` and `direction_vjp`; the latter falls back to
    `torch.func`. One that wants more than the token's own gradient also gives `gradient`, and what it has to remember
    for that in `context_shapes`, once per memory and zero at the start.

    Shapes: G, D and slots `[N, ...]`; lr and momentum `[N]`.
    """

    lr: float = Field(1.0, ge=0)
    _derivatives = ("direction_vjp",)
    _formulas = ("gradient", "direction", "direction_vjp", "slots", "slot_shapes", "context_shapes")
    slots: ClassVar[tuple[str, ...]] = ()
    uses_momentum: ClassVar[bool] = False
    linear: ClassVar[bool] = False  # whether D is linear in gradients and slots, given the gates

    @property
    def weighted_sum(self) -> bool:
        """Whether D is a sum of the gradients so far, with weights fixed by keys and gates; slots without the values'
        width in their shape then hear of no value."""
        return self.linear

    @property
    def default_momentum(self) -> float:
        """The momentum gate used when none is given: the field `momentum` where there is one."""
        return vars(self).get("momentum", 0.0)

    @property
    def stable_step(self) -> float:
        """Largest lr times curvature at which repeated writes of one item do not grow."""
        return 2.0

    def refusal(self, *, linear: bool, diagonal: bool, curvature: float | None) -> str | None:
        """Why it cannot step a structure (linear, diagonal or not) under a bias; None if it can."""
        return None

    def slot_shapes(self, weight: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Shapes of the slots beside one weight, in the order of `slots`; by default its own."""
        return dict.fromkeys(self.slots, weight)

    def context_shapes(self, d_phi: int, d_v: int) -> dict[str, tuple[int, ...]]:
        """Shapes of what `gradient` remembers of one memory's past, by name."""
        return {}

    def gradient(
        self, loss: InnerLoss, token: Token, context: tuple[Tensor, ...]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The gradient that `direction` gets, by default the token's own, and the new context."""
        return loss.gradient(token.phi_k, token.v), context

    def direction(self, grad: Tensor, lr: Tensor, momentum: Tensor, *slots: Tensor) -> tuple[Tensor, ...]:
        """The direction, followed by the new slots."""
        raise NotImplementedError(f"{type(self).__name__} defines no direction")

    def direction_vjp(self, inputs: tuple[Tensor, ...], *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        """Cotangents of (grad, lr, momentum, *slots) from those of (direction, *slots)."""
        _, pull = torch.func.vjp(self.direction, *inputs)  # type: ignore[misc]
        return tuple(pull(cotangents))

    @classmethod
    def takes_any_gradient(cls) -> bool:
        """Whether `direction` gets the token's own gradient, unchanged and without a context."""
        return cls.gradient is Algorithm.gradient

    def kernel_form(self) -> AlgorithmForm | None:
        """The form in which kernels compute `direction`, which a variant declares as `kernel`; None leaves it to torch,
        as where a subclass redefines the formulas below the class that declared it."""
        return self.declared_kernel()

    def block(self) -> Block:
        """`direction` as a tape block: (grad, lr, momentum, *slots) -> (direction, *slots)."""

        def forward(*inputs: Tensor) -> tuple[Tensors, Tensors]:
            return self.direction(*inputs), inputs

        return Block(f"algorithm.{self.kind}", forward, self.direction_vjp if self.hand_written() else None)


AlgorithmKind = Algorithm
