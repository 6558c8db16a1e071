"""Inputs of engines: tokens in phi-space, and the state between them as tensors of N = batch x heads memories."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hecate.rule import MemoryConfig, TokenGates
from hecate.structure import Memory
from hecate.tape import Block, ByHand, Run, Tensors, is_traced, one

Scan = Callable[..., "tuple[Tensor, Carry]"]  # (config or call, tokens, carry, initial, run=run)


class Tokens(NamedTuple):
    """One sequence, time on axis 1: phi_k, phi_q `[N, T, P]`, v `[N, T, V]`, gates and masks `[N, T]`; or each with an
    axis of heads behind time, `[B, T, H, *]`.

    `retain` may be `[N, T, P]`. `write` and `reset` are boolean masks or None. `phi_w` `[N, T, P]` is the key to write
    with where that is not phi_k, `retain_value` `[N, T, V]` decays value channels; both are None without such gates.
    """

    phi_k: Tensor
    phi_q: Tensor
    v: Tensor
    lr: Tensor
    retain: Tensor
    momentum: Tensor
    write: Tensor | None = None
    reset: Tensor | None = None
    phi_w: Tensor | None = None
    retain_value: Tensor | None = None


# `Tokens` and `Inputs` begin with the vectors, then come the gates, then the masks, which have no gradients: the number
# of vectors, and that of vectors and gates.
VECTORS, NUMBERS = 3, 3 + len(TokenGates._fields)
NEUTRAL = Tokens(0, 0, 0, 0, 1, 1, False, False, 0, 1)  # type: ignore[arg-type]  # padding that changes no state


class Carry(NamedTuple):
    """State between tokens, leading axis N; empty tuples where the config needs nothing."""

    memory: Memory
    slots: Memory
    anchor: Memory
    pending: Memory
    pending_retain: Memory
    keys: Memory
    position: Tensor

    @property
    def flat(self) -> tuple[Tensor, ...]:
        """All tensors in order."""
        kinds = self.memory, self.slots, self.anchor, self.pending, self.pending_retain, self.keys
        return (*chain.from_iterable(kinds), self.position)

    def rebuilt(self, flat: tuple[Tensor, ...]) -> Carry:
        """A carry of the same layout from other tensors."""
        return Carry.of(list(map(len, self[:-1])), flat)

    @classmethod
    def of(cls, counts: list[int] | tuple[int, ...], flat: Tensors, at: int = 0) -> Carry:
        """From a flat tuple, starting at index `at`: `counts` tensors of each kind, then the position."""
        kinds: list[Any] = []
        for count in counts:
            kinds.append(flat[at : at + count])
            at += count
        return cls(*kinds, flat[at])  # type: ignore[call-arg]


def linear_block(name: str, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Block:
    """The block of a linear map `there` of one tensor, whose adjoint is `back`."""
    return Block(name, lambda x: ((there(x),), None), lambda _, g: (back(g),))


# Heads.


def by_head(mask: Tensor, heads: int) -> Tensor:
    """`[B, T]` or `[B, T, H]` -> `[B, T, H]`."""
    return mask if mask.dim() == 3 else mask.unsqueeze(-1).expand(*mask.shape, heads)


def fold_mask(mask: Tensor, heads: int) -> Tensor:
    """`[B, T]` or `[B, T, H]` -> `[B*H, T]`."""
    return by_head(mask, heads).transpose(1, 2).flatten(0, 1)


def fold_heads(tokens: Tokens, run: Run) -> Tokens:
    """`[B, T, H, *]` -> `[B*H, T, *]`."""
    kinds = tokens[NUMBERS : NUMBERS + 2], (*tokens[:NUMBERS], *tokens[NUMBERS + 2 :])
    folded = iter(run(_FOLD, *[item for item in kinds[1] if item is not None], label="heads"))
    numbers = [None if item is None else next(folded) for item in kinds[1]]
    masks = [None if mask is None else fold_mask(mask, tokens.lr.shape[2]) for mask in kinds[0]]
    return Tokens(*numbers[:NUMBERS], *masks, *numbers[NUMBERS:])  # type: ignore[arg-type]


def unfold_heads(heads: int) -> Block:
    """`[B*H, T, V]` -> `[B, T, H, V]`."""
    return linear_block(
        "unfold_heads", lambda y: y.unflatten(0, (-1, heads)).transpose(1, 2), lambda g: g.transpose(1, 2).flatten(0, 1)
    )


def in_folds(
    engine: Scan, config: MemoryConfig, tokens: Tokens, carry: Carry, initial: Memory, *, run: Run
) -> tuple[Tensor, Carry]:
    """Runs an engine that takes tokens `[N, T, *]` on tokens of either layout."""
    if tokens.lr.dim() == 2:
        return engine(config, tokens, carry, initial, run=run)
    y, new = engine(config, fold_heads(tokens, run), carry, initial, run=run)
    return one(run(unfold_heads(tokens.lr.shape[2]), y, label="heads")), new


def run_by_hand(
    engine: ByHand | Block, tokens: Tokens, carry: Carry, initial: Memory, *, run: Run
) -> tuple[Tensor, Carry]:
    """Runs tokens by one block of (memory, *slots, initial, *tokens): the outputs, shaped like the values, and the
    final carry."""
    block = engine if isinstance(engine, Block) else engine.block()
    y, memory, *slots = run(block, *carry.memory, *carry.slots, *initial, *tokens, label="tokens")
    return y, carry._replace(memory=(memory,), slots=tuple(slots))  # type: ignore[return-value, arg-type]


_FOLD = Block(
    "fold_heads",
    lambda *tensors: (tuple([x.transpose(1, 2).flatten(0, 1).contiguous() for x in tensors]), tensors[0].shape),
    lambda shape, *cotangents: tuple([g.unflatten(0, (shape[0], shape[2])).transpose(1, 2) for g in cotangents]),
)


# Masks, and sequences cut and joined.


def counted(seen: Tensor, write: Tensor | None, reset: Tensor | None, length: int) -> tuple[Tensor, Tensor]:
    """`written_before`, and the number of tokens `[B]` after the last."""
    position = written_before(seen, write, reset, length)
    if length:
        seen = position[:, -1] + (1 if write is None else write[:, -1])
    return position, seen


def written_before(seen: Tensor, write: Tensor | None, reset: Tensor | None, length: int) -> Tensor:
    """Tokens written before each of `length` tokens since the start or the last reset, `[B, T]`.

    `seen` `[B]` counts those of earlier calls.
    """
    if write is None:
        write = torch.ones(*seen.shape, length, dtype=torch.bool, device=seen.device)
    before = write.cumsum(1) - write.long()
    start = -seen.unsqueeze(1)
    if reset is not None:
        # Counts only grow, so the largest one at a reset so far is that of the last reset.
        start = torch.where(reset, before, start).cummax(1).values
    return before - start


def expand_to(mask: Tensor, like: Tensor) -> Tensor:
    """A mask `[N, ...]` with trailing axes of size 1 up to the rank of `like`."""
    return mask.reshape(*mask.shape, *[1] * (like.dim() - mask.dim()))


def constants(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers as a tensor, made once for each device, which would otherwise be waited for in every call; not to be
    changed in place."""
    if is_traced():  # for torch.export not from a list, which would be lifted into a buffer
        return torch.stack([torch.full((), number, dtype=dtype, device=device) for number in numbers])
    return _constants(numbers, dtype, device)


@lru_cache(maxsize=64)
def _constants(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # autograd may have to save it
        return torch.tensor(numbers, dtype=dtype, device=device)


def cast(dtype: torch.dtype) -> Block:
    """x in another dtype."""
    return Block("cast", lambda x: ((x.to(dtype),), x.dtype), lambda source, g: (g.to(source),))


def split_time(sizes: list[int], axis: int = 1) -> Block:
    """`[N, T, ...]` cut into spans of these sizes."""
    return Block("split", lambda x: (x.split(sizes, axis), None), lambda _, *g: (torch.cat(g, axis),))


def by_token(tokens: Tokens, run: Run) -> list[Tokens]:
    """`[N, T, *]` as T tokens `[N, *]`."""
    columns: list[Any] = []
    for item in tokens:
        columns.append([None] * tokens.v.shape[1] if item is None else run(UNBIND, item, label="tokens"))
    return [Tokens(*row) for row in zip(*columns, strict=True)]


def cut(tensors: Tensors, sizes: list[int], run: Run) -> list[Tensors]:
    """Each tensor `[N, T, ...]`, span by span."""
    block = split_time(sizes)
    cut = [(None,) * len(sizes) if tensor is None else run(block, tensor, label="split") for tensor in tensors]
    return list(zip(*cut, strict=True))


def _select(mask: Tensor, yes: Tensor, no: Tensor) -> tuple[Tensors, Tensor]:
    return (torch.where(expand_to(mask, yes), yes, no),), mask


def _select_vjp(mask: Tensor, g: Tensor) -> tuple[None, Tensor, Tensor]:
    wide = expand_to(mask, g)
    return None, torch.where(wide, g, 0.0), torch.where(wide, 0.0, g)


SELECT = Block("select", _select, _select_vjp)
UNBIND = Block("unbind", lambda x: (x.unbind(1), None), lambda _, *g: (torch.stack(g, 1),))
CONCAT = Block(
    "concat", lambda *x: ((torch.cat(x, 1),), [item.shape[1] for item in x]), lambda sizes, g: g.split(sizes, 1)
)
