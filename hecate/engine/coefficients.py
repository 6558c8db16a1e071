"""The state of every token of a block as coefficients that depend on gates alone, and what follows with the keys.

With R[t, j] the product of retain over j < l <= t, P[j, i] that of momentum over i < l <= j, and
K = R P (all lower triangular), the state after token t of a block that begins at M_0, S_0 is

    M_t = a_t M_0 + s_t S_0 - sum_{i <= t} K[t, i] lr_i G_i

whatever the gradients G_i are. gd is the case P = I, no retention the case R = 1. Products are exact where a gate is
zero, and so are their derivatives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

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
    """The state after each token, before it (but after its reset), and S after it; `form` is by default that of the
    config's algorithm.

    Gates and masks are `[..., C]` and broadcast over the leading axes.
    """
    form = form or config.forms.algorithm
    if form is None:
        raise TypeError(f"algorithm {config.algorithm.kind!r} is not a linear recurrence of the gates alone")
    shape, size, decays = retain.shape, retain.shape[-1], config.retention.uses_retain
    within, alive = _since_resets(reset, retain)
    retain = neutral(retain, write)
    ones = torch.ones(size, size, dtype=retain.dtype, device=retain.device).tril()
    spans = within(span_products(retain) if decays else ones.expand(*shape, size))
    writes, slot = spans, None
    bases = [alive((retain[..., :1] if decays else 1.0) * spans[..., 0])]
    if form.momentum:
        momentum = neutral(momentum, write)
        # A gate may exceed 1, and its product over several documents be infinite.
        carried = within(span_products(momentum if reset is None else torch.where(reset, 0.0, momentum)))
        first = alive(momentum[..., :1] * carried[..., 0])
        slot = Combined(carried, (first,))
        # A masked token adds nothing of S to M.
        adds = spans if write is None else spans * write.unsqueeze(-2)
        if form.nesterov:
            own = torch.eye(size, dtype=retain.dtype, device=retain.device)
            carried, first = momentum.unsqueeze(-1) * carried + own, momentum * first
        writes = adds @ carried
        bases.append((adds @ first.unsqueeze(-1)).squeeze(-1))
    if reset is not None:
        restarts = reset.to(retain.dtype) * (retain if decays else 1.0)
        bases.append((spans @ restarts.unsqueeze(-1)).squeeze(-1))

    before = [alive(_shifted(weight, 0.0 if index else 1.0)) for index, weight in enumerate(bases[: 1 + form.momentum])]
    if reset is not None:
        before.append(torch.where(reset, 1.0, _shifted(bases[-1], 0.0)))
    earlier = within(pad(writes[..., :-1, :], (0, 0, 1, 0)))
    return Combined(writes, tuple(bases)), Combined(earlier, tuple(before)), slot


def faced_states(
    config: MemoryConfig, after: Combined, before: Combined, retain: Tensor, write: Tensor | None
) -> Combined:
    """The states at which gradients are taken: those before the tokens, or these decayed."""
    if config.decay_order == "with_step":
        return before
    if not config.algorithm.uses_momentum:  # the next memory without the token's own write
        return Combined(after.writes.tril(-1), after.bases)
    gate = neutral(retain, write)
    return Combined(gate.unsqueeze(-1) * before.writes, tuple(gate * weight for weight in before.bases))


def _since_resets(reset: Tensor | None, like: Tensor) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Functions that zero `[..., t, i]` where a reset is in i < l <= t, and `[..., t]` where one is up to and at t."""
    if reset is None:
        return (lambda pairs: pairs), (lambda weight: weight)
    count = reset.cumsum(-1)
    same = (count.unsqueeze(-1) == count.unsqueeze(-2)).to(like.dtype)
    none = (count == 0).to(like.dtype)
    return (lambda pairs: pairs * same), (lambda weight: weight * none)


def neutral(gate: Tensor, write: Tensor | None) -> Tensor:
    """A gate that is 1 at tokens that write nothing."""
    return gate if write is None else torch.where(write, gate, 1.0)


def _shifted(weight: Tensor, first: float) -> Tensor:
    return pad(weight[..., :-1], (1, 0), value=first)


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


def stepped_keys(chunks: Tokens) -> Tensor:
    """lr times the keys that tokens are written with; 0 for those that are not."""
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
    seen, mixed = q @ writes.mT, states.writes
    if mixed.shape[2] == 1:
        y = (seen * mixed.squeeze(2)) @ keys
    else:
        y = ((seen.unsqueeze(2) * mixed) @ keys.mT.unsqueeze(-1)).squeeze(-1).mT
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
        seen = chunks.phi_k if moving else None
        return Matrices(chunks.phi_q, attend, stepped, None, seen, lower, None, None)
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
_SPANS = by_hand(_PRODUCTS, lambda *gates: differentiate(lambda run, gates: run(_PRODUCTS, gates), gates, "tape"))
_RUNNING = by_hand(
    Block("running_products", _running, _running_vjp), lambda gates: (gates[..., :1] * span_products(gates)[..., 0],)
)
