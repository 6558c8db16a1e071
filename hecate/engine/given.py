"""What a caller gives in place of a tensor, in words."""

from __future__ import annotations

import torch
from torch import Tensor

from hecate.checks import described, expect, expect_beside
from hecate.errors import ShapeError
from hecate.rule import MemoryState


def check_tokens(q: Tensor, k: Tensor, v: Tensor, axes: str = "B T H width") -> None:
    """Refuses what are no floating point tensors of the rank of a shape on one device."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        expect(tensor, axes, name=name)
    for name, tensor in (("q", q), ("v", v)):
        expect_beside(tensor, k, name)


def check_mask(name: str, mask: Tensor | None, k: Tensor) -> None:
    """Refuses what is no mask over the tokens of keys `[B, T, H, D]`."""
    if mask is not None:
        expect(mask, "B T", name=name, sizes=k.shape[:2], dtype=torch.bool, like=k)


def check_state(state: MemoryState | None) -> None:
    """Refuses what is no state that a scan returned."""
    if state is None:
        return
    if not isinstance(state, MemoryState):
        raise ShapeError(f"state must be the MemoryState that a scan returned, got {described(state)}")
    for field in ("position", "seen"):
        tensor = getattr(state, field)
        if not isinstance(tensor, Tensor) and not (field == "seen" and tensor is None):
            raise ShapeError(f"state.{field} must be a tensor, got {described(tensor)}")
    for field in ("memory", "slots", "anchor", "pending"):
        check_named(f"state.{field}", getattr(state, field))
    check_state(state.normalizer)


def check_named(what: str, tensors: dict[str, Tensor]) -> None:
    """Refuses what are no tensors by name."""
    if not isinstance(tensors, dict):
        raise ShapeError(f"{what} must be a mapping of names to tensors, got {described(tensors)}")
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise ShapeError(f"{what}[{name!r}] must be a tensor, got {described(tensor)}")
