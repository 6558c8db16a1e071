"""What a self-referential memory is configured by, and what it carries from call to call."""

from __future__ import annotations

from typing import Literal, NamedTuple, Self

from pydantic import Field, model_validator
from torch import Tensor

from hecate.errors import ConfigError, ShapeError
from hecate.nn.norm import QKNorm
from hecate.rule import MemoryConfig, MemoryState, bytes_of, detached
from hecate.sizes import Count
from hecate.variant import Config

Box = Literal["k", "v", "q", "lr", "retain", "momentum"]


class SelfReferenceConfig(Config):
    """A memory whose projections are memories of the same kind: boxes. [SELF-CONFIG-D1]

    Fields:
        memory: the rule of every box; `algorithm.lr` is the ceiling of the lr gate.
        phase: 1, projections stay as they start; 2, boxes learn k_t -> v_t; 3, each box learns
            k_t -> its own answer to v_t.
        adaptive: the projections that are written too; None takes none in phase 1 and all but q,
            which the paper keeps static, in phases 2 and 3.
        erase: "once" by the bias alone; "twice" by delta gradient descent on top of bias l2, as
            printed, whose fixed point is half the target.
        chunk: projections and targets of this many tokens are read in the boxes as they were
            before the first of them; None takes `memory.chunk`, where gradients are taken.
        qk_norm: normalisation of q and k before phi.
        input_norm: that of what boxes are asked, x and v; without one they can grow without bound.

    Warning: the gradients of a long `memory.chunk`, all taken at one state, add up and can diverge at an lr that one
    token stands. `chunk=C` with `memory.chunk=1` adapts projections as rarely and stays stable.
    """

    memory: MemoryConfig = MemoryConfig.model_validate({"retention": "decay"})
    phase: Literal[1, 2, 3] = 3
    adaptive: tuple[Box, ...] | None = None
    erase: Literal["once", "twice"] = "once"
    chunk: Count | None = Field(None, ge=1)
    qk_norm: QKNorm = "l2"
    input_norm: QKNorm = "l2"

    @property
    def boxes(self) -> tuple[Box, ...]:
        """The projections that this rule has."""
        found: list[Box] = ["k", "v", "q", "lr"]
        if self.memory.retention.uses_retain:
            found.append("retain")
        if self.memory.algorithm.uses_momentum:
            found.append("momentum")
        return tuple(found)

    @property
    def moving(self) -> tuple[Box, ...]:
        """The projections that are written."""
        if self.adaptive is None:
            return () if self.phase == 1 else tuple(box for box in self.boxes if box != "q")
        return tuple(box for box in self.boxes if box in self.adaptive)

    @property
    def period(self) -> int:
        """Tokens that read the boxes in one state."""
        return self.memory.chunk if self.chunk is None else self.chunk

    @property
    def refers(self) -> bool:
        """Whether what is written depends on what was written before."""
        return bool(self.moving) or self.phase == 3 or self.erase == "twice"

    @property
    def erases(self) -> int:
        """How often a write takes the key's direction out of a box."""
        return 2 if self.erase == "twice" else 1

    @property
    def anchored(self) -> bool:
        """Whether the state keeps what boxes were at the chunk's start."""
        return self.refers and self.period > 1

    @model_validator(mode="after")
    def _possible(self) -> Self:
        memory = self.memory
        if memory.normalizer != "none":
            raise ConfigError(
                f"memory.normalizer={memory.normalizer!r} divides by a sum of weights that is 0 "
                "before the first write, where a projection has to answer already; use "
                "memory.normalizer='none'",
                path=("memory", "normalizer"),
            )
        if memory.feature_map.needs_position:
            raise ConfigError(
                f"feature_map {memory.feature_map.kind!r} depends on the token's position, so a "
                "projection would change along the sequence though nothing is learned; use a "
                "feature_map without positions",
                path=("memory", "feature_map"),
            )
        if self.phase == 1 and self.adaptive:
            raise ConfigError(
                f"phase 1 keeps projections as they start, but adaptive={self.adaptive!r} writes "
                "them; use phase 2 or 3, or leave adaptive out",
                path=("adaptive",),
            )
        self._check_adaptive()
        if self.erase == "twice":
            self._check_erase()
        return self

    def _check_adaptive(self) -> None:
        given = self.adaptive or ()
        if len(set(given)) < len(given):
            raise ConfigError(f"names each box once, got {given!r}", path=("adaptive",))
        absent = [box for box in given if box not in self.boxes]
        if absent:
            rule = self.memory
            raise ConfigError(
                f"{absent[0]!r} is no box of this memory: retention {rule.retention.kind!r} and "
                f"algorithm {rule.algorithm.kind!r} take the boxes {', '.join(self.boxes)}",
                path=("adaptive",),
            )

    def _check_erase(self) -> None:
        rule, reason = self.memory, None
        if rule.structure.kind != "matrix":
            reason = (
                f"the second erase multiplies a matrix by I - lr k k^T, and structure "
                f"{rule.structure.kind!r} is none; use structure 'matrix'"
            )
        elif rule.bias.kind != "l2":
            reason = (
                f"it adds the erase of delta gradient descent to that of bias l2, got bias "
                f"{rule.bias.kind!r}; with bias 'dot' the result is bias 'l2' and erase='once'"
            )
        elif rule.algorithm.kind not in ("gd", "momentum"):
            reason = (
                f"it is one gradient step with two terms, and algorithm {rule.algorithm.kind!r} "
                "is no gradient step; use algorithm 'gd' or 'momentum'"
            )
        elif rule.decay_order != "with_step":
            reason = (
                f"it decays and erases in one step, decay_order={rule.decay_order!r} one after "
                "the other; use decay_order 'with_step'"
            )
        bound, limit = rule.key_bound, rule.algorithm.stable_step
        if reason is None and rule.step == "raw" and bound is not None:
            largest = rule.diverging(self.erases * bound)
            if largest is not None:
                reason = (
                    f"lr={rule.algorithm.lr:g} counts twice, 2 lr |phi|^2 can reach {largest:g}, "
                    f"and algorithm {rule.algorithm.kind!r} diverges beyond {limit:g}; use an lr "
                    f"of at most {limit / (2 * bound):g}"
                )
        if reason is not None:
            raise ConfigError(f"'twice': {reason}, or erase='once'", path=("erase",))


class SelfReferentialState(NamedTuple):
    """What a `SelfReferential` layer carries between calls: a pytree of tensors. [SELF-LAYER-I1]

    Fields:
        boxes: the boxes that are written, the memory last; box-major on the head axis.
        anchor: their weights where the present chunk started; empty if a chunk is one token.
        position: tokens written since then, `[B]` int64.
        conv, conv_segment: as in `hecate.nn.LayerState`.
        features: the state of the feature memory; None without one.
    """

    boxes: MemoryState
    anchor: dict[str, Tensor]
    position: Tensor
    conv: Tensor | None
    conv_segment: Tensor | None
    features: MemoryState | None = None

    def detach(self) -> SelfReferentialState:
        """The same state cut off from the graph that produced it."""
        return detached(self)

    @property
    def bytes(self) -> int:
        """Size of all tensors; it does not grow with the number of tokens seen."""
        return bytes_of(self)


def check_state(
    state: SelfReferentialState, shapes: dict[str, tuple[int, ...] | None], batch: int, *, features: bool
) -> None:
    """Refuses a state that another layer or batch made; a scan looks at the rest of the boxes."""
    if not isinstance(state, SelfReferentialState):
        raise ShapeError(f"state must be the SelfReferentialState that this layer returned, got {type(state).__name__}")
    given: dict[str, Tensor | None] = {"position": state.position, "conv": state.conv}
    given |= {f"boxes.memory[{name!r}]": item for name, item in state.boxes.memory.items()}
    given |= {f"anchor[{name!r}]": item for name, item in state.anchor.items()}
    if state.conv_segment is not None:  # there since a reset_mask was given
        given["conv_segment"] = state.conv_segment
    elif "conv_segment" in shapes:
        shapes = {name: shape for name, shape in shapes.items() if name != "conv_segment"}
    for name in {**shapes, **given}:
        found = None if (item := given.get(name)) is None else list(item.shape)
        wanted = None if (shape := shapes.get(name)) is None else list(shape)
        if found != wanted:
            raise ShapeError(
                f"state.{name} must be {wanted} for this layer and {batch} sequences, got "
                f"{found}; was it made by another layer or with another batch?"
            )
    if (state.features is not None) != features:
        raise ShapeError(
            f"state.features is {'None' if features else 'a state'}, but this layer has "
            f"{'a' if features else 'no'} feature memory; was it made by another layer?"
        )
