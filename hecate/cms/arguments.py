"""Checks of what a caller passes to a `CMS`."""

from __future__ import annotations

import torch
from torch import Tensor

from hecate.cms.state import CMSState
from hecate.errors import ShapeError


def check_state(levels: int, x: Tensor, state: CMSState | None) -> None:
    """Refuses a state of another layer or batch."""
    if state is None:
        return
    if not isinstance(state, CMSState):
        raise ShapeError(f"state must be the CMSState that this layer returned, got {type(state).__name__}")
    if len(state.levels) != levels:
        raise ShapeError(
            f"state.levels must hold one state for each of {levels} levels, got "
            f"{len(state.levels)}; was it made by another layer?"
        )
    written = state.written
    if written.shape != x.shape[:1] or written.dtype != torch.int64 or written.device != x.device:
        raise ShapeError(
            f"state.written must be int64 {list(x.shape[:1])} on {x.device}, got {written.dtype} "
            f"{list(written.shape)} on {written.device}; was it made with another batch?"
        )
