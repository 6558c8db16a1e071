"""Kernels of one token around the products with weights: a `Memory` between its projections, norms, SwiGLU.
[NN-TOKEN-D1]"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hecate.engine import TokenForm, lies, load_kernels, share_out, token_form
from hecate.nn.blocks import EPS, swiglu
from hecate.rule import LAYER, MemoryState
from hecate.tape import STEADY, is_traced
from hecate.tape.ops import reach

STEP = {torch.float32: 16, torch.float64: 8}  # numbers of a vector
SHARE = 1 << 18  # numbers of memories that are worth a thread of their own
_AROUND = LAYER.key_heads, LAYER.conv, LAYER.output
_COUNTS = np.zeros(1, np.int64)


def token_kernels(x: Tensor, *widths: int) -> Any:
    """The kernels, where they take such tensors in rows of these widths; None elsewhere, where torch has to see every
    operation, and within `exact`, whose bits do not depend on them."""
    step = STEP.get(x.dtype)
    if step is None or not x.is_cpu or STEADY.get() or torch.is_autocast_enabled("cpu") or is_traced():
        return None
    for width in widths:
        if width % step:
            return None
    return load_kernels("token")


@cache
def _numbers(dtype: torch.dtype, *numbers: float) -> Any:
    return np.array(numbers, np.float32 if dtype == torch.float32 else np.float64)


@cache
def _norms(dtype: torch.dtype, P: int, qk_norm: str, qk_eps: float, key_norm: str, scale: str, *rest: float) -> Any:
    size, longest = {"none": 0, "l2": 1, "rms": P}[qk_norm], reach(dtype, 0.5)
    query = 1 / math.sqrt(P) if scale == "key_dim" else 1
    return _numbers(dtype, size, qk_eps**2, key_norm == "l2", longest, query, *rest)


def _addresses(dtype: torch.dtype, tensors: Iterable[tuple[Tensor | None, int]]) -> list[int] | None:
    """Where tensors of so many numbers lie, 0 of None; None where one is not as kernels take it."""
    found = []
    for tensor, size in tensors:
        if tensor is None:
            found.append(0)
            continue
        if tensor.dtype != dtype or tensor.numel() != size or not lies(tensor):
            return None
        found.append(place := tensor.data_ptr())
        if not place and size:
            return None  # zeros that torch has not laid out
    return found


def add_norm(kernels: Any, x: Tensor, more: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
    """x + more, or x, and that at root mean square 1 times the weight: rows of a token, by kernels if there are any."""
    width, size = x.shape[-1], x.numel()
    given = kernels and _addresses(x.dtype, ((x, size), (more, size), (weight, width)))
    if not given:
        total = x if more is None else x + more
        return total, torch.rms_norm(total, (width,), weight, EPS)
    total, y = x if more is None else torch.empty_like(x), torch.empty_like(x)
    kernels.add_norm(size // width, width, _numbers(x.dtype, EPS), *given, total.data_ptr(), y.data_ptr())
    return total, y


def gated_product(kernels: Any, x: Tensor) -> Tensor:
    """silu(a) b of rows [a, b] of a token, by kernels if there are any."""
    width, rest = divmod(x.shape[-1], 2)
    whole = kernels and not rest and not width % STEP[x.dtype]  # as wide as the weight behind it, if that fits
    if not (given := whole and _addresses(x.dtype, ((x, x.numel()),))):
        return swiglu.__wrapped__(x)
    y = x.new_empty(*x.shape[:-1], width)
    kernels.swiglu(y.numel() // width, width, _numbers(x.dtype, EPS), *given, y.data_ptr())
    return y


def form_of(layer: Any, conv: Any) -> TokenForm | None:
    """The form of a `Memory` that does with a token what the kernel computes; None of another."""
    config, options = layer.config, layer.config.layer_options
    if options is not None and (options.key_heads, options.conv, options.output) != _AROUND:
        return None
    return token_form(config) if conv is not None and config.layer_v_norm == "none" else None


Held = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
"""A memory, its momentum or the sum of a chunk's gradients, and of a chunk the product of its retain gates and its
tokens so far."""
_NONE, _WEIGHT, _GATHERED = set[str](), {"weight"}, {"weight", "retain"}
_NAMED = [dict] * 4


def _held(form: TokenForm, config: Any, state: Any) -> Held | None:
    """Tensors of a state; None where it has other parts than the config's own, which the whole way has to say."""
    if type(state) is not MemoryState or [*map(type, state[:4])] != _NAMED:
        return None
    memory, slots, anchor, pending, position, normalizer, seen, readout = state
    own, summed = config.algorithm.slots, _GATHERED if form.chunk > 1 else _NONE
    if memory.keys() != _WEIGHT or len(slots) != len(own) or anchor or pending.keys() != summed:
        return None
    if normalizer is not None or seen is not None or readout is not None:
        return None
    if form.chunk > 1:
        return memory["weight"], pending["weight"], pending["retain"], position
    return memory["weight"], slots.get(f"{own[0]}.weight") if own else None, None, None


def _named(form: TokenForm, state: MemoryState, held: list[Any]) -> MemoryState:
    memory, moved, retain, position = held
    weights = dict.fromkeys(state.memory, memory)
    if form.chunk > 1:
        return MemoryState(weights, {}, {}, {**dict.fromkeys(weights, moved), "retain": retain}, position)
    return MemoryState(weights, dict.fromkeys(state.slots, moved), {}, {}, state.position)


def layer_token(
    kernels: Any, layer: Any, form: TokenForm, gates: Any, conv: Any, x: Tensor, mixed: Tensor, opened: Tensor | None,
    past: Tensor, state: MemoryState,
) -> tuple[Tensor, MemoryState, Tensor] | None:  # fmt: skip
    """The normalised and gated answers `[B, 1, H V]` of a token x, and the memory and the convolution's past after it;
    None where tensors are others than the kernel takes, or what it leaves is not finite.

    mixed `[B, 1, H (2 P + V)]` has the projections, opened `[B, 1, H V]` those of the output gate, past
    `[B, K-1, H (2 P + V)]` what the convolution saw before.
    """
    config, dtype, heads, P, V = layer.config, mixed.dtype, layer.heads, layer.d_key, layer.d_value
    taps, norm = conv._parameters.get("weight"), layer._parameters.get("norm")
    x = x.contiguous()  # a token of a longer sequence
    batch, X = mixed.shape[0], x.shape[-1]
    count, cells, wide = batch * heads, batch * heads * V * P, heads * (2 * P + V)
    held = _held(form, config, state)
    if held is None or config.dtype == torch.float64 != dtype:
        return None  # a state of another config, or one that the whole way widens
    memory, moved, gathered, _ = held
    channels, own = False, gates.plain()
    if own is None:
        made, X = gates.forward(x), 0
        own = [made.lr, None, made.retain, None, made.momentum, None]
        channels = form.decays and form.chunk == 1 and made.retain is not None and made.retain.dim() == 4
    lr, lr_bias, retain, retain_bias, momentum, momentum_bias = own
    size = heads * X or count
    kept = retain if form.decays else None
    given = (
        *((x, x.numel()), (lr, size), (lr_bias, heads), (kept, size * P if channels else size), (retain_bias, heads)),
        *((momentum, size), (momentum_bias, heads), (mixed, batch * wide), (past, batch * (conv.kernel - 1) * wide)),
        *((taps, conv.kernel * wide), (memory, cells), (moved, cells), (gathered, count)),
    )
    found, at = _addresses(dtype, given), _addresses(torch.int64, ((state.position, count),))
    rest = _addresses(dtype, ((norm, heads * V), (opened, count * V)))
    if not (found and at and rest) or 0 in (*at, found[1], *found[9:11], rest[0]) or (form.decays and not found[3]):
        return None  # a gate or a weight is missing
    moves = bool(config.algorithm.slots)
    if (moved is None) == (moves or form.chunk > 1) or (moves and not found[5]) or (form.chunk > 1 and not found[12]):
        return None
    if not memory.shape == (batch, heads, V, P) == (memory if moved is None else moved).shape:
        return None
    if not state.position.shape == (batch, heads) == (state.position if gathered is None else gathered).shape:
        return None
    new, after = [None if item is None else torch.empty_like(item) for item in held], torch.empty_like(past)
    y, rows = mixed.new_empty(batch, 1, heads * V), mixed.new_empty(count * (3 * P + 2 * V))
    into = [0 if item is None else item.data_ptr() for item in (after, *new, y)]
    flags = conv.activation, form.blind, form.early, form.after, channels, form.dampens
    about = layer.qk_norm, layer.qk_eps, config.key_norm, config.query_scale, layer.output_options.norm.eps
    numbers, told = _norms(dtype, P, *about, gates.lr_max), []

    def work(lo: int, hi: int) -> None:
        sizes = lo, hi, heads, P, V, conv.kernel, X, form.chunk
        told.append(kernels.token(*sizes, *flags, numbers, _COUNTS, rows.data_ptr(), *found, *at, *rest, *into))

    share_out(work, count, cells, SHARE)
    if not math.isfinite(sum(told)):  # the kernel has left off, so that there is nothing to hand on
        return None
    return y, _named(form, state, new), after
