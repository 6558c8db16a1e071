"""Engine inputs as flat tensors: a sequence for N = batch x heads memories, and the state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hecate.rule import MemoryConfig, MemoryState
from hecate.rule.state import frozen_gradients
from hecate.structure import Memory
from hecate.tape import Block, Tensors


class Tokens(NamedTuple):
    """One sequence, time on axis 1: phi_k, phi_q `[N, T, P]`, v `[N, T, V]`, gates and masks `[N, T]`; or each with an
    axis of heads behind time, `[B, T, H, *]`.

    `retain` may be `[N, T, P]`. `write` and `reset` are boolean or None.
    """

    phi_k: Tensor
    phi_q: Tensor
    v: Tensor
    lr: Tensor
    retain: Tensor
    momentum: Tensor
    write: Tensor | None = None
    reset: Tensor | None = None


class Carry(NamedTuple):
    """State between tokens, leading axis N; empty tuples where the config needs nothing."""

    memory: Memory
    slots: Memory
    anchor: Memory
    pending: Memory
    pending_retain: Memory
    position: Tensor

    @property
    def flat(self) -> tuple[Tensor, ...]:
        """All tensors in order."""
        parts = (self.memory, self.slots, self.anchor, self.pending, self.pending_retain)
        return (*(tensor for part in parts for tensor in part), self.position)

    def rebuilt(self, flat: tuple[Tensor, ...]) -> Carry:
        """A carry of the same layout from other tensors."""
        parts: list[Memory] = []
        at = 0
        for part in self[:-1]:
            parts.append(flat[at : at + len(part)])
            at += len(part)
        return Carry(*parts, flat[at])  # type: ignore[call-arg, arg-type]


def flatten_state(state: MemoryState) -> Carry:
    """`[B, H, ...]` by name -> `[B*H, ...]` in order."""
    gradients = {name: tensor for name, tensor in state.pending.items() if name != "retain"}
    retain = {name: tensor for name, tensor in state.pending.items() if name == "retain"}
    return Carry(
        _flat(state.memory),
        _flat(state.slots),
        _flat(state.anchor),
        _flat(gradients),
        _flat(retain),
        state.position.flatten(),
    )


def flatten_memory(state: MemoryState) -> Memory:
    """The weights alone."""
    return _flat(state.memory)


def _flat(tensors: dict[str, Tensor]) -> Memory:
    return tuple(tensor.flatten(0, 1) for tensor in tensors.values())


def unflatten_state(carry: Carry, like: MemoryState) -> MemoryState:
    """The inverse of `flatten_state`, names and batch size taken from another state."""
    lead = like.position.shape

    def named(names: list[str], tensors: Memory) -> dict[str, Tensor]:
        return {name: tensor.unflatten(0, lead) for name, tensor in zip(names, tensors, strict=True)}

    names = list(like.memory)
    pending = named(names, carry.pending) if carry.pending else {}
    if carry.pending_retain:
        pending["retain"] = carry.pending_retain[0].unflatten(0, lead)
    return MemoryState(
        memory=named(names, carry.memory),
        slots=named(list(like.slots), carry.slots),
        anchor=named(names, carry.anchor) if like.anchor else {},
        pending=pending,
        position=carry.position.unflatten(0, lead),
        normalizer=like.normalizer,
    )


def restart(config: MemoryConfig, initial: Memory, carry: Carry) -> Carry:
    """The carry of a memory that starts anew from `initial`, shaped like another carry."""
    return Carry(
        memory=initial,
        slots=tuple(torch.zeros_like(slot) for slot in carry.slots),
        anchor=initial if frozen_gradients(config) else (),
        pending=tuple(torch.zeros_like(grad) for grad in carry.pending),
        pending_retain=tuple(torch.ones_like(retain) for retain in carry.pending_retain),
        position=torch.zeros_like(carry.position),
    )


def expand_to(mask: Tensor, like: Tensor) -> Tensor:
    """A mask `[N, ...]` with trailing axes added."""
    return mask.reshape(*mask.shape, *[1] * (like.dim() - mask.dim()))


def split_time(size: int | list[int]) -> Block:
    """`[N, T, ...]` cut into pieces of a size, or of the sizes given."""

    def forward(x: Tensor) -> tuple[Tensors, None]:
        return x.split(size, 1), None

    def vjp(_: None, *cotangents: Tensor) -> tuple[Tensor]:
        return (torch.cat(cotangents, 1),)

    return Block("split", forward, vjp)


def linear_block(name: str, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Block:
    """A linear map of one tensor, given with its adjoint."""
    return Block(name, lambda x: ((there(x),), None), lambda _, g: (back(g),))


def _unbind(x: Tensor) -> tuple[Tensors, None]:
    return x.unbind(1), None


def _unbind_vjp(_: None, *cotangents: Tensor) -> tuple[Tensor]:
    return (torch.stack(cotangents, 1),)


def _concat(*pieces: Tensor) -> tuple[Tensors, list[int]]:
    return (torch.cat(pieces, 1),), [piece.shape[1] for piece in pieces]


def _concat_vjp(sizes: list[int], g: Tensor) -> Any:
    return g.split(sizes, 1)


def _select(mask: Tensor, yes: Tensor, no: Tensor) -> tuple[Tensors, Tensor]:
    return (torch.where(expand_to(mask, yes), yes, no),), mask


def _select_vjp(mask: Tensor, g: Tensor) -> tuple[None, Tensor, Tensor]:
    wide = expand_to(mask, g)
    return None, torch.where(wide, g, 0.0), torch.where(wide, 0.0, g)


SELECT = Block("select", _select, _select_vjp)
UNBIND = Block("unbind", _unbind, _unbind_vjp)
CONCAT = Block("concat", _concat, _concat_vjp)
