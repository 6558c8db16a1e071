"""The windows of slow levels: how they add up, and their place in a state dict."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor

from hecate.errors import CheckpointError, ShapeError
from hecate.optim.options import Group, name_of

_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def added(window: Tensor | None, grad: Tensor) -> Tensor:
    """A window, with one more gradient; half precision is summed in float32."""
    wide = grad.detach().to(_WIDER.get(grad.dtype, grad.dtype), copy=window is None)
    if window is None:
        return wide
    return wide + window if window.is_sparse else window.add_(wide)


def add_windows(optimizer: Any, state: dict[str, Any]) -> None:
    """Puts the windows of slow levels beside what the wrapped optimiser keeps of a parameter."""
    slow = {p for group in optimizer.param_groups if group["period"] > 1 for p in group["params"]}
    for index, p in _indexed(state["param_groups"], optimizer.param_groups):
        window = optimizer._windows.get(p)
        entries = {**state["state"].get(index, {}), "has_window": torch.tensor(window is not None)}
        if window is None and p in slow:
            window = torch.zeros_like(p, dtype=_WIDER.get(p.dtype, p.dtype))
        state["state"][index] = entries if window is None else {**entries, "window": window}


def windows_of(state: dict[str, Any], groups: list[Group]) -> dict[Tensor, Tensor]:
    """Copies of the running windows of a state dict; their dtype is not the parameter's."""
    for number, group in enumerate(state["param_groups"]):
        if "period" not in group or "elapsed" not in group:
            raise CheckpointError(
                f"param_groups[{number}] of the state has no period: another optimiser wrote it; "
                "load it into one of that kind"
            )
    entries = {i: e for i, e in state["state"].items() if "window" in e}
    windows = {i: {"window": e["window"]} for i, e in entries.items()}
    refuse_shapes(windows, state["param_groups"], groups)
    return {
        p: entries[i]["window"].detach().to(p.device, copy=True)
        for i, p in _indexed(state["param_groups"], groups)
        if i in entries and bool(entries[i].get("has_window", True))
    }


def refuse_shapes(state: dict[int, Any], saved: list[Group], groups: list[Group]) -> None:
    """Refuses what is not of its parameter's shape; factors of it, as Adafactor's, are together."""
    for index, p in _indexed(saved, groups):
        shapes = {k: v.shape for k, v in state.get(index, {}).items() if getattr(v, "ndim", 0)}
        dims = [max(sizes) for sizes in zip(*shapes.values(), strict=False)]
        ranks = {len(shape) for shape in shapes.values()}
        if shapes and (ranks != {p.ndim} or dims != list(p.shape)):
            key = next(k for k, shape in shapes.items() if shape != p.shape)
            group = next(g for g in groups if any(q is p for q in g["params"]))
            raise ShapeError(
                f"state {key!r} of {name_of(group, p)} is {list(shapes[key])} in the checkpoint, "
                f"which does not fit the parameter's {list(p.shape)}; load it into the same model"
            )


def _indexed(saved: list[Group], groups: list[Group]) -> list[tuple[int, Tensor]]:
    """Parameters with their numbers in a state dict; none if groups differ, which torch reports."""
    numbers, params = ([g["params"] for g in each] for each in (saved, groups))
    if [len(each) for each in numbers] != [len(each) for each in params]:
        return []
    return list(zip(chain(*numbers), chain(*params), strict=True))
