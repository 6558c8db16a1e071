"""What an engine is told of one scan beside its config."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Call(NamedTuple):
    """One scan, as far as the choice of an engine depends on it.

    A config alone says whether an engine is exact (`*_refusal`); whether it can run here, on these tensors, is asked of
    the call (`*_unfit`).

    Fields:
        length: number of tokens.
        steps: in how many the chunk engine takes them.
        shape: of a memory's first weight, `(V, P)` for a matrix.
        device: type of the device of all tensors.
        dtype: of the state.
        values: dtype of v.
        retain: the gates `[B, T, H]` or `[B, T, H, P]`; None if they are not known yet.
        masked: whether there is a write or a reset mask.
        traced: whether torch has to see every operation.
    """

    length: int = 2
    steps: int = 0
    shape: tuple[int, ...] = (64, 64)
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    values: torch.dtype = torch.float32
    retain: Tensor | None = None
    masked: bool = False
    traced: bool = False


TRACED = "torch has to see every operation here (torch.compile, torch.func, a dispatch mode)"
