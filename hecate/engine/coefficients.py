"""Blocks of tokens of a linear memory: the state of every token as coefficients that depend on gates alone, what
follows with the keys, and the walk over the states of blocks.

With R[t, j] the product of retain over j < l <= t, P[j, i] that of momentum over i < l <= j, and
K = R P (all lower triangular), the state after token t of a block that begins at M_0, S_0 is

    M_t = a_t M_0 + s_t S_0 - sum_{i <= t} K[t, i] lr_i G_i

whatever the gradients G_i are. gd is the case P = I, no retention the case R = 1. Products are exact where a gate is
zero, and so are their derivatives.

The walk is one product a block, in few launches; a CPU, on which a launch costs little and arithmetic counts, walks in
`hecate.engine.parallel`. [ENG-PAR-D6]

With the base states B = [M, S, M_0] of a block side by side, T = (I + L)^-1 and K = [keys, slot keys], the writes are
w = T v - (T seen) B^T, and the states that leave are

    [M', S'] = (T v)^T K + B (leaving - (T seen)^T K)

T v and T seen are one triangular solve for all blocks of a group (the WY form); what is left to walk is the product.
Under bias dot, whose writes are v, states stand still or decay and are summed. The backward pass is the same walk from
the last block, with the products transposed.

Shapes: v and writes `[g, N, C, V]`, states side by side `[N, V, b P]`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hecate.algorithm import AlgorithmForm
from hecate.engine.tokens import Tokens
from hecate.rule import MemoryConfig
from hecate.tape import Block, Tensors, by_hand, differentiate, execute, one


class Combined(NamedTuple):
    """A state per token as a combination: weights of the block's writes `[..., C, C]`, and of each base state (first M,
    first S, initial M, where they exist) `[..., C]`."""

    writes: Tensor
    bases: tuple[Tensor, ...]

    @property
    def last(self) -> Tensor:
        """Weights of the writes in the block's last state, `[..., C]`."""
        return self.writes[..., -1, :]


def coefficients(
    config: MemoryConfig,
    retain: Tensor,
    momentum: Tensor,
    write: Tensor | None = None,
    reset: Tensor | None = None,
    form: AlgorithmForm | None = None,
) -> tuple[Combined, Combined, Combined | None]:
    """Coefficients of the memory after each token, of the memory before it (but after its reset), and of S after it;
    `form` is by default that of the config's algorithm.

    Gates and masks are `[..., C]` and broadcast over the leading axes.
    """
    known: Any = form or config.forms.algorithm  # engines refuse algorithms without one
    shape, size, decays = retain.shape, retain.shape[-1], config.retention.uses_retain
    within, alive = _since_resets(reset, retain)
    retain = neutral(retain, write)
    ones = torch.ones(size, size, dtype=retain.dtype, device=retain.device).tril()
    spans = within(span_products(retain) if decays else ones.expand(*shape, size))
    writes, slot = spans, None
    bases = [alive((retain[..., :1] if decays else 1.0) * spans[..., 0])]
    if known.momentum:
        momentum = neutral(momentum, write)
        # A gate may exceed 1, and its product over several documents be infinite.
        carried = within(span_products(momentum if reset is None else torch.where(reset, 0.0, momentum)))
        first = alive(momentum[..., :1] * carried[..., 0])
        slot = Combined(carried, (first,))
        # A masked token adds nothing of S to M.
        adds = spans if write is None else spans * write.unsqueeze(-2)
        if known.nesterov:
            identity = torch.eye(size, dtype=retain.dtype, device=retain.device)
            carried, first = momentum.unsqueeze(-1) * carried + identity, momentum * first
        writes = adds @ carried
        bases.append((adds @ first.unsqueeze(-1)).squeeze(-1))
    if reset is not None:
        restarts = reset.to(retain.dtype) * (retain if decays else 1.0)
        bases.append((spans @ restarts.unsqueeze(-1)).squeeze(-1))

    before = [alive(_shift(weight, 0.0 if index else 1.0)) for index, weight in enumerate(bases[: 1 + known.momentum])]
    if reset is not None:
        before.append(torch.where(reset, 1.0, _shift(bases[-1], 0.0)))
    earlier = within(pad(writes[..., :-1, :], (0, 0, 1, 0)))
    return Combined(writes, tuple(bases)), Combined(earlier, tuple(before)), slot


def faced_states(
    config: MemoryConfig, after: Combined, before: Combined, retain: Tensor, write: Tensor | None
) -> Combined:
    """Coefficients of the states at which gradients are taken: before each token, or that decayed."""
    if config.decay_order == "with_step":
        return before
    if not config.algorithm.uses_momentum:  # the next memory without the token's own write
        return Combined(after.writes.tril(-1), after.bases)
    gate = neutral(retain, write)
    return Combined(gate.unsqueeze(-1) * before.writes, tuple(gate * weight for weight in before.bases))


def _since_resets(reset: Tensor | None, like: Tensor) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Two functions: one zeroes `[..., t, i]` where a reset is at l, i < l <= t, the other `[..., t]` where one is at
    or before t."""
    if reset is None:
        return (lambda pairs: pairs), (lambda weight: weight)
    count = reset.cumsum(-1)
    same = (count.unsqueeze(-1) == count.unsqueeze(-2)).to(like.dtype)
    none = (count == 0).to(like.dtype)
    return (lambda pairs: pairs * same), (lambda weight: weight * none)


def neutral(gate: Tensor, write: Tensor | None) -> Tensor:
    """A gate that is 1 at tokens that write nothing."""
    return gate if write is None else torch.where(write, gate, 1.0)


def _shift(weight: Tensor, first: float) -> Tensor:
    return pad(weight[..., :-1], (1, 0), value=first)


class Matrices(NamedTuple):
    """A group of g blocks of C tokens, `[g, N, ...]`, for base states side by side in `[V, b P]`: first M, first S,
    initial M, where they exist."""

    read: Tensor  # [C, b P]: the queries, as multiplied with the base states
    attend: Tensor  # [C, C]: the weight of each write in the answer to each query
    keys: Tensor  # [C, P]: the keys, weighted as in the block's last memory
    leaving: Tensor | None  # [1 or P, b]: weight of each base state in the last memory; 1
    seen: Tensor | None  # [C, b P], [C, C]: as `read` and `attend`, for the predictions;
    lower: Tensor | None  # None where u does not depend on them
    slot_keys: Tensor | None  # [C, P] and [1]: as `keys` and `leaving`, for S
    slot_leaving: Tensor | None


def stepped_keys(chunks: Tokens) -> Tensor:
    """lr times the key that each token writes with; 0 for tokens that are not written."""
    lr = chunks.lr if chunks.write is None else torch.where(chunks.write, chunks.lr, 0.0)
    return lr.unsqueeze(-1) * (chunks.phi_k if chunks.phi_w is None else chunks.phi_w)


def states_of(config: MemoryConfig, chunks: Tokens) -> tuple[Combined, Combined, Combined | None]:
    """`coefficients` of a group of blocks, with an axis before time: 1, or the P phi channels where retain differs
    between them."""
    retain = chunks.retain.mT if chunks.retain.dim() == 4 else chunks.retain.unsqueeze(2)
    write, reset = (None if mask is None else mask.unsqueeze(2) for mask in (chunks.write, chunks.reset))
    return coefficients(config, retain, chunks.momentum.unsqueeze(2), write, reset)


def transposed_reads(states: Combined, chunks: Tokens, bases: Tensor, writes: Tensor) -> Tensor:
    """M^T q of the states of a group's tokens, `[g, N, C, P]`, from queries `[g, N, C, V]`, base states side by side
    `[g, N, V, b P]` and the writes w `[g, N, C, V]`: with M_t = a_t M_0 + sum_i K[t, i] w_i k_i^T,

    y_t = a_t M_0^T q_t + sum_i K[t, i] (w_i . q_t) k_i
    """
    q, keys = chunks.phi_q, stepped_keys(chunks)
    scores, mixed = q @ writes.mT, states.writes
    if mixed.shape[2] == 1:
        y = (scores * mixed.squeeze(2)) @ keys
    else:
        y = ((scores.unsqueeze(2) * mixed) @ keys.mT.unsqueeze(-1)).squeeze(-1).mT
    for base, weight in zip(bases.split(keys.shape[-1], -1), states.bases, strict=True):
        y = y + weight.mT * (q @ base)
    return y


def matrices_of(
    config: MemoryConfig, chunks: Tokens, states: tuple[Combined, Combined, Combined | None] | None = None
) -> Matrices:
    """The matrices of a group of blocks from its tokens `[g, N, C, ...]`, whatever the states; `states` is `states_of`
    where it is known."""
    stepped = stepped_keys(chunks)
    moving = not config.forms.target  # under dot no write depends on what the memory predicts
    if not (config.retention.uses_retain or config.algorithm.uses_momentum or chunks.reset is not None):
        attend = (chunks.phi_q @ stepped.mT).tril(0 if config.read == "after" else -1)
        lower = (chunks.phi_k @ stepped.mT).tril(-1) if moving else None
        keys = chunks.phi_k if moving else None
        return Matrices(chunks.phi_q, attend, stepped, None, keys, lower, None, None)
    after, before, slot = states_of(config, chunks) if states is None else states
    retain = chunks.retain.mT if chunks.retain.dim() == 4 else chunks.retain.unsqueeze(2)
    write = None if chunks.write is None else chunks.write.unsqueeze(2)
    read, faced = after if config.read == "after" else before, faced_states(config, after, before, retain, write)
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


def _spread(states: Combined, vectors: Tensor) -> Tensor:
    """`[g, N, C, P]` weighted for each base state, side by side: `[g, N, C, b P]`."""
    weighted = [weight.mT * vectors for weight in states.bases]
    return torch.cat(weighted, -1) if len(weighted) > 1 else weighted[0]


def _pairs(states: Combined, a: Tensor, b: Tensor) -> Tensor:
    """`sum_p a[t, p] writes[t, i, p] b[i, p]`: the writes as vectors see them, `[g, N, C, C]`."""
    if states.writes.shape[2] == 1:
        return (a @ b.mT) * states.writes.squeeze(2)
    return (a.mT.unsqueeze(-1) * states.writes * b.mT.unsqueeze(-2)).sum(2)


def span_products(gates: Tensor) -> Tensor:
    """R[t, j] = prod of gates over j < l <= t for j <= t, else 0: `[..., C]` -> `[..., C, C]`.

    Its derivative needs no division, so gates of exactly 0 get their true gradient:
    g_l = sum_(j < l) (R^T g)[l, j] R[l-1, j]. [ENG-PAR-V1]
    """
    return one(execute(_SPANS, gates))


def running_products(gates: Tensor) -> Tensor:
    """prod of gates over l <= t: `[..., C]` -> `[..., C]`, its derivative without division too.

    With R as above, g_l = prod_(j < l) gates (R^T g)[l].
    """
    return one(execute(_RUNNING, gates))


def _spans(gates: Tensor) -> tuple[Tensors, Tensor]:
    size = gates.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=gates.device).tril(-1)
    spans = torch.where(later, gates.unsqueeze(-1), 1.0).cumprod(-2).tril()
    return (spans,), spans


def _spans_vjp(spans: Tensor, g: Tensor) -> Tensors:
    previous = pad(spans[..., :-1, :], (0, 0, 1, 0))
    return (((spans.mT @ g.tril()) * previous).sum(-1),)


def _running(gates: Tensor) -> tuple[Tensors, tuple[Tensor, Tensor]]:
    products = gates.cumprod(-1)
    return (products,), (gates, products)


def _running_vjp(residuals: tuple[Tensor, Tensor], g: Tensor) -> Tensors:
    gates, products = residuals
    earlier = pad(products[..., :-1], (1, 0), value=1.0)
    return (earlier * (_spans(gates)[1].mT @ g.unsqueeze(-1)).squeeze(-1),)


_PRODUCTS = Block("span_products", _spans, _spans_vjp)
# As torch operations, for derivatives of any order, they are the same formulas.
_SPANS = by_hand(_PRODUCTS, lambda *gates: differentiate(lambda run, gates: run(_PRODUCTS, gates), gates, "auto"))
_RUNNING = by_hand(
    Block("running_products", _running, _running_vjp), lambda gates: (gates[..., :1] * span_products(gates)[..., 0],)
)


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
    keys, values, taken = _keys(matrices), v, None
    if matrices.seen is not None and matrices.lower is not None:
        values, taken = solve_rows(matrices.lower, torch.cat((v, matrices.seen), -1)).split(
            (v.shape[-1], matrices.seen.shape[-1]), -1
        )
    tensors = [*filter(torch.is_tensor, states)]
    all_states = v.new_empty(len(v) + 1, *tensors[0].shape[:-1], len(tensors) * tensors[0].shape[-1])
    torch.cat(tensors, -1, out=all_states[0])
    leaving = all_states[..., : keys.shape[-1]]
    leaving[1:] = values.mT @ keys
    if states.initial is not None:
        all_states[1:, ..., keys.shape[-1] :] = states.initial
    if taken is None and len(tensors) == 1:
        _sum_states(matrices.leaving, all_states)
    else:
        steps = zip(all_states.unbind(0), leaving[1:].unbind(0), _taken(matrices, taken, keys).unbind(0), strict=False)
        for before, after, way in steps:
            after.baddbmm_(before, way, alpha=-1)
    bases, last = all_states[:-1], leaving[-1].split(states.memory.shape[-1], -1)
    writes = values if taken is None else plus(values, taken, bases.mT, -1)
    y = plus(matrices.read @ bases.mT, matrices.attend, writes)
    # Copies, so that the carry does not keep the states of all blocks alive.
    return y, bases, writes, States(last[0].clone(), None if states.slot is None else last[1].clone(), states.initial)


def walk_linear_vjp(
    matrices: Matrices, v: Tensor, bases: Tensor, writes: Tensor, gy: Tensor, later: States
) -> tuple[Matrices, Tensor, States]:
    """Cotangents of the matrices, of v and of the first states, from those of outputs and last states."""
    keys, width = _keys(matrices), matrices.keys.shape[-1]
    of_writes = matrices.attend.mT @ gy
    flows = v.new_empty(len(v) + 1, *bases.shape[1:])  # cotangents of base states
    flows[:-1] = gy.mT @ matrices.read
    leaving = flows[..., : keys.shape[-1]]
    torch.cat([item for item in later[:2] if item is not None], -1, out=leaving[-1])
    taken = None
    if matrices.seen is not None and matrices.lower is not None:
        taken = solve_rows(matrices.lower, matrices.seen)
        flows[:-1].flatten(0, 1).baddbmm_(of_writes.mT.flatten(0, 1), taken.flatten(0, 1), alpha=-1)
    if taken is None and bases.shape[-1] == width:
        _sum_cotangents(matrices.leaving, flows)
    else:
        ways = _taken(matrices, taken, keys).mT.unbind(0)
        for before, after, way in reversed([*zip(flows[:-1].unbind(0), leaving[1:].unbind(0), ways, strict=True)]):
            before.baddbmm_(after, way, alpha=-1)
    g, (gmemory, *gslots) = leaving[1:], leaving[1:].split(width, -1)
    of_writes = plus(of_writes, keys, g.mT)
    gpred = None
    if matrices.lower is not None:
        of_writes = solve_columns(matrices.lower, of_writes)
        gpred = -of_writes
    left = States(gmemory, gslots[0] if gslots else None, None)
    cotangents = cotangents_of(matrices, bases, writes, gy, gpred, left)
    first = [item.clone() for item in leaving[0].split(width, -1)]
    initial = None if later.initial is None else later.initial + flows[:-1, ..., keys.shape[-1] :].sum(0)
    return cotangents, of_writes, States(first[0], first[1] if gslots else None, initial)


def cotangents_of(
    matrices: Matrices, bases: Tensor, writes: Tensor, gy: Tensor, gpred: Tensor | None, left: States
) -> Matrices:
    """Cotangents of the matrices from those of outputs, base predictions and the states that leave every block."""
    gmemory, gslot, _ = left
    states = bases.split(matrices.keys.shape[-1], -1)
    return Matrices(
        read=gy @ bases,
        attend=gy @ writes.mT,
        keys=writes @ gmemory,
        leaving=None if matrices.leaving is None else overlap(gmemory, states, matrices.leaving),
        seen=None if gpred is None else gpred @ bases,
        lower=None if gpred is None else gpred @ writes.mT,
        slot_keys=None if gslot is None else writes @ gslot,
        slot_leaving=None if gslot is None else (gslot * states[1]).sum((-2, -1)),
    )


def overlap(gmemory: Tensor, bases: tuple[Tensor, ...], leaving: Tensor) -> Tensor:
    """Cotangent of `leaving` `[g, N, 1 or P, b]`: per base state <U, X>, or its sum over V."""
    axes = (-2, -1) if leaving.shape[-2] == 1 else (-2,)
    weights = [(gmemory * base).sum(axes) for base in bases]
    return torch.stack(weights, -1).view(leaving.shape)


def _keys(matrices: Matrices) -> Tensor:
    return matrices.keys if matrices.slot_keys is None else torch.cat((matrices.keys, matrices.slot_keys), -1)


def _taken(matrices: Matrices, taken: Tensor | None, keys: Tensor) -> Tensor:
    """(T seen)^T K - leaving, `[g, N, b P, s P]`: what a block subtracts from its base states."""
    width, count = matrices.keys.shape[-1], 1 if matrices.leaving is None else matrices.leaving.shape[-1]
    if taken is None:
        way = keys.new_zeros(*keys.shape[:2], count * width, keys.shape[-1])
    else:
        way = taken.mT @ keys
    diagonal = way.unflatten(-1, (-1, width)).unflatten(2, (-1, width)).diagonal(0, 3, 5)  # [g, N, b, s, P]
    if matrices.leaving is None:
        diagonal.sub_(1.0)
        return way
    diagonal[:, :, :, 0].sub_(matrices.leaving.mT)
    if matrices.slot_leaving is not None:
        diagonal[:, :, 1, 1].sub_(matrices.slot_leaving.unsqueeze(-1))
    return way


def _sum_states(leaving: Tensor | None, states: Tensor) -> None:
    """Adds to each block's writes, in place, what is left after it of the state before it."""
    if leaving is None:
        states.cumsum_(0)
        return
    for before, after, weight in zip(states, states[1:], leaving.mT.unbind(0), strict=False):
        after.addcmul_(weight, before)


def _sum_cotangents(leaving: Tensor | None, flows: Tensor) -> None:
    """The same for cotangents, from the last block to the first."""
    if leaving is None:
        flows.copy_(flows.flip(0).cumsum_(0).flip(0))
        return
    for before, after, weight in reversed([*zip(flows, flows[1:], leaving.mT.unbind(0), strict=False)]):
        before.addcmul_(weight, after)
