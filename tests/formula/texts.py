"""Printed texts as torch runs them: a check that needs no compiler."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from hecate.formula.nodes import NAMES
from hecate.formula.printer import Text


def torch_names(dtype: torch.dtype) -> dict[str, Any]:
    """The names of a text as torch runs it."""

    def where(condition: torch.Tensor, x: Any, y: Any) -> torch.Tensor:
        x, y = (item if isinstance(item, torch.Tensor) else torch.tensor(item, dtype=dtype) for item in (x, y))
        return torch.where(condition, x, y)

    names = {name: getattr(torch, name) for name in NAMES if hasattr(torch, name)}
    return names | {
        "where": where, "power": torch.pow, "total": lambda x: x.sum(-1, keepdim=True),
        "top": lambda x: x.amax(-1, keepdim=True), "INF": math.inf, "NAN": math.nan,
    }  # fmt: skip


def in_torch(text: Text, dtype: torch.dtype, width: int) -> Callable[..., Any]:
    """A text as torch runs it, of tensors and the numbers c."""
    names = torch_names(dtype) | {"N": float(width)}
    exec(compile(text.source, f"<formula {text.name}>", "exec"), names)
    return names[text.name]
