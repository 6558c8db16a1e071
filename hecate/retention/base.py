"""Retention: how the past is kept when a step is taken."""

from __future__ import annotations

from types import MappingProxyType
from typing import ClassVar, Literal, NamedTuple

from torch import Tensor

from hecate.tape import Block, Tensors, formula_block
from hecate.tape.ops import torch_vjp
from hecate.variant import Variant

LinkAt = Literal["token", "chunk", "linear"]


class GateForm(NamedTuple):
    """Form of a layer's retain gate from a token: one logit per head or per phi channel, of a linear head or of one of
    low `rank` ("head": as wide as a key), and its squashing function, of `bounded` with the least log retain."""

    channels: bool = False
    rank: int | Literal["head"] | None = None
    squash: Literal["sigmoid", "root", "softplus", "bounded"] = "sigmoid"
    lowest: float = -5.0


class Retention(Variant, family="retention"):
    """The new memory from the old one and a direction D (the step, sign included).

    A variant gives `step` and `step_vjp` for one weight tensor; the latter falls back to `torch.func`. What is carried
    from step to step is the memory itself, unless `weights` says how the memory follows from it: then it is a dual
    state, as in mirror descent.

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
        """At which dual states of a chunk `weights` are taken; see `MirrorRetention`."""
        return "token"

    @property
    def linear(self) -> bool:
        """True if the step is `a M + D` with a fixed by the gates, and M itself is carried: the parallel form."""
        return False

    @property
    def additive(self) -> bool:
        """True if the step is `a X + D` of the carried X, a fixed by the gates, whatever the memory is of X; D as
        `centred` leaves it."""
        return self.linear

    @property
    def anchored(self) -> bool:
        """True if memories decay towards the weights that they started at: (1 - retain) of these are added to every
        step. [RET-START-D2]"""
        return False

    def settled(self, *, deep: bool) -> Retention:
        """Itself, with what it leaves to the structure said: whether that is a deep one."""
        return self

    @property
    def weighted_sum(self) -> bool:
        """True if memories stay weighted sums of what was written, with weights fixed by the gates, which a sum of
        weights can normalise."""
        return self.linear

    @property
    def default_retain(self) -> float:
        """The retain gate used when none is given: the field `retain` where there is one."""
        return vars(self).get("retain", 1.0)

    @property
    def per_head(self) -> bool:
        """True if the default retain differs between heads: then `default_retain` is that of the first."""
        return False

    def default_retains(self, heads: int) -> tuple[float, ...]:
        """The retain gate of each of so many heads where none is given."""
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
        """State carried at first by a memory of these initial weights `[N, ...]`: themselves by default.

        A retention that keeps memories in a set maps every tensor into it, smoothly, and zero to a constant from which
        gradients flow. It sees initial weights, never a state that goes on. [RET-START-D1]
        """
        return weights

    def weights(self, carried: Tensor) -> Tensor:
        """The memory M of what is carried: what predicts, is descended and read. [RET-MIRROR-D1]"""
        return carried

    def weights_vjp(self, carried: Tensor, g: Tensor) -> Tensor:
        """Cotangent of what is carried from that of the memory."""
        return torch_vjp(self.weights, (carried,), g)[0]

    @property
    def centring(self) -> bool:
        """True if `centred` changes steps under a gate that rows share."""
        return False

    def centred(self, direction: Tensor, retain: Tensor) -> Tensor:
        """A direction as an additive step takes it: without what no memory would ever see of it.

        An orthogonal projection of the last axis.
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
        return formula_block(f"retention.{self.kind}", self.step, self.step_vjp if self.hand_written() else None)

    def weights_block(self) -> Block:
        """`weights` as a tape block: (carried) -> memory."""
        by_hand = type(self).weights_vjp is not Retention.weights_vjp
        return formula_block(f"retention.{self.kind}.weights", self.weights, self.weights_vjp if by_hand else None)


RetentionKind = Retention
