"""Causal linear attention as the memory that it is: a sum of v phi(k)^T, bias dot with lr 1."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hecate.engine import counted, document_starts
from hecate.nn import LinearAttention, LinearAttentionState
from hecate.nn.asked import Asked
from hecate.nn.positions import Relative, Rotation
from hecate.rule import Gates, MemoryConfig, MemoryState
from hecate.rule.rule import one


def is_memory(layer: LinearAttention) -> bool:
    """Whether a layer answers from a memory: not from sums over what comes later, nor from features that positions have
    turned or a table weighs. [SCOPE-LIN-D1]"""
    positions = layer.positions
    turned = isinstance(positions, Rotation) and positions.where == "numerator"
    table = isinstance(positions, Relative) and positions.form == "table"
    return layer.causal and not turned and not table


def asked_of(layer: LinearAttention, given: dict[str, Any]) -> tuple[Asked, str | None]:
    """What a layer's call asks of its memory, one per query head, and why the answers are not the layer's; None if they
    are."""
    x, state, write = given["x"], given.get("state"), given.get("write_mask")
    group, source = layer.heads // layer.kv_heads, x
    if write is not None:
        source = torch.where(write.unsqueeze(-1), x, 0.0)
    q = layer.query(x).unflatten(-1, (layer.heads, -1))
    k, v = (
        part.unflatten(-1, (layer.kv_heads, -1)).repeat_interleave(group, 2)
        for part in layer.key_value(source).split(layer.splits, -1)
    )
    reset, borders = given.get("reset_mask"), given.get("cu_seqlens")
    reset = document_starts(reset, borders, k, going_on=state is not None)
    phi, params = _repeated((layer.phi_params, layer.position_params.tensors), group, 0)
    positions, retain = layer.positions, None
    if isinstance(positions, Rotation):
        seen = k.new_zeros(len(k), dtype=torch.int64) if state is None else state.seen
        place, _ = counted(one((seen,)), write, reset, k.shape[1])
        q, k = (positions.turned(part, place, params) for part in (q, k))
    elif isinstance(positions, Relative):
        retain = positions.retain(k, params)
    config = MemoryConfig(
        bias="dot",
        feature_map=layer.feature_map,
        normalizer=layer.normalizer,
        retention="none" if retain is None else "decay",
        on_nonfinite="propagate",
    )
    before = None if state is None else state_of(layer, state)
    unread = None
    if layer.eps:
        unread = f"eps={layer.eps:g} is added to the sum of weights"
    elif retain is not None and layer.normalizer == "none" and write is not None:
        unread = "a masked token reads the memory decayed once more than it is"
    return Asked(config, q, k, v, Gates(retain=retain), phi, None, before, write, reset), unread


def state_of(layer: LinearAttention, state: LinearAttentionState) -> MemoryState:
    """The sums as states of a memory per query head."""
    weighted, total = _repeated(state[:2], layer.heads // layer.kv_heads, 1)
    place = torch.zeros(weighted.shape[:2], dtype=torch.int64, device=weighted.device)
    held = MemoryState({"weight": weighted}, {}, {}, {}, place)
    if total is not None:
        held = held._replace(normalizer=held._replace(memory={"weight": total.unsqueeze(2)}))
    return held._replace(seen=state.seen if layer.feature_map.needs_position else None)


def _repeated(tree: Any, group: int, axis: int) -> Any:
    return pytree.tree_map_only(Tensor, lambda x: x.repeat_interleave(group, axis), tree)
