"""Linear attention without projections: y_t = sum_s w_ts v_s / sum_s w_ts, w = phi(q).phi(k).

Keys and values enter as sums of phi(k) and v phi(k)^T, so the cost is linear in the number of tokens and what is
carried from token to token has a fixed size.
"""

from __future__ import annotations

from functools import reduce
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from hecate.checks import described, expect_beside, expect_choice, expect_number
from hecate.engine import (
    DIVIDE,
    EngineName,
    check_mask,
    check_params,
    check_tokens,
    counted,
    document_starts,
    largest,
    levelling,
    near_one,
)
from hecate.errors import ConfigError, ShapeError, shorten
from hecate.nn.arguments import check_engine
from hecate.nn.attention.sums import MEMORIES, Sums, state_of_sums, written
from hecate.nn.positions import Position, PositionKind
from hecate.phi import FeatureMap, FeatureMapKind, Params
from hecate.rule import MemoryState
from hecate.rule.rule import one
from hecate.tape import Autodiff, by_hand, execute
from hecate.tape.bridge import without_autocast

Normalizer = Literal["sum", "none"]
Pair = tuple[Tensor, Tensor]
LinearAttentionState = MemoryState  # what linear attention carries is the state of a memory


class Weights(NamedTuple):
    """What makes the weight of a query and a key: phi, what distance does, and the parameters of both."""

    feature_map: FeatureMap
    params: Params
    positions: Position
    position_params: dict[str, Tensor]

    def places(
        self, state: MemoryState | None, write: Tensor | None, reset: Tensor | None, k: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """Places of tokens k `[B, S, ...]` in their documents, `[B, S]`, and the count after the last; None where
        nothing depends on them."""
        if not (self.positions.needs_position or self.feature_map.needs_position):
            return None, None
        seen = k.new_zeros(len(k), dtype=torch.int64) if state is None else state.seen
        return counted(one((seen,)), write, reset, k.shape[1])

    def turned(self, x: Tensor, place: Tensor | None) -> Tensor:
        """Tokens `[B, T, G, D]` at places `[B, T]` as phi sees them."""
        if place is None or self.positions.turns_features:
            return x
        return self.positions.turned(x, place, self.position_params)

    def features(self, x: Tensor, place: Tensor | None) -> tuple[Tensor, Tensor]:
        """phi(x) as it enters the sum of values and the sum of weights, with its own derivative."""
        params = self.params
        if self.feature_map.needs_position and place is not None:
            params = {**params, "position": place.unsqueeze(-1)}
        block, tensors = self.feature_map.block(params)
        if block.hand_written:
            block = by_hand(block)
        x = one(execute(block, self.turned(x, place), *tensors))
        if place is None or not self.positions.turns_features:
            return x, x
        return self.positions.turned(x, place, self.position_params), x


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
    state: MemoryState | None = None,
    write_mask: Tensor | None = None,
    reset_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    engine: EngineName = "auto",
    autodiff: Autodiff = "auto",
    name: str = "attention",
) -> tuple[Tensor, MemoryState]:
    """y and the sums to go on from. [LIN-ATT-D1]

    Shapes: q `[B, T, H, D]`, k `[B, S, G, D]`, v `[B, S, G, V]`, H a multiple of G (query heads h G/H share a key
    head); y `[B, T, H, V]` in v's dtype. Causal attention needs S = T, as do positions and documents. The state is that
    of a memory with bias dot and lr 1 per key head: sums of v phi(k)^T, `memory["weight"]` `[B, G, V, P]`, and with a
    normaliser of phi(k), `normalizer.memory["weight"]` `[B, G, 1, P]`, in float32 or better; `seen` `[B]` counts the
    tokens of the present document where positions need it. [LIN-ATT-I1]

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
    weights = Weights(
        feature_map, {"learned": {}, "frozen": {}}, positions, {} if position_params is None else position_params
    )
    sums = Sums(causal, write_mask, reset_mask, engine=engine, autodiff=autodiff, name=name)
    if not torch.compiler.is_compiling():
        check_options(feature_map, causal=causal, normalizer=normalizer, eps=eps, engine=engine, autodiff=autodiff)
        _check_tensors(weights, sums, q, k, v)
        if state is not None:
            _check_state(weights, sums, k, v, state, normalizer)
    weights = weights._replace(params=check_params(feature_map, params, k))
    group = q.shape[2] // k.shape[2]
    with without_autocast(k.device.type):
        queries, keys, values = _grouped(q, k, v, write_mask)
        place, seen = weights.places(state, write_mask, reset_mask, k)
        phi_q = weights.features(queries, None if place is None else place.repeat_interleave(group, 1))
        phi_k = weights.features(keys, place)
        retain = positions.retain(keys, weights.position_params)
        factors = positions.factors(keys, weights.position_params, causal=causal)
        sums = sums._replace(retain=retain, factors=factors)
        if normalizer == "sum":
            y, held, total = _mean(sums, phi_q, phi_k, values, state, eps)
        else:
            start = None if state is None else state.memory["weight"].to(values.dtype)
            (y, held), total = sums(phi_q[0], phi_k[0], values, start), None
    # From the queries of a group side by side back to heads.
    y = y.unflatten(1, (q.shape[1], group)).transpose(2, 3).flatten(2, 3)
    return y.to(v.dtype), state_of_sums(held, total, seen)


def _grouped(q: Tensor, k: Tensor, v: Tensor, write: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """q `[B, T r, G, D]`, the r queries of a key head's group side by side, k and v; in float32 or better."""
    dtype = reduce(torch.promote_types, (q.dtype, k.dtype, v.dtype), torch.float32)
    q, k, v = q.to(dtype), written(k.to(dtype), write), written(v.to(dtype), write)
    q = q.unflatten(2, (k.shape[2], q.shape[2] // k.shape[2]))
    return q.transpose(2, 3).flatten(1, 2), k, v


def _mean(
    sums: Sums, phi_q: Pair, phi_k: Pair, v: Tensor, state: MemoryState | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """y `[B, T r, G, V]`, and the sums of weighted values and of features."""
    (q, weight_q), (k, weight_k) = phi_q, phi_k
    held = total = None
    if state is not None and state.normalizer is not None:
        held = state.memory["weight"].to(v.dtype)
        total = state.normalizer.memory["weight"].to(v.dtype)
    alike, size = q is weight_q, largest(weight_q)
    units: tuple[Tensor, ...] = ()
    if eps == 0 and not near_one(size):  # else no sum is small; a query's own size cancels
        units = (levelling(size),)
        q, weight_q = q * units[0], weight_q * units[0]
    ones = torch.ones_like(v[..., :1])
    if alike:  # one pass for both sums: that of weights has 1 for a value
        start = None if held is None or total is None else torch.cat([held, total], 2)
        y, after = sums(q, k, torch.cat([v, ones], -1), start)
        y, weight = y[..., :-1], y[..., -1:]
        held, total = after[:, :, :-1], after[:, :, -1:]
    else:
        y, held = sums(q, k, v, held)
        weight, total = sums(weight_q, weight_k, ones, total)
        y = torch.where(weight + eps > 0, y, 0.0)
    return one(execute(DIVIDE, y, weight + eps, *units)), held, total


def check_options(
    feature_map: FeatureMap, *, causal: bool, normalizer: str, eps: float, engine: EngineName, autodiff: Autodiff
) -> None:
    """Refuses a normaliser that the feature map cannot have, and engines that there are not."""
    check_engine(MEMORIES["after", False], engine, autodiff)
    expect_choice(normalizer, "normalizer", get_args(Normalizer))
    if not isinstance(causal, bool):
        raise ConfigError(f"causal must be True or False, got {shorten(causal)}")
    expect_number(eps, "eps")
    if normalizer == "sum" and not feature_map.kernel_non_negative:
        raise ConfigError(
            f"normalizer='sum' with feature_map {feature_map.kind!r}: the sum of weights could "
            "vanish or change sign; use a map with a non-negative kernel, such as elu or favor, or "
            "normalizer='none'",
            path=("normalizer",),
        )
    if normalizer == "none" and eps:
        raise ConfigError(f"eps={eps:g} is added to the sum of weights, but normalizer is 'none'", ("eps",))


def turned_width(positions: Position, feature_map: FeatureMap, d_key: int) -> int:
    """Width of the vectors that a position turns, of keys or of their features; refused where it cannot turn them."""
    width = feature_map.output_dim(d_key) if positions.turns_features else d_key
    refusal = positions.refusal(width)
    if refusal is not None:
        raise ConfigError(
            f"positions {positions.kind!r} with feature_map {feature_map.kind!r} and keys of width "
            f"{d_key}: {refusal}; change the widths or the positions",
            path=("positions",),
        )
    return width


def _check_tensors(weights: Weights, sums: Sums, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuses tensors that do not fit together."""
    check_tokens(q, k, v, "B T heads width")
    if v.shape[:3] != k.shape[:3] or q.shape[0] != k.shape[0] or q.shape[-1] != k.shape[-1]:
        raise ShapeError(
            "q must be [B, T, H, D], k [B, S, G, D] and v [B, S, G, V] with equal B, S, G, D; got "
            f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
        )
    if not k.shape[2] or not q.shape[2] or q.shape[2] % k.shape[2]:
        raise ShapeError(f"{k.shape[2]} key heads do not divide {q.shape[2]} query heads")
    check_mask("write_mask", sums.write, k)
    check_mask("reset_mask", sums.reset, k)
    positions = weights.positions
    if sums.reset is not None:
        positions.check_past("documents packed into a row", "give each a row of its own")
    ordered = sums.causal or positions.needs_order or weights.feature_map.needs_position
    if (ordered or sums.reset is not None) and q.shape[1] != k.shape[1]:
        raise ShapeError(
            "causal attention, positions and documents need one query per key, got "
            f"{q.shape[1]} queries and {k.shape[1]} keys; use causal=False, positions='none', no "
            "reset_mask and a feature map without positions to look at other tokens"
        )
    params, heads = weights.position_params, k.shape[2]
    if not isinstance(params, dict) or not all(
        isinstance(x, Tensor) and x.is_floating_point() for x in params.values()
    ):
        raise ShapeError(
            "position_params must be a mapping of names to floating point tensors, as "
            f"positions.init returns it, got {shorten(params)}"
        )
    width = turned_width(positions, weights.feature_map, k.shape[-1])
    init = positions.init(width, heads=heads, causal=sums.causal, device="meta")
    expected, given = ({name: tuple(x.shape) for name, x in tensors.items()} for tensors in (init, params))
    if given != expected:
        raise ConfigError(
            f"positions {positions.kind!r} need parameters {expected or 'none'}, got "
            f"{given or 'none'}; pass positions.init({width}, heads={heads}, causal={sums.causal})"
        )


def _check_state(
    weights: Weights, sums: Sums, k: Tensor, v: Tensor, state: MemoryState, normalizer: Normalizer
) -> None:
    """Refuses a state of another attention or batch, and one where nothing can go on."""
    positions, feature_map = weights.positions, weights.feature_map
    positions.check_past("a state", "give the whole sequence in one call")
    if not sums.causal and (sums.reset is not None or positions.weighs_distance):
        other = f"positions {positions.kind!r}" if positions.weighs_distance else "reset_mask"
        raise ConfigError(
            f"causal=False with a state and {other}: sums from both sides start at a document's "
            "two ends, and a state knows one; give the whole sequence in one call"
        )
    if not isinstance(state, MemoryState):
        raise ShapeError(f"state must be the MemoryState that this attention returned, got {type(state).__name__}")
    others = [*state.slots, *state.anchor, *state.pending]
    if others:
        raise ShapeError(f"state must hold sums alone, got {others} too; was it made by another memory?")
    batch, heads, width = k.shape[0], k.shape[2], feature_map.output_dim(k.shape[-1])
    total = None if state.normalizer is None else state.normalizer.memory.get("weight")
    for name, given, shape in (
        ("memory['weight']", state.memory.get("weight"), (batch, heads, v.shape[-1], width)),
        ("normalizer", total, (batch, heads, 1, width) if normalizer == "sum" else None),
        ("seen", state.seen, (batch,) if positions.needs_position or feature_map.needs_position else None),
    ):
        if given is None and shape is None:
            continue
        count = name == "seen"
        wanted = isinstance(given, Tensor) and (given.dtype == torch.int64 if count else given.is_floating_point())
        if not isinstance(given, Tensor) or not wanted or tuple(given.shape) != shape:
            raise ShapeError(
                f"state.{name} must be {'int64 ' if count and shape else ''}{list(shape) if shape else None} here, got "
                f"{described(given)}; was it made by another attention or with another batch?"
            )
        expect_beside(given, k, f"state.{name}")
