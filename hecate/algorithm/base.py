"""The inner algorithm: how a gradient becomes a step."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import ClassVar, NamedTuple

from pydantic import Field
from torch import Tensor

from hecate.errors import ShapeError
from hecate.tape import Block
from hecate.tape.ops import torch_vjp
from hecate.variant import Variant

State = tuple[Tensor, ...]  # weights, slots or context of memories, in their order


class AlgorithmForm(NamedTuple):
    """Direction D that kernels and parallel forms compute from the token's own gradient G: D = -lr G, or with
    `momentum` S' = momentum S - lr G and D = S', or with `nesterov` too D = momentum S' - lr G.

    As the attribute `token`, for a matrix only: with `erase` e also S' = S (momentum - c G^T G) - lr G, c = e / (1 + e
    |G|^2), or 1 unless `bounded`; with `ridge` G is that of recursive least squares, as in `RLS`, with a `discount`.
    [ENG-NUM-D8]
    """

    momentum: bool = False
    nesterov: bool = False
    erase: float | None = None
    bounded: bool = True
    ridge: float | None = None
    discount: float = 1.0

    @property
    def plain(self) -> bool:
        """True if G is the token's own gradient and adds to S."""
        return self.erase is None and self.ridge is None


class GramForm(NamedTuple):
    """Direction of a matrix memory in block engines, if a function of the momentum's Gram matrix mixes its rows: S' =
    momentum S + G, D = -lr Q S' with Q = gain(S' S'^T).

    Fields:
        gain: (weight's shape `(V, P)`) -> the block (gram `[N, V, V]`) -> Q `[N, V, V]`.
    """

    gain: Callable[[tuple[int, ...]], Block]


class WindowForm(NamedTuple):
    """Gradient of a window in block engines: G = sum_a weights[a] grad ell(M; phi_(t-a), v_(t-a)) over the last tokens
    since the start or the last reset, and a step of `inner` along it. If `remembers`, the context consists of the keys,
    values and marks of as many tokens."""

    weights: tuple[float, ...]
    inner: Algorithm
    remembers: bool = True


class Token(NamedTuple):
    """One token's inputs to a write: phi_k `[N, P]`, v `[N, V]` and the lr gate `[N]`; phi_w `[N, P]` is the key along
    which the error is written, None if that is phi_k."""

    phi_k: Tensor
    v: Tensor
    lr: Tensor
    phi_w: Tensor | None = None


class InnerLoss(NamedTuple):
    """The inner loss at one state of the memory, for an algorithm to evaluate. [RULE-LOSS-D1]

    Fields:
        curvature: the bias' bound of its Hessian's eigenvalues.
        diagonal: whether every weight acts on one coordinate of phi alone.
        gradient: (phi_k, v) -> its gradient by the weights for one key and value per memory.
        error: (phi_k, v) -> its gradient by the prediction, `[N, V]`.
        pullback: (phi_k, u) -> the weights' cotangents from that of a prediction.
        run: (block, *inputs) -> outputs; runs a block of the algorithm's own.
    """

    curvature: float | None
    diagonal: bool
    gradient: Callable[[Tensor, Tensor], State]
    error: Callable[[Tensor, Tensor], Tensor]
    pullback: Callable[[Tensor, Tensor], State]
    run: Callable[..., State]


class Algorithm(Variant, family="algorithm"):
    """The direction D (sign included) from a gradient G, for one weight tensor at a time.

    State besides the weights is in `slots`: one tensor for each name, of the weight's shape unless `slot_shapes` says
    otherwise, zero at the start. A variant defines `direction` and `direction_vjp`; the latter falls back to
    `torch.func`. One that needs more than the token's own gradient also defines `gradient`, and in `context_shapes` the
    tensors that it remembers for that, once per memory and zero at the start. `kernel_form` is an `AlgorithmForm`.

    Shapes: G, D and slots `[N, ...]`; lr and momentum `[N]`.
    """

    lr: float = Field(1.0, ge=0)
    lr_start: float = Field(0.5, gt=0, lt=1, description="where the lr gate of a layer starts, as a share of lr")
    _derivatives = ("direction_vjp",)
    _formulas = ("gradient", "direction", "direction_vjp", "slots", "slot_shapes", "context_shapes")
    _follows = MappingProxyType({
        "direction_vjp": ("direction",), **dict.fromkeys(("linear", "weighted_sum"), ("direction", "gradient")),
    })  # fmt: skip
    slots: ClassVar[tuple[str, ...]] = ()
    uses_momentum: ClassVar[bool] = False
    linear: ClassVar[bool] = False  # whether D is linear in gradients and slots, given the gates

    @property
    def weighted_sum(self) -> bool:
        """True if D is a sum of the gradients so far, with weights fixed by keys and gates; slots whose shape lacks the
        values' width then do not depend on values."""
        return self.linear

    @property
    def default_momentum(self) -> float:
        """The momentum gate used when none is given: the field `momentum` if there is one, else 0."""
        return vars(self).get("momentum", 0.0)

    @property
    def dampens(self) -> bool:
        """True if lr is multiplied by (1 - momentum) token by token, before anything else."""
        return False

    @property
    def momentum_top(self) -> float:
        """The largest momentum gate; the least is 0."""
        return 1.0

    @property
    def stable_step(self) -> float:
        """Largest lr times curvature at which repeated writes of one item do not grow."""
        return 2.0

    @property
    def returning_step(self) -> float:
        """Largest lr times curvature at which writes of an item that returns do not grow, however many unrelated items
        come in between."""
        return self.stable_step

    def limits(self, limit: float | None = None) -> str:
        """`stable_step` in words, or `limit` in its place, and `returning_step` if that is smaller."""
        limit = self.stable_step if limit is None else limit
        words = f"{limit:g} where one key is written again and again"
        if self.returning_step < limit:
            words += f", beyond {self.returning_step:g} where it returns among others"
        return words

    def refusal(self, *, linear: bool, diagonal: bool, curvature: float | None) -> str | None:
        """Reason why it cannot step a structure (linear, diagonal or not) under a bias; None if it can."""
        return None

    def slot_shapes(self, weight: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Shapes of the slots of one weight, in the order of `slots`; by default the weight's shape."""
        return dict.fromkeys(self.slots, weight)

    def context_shapes(self, d_phi: int, d_v: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors that `gradient` remembers for one memory, by name."""
        return {}

    def gradient(self, loss: InnerLoss, token: Token, context: State) -> tuple[State, State]:
        """The gradient that `direction` gets, by default the token's own, and the new context."""
        return loss.gradient(token.phi_k, token.v), context

    def direction(self, grad: Tensor, lr: Tensor, momentum: Tensor, *slots: Tensor) -> tuple[Tensor, ...]:
        """The direction, followed by the new slots."""
        raise NotImplementedError(f"{type(self).__name__} defines no direction")

    def direction_vjp(self, inputs: tuple[Tensor, ...], *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        """Cotangents of (grad, lr, momentum, *slots) from those of (direction, *slots)."""
        return torch_vjp(self.direction, inputs, cotangents)

    @classmethod
    def takes_any_gradient(cls) -> bool:
        """True if `direction` gets the token's own gradient, unchanged and without a context."""
        return cls.gradient is Algorithm.gradient

    def window_form(self) -> WindowForm | None:
        """Form of a gradient that sums those of the last tokens, all at the present memory; None if it is another."""
        return WindowForm((1.0,), self, remembers=False) if self.takes_any_gradient() else None

    def factored_form(self) -> Block | None:
        """The direction from the gradient u p^T of a matrix memory, which is not built, as a product of narrow factors:
        (u `[N, V]`, p `[N, P]`, lr, momentum, *slots) -> (left `[N, V, r]`, right `[N, P, r]`, *slots) with D = left
        right^T; None if it needs the whole gradient."""
        return None

    def gram_form(self) -> GramForm | None:
        """Direction as a function of the momentum's Gram matrix; None if it is not one."""
        return None

    def block(self) -> Block:
        """`direction` as a tape block: (grad, lr, momentum, *slots) -> (direction, *slots)."""

        def forward(*inputs: Tensor) -> tuple[State, State]:
            outputs = self.direction(*inputs)
            if not isinstance(outputs, tuple) or len(outputs) != 1 + len(self.slots):
                expected = ", ".join(("direction", *self.slots)) + "," * (not self.slots)
                count = f"{len(outputs)} of them" if isinstance(outputs, tuple) else f"a {type(outputs).__name__}"
                raise ShapeError(f"algorithm {self.kind!r}: direction must return the tuple ({expected}), got {count}")
            for name, before, after in zip(("direction", *self.slots), (inputs[0], *inputs[3:]), outputs, strict=True):
                if before.shape != after.shape:
                    shapes = f"{list(before.shape)}, got {list(after.shape)}"
                    raise ShapeError(f"algorithm {self.kind!r}: the {name} that direction returns must be {shapes}")
            return outputs, inputs

        return Block(f"algorithm.{self.kind}", forward, self.direction_vjp if self.hand_written() else None)


class Carrying(Algorithm):
    """Helper for algorithms that carry past gradients over, decayed by the momentum gate."""

    momentum: float = Field(0.9, ge=0, lt=1)
    slots: ClassVar[tuple[str, ...]] = ("momentum",)
    uses_momentum: ClassVar[bool] = True


AlgorithmKind = Algorithm
