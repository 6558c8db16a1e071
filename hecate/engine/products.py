"""Products of gates over every span of a block, exact where a gate is zero."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hecate.rule.rule import one
from hecate.tape import Block, ByHand, Tensors, differentiate, execute


def span_products(gates: Tensor) -> Tensor:
    """R[t, j] = prod of gates over j < l <= t for j <= t, else 0: `[..., C]` -> `[..., C, C]`.

    Its derivative needs no division, so gates of exactly 0 get their true gradient:
    g_l = sum_(j < l) (R^T g)[l, j] R[l-1, j]. [ENG-PAR-V1]
    """
    return one(execute(_BY_HAND.block(keeps=False), gates))


def _spans(gates: Tensor) -> Tensor:
    size = gates.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=gates.device).tril(-1)
    factors = torch.where(later, gates.unsqueeze(-1), 1.0)
    return factors.cumprod(-2).tril()


def _forward(inputs: Tensors, keeps: bool) -> tuple[Tensors, Tensors]:
    spans = _spans(one(inputs))
    return (spans,), (spans,)


def _vjp(_: Tensors, record: Tensors, cotangents: Sequence[Tensor]) -> Tensors:
    spans, (g,) = one(record), cotangents
    previous = torch.nn.functional.pad(spans[..., :-1, :], (0, 0, 1, 0))
    return (((spans.mT @ g.tril()) * previous).sum(-1),)


def _plain(*inputs: Tensor | None) -> Tensors:
    """The same formula as torch operations, for derivatives of any order."""
    block = Block("span_products", lambda gates: _forward((gates,), True), lambda record, g: _vjp((), record, (g,)))
    return differentiate(lambda run, gates: run(block, gates), inputs, "tape")


def running_products(gates: Tensor) -> Tensor:
    """prod of gates over l <= t: `[..., C]` -> `[..., C]`, its derivative without division too.

    With R as above, g_l = prod_(j < l) gates (R^T g)[l].
    """
    return one(execute(_RUNNING.block(keeps=False), gates))


def _run(inputs: Tensors, keeps: bool) -> tuple[Tensors, Tensors]:
    products = one(inputs).cumprod(-1)
    return (products,), (products,)


def _run_vjp(inputs: Tensors, record: Tensors, cotangents: Sequence[Tensor]) -> Tensors:
    products, (g,) = one(record), cotangents
    earlier = torch.nn.functional.pad(products[..., :-1], (1, 0), value=1.0)
    return (earlier * (_spans(one(inputs)).mT @ g.unsqueeze(-1)).squeeze(-1),)


def _run_plain(*inputs: Tensor | None) -> Tensors:
    gates = one(inputs)
    return (gates[..., :1] * span_products(gates)[..., 0],)


_RUNNING = ByHand("running_products", _run, _run_vjp, _run_plain)
_BY_HAND = ByHand("span_products", _forward, _vjp, _plain)
