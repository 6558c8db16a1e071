"""Blocks of the parallel engine: what depends on gates and keys alone, and the walk over states.

`parts_of` turns a group of blocks into a few matrices, all blocks at once. `walk` carries the memory from block to
block through them, and `walk_vjp` is the same walk backwards, by hand.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hecate.bias import L2, Bias, Dot
from hecate.engine.coefficients import Rows, coefficients, last_row, neutral
from hecate.engine.parallel.implicit import adjoint, implicit_gradients, solve
from hecate.engine.tokens import Tokens
from hecate.rule import MemoryConfig
from hecate.rule.rule import one
from hecate.tape.ops import over


class Parts(NamedTuple):
    """A group of g blocks of C tokens, `[g, N, ...]`, for base states side by side in `[V, b P]`: first M, first S,
    initial M, where they exist."""

    read: Tensor  # [C, b P]: the queries as the base states see them
    attend: Tensor  # [C, C]: the writes as the queries see them
    keys: Tensor  # [C, P]: the keys as the last memory holds them
    leaving: Tensor | None  # [1 or P, b]: how much of each base state the last memory holds; 1
    seen: Tensor | None  # [C, b P], [C, C]: as `read` and `attend`, for the predictions;
    lower: Tensor | None  # None where u does not depend on them
    slot_keys: Tensor | None  # [C, P] and [1]: as `keys` and `leaving`, for S
    slot_leaving: Tensor | None


class States(NamedTuple):
    """What is carried from block to block `[N, V, P]`, and the weights at which memories restart, None where nothing
    resets."""

    memory: Tensor
    slot: Tensor | None
    initial: Tensor | None


def parts_of(config: MemoryConfig, chunks: Tokens) -> Parts:
    """The matrices of a group of blocks from its tokens `[g, N, C, ...]`, whatever the states."""
    lr = chunks.lr if chunks.write is None else torch.where(chunks.write, chunks.lr, 0.0)
    stepped = lr.unsqueeze(-1) * chunks.phi_k
    moving = type(config.bias) is not Dot
    if not (config.retention.uses_retain or config.algorithm.uses_momentum or _resets(chunks)):
        attend = (chunks.phi_q @ stepped.mT).tril(0 if config.read == "after" else -1)
        lower = (chunks.phi_k @ stepped.mT).tril(-1) if moving else None
        seen = chunks.phi_k if moving else None
        return Parts(chunks.phi_q, attend, stepped, None, seen, lower, None, None)
    # An axis G before time: 1, or the P phi channels where retain differs between them.
    retain = chunks.retain.mT if chunks.retain.dim() == 4 else chunks.retain.unsqueeze(2)
    write, reset = (None if mask is None else mask.unsqueeze(2) for mask in (chunks.write, chunks.reset))
    momentum = chunks.momentum.unsqueeze(2)
    after, before, slot_rows = coefficients(config, retain, momentum, write, reset)
    rows = after if config.read == "after" else before
    faced = before
    if config.decay_order == "before_gradient":
        faced = before.scaled(neutral(retain, write))
        if not config.algorithm.uses_momentum:
            # The decayed memory is the next one without the token's own write.
            faced = Rows(after.writes.tril(-1), after.bases)
    return Parts(
        read=_spread(rows, chunks.phi_q),
        attend=_pairs(rows, chunks.phi_q, stepped),
        keys=last_row(after).mT * stepped,
        leaving=torch.stack([weight[..., -1] for weight in after.bases], -1),
        seen=_spread(faced, chunks.phi_k) if moving else None,
        lower=_pairs(faced, chunks.phi_k, stepped) if moving else None,
        slot_keys=None if slot_rows is None else last_row(slot_rows).mT * stepped,
        slot_leaving=None if slot_rows is None else slot_rows.bases[0][..., 0, -1],
    )


def walk(
    bias: Bias, parts: Parts, v: Tensor, states: States, *, by_hand: bool
) -> tuple[Tensor, Tensor, Tensor, States]:
    """Outputs, base states and writes of all blocks, and the states that leave the last.

    `by_hand` says that no derivative of the operations is wanted, so that a solution need not carry its own.
    """
    all_bases: list[Tensor] = []
    all_writes: list[Tensor] = []
    for part, target in zip(_split(parts), v.unbind(0), strict=True):
        base = _side_by_side(states)
        writes = _writes(bias, part, base, target, by_hand)
        all_bases.append(base)
        all_writes.append(writes)
        memory = torch.baddbmm(_leaving(part, states), writes.mT, part.keys)
        slot = states.slot
        if slot is not None and part.slot_leaving is not None and part.slot_keys is not None:
            slot = over(part.slot_leaving, slot) * slot
            slot = torch.baddbmm(slot, writes.mT, part.slot_keys)
        states = States(memory, slot, states.initial)
    bases = torch.stack(all_bases)
    writes = v if parts.seen is None else torch.stack(all_writes)
    return _plus(parts.read @ bases.mT, parts.attend, writes), bases, writes, states


def walk_vjp(
    bias: Bias, parts: Parts, v: Tensor, bases: Tensor, writes: Tensor, gy: Tensor, later: States
) -> tuple[Parts, Tensor, States]:
    """Cotangents of the parts, of v and of the first states, from those of outputs and last states.

    Block by block from the last. With U the cotangent of the memory that leaves,

        g_w = attend^T g_y + keys U^T,   g_base = g_y^T read + e^T seen + leaving U

    where e, the cotangent of the base predictions, solves the transposed system (dot has none).
    """
    width = parts.keys.shape[-1]
    pulled, drawn = parts.attend.mT @ gy, gy.mT @ parts.read
    pred = v
    if parts.seen is not None and parts.lower is not None and type(bias) is not L2:
        pred = _plus(parts.seen @ bases.mT, parts.lower, writes)
    received: list[States] = []
    slopes: list[Tensor] = []
    values: list[Tensor] = []
    pieces = zip(_split(parts), *(x.unbind(0) for x in (pulled, drawn, pred, v)), strict=True)
    for part, gw, gbase, at, target in reversed(list(pieces)):
        received.append(later)
        if part.seen is not None:
            slope, gv = _writes_vjp(bias, part, at, target, _pulled(gw, part, later))
            gbase = torch.baddbmm(gbase, slope.mT, part.seen)
            slopes.append(slope)
            values.append(gv)
        later = _earlier(part, gbase.split(width, -1), later)
    gpred = torch.stack(slopes[::-1]) if slopes else None
    gmemory = torch.stack([states.memory for states in reversed(received)])
    slots = [states.slot for states in reversed(received) if states.slot is not None]
    gslot = torch.stack(slots) if slots else None
    held = bases.split(width, -1)
    cotangents = Parts(
        read=gy @ bases,
        attend=gy @ writes.mT,
        keys=writes @ gmemory,
        leaving=None if parts.leaving is None else _overlap(gmemory, held, parts.leaving),
        seen=None if gpred is None else gpred @ bases,
        lower=None if gpred is None else gpred @ writes.mT,
        slot_keys=None if gslot is None else writes @ gslot,
        slot_leaving=None if gslot is None else (gslot * held[1]).sum((-2, -1)),
    )
    if values:
        return cotangents, torch.stack(values[::-1]), later
    return cotangents, _pulled(pulled, parts, States(gmemory, gslot, None)), later


def _split(parts: Parts) -> list[Parts]:
    """The parts of each block."""
    columns = [None if item is None else item.unbind(0) for item in parts]
    return [
        Parts(*(None if column is None else column[index] for column in columns))  # type: ignore[arg-type]
        for index in range(parts.keys.shape[0])
    ]


def _side_by_side(states: States) -> Tensor:
    bases = [state for state in states if state is not None]
    return torch.cat(bases, -1) if len(bases) > 1 else bases[0]


def _leaving(part: Parts, states: States) -> Tensor:
    """What the base states leave in the last memory."""
    if part.leaving is None:
        return states.memory
    bases = [state for state in states if state is not None]
    weights = part.leaving.unsqueeze(1).unbind(-1)
    left = weights[0] * bases[0]
    for weight, base in zip(weights[1:], bases[1:], strict=True):
        left = torch.addcmul(left, weight, base)
    return left


def _earlier(part: Parts, drawn: tuple[Tensor, ...], later: States) -> States:
    """Cotangents of a block's first states, from what its tokens drew of them and the later ones'.

    That of the initial weights adds up.
    """
    if part.leaving is None:
        return later._replace(memory=drawn[0] + later.memory)
    weights = part.leaving.unsqueeze(1).unbind(-1)
    pulled = [torch.addcmul(own, weight, later.memory) for own, weight in zip(drawn, weights, strict=True)]
    slot, initial = later.slot, later.initial
    if slot is not None and part.slot_leaving is not None:
        slot = torch.addcmul(pulled[1], over(part.slot_leaving, slot), slot)
    if initial is not None:
        initial = initial + pulled[-1]
    return States(pulled[0], slot, initial)


def _pulled(gw: Tensor, part: Parts, later: States) -> Tensor:
    """The cotangent of writes: what their own block drew of them and what the states after it."""
    gw = _plus(gw, part.keys, later.memory.mT)
    if later.slot is not None and part.slot_keys is not None:
        gw = _plus(gw, part.slot_keys, later.slot.mT)
    return gw


def _overlap(gmemory: Tensor, bases: tuple[Tensor, ...], leaving: Tensor) -> Tensor:
    """Cotangent of `leaving` `[g, N, 1 or P, b]`: per base state <U, X>, or its sum over V."""
    axes = (-2, -1) if leaving.shape[-2] == 1 else (-2,)
    weights = [(gmemory * base).sum(axes) for base in bases]
    return torch.stack(weights, -1).view(leaving.shape)


def _writes(bias: Bias, part: Parts, base: Tensor, v: Tensor, by_hand: bool) -> Tensor:
    """w = -u, the gradients by the predictions with their sign turned."""
    if part.seen is None or part.lower is None:
        return v
    if type(bias) is L2:
        # (I + L) W = V - predictions; the solver is fastest for unknowns on the left, transposed.
        right = torch.baddbmm(v, part.seen, base.mT, alpha=-1)
        return _solve_triangular(part.lower.mT, right.mT, upper=True).mT
    errors = (solve if by_hand else implicit_gradients)(bias, part.seen @ base.mT, part.lower, v)
    return -errors


def _writes_vjp(bias: Bias, part: Parts, pred: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Cotangents of the base predictions and of v from that of w."""
    lower = one((part.lower,))
    if type(bias) is L2:
        pulled = _solve_triangular(lower, g.mT, upper=False).mT
        return -pulled, pulled
    g = -g
    slope = adjoint(bias, pred, lower, v, g)
    return slope, bias.grad_vjp(pred, v, torch.baddbmm(g, lower.mT, slope, alpha=-1))[1]


def _solve_triangular(matrix: Tensor, right: Tensor, *, upper: bool) -> Tensor:
    return torch.linalg.solve_triangular(matrix, right, upper=upper, left=False, unitriangular=True)


def _plus(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`x + a b`, batched over all leading axes."""
    return torch.baddbmm(*(item.flatten(0, -3) for item in (x, a, b))).view(x.shape)


def _spread(rows: Rows, vectors: Tensor) -> Tensor:
    """`[g, N, C, P]` weighted for each base state, side by side: `[g, N, C, b P]`."""
    weighted = [weight.mT * vectors for weight in rows.bases]
    return torch.cat(weighted, -1) if len(weighted) > 1 else weighted[0]


def _pairs(rows: Rows, a: Tensor, b: Tensor) -> Tensor:
    """`sum_p a[t, p] writes[t, i, p] b[i, p]`: the writes as vectors see them, `[g, N, C, C]`."""
    if rows.writes.shape[2] == 1:
        return (a @ b.mT) * rows.writes.squeeze(2)
    return (a.mT.unsqueeze(-1) * rows.writes * b.mT.unsqueeze(-2)).sum(2)


def _resets(chunks: Tokens) -> bool:
    return chunks.reset is not None
