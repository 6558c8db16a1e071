"""What a caller gives in place of a tensor, in words."""

from __future__ import annotations

import torch
from torch import Tensor

from hecate.errors import ShapeError, shorten
from hecate.rule import MemoryState


def described(given: object) -> str:
    """Dtype and shape of a tensor, else what it is, for an error."""
    if isinstance(given, Tensor):
        return f"{given.dtype} {list(given.shape)}"
    return "None" if given is None else f"{shorten(given)} ({type(given).__name__}), no tensor"


def check_tokens(q: Tensor, k: Tensor, v: Tensor, shape: str = "[B, T, H, width]") -> None:
    """Refuses what are no floating point tensors of the rank of a shape on one device."""
    rank = shape.count(",") + 1
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise ShapeError(f"{name} must be a tensor {shape}, got {described(tensor)}")
        if tensor.dim() != rank:
            raise ShapeError(f"{name} must be {shape}, got {list(tensor.shape)}")
        if not tensor.is_floating_point():
            raise ShapeError(f"{name} must be floating point, got {tensor.dtype}")
    for name, tensor in (("q", q), ("v", v)):
        if tensor.device != k.device:
            raise ShapeError(f"{name} is on {tensor.device}, k on {k.device}; move them together")


def check_mask(name: str, mask: Tensor | None, k: Tensor) -> None:
    """Refuses what is no mask over the tokens of keys `[B, T, H, D]`."""
    if mask is None:
        return
    lead = k.shape[:2]
    if not isinstance(mask, Tensor) or mask.shape != lead or mask.dtype != torch.bool:
        raise ShapeError(f"{name} must be bool [B, T] = {list(lead)}, got {described(mask)}")
    if mask.device != k.device:
        raise ShapeError(f"{name} is on {mask.device}, k on {k.device}; move them together")


def check_state(state: MemoryState | None) -> None:
    """Refuses what is no state that a scan returned."""
    if state is None:
        return
    if not isinstance(state, MemoryState):
        raise ShapeError(
            f"state must be the MemoryState that a scan returned, got {described(state)}"
        )
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
