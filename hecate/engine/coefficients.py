"""The state of every token of a block as coefficients that depend on the gates alone.

With R[t, j] the product of retain over j < l <= t, P[j, i] that of momentum over i < l <= j, and
K = R P (all lower triangular), the state after token t of a block that begins at M_0, S_0 is

    M_t = a_t M_0 + s_t S_0 - sum_{i <= t} K[t, i] lr_i G_i

whatever the gradients G_i are. gd is the case P = I, no retention the case R = 1. Products are exact where a gate is
zero, and so are their derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hecate.rule import MemoryConfig
from hecate.rule.rule import one
from hecate.tape import Block, ByHand, Tensors, differentiate, execute


class Combined(NamedTuple):
    """A state per token as a combination: weights of the block's writes `[..., C, C]`, and of each base state (first M,
    first S, initial M, where they exist) `[..., C]`."""

    writes: Tensor
    bases: tuple[Tensor, ...]

    @property
    def last(self) -> Tensor:
        """Weights of the writes in the block's last state, `[..., C]`."""
        return self.writes[..., -1, :]

    def scaled(self, gate: Tensor) -> Combined:
        """Every state times a gate `[..., C]`."""
        return Combined(gate.unsqueeze(-1) * self.writes, tuple(gate * weight for weight in self.bases))


def coefficients(
    config: MemoryConfig, retain: Tensor, momentum: Tensor, write: Tensor | None = None, reset: Tensor | None = None
) -> tuple[Combined, Combined, Combined | None]:
    """The state after each token, before it (but after its reset), and S after it.

    Gates and masks are `[..., C]` and broadcast over the leading axes.
    """
    form = config.algorithm.kernel_form()
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
        carried = within(span_products(momentum))
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


def _since_resets(reset: Tensor | None, like: Tensor) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """What cuts `[..., t, i]` where a reset is in i < l <= t, and `[..., t]` where one is up to and at t."""
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


def _spans(gates: Tensor) -> Tensor:
    size = gates.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=gates.device).tril(-1)
    factors = torch.where(later, gates.unsqueeze(-1), 1.0)
    return factors.cumprod(-2).tril()


def _spans_forward(inputs: Tensors, keeps: bool) -> tuple[Tensors, Tensors]:
    spans = _spans(one(inputs))
    return (spans,), (spans,)


def _spans_vjp(_: Tensors, record: Tensors, cotangents: Sequence[Tensor]) -> Tensors:
    spans, (g,) = one(record), cotangents
    previous = pad(spans[..., :-1, :], (0, 0, 1, 0))
    return (((spans.mT @ g.tril()) * previous).sum(-1),)


def _spans_plain(*inputs: Tensor | None) -> Tensors:
    """The same formula as torch operations, for derivatives of any order."""
    block = Block(
        "span_products", lambda gates: _spans_forward((gates,), True), lambda record, g: _spans_vjp((), record, (g,))
    )
    return differentiate(lambda run, gates: run(block, gates), inputs, "tape")


def _running_forward(inputs: Tensors, keeps: bool) -> tuple[Tensors, Tensors]:
    products = one(inputs).cumprod(-1)
    return (products,), (products,)


def _running_vjp(inputs: Tensors, record: Tensors, cotangents: Sequence[Tensor]) -> Tensors:
    products, (g,) = one(record), cotangents
    earlier = pad(products[..., :-1], (1, 0), value=1.0)
    return (earlier * (_spans(one(inputs)).mT @ g.unsqueeze(-1)).squeeze(-1),)


def _running_plain(*inputs: Tensor | None) -> Tensors:
    gates = one(inputs)
    return (gates[..., :1] * span_products(gates)[..., 0],)


_SPANS = ByHand("span_products", _spans_forward, _spans_vjp, _spans_plain).block()
_RUNNING = ByHand("running_products", _running_forward, _running_vjp, _running_plain).block()
