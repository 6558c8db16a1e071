"""From q, k, v and gates to tokens in phi-space: one path for every engine and every read."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hecate.engine.quotients import L2_NORM, SUM_NORM, Step, stepped
from hecate.engine.tokens import SELECT, Carry, Tokens
from hecate.phi import Params
from hecate.rule import MemoryConfig
from hecate.rule.rule import one
from hecate.structure import Memory
from hecate.tape import Block, ByHand, Run, Tensors, execute


class Sequence(NamedTuple):
    """Inputs of a scan, checked and complete: `[B, T, H, *]`, gates `[B, T, H]` (retain also per channel), masks `[B,
    T]` or None, positions `[B, T]` or None where phi needs none."""

    q: Tensor
    k: Tensor
    v: Tensor
    lr: Tensor
    retain: Tensor
    momentum: Tensor
    write: Tensor | None = None
    reset: Tensor | None = None
    position: Tensor | None = None


def to_tokens(config: MemoryConfig, inputs: Sequence, params: Params, dtype: torch.dtype, run: Run) -> Tokens:
    """phi, key_norm, query_scale and the step rule: tokens `[B, T, H, *]`."""
    heads = inputs.lr.shape[2]
    q, k, v, lr, retain, momentum = (
        tensor if tensor.dtype == dtype else one(run(cast(dtype), tensor, label="inputs")) for tensor in inputs[:6]
    )
    if inputs.write is not None:
        # A masked token may carry garbage: it must not even be multiplied by zero.
        k, v, lr, retain, momentum = (
            one(run(SELECT, inputs.write, tensor, torch.zeros_like(tensor), label="write_mask"))
            for tensor in (k, v, lr, retain, momentum)
        )
    if inputs.position is not None:
        params = {**params, "position": inputs.position.unsqueeze(-1)}
    block, tensors = config.feature_map.block(params)
    if block.hand_written:
        block = ByHand.of(block).block(keeps=run is not execute)
    phi_k = one(run(block, k, *tensors, label="phi(k)"))
    phi_q = one(run(block, q, *tensors, label="phi(q)"))
    if config.key_norm != "none":
        norm = (L2_NORM if config.key_norm == "l2" else SUM_NORM).block(keeps=run is not execute)
        phi_k = one(run(norm, phi_k, label="key_norm"))
        phi_q = one(run(norm, phi_q, label="key_norm"))
    if config.query_scale == "key_dim":
        phi_q = one(run(_scale(1 / math.sqrt(inputs.k.shape[-1])), phi_q, label="query_scale"))
    if config.step != "raw":
        phi_k, v, lr = stepped(config, Step(phi_k, v, lr), run)
    masks = (None if mask is None else by_head(mask, heads) for mask in inputs[6:8])
    return Tokens(phi_k, phi_q, v, lr, retain, momentum, *masks)


def by_head(mask: Tensor, heads: int) -> Tensor:
    """`[B, T]` or `[B, T, H]` -> `[B, T, H]`."""
    return mask if mask.dim() == 3 else mask.unsqueeze(-1).expand(*mask.shape, heads)


def fold_mask(mask: Tensor, heads: int) -> Tensor:
    """`[B, T]` or `[B, T, H]` -> `[B*H, T]`."""
    return by_head(mask, heads).transpose(1, 2).flatten(0, 1)


def fold_heads(tokens: Tokens, run: Run) -> Tokens:
    """`[B, T, H, *]` -> `[B*H, T, *]`."""
    heads = tokens.lr.shape[2]
    folded = (one(run(_FOLD, tensor, label="heads")) for tensor in tokens[:6])
    masks = (None if mask is None else fold_mask(mask, heads) for mask in tokens[6:])
    return Tokens(*folded, *masks)


def in_folds(
    engine: Callable[..., tuple[Tensor, Carry]],
    config: MemoryConfig,
    tokens: Tokens,
    carry: Carry,
    initial: Memory,
    *,
    run: Run,
) -> tuple[Tensor, Carry]:
    """Runs an engine for tokens `[N, T, *]` on those of either layout."""
    if tokens.lr.dim() == 2:
        return engine(config, tokens, carry, initial, run=run)
    y, new = engine(config, fold_heads(tokens, run), carry, initial, run=run)
    return one(run(unfold_heads(tokens.lr.shape[2]), y, label="heads")), new


def unfold_heads(heads: int) -> Block:
    """`[B*H, T, V]` -> `[B, T, H, V]`."""

    def forward(y: Tensor) -> tuple[Tensors, None]:
        return (y.unflatten(0, (-1, heads)).transpose(1, 2),), None

    def vjp(_: None, g: Tensor) -> tuple[Tensor]:
        return (g.transpose(1, 2).flatten(0, 1),)

    return Block("unfold_heads", forward, vjp)


def cast(dtype: torch.dtype) -> Block:
    """x in another dtype."""

    def forward(x: Tensor) -> tuple[Tensors, torch.dtype]:
        return (x.to(dtype),), x.dtype

    def vjp(source: torch.dtype, g: Tensor) -> tuple[Tensor]:
        return (g.to(source),)

    return Block("cast", forward, vjp)


def _scale(factor: float) -> Block:
    def forward(x: Tensor) -> tuple[Tensors, None]:
        return (x * factor,), None

    def vjp(_: None, g: Tensor) -> tuple[Tensor]:
        return (g * factor,)

    return Block("scale", forward, vjp)


def _fold(x: Tensor) -> tuple[Tensors, torch.Size]:
    return (x.transpose(1, 2).flatten(0, 1).contiguous(),), x.shape


def _fold_vjp(shape: torch.Size, g: Tensor) -> tuple[Tensor]:
    return (g.unflatten(0, (shape[0], shape[2])).transpose(1, 2),)


_FOLD = Block("fold_heads", _fold, _fold_vjp)


def params_tensors(params: Params) -> tuple[Tensor, ...]:
    """Learned and frozen parameters in order."""
    return *params["learned"].values(), *params["frozen"].values()


def with_tensors(params: Params, tensors: tuple[Tensor, ...]) -> Params:
    """The same parameters with other tensors."""
    split = len(params["learned"])
    return {
        "learned": dict(zip(params["learned"], tensors[:split], strict=True)),
        "frozen": dict(zip(params["frozen"], tensors[split:], strict=True)),
    }
