"""Blocks of the parallel engine: what depends on gates and keys alone, the walk over states, and the implicit writes.

`matrices_of` turns a group of blocks into a few matrices, all blocks at once. `walk` carries the memory from block to
block through them, and `walk_vjp` is the same walk backwards, by hand.

Under a bias that is neither linear nor blind to the memory the gradients of a block solve
u_t = g(base_t - sum_{i<t} L[t,i] u_i, v_t). L is strictly lower triangular, so within a sub-block of b tokens the
fixed-point iteration is exact after b steps, whatever g is: step s settles row s. Convergence is usually reached
earlier and then detected. Sub-blocks bound how far the iterates can overshoot while they settle. [ENG-IMP-D1]
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat, starmap
from typing import NamedTuple

import torch
from torch import Tensor

from hecate.bias import Bias
from hecate.engine.coefficients import Combined, coefficients, neutral
from hecate.engine.tokens import Tokens
from hecate.rule import MemoryConfig
from hecate.rule.rule import one
from hecate.tape import Block, Tensors, can_inspect, differentiate, is_traced
from hecate.tape.ops import over

SUB_BLOCK = 16
LOOK = 4  # steps between looks at whether an iteration has settled, on devices


class Matrices(NamedTuple):
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


def matrices_of(config: MemoryConfig, form: str | None, chunks: Tokens) -> Matrices:
    """The matrices of a group of blocks from its tokens `[g, N, C, ...]`, whatever the states; `form` is the bias's."""
    lr = chunks.lr if chunks.write is None else torch.where(chunks.write, chunks.lr, 0.0)
    stepped = lr.unsqueeze(-1) * chunks.phi_k
    moving = form != "target"  # under dot no write depends on what the memory predicts
    if not (config.retention.uses_retain or config.algorithm.uses_momentum or chunks.reset is not None):
        attend = (chunks.phi_q @ stepped.mT).tril(0 if config.read == "after" else -1)
        lower = (chunks.phi_k @ stepped.mT).tril(-1) if moving else None
        seen = chunks.phi_k if moving else None
        return Matrices(chunks.phi_q, attend, stepped, None, seen, lower, None, None)
    # An axis G before time: 1, or the P phi channels where retain differs between them.
    retain = chunks.retain.mT if chunks.retain.dim() == 4 else chunks.retain.unsqueeze(2)
    write, reset = (None if mask is None else mask.unsqueeze(2) for mask in (chunks.write, chunks.reset))
    momentum = chunks.momentum.unsqueeze(2)
    after, before, slot = coefficients(config, retain, momentum, write, reset)
    read = after if config.read == "after" else before
    faced = before
    if config.decay_order == "before_gradient":
        faced = before.scaled(neutral(retain, write))
        if not config.algorithm.uses_momentum:
            # The decayed memory is the next one without the token's own write.
            faced = Combined(after.writes.tril(-1), after.bases)
    return Matrices(
        read=_spread(read, chunks.phi_q),
        attend=_pairs(read, chunks.phi_q, stepped),
        keys=after.last.mT * stepped,
        leaving=torch.stack([weight[..., -1] for weight in after.bases], -1),
        seen=_spread(faced, chunks.phi_k) if moving else None,
        lower=_pairs(faced, chunks.phi_k, stepped) if moving else None,
        slot_keys=None if slot is None else slot.last.mT * stepped,
        slot_leaving=None if slot is None else slot.bases[0][..., 0, -1],
    )


def walk(
    bias: Bias, form: str | None, matrices: Matrices, v: Tensor, states: States, *, by_hand: bool
) -> tuple[Tensor, Tensor, Tensor, States]:
    """Outputs, base states and writes of all blocks, and the states that leave the last.

    `by_hand` says that no derivative of the operations is wanted, so that a solution need not carry its own.
    """
    all_bases: list[Tensor] = []
    all_writes: list[Tensor] = []
    for block, target in zip(_split(matrices), v.unbind(0), strict=True):
        base = _side_by_side(states)
        writes = _writes(bias, form, block, base, target, by_hand)
        all_bases.append(base)
        all_writes.append(writes)
        memory = torch.baddbmm(_leaving(block, states), writes.mT, block.keys)
        slot = states.slot
        if slot is not None and block.slot_leaving is not None and block.slot_keys is not None:
            slot = over(block.slot_leaving, slot) * slot
            slot = torch.baddbmm(slot, writes.mT, block.slot_keys)
        states = States(memory, slot, states.initial)
    bases = torch.stack(all_bases)
    writes = v if matrices.seen is None else torch.stack(all_writes)
    return _plus(matrices.read @ bases.mT, matrices.attend, writes), bases, writes, states


def walk_vjp(
    bias: Bias,
    form: str | None,
    matrices: Matrices,
    v: Tensor,
    bases: Tensor,
    writes: Tensor,
    gy: Tensor,
    later: States,
) -> tuple[Matrices, Tensor, States]:
    """Cotangents of the matrices, of v and of the first states, from those of outputs and last states.

    Block by block from the last. With U the cotangent of the memory that leaves,

        g_w = attend^T g_y + keys U^T,   g_base = g_y^T read + e^T seen + leaving U

    where e, the cotangent of the base predictions, solves the transposed system (dot has none).
    """
    width = matrices.keys.shape[-1]
    pulled, drawn = matrices.attend.mT @ gy, gy.mT @ matrices.read
    pred = v
    if matrices.seen is not None and matrices.lower is not None and form != "error":
        pred = _plus(matrices.seen @ bases.mT, matrices.lower, writes)
    received: list[States] = []
    slopes: list[Tensor] = []
    values: list[Tensor] = []
    blocks = zip(_split(matrices), *map(Tensor.unbind, (pulled, drawn, pred, v)), strict=True)
    for block, gw, gbase, at, target in reversed(list(blocks)):
        received.append(later)
        if block.seen is not None:
            slope, gv = _writes_vjp(bias, form, block, at, target, _pulled(gw, block, later))
            gbase = torch.baddbmm(gbase, slope.mT, block.seen)
            slopes.append(slope)
            values.append(gv)
        later = _earlier(block, gbase.split(width, -1), later)
    gpred = torch.stack(slopes[::-1]) if slopes else None
    gmemory = torch.stack([states.memory for states in reversed(received)])
    slots = [states.slot for states in reversed(received) if states.slot is not None]
    gslot = torch.stack(slots) if slots else None
    held = bases.split(width, -1)
    cotangents = Matrices(
        read=gy @ bases,
        attend=gy @ writes.mT,
        keys=writes @ gmemory,
        leaving=None if matrices.leaving is None else _overlap(gmemory, held, matrices.leaving),
        seen=None if gpred is None else gpred @ bases,
        lower=None if gpred is None else gpred @ writes.mT,
        slot_keys=None if gslot is None else writes @ gslot,
        slot_leaving=None if gslot is None else (gslot * held[1]).sum((-2, -1)),
    )
    if values:
        return cotangents, torch.stack(values[::-1]), later
    return cotangents, _pulled(pulled, matrices, States(gmemory, gslot, None)), later


def _split(matrices: Matrices) -> list[Matrices]:
    """The matrices of each block."""
    columns = [repeat(None) if item is None else item.unbind(0) for item in matrices]
    return list(starmap(Matrices, zip(*columns)))  # noqa: B905


def _side_by_side(states: States) -> Tensor:
    bases = [state for state in states if state is not None]
    return torch.cat(bases, -1) if len(bases) > 1 else bases[0]


def _leaving(block: Matrices, states: States) -> Tensor:
    """What the base states leave in the last memory."""
    if block.leaving is None:
        return states.memory
    bases = [state for state in states if state is not None]
    weights = block.leaving.unsqueeze(1).unbind(-1)
    left = weights[0] * bases[0]
    for weight, base in zip(weights[1:], bases[1:], strict=True):
        left = torch.addcmul(left, weight, base)
    return left


def _earlier(block: Matrices, drawn: tuple[Tensor, ...], later: States) -> States:
    """Cotangents of a block's first states, from what its tokens drew of them and the later ones'.

    That of the initial weights adds up.
    """
    if block.leaving is None:
        return later._replace(memory=drawn[0] + later.memory)
    weights = block.leaving.unsqueeze(1).unbind(-1)
    pulled = [torch.addcmul(own, weight, later.memory) for own, weight in zip(drawn, weights, strict=True)]
    slot, initial = later.slot, later.initial
    if slot is not None and block.slot_leaving is not None:
        slot = torch.addcmul(pulled[1], over(block.slot_leaving, slot), slot)
    if initial is not None:
        initial = initial + pulled[-1]
    return States(pulled[0], slot, initial)


def _pulled(gw: Tensor, block: Matrices, later: States) -> Tensor:
    """The cotangent of writes: what their own block drew of them and what the states after it."""
    gw = _plus(gw, block.keys, later.memory.mT)
    if later.slot is not None and block.slot_keys is not None:
        gw = _plus(gw, block.slot_keys, later.slot.mT)
    return gw


def _overlap(gmemory: Tensor, bases: tuple[Tensor, ...], leaving: Tensor) -> Tensor:
    """Cotangent of `leaving` `[g, N, 1 or P, b]`: per base state <U, X>, or its sum over V."""
    axes = (-2, -1) if leaving.shape[-2] == 1 else (-2,)
    weights = [(gmemory * base).sum(axes) for base in bases]
    return torch.stack(weights, -1).view(leaving.shape)


def _writes(bias: Bias, form: str | None, block: Matrices, base: Tensor, v: Tensor, by_hand: bool) -> Tensor:
    """w = -u, the gradients by the predictions with their sign turned."""
    if block.seen is None or block.lower is None:
        return v
    if form == "error":
        # (I + L) W = V - predictions; the solver is fastest for unknowns on the left, transposed.
        right = torch.baddbmm(v, block.seen, base.mT, alpha=-1)
        return _solve_triangular(block.lower.mT, right.mT, upper=True).mT
    errors = (solve if by_hand else implicit_gradients)(bias, block.seen @ base.mT, block.lower, v)
    return -errors


def _writes_vjp(
    bias: Bias, form: str | None, block: Matrices, pred: Tensor, v: Tensor, g: Tensor
) -> tuple[Tensor, Tensor]:
    """Cotangents of the base predictions and of v from that of w."""
    lower = one((block.lower,))
    if form == "error":
        pulled = _solve_triangular(lower, g.mT, upper=False).mT
        return -pulled, pulled
    g = -g
    slope = adjoint(bias, pred, lower, v, g)
    return slope, bias.grad_vjp(pred, v, torch.baddbmm(g, lower.mT, slope, alpha=-1))[1]


def _solve_triangular(matrix: Tensor, right: Tensor, *, upper: bool) -> Tensor:
    return torch.linalg.solve_triangular(matrix, right, upper=upper, left=False, unitriangular=True)


def _plus(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`x + a b`, batched over all leading axes."""
    return torch.baddbmm(x.flatten(0, -3), a.flatten(0, -3), b.flatten(0, -3)).view(x.shape)


def _spread(states: Combined, vectors: Tensor) -> Tensor:
    """`[g, N, C, P]` weighted for each base state, side by side: `[g, N, C, b P]`."""
    weighted = [weight.mT * vectors for weight in states.bases]
    return torch.cat(weighted, -1) if len(weighted) > 1 else weighted[0]


def _pairs(states: Combined, a: Tensor, b: Tensor) -> Tensor:
    """`sum_p a[t, p] writes[t, i, p] b[i, p]`: the writes as vectors see them, `[g, N, C, C]`."""
    if states.writes.shape[2] == 1:
        return (a @ b.mT) * states.writes.squeeze(2)
    return (a.mT.unsqueeze(-1) * states.writes * b.mT.unsqueeze(-2)).sum(2)


def implicit_gradients(bias: Bias, base: Tensor, lower: Tensor, v: Tensor) -> Tensor:
    """u `[N, C, V]` from base, v `[N, C, V]` and the strictly lower triangular `[N, C, C]`.

    The derivative comes from the implicit function theorem, not from the iteration: with J the Jacobian of g by its
    first argument, the cotangent e of the errors' arguments obeys e = J (g_u - L^T e), an upper triangular system
    solved the same way from the last token back. [ENG-IMP-V1]"""

    def forward(base: Tensor, lower: Tensor, v: Tensor) -> tuple[Tensors, Tensors]:
        u = solve(bias, base, lower, v)
        return (u,), (base, lower, v, u)

    def vjp(residuals: tuple[Tensor, ...], g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        base, lower, v, u = residuals
        if torch.is_grad_enabled():
            # As a residual u is a constant; solved again here it is a function of the inputs.
            u = implicit_gradients(bias, base, lower, v)
        pred = base - lower @ u
        slope = adjoint(bias, pred, lower, v, g)
        _, gv = bias.grad_vjp(pred, v, g - lower.mT @ slope)
        return slope, -(slope @ u.mT).tril(-1), gv

    block = Block("implicit_gradients", forward, vjp)
    return one(differentiate(lambda run, *inputs: run(block, *inputs), (base, lower, v), "tape"))


def solve(bias: Bias, base: Tensor, lower: Tensor, v: Tensor) -> Tensor:
    """u alone, by operations whose derivative is not that of u."""

    def tame(u: Tensor) -> Tensor:
        # A row not yet settled may overflow: 0 * inf must not reach the other rows.
        return torch.nan_to_num(u, nan=0.0, posinf=0.0, neginf=0.0)

    return _substituted(bias.grad, lower, base, (v,), tame)


def adjoint(bias: Bias, pred: Tensor, lower: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Cotangent e of `base`, from that of u and from the solution `pred = base - L u`."""
    return _substituted(lambda x, pred, v: bias.grad_jvp(pred, v, x), lower.mT, g, (pred, v), backwards=True)


def _substituted(
    f: Callable[..., Tensor],
    coupling: Tensor,
    right: Tensor,
    given: tuple[Tensor, ...],
    tame: Callable[[Tensor], Tensor] | None = None,
    *,
    backwards: bool = False,
) -> Tensor:
    """x of x_t = f(right_t - sum_i coupling[t, i] x_i, *given_t), from the first row down or from the last one up."""
    length = right.shape[-2]
    found: list[Tensor] = []
    starts = range(0, length, SUB_BLOCK)
    for start in reversed(starts) if backwards else starts:
        stop = min(start + SUB_BLOCK, length)
        known = right.narrow(-2, start, stop - start)  # `...` has no rule for batched cotangents
        if found:
            solved = slice(stop, None) if backwards else slice(None, start)
            known = known - coupling[..., start:stop, solved] @ torch.cat(found, -2)
        inside, own = coupling[..., start:stop, start:stop], [item[..., start:stop, :] for item in given]
        x = f(known, *own)
        for step in range(1, stop - start):
            before, x = x, f(known - inside @ (x if tame is None else tame(x)), *own)
            if _settled(before, x, step):
                break
        found.insert(0 if backwards else len(found), x)
    return torch.cat(found, -2)


def _settled(before: Tensor, after: Tensor, step: int) -> bool:
    """Whether a step changed rounding only. Values may not tell while autograd records: an iteration cut short has the
    right value, but not yet the right derivative.

    Off the CPU a look makes the host wait for the device, so only every few steps are looked at."""
    if after.requires_grad or (step % LOOK and after.device.type != "cpu"):
        return False
    if is_traced(before, after) or not can_inspect(before, after):
        return False
    change, size = (after - before).abs().amax(), after.abs().amax()
    return bool(change <= 4 * torch.finfo(after.dtype).eps * size)
