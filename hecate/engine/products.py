"""Products of gates over every span of a block, exact where a gate is zero."""

from __future__ import annotations

import torch
from torch import Tensor

from hecate.rule.rule import one
from hecate.tape import Block, Tensors, differentiate


def span_products(gates: Tensor) -> Tensor:
    """R[t, j] = prod of gates over j < l <= t for j <= t, else 0: `[..., C]` -> `[..., C, C]`.

    Its derivative needs no division, so gates of exactly 0 get their true gradient:
    g_l = sum_(j < l) (R^T g)[l, j] R[l-1, j]. [ENG-PAR-V1]
    """
    return one(differentiate(lambda run, gates: run(_SPANS, gates), (gates,), "tape"))


def _spans(gates: Tensor) -> Tensor:
    size = gates.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=gates.device).tril(-1)
    factors = torch.where(later, gates.unsqueeze(-1), 1.0)
    return factors.cumprod(-2).tril()


def _forward(gates: Tensor) -> tuple[Tensors, Tensor]:
    spans = _spans(gates)
    return (spans,), spans


def _vjp(spans: Tensor, g: Tensor) -> tuple[Tensor]:
    previous = torch.nn.functional.pad(spans[..., :-1, :], (0, 0, 1, 0))
    return (((spans.mT @ g.tril()) * previous).sum(-1),)


_SPANS = Block("span_products", _forward, _vjp)
