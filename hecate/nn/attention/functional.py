"""Linear attention without projections: y_t = sum_s w_ts v_s / sum_s w_ts, w = phi(q).phi(k).

Keys and values enter as sums of phi(k) and v phi(k)^T, so the cost is linear in the number of
tokens and what is carried from token to token has a fixed size.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from hecate.engine import Engine
from hecate.engine.arguments import document_starts
from hecate.engine.by_hand import ByHand
from hecate.engine.positions import written_before
from hecate.engine.prepare import DIVIDE
from hecate.nn.attention.arguments import check_call, check_options
from hecate.nn.attention.state import LinearAttentionState
from hecate.nn.attention.sums import Pass, from_both_sides, over_all, running
from hecate.nn.positions import Position, PositionKind, Rotation
from hecate.phi import FeatureMap, FeatureMapKind, Params
from hecate.rule.rule import one
from hecate.tape import Autodiff, execute
from hecate.tape.bridge import without_autocast

Normalizer = Literal["sum", "none"]


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    feature_map: FeatureMapKind | str = "elu",
    params: Params | None = None,
    *,
    causal: bool = True,
    normalizer: Normalizer = "sum",
    eps: float = 0.0,
    positions: PositionKind | str = "none",
    position_params: dict[str, Tensor] | None = None,
    state: LinearAttentionState | None = None,
    write_mask: Tensor | None = None,
    reset_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    engine: Engine = "auto",
    autodiff: Autodiff = "auto",
    name: str = "attention",
) -> tuple[Tensor, LinearAttentionState]:
    """y and the sums to go on from. [LIN-ATT-D1]

    Shapes: q `[B, T, H, D]`, k `[B, S, G, D]`, v `[B, S, G, V]`, H a multiple of G (query heads h
    G/H share a key head); y `[B, T, H, V]` in v's dtype. Causal attention needs S = T, as do
    positions and documents.

    Args:
        feature_map, params: phi and its parameters, from `feature_map.init(D, heads=G)`.
        causal: whether a query sees the tokens up to its own or all.
        normalizer: "sum" divides by eps plus the sum of weights, which needs a feature map with a
            non-negative kernel; "none" leaves the sum of values.
        positions, position_params: what distance does to a weight.
        state: the sums to add to.
        write_mask: `[B, S]` bool; at False a key is nowhere seen, whatever it holds.
        reset_mask: `[B, T]` bool; at True a document starts, which sees nothing of the others.
        cu_seqlens: `[documents + 1]` int, borders of documents packed into one row (B = 1).
        engine, autodiff: passed to `memory_scan`, which runs causal sums.
        name: what errors call this attention.

    A query that sees no token, or whose kernel with all it sees is 0, gets 0, as in `memory_scan`.
    """
    if not isinstance(feature_map, FeatureMap):
        feature_map = FeatureMap.model_validate(feature_map)
    if not isinstance(positions, Position):
        positions = Position.model_validate(positions)
    reset_mask = document_starts(reset_mask, cu_seqlens, k, going_on=state is not None)
    if not torch.compiler.is_compiling():
        check_options(feature_map, causal=causal, normalizer=normalizer, eps=eps)
        tensors = (q, k, v, state, write_mask, reset_mask)
        check_call(feature_map, positions, *tensors, causal=causal, normalizer=normalizer)
    how = Pass(write_mask, reset_mask, None, engine, autodiff, name)
    with without_autocast(k.device.type):
        tokens, seen = _features(
            q, k, v, feature_map, params, positions, position_params or {}, state, how
        )
        way = running if causal else over_all if reset_mask is None else from_both_sides
        y, weighted, total = _read(way, tokens, state, how, normalizer, eps)
    heads = (k.shape[2], q.shape[2] // k.shape[2])
    y = y.unflatten(1, (q.shape[1], heads[1])).transpose(2, 3).flatten(2, 3)
    return y.to(v.dtype), LinearAttentionState(weighted, total, seen)


class _Features(NamedTuple):
    """Queries `[B, T r, G, *]`, the r of each group side by side, and keys `[B, S, G, *]` as they
    enter the sum of values and the sum of weights, and the values."""

    q: Tensor
    k: Tensor
    v: Tensor
    total_q: Tensor
    total_k: Tensor


def _features(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    feature_map: FeatureMap,
    params: Params | None,
    positions: Position,
    position_params: dict[str, Tensor],
    state: LinearAttentionState | None,
    how: Pass,
) -> tuple[_Features, Tensor | None]:
    wide = torch.promote_types(torch.promote_types(q.dtype, k.dtype), torch.float32)
    q, k, v = (part.to(torch.promote_types(wide, v.dtype)) for part in (q, k, v))
    if how.write is not None:  # a masked token may hold garbage, even to be multiplied by 0
        k, v = (torch.where(how.write[..., None, None], part, 0.0) for part in (k, v))
    group = q.shape[2] // k.shape[2]
    q = q.unflatten(2, (k.shape[2], group)).transpose(2, 3).flatten(1, 2)
    place, seen = None, None
    if positions.needs_position or feature_map.needs_position:
        seen = k.new_zeros(k.shape[:1], dtype=torch.int64) if state is None else state.seen
        place = written_before(one((seen,)), how.write, how.reset, k.shape[1])
        if k.shape[1]:
            seen = place[:, -1] + (1 if how.write is None else how.write[:, -1])
    places = (None, None) if place is None else (place.repeat_interleave(group, 1), place)
    turns = positions if isinstance(positions, Rotation) else None

    def turned(x: Tensor, place: Tensor | None) -> Tensor:
        return x if turns is None or place is None else turns.turned(x, place, position_params)

    if turns is not None and turns.where == "before":
        q, k = turned(q, places[0]), turned(k, places[1])
    total_q, total_k = (
        _phi(feature_map, params, x, at) for x, at in zip((q, k), places, strict=True)
    )
    if turns is None or turns.where == "before":
        return _Features(total_q, total_k, v, total_q, total_k), seen
    return _Features(
        turned(total_q, places[0]), turned(total_k, places[1]), v, total_q, total_k
    ), seen


def _phi(feature_map: FeatureMap, params: Params | None, x: Tensor, place: Tensor | None) -> Tensor:
    """phi(x) `[B, T, G, P]` with its own derivative."""
    own: Params = {"learned": {}, "frozen": {}} if params is None else params
    if feature_map.needs_position and place is not None:
        own = {**own, "position": place.unsqueeze(-1)}
    block, tensors = feature_map.block(own)
    if block.hand_written:
        block = ByHand.of(block).block(keeps=False)
    return one(execute(block, x, *tensors))


def _read(
    way: Any,
    tokens: _Features,
    state: LinearAttentionState | None,
    how: Pass,
    normalizer: Normalizer,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """y `[B, T r, G, V]`, and the sums of weighted values and of features."""
    q, k, v, total_q, total_k = tokens
    held = None if state is None else state.weighted
    if normalizer == "none":
        return *way(q, k, v, held, how), None
    ones = torch.ones_like(v[..., :1])
    total = None if state is None or state.total is None else state.total.unsqueeze(2)
    if q is total_q:  # one pass for both sums: the weights are those of one more value, 1
        if held is not None and total is not None:
            held = torch.cat([held, total.to(held.dtype)], 2)
        both, after = way(q, k, torch.cat([v, ones], -1), held, how)
        y, weights = both[..., :-1], both[..., -1:]
        weighted, total = after[:, :, :-1], after[:, :, -1]
    else:
        y, weighted = way(q, k, v, held, how)
        weights, after = way(total_q, total_k, ones, total, how)
        y, total = torch.where(weights + eps > 0, y, 0.0), after[:, :, 0]
    return one(execute(DIVIDE.block(keeps=False), y, weights + eps)), weighted, total
