"""Checks of what linear attention is built of and called with."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hecate.checks import described
from hecate.engine import EngineName, check_mask, check_tokens
from hecate.errors import ConfigError, ShapeError, shorten
from hecate.nn.arguments import check_engine, check_sequence
from hecate.nn.attention.state import LinearAttentionState
from hecate.nn.attention.sums import MEMORIES
from hecate.nn.positions import Position, Relative, Rotation
from hecate.phi import FeatureMap
from hecate.tape import Autodiff

if TYPE_CHECKING:
    from hecate.nn.attention.linear import LinearAttention

NORMALIZERS = ("sum", "none")


def check_options(
    feature_map: FeatureMap, *, causal: bool, normalizer: str, eps: float, engine: EngineName, autodiff: Autodiff
) -> None:
    """Refuses a normaliser that the feature map cannot have, and engines that there are not."""
    check_engine(MEMORIES["after", "none"], engine, autodiff)
    if normalizer not in NORMALIZERS:
        raise ConfigError(f"normalizer must be one of {NORMALIZERS}, got {shorten(normalizer)}")
    if not isinstance(causal, bool):
        raise ConfigError(f"causal must be True or False, got {shorten(causal)}")
    if type(eps) not in (int, float) or not 0 <= eps < math.inf:
        raise ConfigError(f"eps must be a finite number >= 0, got {shorten(eps)}")
    if normalizer == "sum" and not feature_map.kernel_non_negative:
        raise ConfigError(
            f"normalizer='sum' with feature_map {feature_map.kind!r}: the sum of weights could "
            "vanish or change sign; use a map with a non-negative kernel, such as elu or favor, or "
            "normalizer='none'",
            path=("normalizer",),
        )
    if normalizer == "none" and eps:
        reason = f"eps={eps:g} is added to the sum of weights, but normalizer is 'none'"
        raise ConfigError(reason, ("eps",))


def _is_real(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def width_of(positions: Position, feature_map: FeatureMap, d_key: int) -> int:
    """Width of the vectors that a position turns: of keys, or of their features."""
    numerator = isinstance(positions, Rotation) and positions.where == "numerator"
    return feature_map.output_dim(d_key) if numerator else d_key


def check_width(feature_map: FeatureMap, positions: Position, d_key: int) -> None:
    """Refuses vectors that cannot be turned."""
    refusal = positions.refusal(width_of(positions, feature_map, d_key))
    if refusal is not None:
        raise ConfigError(
            f"positions {positions.kind!r} with feature_map {feature_map.kind!r} and keys of width "
            f"{d_key}: {refusal}; change the widths or the positions",
            path=("positions",),
        )


def check_positions(
    feature_map: FeatureMap, positions: Position, k: Tensor, params: dict[str, Tensor] | None, *, causal: bool
) -> None:
    """Refuses parameters that are not those of the positions, for keys `[B, S, G, D]`."""
    check_width(feature_map, positions, k.shape[-1])
    width = width_of(positions, feature_map, k.shape[-1])
    init = positions.init(width, heads=k.shape[2], causal=causal, device="meta")
    expected = {name: tuple(tensor.shape) for name, tensor in init.items()}
    params = {} if params is None else params
    if not isinstance(params, dict) or not all(map(_is_real, params.values())):
        raise ShapeError(
            "position_params must be a mapping of names to floating point tensors, as "
            f"positions.init returns it, got {shorten(params)}"
        )
    given = {name: tuple(tensor.shape) for name, tensor in params.items()}
    if given != expected:
        raise ConfigError(
            f"positions {positions.kind!r} need parameters {expected or 'none'}, got "
            f"{given or 'none'}; pass positions.init({width}, heads={k.shape[2]}, causal={causal})"
        )


def check_call(
    feature_map: FeatureMap,
    positions: Position,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: LinearAttentionState | None,
    write_mask: Tensor | None,
    reset_mask: Tensor | None,
    *,
    causal: bool,
    normalizer: str,
) -> None:
    """Refuses tensors that do not fit together."""
    check_tokens(q, k, v, "B T heads width")
    if v.shape[:3] != k.shape[:3] or q.shape[0] != k.shape[0] or q.shape[-1] != k.shape[-1]:
        raise ShapeError(
            "q must be [B, T, H, D], k [B, S, G, D] and v [B, S, G, V] with equal B, S, G, D; got "
            f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
        )
    if not k.shape[2] or not q.shape[2] or q.shape[2] % k.shape[2]:
        raise ShapeError(f"{k.shape[2]} key heads do not divide {q.shape[2]} query heads")
    check_mask("write_mask", write_mask, k)
    check_mask("reset_mask", reset_mask, k)
    _check_relative(positions, state, reset_mask, causal=causal)
    ordered = causal or positions.needs_order or feature_map.needs_position
    if (ordered or reset_mask is not None) and q.shape[1] != k.shape[1]:
        raise ShapeError(
            "causal attention, positions and documents need one query per key, got "
            f"{q.shape[1]} queries and {k.shape[1]} keys; use causal=False, positions='none', no "
            "reset_mask and a feature map without positions to look at other tokens"
        )
    if state is not None:
        counted = positions.needs_position or feature_map.needs_position
        _check_state(feature_map, k, v, state, normalizer=normalizer, counted=counted)


def _check_relative(
    positions: Position, state: LinearAttentionState | None, reset_mask: Tensor | None, *, causal: bool
) -> None:
    relative = positions if isinstance(positions, Relative) else None
    if relative is not None and relative.form == "table":
        for name, given, instead in (
            ("a state", state, "give the whole sequence in one call"),
            ("documents packed into a row", reset_mask, "give each a row of its own"),
        ):
            if given is not None:
                raise ConfigError(
                    f"positions 'relative' with form='table' and {name}: with a free weight per "
                    "distance no sum of fixed size stands for what lies behind; "
                    f"{instead}, or use form='linear'"
                )
    if state is not None and not causal and (reset_mask is not None or relative is not None):
        other = "reset_mask" if relative is None else "positions 'relative'"
        raise ConfigError(
            f"causal=False with a state and {other}: sums from both sides start at a document's "
            "two ends, and a state knows one; give the whole sequence in one call"
        )


def _check_state(
    feature_map: FeatureMap, k: Tensor, v: Tensor, state: LinearAttentionState, *, normalizer: str, counted: bool
) -> None:
    if not isinstance(state, LinearAttentionState):
        raise ShapeError(
            f"state must be the LinearAttentionState that this attention returned, got {type(state).__name__}"
        )
    lead, width = (k.shape[0], k.shape[2]), feature_map.output_dim(k.shape[-1])
    shapes: dict[str, Any] = {
        "weighted": (*lead, v.shape[-1], width),
        "total": (*lead, width) if normalizer == "sum" else None,
        "seen": lead[:1] if counted else None,
    }
    for name, shape in shapes.items():
        given = getattr(state, name)
        fits = given is None if shape is None else isinstance(given, Tensor)
        if isinstance(given, Tensor) and fits:
            counts = given.dtype == torch.int64
            fits = given.shape == shape and (counts if name == "seen" else _is_real(given))
        if not fits:
            expected = None if shape is None else list(shape)
            kind = "int64 " if name == "seen" else ""
            raise ShapeError(
                f"state.{name} must be {kind if shape else ''}{expected} here, got "
                f"{described(given)}; was it made by another attention or with another batch?"
            )
        if given is not None and given.device != k.device:
            raise ShapeError(f"state.{name} is on {given.device}, k on {k.device}")


def check_layer(layer: LinearAttention) -> None:
    """Refuses options that do not fit together."""
    for name in ("kv_heads", "d_context"):
        size = getattr(layer, name)
        if (type(size) is not int or size < 1) and not (size is None and name == "d_context"):
            raise ConfigError(f"{name} must be an integer >= 1, got {shorten(size)}")
    if layer.heads % layer.kv_heads:
        reason = f"kv_heads={layer.kv_heads} does not divide heads={layer.heads}"
        raise ConfigError(reason, ("kv_heads",))
    if type(layer.dropout) not in (int, float) or not 0 <= layer.dropout < 1:
        raise ConfigError(f"dropout must be a number in [0, 1), got {shorten(layer.dropout)}")
    check_options(
        layer.feature_map,
        causal=layer.causal,
        normalizer=layer.normalizer,
        eps=layer.eps,
        engine=layer.engine,
        autodiff=layer.autodiff,
    )
    check_width(layer.feature_map, layer.positions, layer.d_key)
    if layer.d_context is None:
        return
    if layer.causal:
        raise ConfigError(
            f"causal=True with d_context={layer.d_context}: the tokens of x and of context have no "
            "common order; set causal=False"
        )
    for what, kind, needs in (
        ("positions", layer.positions.kind, layer.positions.needs_order),
        ("feature_map", layer.feature_map.kind, layer.feature_map.needs_position),
    ):
        if needs:
            raise ConfigError(
                f"{what} {kind!r} with d_context={layer.d_context}: x and context count their "
                "tokens apart, so no distance lies between them; choose one without positions"
            )


def check_forward(
    layer: LinearAttention,
    x: Tensor,
    state: LinearAttentionState | None,
    context: Tensor | None,
    write_mask: Tensor | None,
    reset_mask: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    """Refuses tensors that do not fit the layer or each other."""
    if layer.d_context is None:
        if context is not None:
            raise ConfigError(
                f"{layer.name}: a context is given, but the layer was built for self-attention; "
                "build it with d_context=..."
            )
        check_sequence(layer.query.weight, x, write_mask=write_mask, reset_mask=reset_mask)
        return
    if reset_mask is not None or cu_seqlens is not None:
        raise ConfigError(
            f"{layer.name}: documents packed into one row cannot be told apart in "
            "cross-attention; give every document a row of its own, with write_mask over context"
        )
    check_sequence(layer.query.weight, x)
    if context is not None:
        check_sequence(layer.key_value.weight, context, "context", write_mask=write_mask)
    elif state is None or write_mask is not None:
        raise ConfigError(
            f"{layer.name}: cross-attention needs a context, or the state of one to read again"
            + ("" if write_mask is None else "; write_mask is over context, and there is none")
        )
