"""The walk over the states of blocks whose writes are linear in them, in few launches: one product a block. A CPU, on
which a launch costs little and arithmetic counts, walks in `hecate.engine.parallel`. [ENG-PAR-D6]

With the base states B = [M, S, M_0] of a block side by side, T = (I + L)^-1 and K = [keys, slot keys], the writes are
w = T v - (T seen) B^T, and the states that leave are

    [M', S'] = (T v)^T K + B (leaving - (T seen)^T K)

T v and T seen are one triangular solve for all blocks of a group (the WY form); what is left to walk is the product.
Under bias dot, whose writes are v, states stand still or decay and are summed. The backward pass is the same walk from
the last block, with the products transposed.

Shapes: v and writes `[g, N, C, V]`, states side by side `[N, V, b P]`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hecate.engine.coefficients import Matrices


class States(NamedTuple):
    """State carried from block to block `[N, V, P]`, and the weights at which memories restart, None where nothing
    resets."""

    memory: Tensor
    slot: Tensor | None
    initial: Tensor | None


def solve_rows(lower: Tensor, right: Tensor) -> Tensor:
    """X of (I + L) X = right."""
    # The solver is fastest for unknowns on the left, transposed.
    return torch.linalg.solve_triangular(lower.mT, right.mT, upper=True, left=False, unitriangular=True).mT


def solve_columns(lower: Tensor, right: Tensor) -> Tensor:
    """X of (I + L)^T X = right."""
    return torch.linalg.solve_triangular(lower, right.mT, upper=False, left=False, unitriangular=True).mT


def plus(x: Tensor, a: Tensor, b: Tensor, sign: int = 1) -> Tensor:
    """`x + sign a b`, batched over all leading axes."""
    return torch.baddbmm(x.flatten(0, -3), a.flatten(0, -3), b.flatten(0, -3), alpha=sign).view(x.shape)


def walk_linear(matrices: Matrices, v: Tensor, states: States) -> tuple[Tensor, Tensor, Tensor, States]:
    """Outputs, base states and writes of all blocks, and the states that leave the last."""
    keys, own, taken = _keys(matrices), v, None
    if matrices.seen is not None and matrices.lower is not None:
        own, taken = solve_rows(matrices.lower, torch.cat((v, matrices.seen), -1)).split(
            (v.shape[-1], matrices.seen.shape[-1]), -1
        )
    held = [*filter(torch.is_tensor, states)]
    all_states = v.new_empty(len(v) + 1, *held[0].shape[:-1], len(held) * held[0].shape[-1])
    torch.cat(held, -1, out=all_states[0])
    leaving = all_states[..., : keys.shape[-1]]
    leaving[1:] = own.mT @ keys
    if states.initial is not None:
        all_states[1:, ..., keys.shape[-1] :] = states.initial
    if taken is None and len(held) == 1:
        _summed(matrices.leaving, all_states)
    else:
        steps = zip(all_states.unbind(0), leaving[1:].unbind(0), _taken(matrices, taken, keys).unbind(0), strict=False)
        for before, after, way in steps:
            after.baddbmm_(before, way, alpha=-1)
    bases, last = all_states[:-1], leaving[-1].split(states.memory.shape[-1], -1)
    writes = own if taken is None else plus(own, taken, bases.mT, -1)
    y = plus(matrices.read @ bases.mT, matrices.attend, writes)
    # Copies: what goes on shall not hold the states of all blocks.
    return y, bases, writes, States(last[0].clone(), None if states.slot is None else last[1].clone(), states.initial)


def walk_linear_vjp(
    matrices: Matrices, v: Tensor, bases: Tensor, writes: Tensor, gy: Tensor, later: States
) -> tuple[Matrices, Tensor, States]:
    """Cotangents of the matrices, of v and of the first states, from those of outputs and last states."""
    keys, width = _keys(matrices), matrices.keys.shape[-1]
    of_writes = matrices.attend.mT @ gy
    flows = v.new_empty(len(v) + 1, *bases.shape[1:])  # cotangents of base states
    flows[:-1] = gy.mT @ matrices.read
    left = flows[..., : keys.shape[-1]]
    torch.cat([item for item in later[:2] if item is not None], -1, out=left[-1])
    taken = None
    if matrices.seen is not None and matrices.lower is not None:
        taken = solve_rows(matrices.lower, matrices.seen)
        flows[:-1].flatten(0, 1).baddbmm_(of_writes.mT.flatten(0, 1), taken.flatten(0, 1), alpha=-1)
    if taken is None and bases.shape[-1] == width:
        _summed_back(matrices.leaving, flows)
    else:
        ways = _taken(matrices, taken, keys).mT.unbind(0)
        for before, after, way in reversed([*zip(flows[:-1].unbind(0), left[1:].unbind(0), ways, strict=True)]):
            before.baddbmm_(after, way, alpha=-1)
    g, (gmemory, *gslots) = left[1:], left[1:].split(width, -1)
    of_writes = plus(of_writes, keys, g.mT)
    gpred = None
    if matrices.lower is not None:
        of_writes = solve_columns(matrices.lower, of_writes)
        gpred = -of_writes
    gslot = gslots[0] if gslots else None
    cotangents = cotangents_of(matrices, bases, writes, gy, gpred, gmemory, gslot)
    first = [item.clone() for item in left[0].split(width, -1)]
    initial = None if later.initial is None else later.initial + flows[:-1, ..., keys.shape[-1] :].sum(0)
    return cotangents, of_writes, States(first[0], first[1] if gslots else None, initial)


def cotangents_of(
    matrices: Matrices,
    bases: Tensor,
    writes: Tensor,
    gy: Tensor,
    gpred: Tensor | None,
    gmemory: Tensor,
    gslot: Tensor | None,
) -> Matrices:
    """Cotangents of the matrices from those of outputs, base predictions and the states that leave every block."""
    held = bases.split(matrices.keys.shape[-1], -1)
    return Matrices(
        read=gy @ bases,
        attend=gy @ writes.mT,
        keys=writes @ gmemory,
        leaving=None if matrices.leaving is None else overlap(gmemory, held, matrices.leaving),
        seen=None if gpred is None else gpred @ bases,
        lower=None if gpred is None else gpred @ writes.mT,
        slot_keys=None if gslot is None else writes @ gslot,
        slot_leaving=None if gslot is None else (gslot * held[1]).sum((-2, -1)),
    )


def overlap(gmemory: Tensor, bases: tuple[Tensor, ...], leaving: Tensor) -> Tensor:
    """Cotangent of `leaving` `[g, N, 1 or P, b]`: per base state <U, X>, or its sum over V."""
    axes = (-2, -1) if leaving.shape[-2] == 1 else (-2,)
    weights = [(gmemory * base).sum(axes) for base in bases]
    return torch.stack(weights, -1).view(leaving.shape)


def _keys(matrices: Matrices) -> Tensor:
    return matrices.keys if matrices.slot_keys is None else torch.cat((matrices.keys, matrices.slot_keys), -1)


def _taken(matrices: Matrices, taken: Tensor | None, keys: Tensor) -> Tensor:
    """(T seen)^T K - leaving, `[g, N, b P, s P]`: what a block takes of its base states."""
    width, count = matrices.keys.shape[-1], 1 if matrices.leaving is None else matrices.leaving.shape[-1]
    if taken is None:
        way = keys.new_zeros(*keys.shape[:2], count * width, keys.shape[-1])
    else:
        way = taken.mT @ keys
    kept = way.unflatten(-1, (-1, width)).unflatten(2, (-1, width)).diagonal(0, 3, 5)  # [g, N, b, s, P]
    if matrices.leaving is None:
        kept.sub_(1.0)
        return way
    kept[:, :, :, 0].sub_(matrices.leaving.mT)
    if matrices.slot_leaving is not None:
        kept[:, :, 1, 1].sub_(matrices.slot_leaving.unsqueeze(-1))
    return way


def _summed(leaving: Tensor | None, states: Tensor) -> None:
    """Adds to the writes of every block, in place, what is left of the state before it."""
    if leaving is None:
        states.cumsum_(0)
        return
    for before, after, weight in zip(states, states[1:], leaving.mT.unbind(0), strict=False):
        after.addcmul_(weight, before)


def _summed_back(leaving: Tensor | None, flows: Tensor) -> None:
    """The same from the last block."""
    if leaving is None:
        flows.copy_(flows.flip(0).cumsum_(0).flip(0))
        return
    for before, after, weight in reversed([*zip(flows, flows[1:], leaving.mT.unbind(0), strict=False)]):
        before.addcmul_(weight, after)
