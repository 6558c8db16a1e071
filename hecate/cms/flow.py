"""The way of a sequence through the levels, as calls of `run`, which a tape can record."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hecate.cms.nested import in_windows, restarted
from hecate.engine import CONCAT
from hecate.nn import LayerState
from hecate.tape import Block, Run, execute, one

if TYPE_CHECKING:
    from hecate.cms.cms import CMS

Levels = tuple[LayerState | None, ...]
Masks = dict[str, Tensor | None]


def flow(layer: CMS, x: Tensor, levels: Levels, masks: list[Masks], *, run: Run = execute) -> tuple[Tensor, Levels]:
    """Every level once over x: the layer's output and the states of the levels.

    A level's call on a tape is named `level` and labelled with its name.
    """
    residual, chained = len(layer.norms) > 0, layer.config.composition == "chained"
    states: list[LayerState | None] = []
    outputs: list[Tensor] = []
    seen = x
    for index in range(len(layer.memories)):
        given = one(run(_plain("norm", layer.norms[index]), seen)) if residual else seen

        def called(x: Tensor, state: LayerState | None, at: int = index) -> Any:
            return layer.memories[at](x, state, **masks[at])

        label = layer.config.levels[index].name
        out, after = _with_state(run, "level", called, given, levels[index], label)
        if residual:
            seen = one(run(_plain("add", torch.add), seen, out))
        elif chained:
            seen = out
        states.append(after)
        outputs.append(out)
    if chained:
        return seen, tuple(states)
    return one(run(_plain("join", layer.joined), x, *outputs)), tuple(states)


def nested_flow(
    layer: CMS, x: Tensor, levels: Levels, masks: list[Masks], written: tuple[Tensor, Tensor], *, run: Run = execute
) -> tuple[Tensor, Levels]:
    """The flow in windows that end where a level commits from which another restarts.

    `written` tells which tokens are written and how many have been, both `[B, T]`.
    """
    periods = [level.period for level in layer.config.levels]
    outputs: list[Tensor] = []
    for window, write, count in in_windows(*written, periods[1:]):
        own = [{name: None if mask is None else mask[:, window] for name, mask in each.items()} for each in masks]
        piece = one(run(_plain("window", lambda x, at=window: x[:, at]), x))
        y, levels = flow(layer, piece, levels, own, run=run)

        def restart(y: Tensor, states: Any, at: Any = (write, count)) -> Any:
            return y, restarted(periods, states, *at)

        y, levels = _with_state(run, "restart", restart, y, levels)
        outputs.append(y)
    return one(run(CONCAT, *outputs)), levels


def _plain(name: str, function: nn.Module | Callable[..., Tensor]) -> Block:
    def forward(*inputs: Tensor) -> tuple[tuple[Tensor], None]:
        return (function(*inputs),), None

    return Block(name, forward)


def _with_state(
    run: Run, name: str, function: Callable[..., Any], x: Tensor, state: Any, label: str = ""
) -> tuple[Tensor, Any]:
    """`function(x, state) -> (y, state)` as one call of `run`, the states' tensors among its
    inputs and outputs."""
    if run is execute:
        return function(x, state)
    flat, layout = torch.utils._pytree.tree_flatten(state)
    made: list[Any] = []

    def forward(x: Tensor, *flat: Tensor | None) -> tuple[tuple[Tensor | None, ...], None]:
        y, after = function(x, torch.utils._pytree.tree_unflatten(flat, layout))
        leaves, own = torch.utils._pytree.tree_flatten(after)
        made.append(own)
        return (y, *leaves), None

    y, *leaves = run(Block(name, forward), x, *flat, label=label)
    return one((y,)), torch.utils._pytree.tree_unflatten(leaves, made[0])
