"""The state of every token of a block as coefficients that depend on the gates alone.

With R[t, j] the product of retain over j < l <= t, P[j, i] that of momentum over i < l <= j, and
K = R P (all lower triangular), the state after token t of a block that begins at M_0, S_0 is

    M_t = a_t M_0 + s_t S_0 - sum_{i <= t} K[t, i] lr_i G_i

whatever the gradients G_i are. gd is the case P = I, no retention the case R = 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hecate.algorithm import Momentum
from hecate.engine.products import span_products
from hecate.rule import MemoryConfig


class Rows(NamedTuple):
    """A state per token as coefficients: of the block's writes `[..., C, C]`, and of each base state (first M, first S,
    initial M, where they exist) `[..., C]`."""

    writes: Tensor
    bases: tuple[Tensor, ...]

    def scaled(self, gate: Tensor) -> Rows:
        """Every row times a gate `[..., C]`."""
        return Rows(gate.unsqueeze(-1) * self.writes, tuple(gate * weight for weight in self.bases))


def coefficients(
    config: MemoryConfig, retain: Tensor, momentum: Tensor, write: Tensor | None = None, reset: Tensor | None = None
) -> tuple[Rows, Rows, Rows | None]:
    """Rows of the state after each token, before it (but after its reset), and of S after it.

    Gates and masks are `[..., C]` and broadcast over the leading axes.
    """
    shape = retain.shape
    size = shape[-1]
    segments = _segments(reset, retain)
    decays = config.retention.uses_retain
    retain = neutral(retain, write)
    ones = torch.ones(size, size, dtype=retain.dtype, device=retain.device).tril()
    spans = _within(segments, span_products(retain) if decays else ones.expand(*shape, size))
    start = _alive(segments, (retain[..., :1] if decays else 1.0) * spans[..., 0])
    writes, bases, slot_rows = spans, [start], None
    if config.algorithm.uses_momentum:
        momentum = neutral(momentum, write)
        carried = _within(segments, span_products(momentum))
        first = _alive(segments, momentum[..., :1] * carried[..., 0])
        # A masked token adds nothing of S to M.
        adds = spans if write is None else spans * write.unsqueeze(-2)
        slots, start = carried, first
        if isinstance(config.algorithm, Momentum) and config.algorithm.nesterov:
            own = torch.eye(size, dtype=retain.dtype, device=retain.device)
            slots, start = momentum.unsqueeze(-1) * carried + own, momentum * first
        writes = adds @ slots
        bases.append((adds @ start.unsqueeze(-1)).squeeze(-1))
        slot_rows = Rows(carried, (first,))
    if reset is not None:
        restarts = reset.to(retain.dtype) * (retain if decays else 1.0)
        bases.append((spans @ restarts.unsqueeze(-1)).squeeze(-1))
    after = Rows(writes, tuple(bases))

    before = [_alive(segments, _shifted(bases[0], 1.0))]
    if config.algorithm.uses_momentum:
        before.append(_alive(segments, _shifted(bases[1], 0.0)))
    if reset is not None:
        before.append(torch.where(reset, 1.0, _shifted(bases[-1], 0.0)))
    rows = _within(segments, torch.nn.functional.pad(writes[..., :-1, :], (0, 0, 1, 0)))
    return after, Rows(rows, tuple(before)), slot_rows


def _segments(reset: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor] | None:
    """Masks: [t, i] no reset in i < l <= t; [t] no reset up to and at t; None without resets."""
    if reset is None:
        return None
    count = reset.cumsum(-1)
    same = count.unsqueeze(-1) == count.unsqueeze(-2)
    return same.to(like.dtype), (count == 0).to(like.dtype)


def _within(segments: tuple[Tensor, Tensor] | None, pairs: Tensor) -> Tensor:
    return pairs if segments is None else pairs * segments[0]


def _alive(segments: tuple[Tensor, Tensor] | None, weight: Tensor) -> Tensor:
    return weight if segments is None else weight * segments[1]


def neutral(gate: Tensor, write: Tensor | None) -> Tensor:
    """A gate that is 1 at tokens that write nothing."""
    return gate if write is None else torch.where(write, gate, 1.0)


def _shifted(weight: Tensor, first: float) -> Tensor:
    return torch.nn.functional.pad(weight[..., :-1], (1, 0), value=first)


def last_row(rows: Rows) -> Tensor:
    """Coefficients of the writes in the block's last state, `[..., C]`."""
    return rows.writes[..., -1, :]
