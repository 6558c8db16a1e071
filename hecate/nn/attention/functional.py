"""Linear attention without projections: y_t = sum_s w_ts v_s / sum_s w_ts, w = phi(q).phi(k).

Keys and values enter as sums of phi(k) and v phi(k)^T, so the cost is linear in the number of tokens and what is
carried from token to token has a fixed size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hecate.engine import (
    DIVIDE,
    ByHand,
    EngineName,
    check_params,
    counted,
    document_starts,
    largest,
    levelling,
    near_one,
)
from hecate.nn.attention.arguments import check_call, check_options, check_positions
from hecate.nn.attention.state import LinearAttentionState
from hecate.nn.attention.sums import Pass, from_both_sides, over_all, running
from hecate.nn.attention.toeplitz import by_distance
from hecate.nn.positions import Position, PositionKind, Relative, Rotation
from hecate.phi import FeatureMap, FeatureMapKind, Params
from hecate.rule.rule import one
from hecate.tape import Autodiff, execute
from hecate.tape.bridge import without_autocast

Normalizer = Literal["sum", "none"]
Way = Callable[[Tensor, Tensor, Tensor, Tensor | None, Pass], tuple[Tensor, Tensor]]


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
    engine: EngineName = "auto",
    autodiff: Autodiff = "auto",
    name: str = "attention",
) -> tuple[Tensor, LinearAttentionState]:
    """y and the sums to go on from. [LIN-ATT-D1]

    Shapes: q `[B, T, H, D]`, k `[B, S, G, D]`, v `[B, S, G, V]`, H a multiple of G (query heads h G/H share a key
    head); y `[B, T, H, V]` in v's dtype. Causal attention needs S = T, as do positions and documents.

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

    A query that sees no token, or whose kernel with all it sees is 0, gets 0, as in `memory_scan`."""
    if not isinstance(feature_map, FeatureMap):
        feature_map = FeatureMap.model_validate(feature_map)
    if not isinstance(positions, Position):
        positions = Position.model_validate(positions)
    reset_mask = document_starts(reset_mask, cu_seqlens, k, going_on=state is not None)
    if not torch.compiler.is_compiling():
        check_options(feature_map, causal=causal, normalizer=normalizer, eps=eps, engine=engine, autodiff=autodiff)
        tensors = (q, k, v, state, write_mask, reset_mask)
        check_call(feature_map, positions, *tensors, causal=causal, normalizer=normalizer)
        check_positions(feature_map, positions, k, position_params, causal=causal)
    how = Pass(write_mask, reset_mask, None, engine, autodiff, name)
    phi = Phi(feature_map, check_params(feature_map, params, k))
    turn = Turn(positions, position_params or {})
    with without_autocast(k.device.type):
        rows, keys, values = _prepared(q, k, v, write_mask)
        seen: Tensor | None = None
        at: tuple[Tensor | None, Tensor | None] = (None, None)
        if positions.needs_position or feature_map.needs_position:
            seen = k.new_zeros(len(k), dtype=torch.int64) if state is None else state.seen
            place, seen = counted(one((seen,)), write_mask, reset_mask, k.shape[1])
            at = place.repeat_interleave(q.shape[2] // k.shape[2], 1), place
        tokens = _features(rows, keys, values, phi, turn, at)
        way, how = _way(turn, tokens.k, how, causal=causal)
        y, weighted, total = _read(way, tokens, state, how, normalizer, eps)
    # From the queries of a group side by side back to heads.
    y = y.unflatten(1, (q.shape[1], q.shape[2] // k.shape[2])).transpose(2, 3).flatten(2, 3)
    return y.to(v.dtype), LinearAttentionState(weighted, total, seen)


class Phi(NamedTuple):
    """A feature map and its parameters."""

    kind: FeatureMap
    params: Params

    def __call__(self, x: Tensor, place: Tensor | None) -> Tensor:
        """phi(x) of tokens `[B, T, G, D]` at places `[B, T]`, with its own derivative."""
        params = self.params
        if self.kind.needs_position and place is not None:
            params = {**params, "position": place.unsqueeze(-1)}
        block, tensors = self.kind.block(params)
        if block.hand_written:
            block = ByHand.of(block).block(keeps=False)
        return one(execute(block, x, *tensors))


class Turn(NamedTuple):
    """A kind of position and its parameters."""

    kind: Position
    params: dict[str, Tensor]

    def __call__(self, x: Tensor, place: Tensor | None, where: str) -> Tensor:
        """Tokens `[B, T, G, width]`, turned if this is a rotation and here is where it turns."""
        if place is None or not isinstance(self.kind, Rotation) or self.kind.where != where:
            return x
        return self.kind.turned(x, place, self.params)


class Tokens(NamedTuple):
    """Queries `[B, T r, G, P]` and keys `[B, S, G, P]` as they enter the sum of values and the sum of weights, and
    values `[B, S, G, V]`."""

    q: Tensor
    k: Tensor
    v: Tensor
    total_q: Tensor
    total_k: Tensor


def _prepared(q: Tensor, k: Tensor, v: Tensor, write: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """q `[B, T r, G, D]`, the r queries of a key head's group side by side, k and v; in float32 or better."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    for tensor in (k, v):
        dtype = torch.promote_types(dtype, tensor.dtype)
    q, k, v = (tensor.to(dtype) for tensor in (q, k, v))
    if write is not None:  # a masked token may hold garbage, too bad even to be multiplied by 0
        k, v = (torch.where(write[..., None, None], tensor, 0.0) for tensor in (k, v))
    q = q.unflatten(2, (k.shape[2], q.shape[2] // k.shape[2]))
    return q.transpose(2, 3).flatten(1, 2), k, v


def _features(q: Tensor, k: Tensor, v: Tensor, phi: Phi, turn: Turn, at: tuple[Tensor | None, Tensor | None]) -> Tokens:
    q, k = (phi(turn(x, place, "before"), place) for x, place in ((q, at[0]), (k, at[1])))
    return Tokens(turn(q, at[0], "numerator"), turn(k, at[1], "numerator"), v, q, k)


def _way(turn: Turn, k: Tensor, how: Pass, *, causal: bool) -> tuple[Way, Pass]:
    """How sums are made, and from what."""
    kind, params = turn
    if isinstance(kind, Relative) and kind.form == "table":
        factors = kind.factors(k, params, causal=causal)
        return partial(by_distance, factors=factors, causal=causal), how
    if isinstance(kind, Relative):
        how = how._replace(retain=kind.retain(k, params))
    if causal:
        return running, how
    return (over_all if how.reset is None and how.retain is None else from_both_sides), how


def _read(
    way: Way, tokens: Tokens, state: LinearAttentionState | None, how: Pass, normalizer: Normalizer, eps: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """y `[B, T r, G, V]`, and the sums of weighted values and of features."""
    q, k, v, total_q, total_k = tokens
    held = None if state is None else state.weighted.to(v.dtype)
    total = None if state is None or state.total is None else state.total.to(v.dtype).unsqueeze(2)
    if normalizer == "none":
        return *way(q, k, v, held, how), None
    alike, size = q is total_q, largest(total_q)
    units: tuple[Tensor, ...] = ()
    if eps == 0 and not near_one(size):  # else no sum is small; a query's own size cancels
        units = (levelling(size),)
        q, total_q = q * units[0], total_q * units[0]
    ones = torch.ones_like(v[..., :1])
    if alike:  # one pass for both sums: that of weights has 1 for a value
        if held is not None and total is not None:
            held = torch.cat([held, total], 2)
        y, after = way(q, k, torch.cat([v, ones], -1), held, how)
        y, weights = y[..., :-1], y[..., -1:]
        weighted, after = after[:, :, :-1], after[:, :, -1:]
    else:
        y, weighted = way(q, k, v, held, how)
        weights, after = way(total_q, total_k, ones, total, how)
        y = torch.where(weights + eps > 0, y, 0.0)
    y = one(execute(DIVIDE.block(keeps=False), y, weights + eps, *units))
    return y, weighted, after.squeeze(2)
