"""What a `Composed` layer carries, and checks of what it is given."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hecate.errors import ConfigError, ShapeError, shorten
from hecate.nn.compose.config import AttentionConfig
from hecate.nn.sliding import SlidingState
from hecate.rule import bytes_of, detached


class ComposedState(NamedTuple):
    """What a `Composed` layer carries: a pytree of tensors. [ATT-COMP-I1]

    Fields:
        attention: of the attention.
        memory: of the memory layer; None without one.
        start: mac only: the memory's state where the present segment began.
        place: mac only: tokens written in the present segment, `[B]` int64.
    """

    attention: SlidingState
    memory: Any = None
    start: Any = None
    place: Any = None

    def detach(self) -> ComposedState:
        """The same state cut off from the graph that produced it."""
        return detached(self)

    @property
    def bytes(self) -> int:
        """Size of all tensors."""
        return bytes_of(self)


def check_memory(config: AttentionConfig, d_model: int, memory: nn.Module | None) -> None:
    """Refuses a memory layer that the kind has no use for, none where it needs one."""
    if config.kind == "attention" and memory is not None:
        raise ConfigError(
            f"kind 'attention' has no memory, got a {type(memory).__name__}; choose kind 'mag', "
            "'mal' or 'mac', or leave it out"
        )
    if config.kind != "attention" and not isinstance(memory, nn.Module):
        raise ConfigError(
            f"kind {config.kind!r} needs a memory layer, got {shorten(memory)}; give one, or choose kind 'attention'"
        )
    width = getattr(memory, "d_model", d_model)
    if width != d_model:
        raise ConfigError(f"d_model={d_model}, but the memory layer's d_model is {width}")


def check_state(kind: str, name: str, x: Tensor, state: ComposedState | None) -> None:
    """Refuses a state of another layer or batch."""
    if state is None:
        return
    if not isinstance(state, ComposedState):
        raise ShapeError(
            f"{name}: state must be the ComposedState that this layer returned, got {type(state).__name__}"
        )
    expected = {"memory": kind != "attention", "start": kind == "mac", "place": kind == "mac"}
    for field, needed in expected.items():
        if (getattr(state, field) is not None) != needed:
            raise ShapeError(
                f"{name}: state.{field} must {'not ' if needed else ''}be None for kind "
                f"{kind!r}; was it made by another layer?"
            )
    if state.place is not None and state.place.shape != x.shape[:1]:
        raise ShapeError(
            f"{name}: state.place must be {list(x.shape[:1])}, got "
            f"{list(state.place.shape)}; was it made with another batch?"
        )


def check_rows(name: str, layer: nn.Module, state: Any, batch: int) -> None:
    """Refuses a memory's state that cannot be taken apart row by row."""
    for leaf in pytree.tree_leaves(state):
        given = list(leaf.shape) if isinstance(leaf, Tensor) else shorten(leaf)
        if leaf is not None and (not isinstance(given, list) or given[:1] != [batch]):
            raise ShapeError(
                f"{name}: kind 'mac' begins segments row by row, so every tensor of the memory's "
                f"state must have {batch} rows, one per sequence; that of {type(layer).__name__} "
                f"holds {given}"
            )
