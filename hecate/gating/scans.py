"""Scans of what a gating carries from token to token, with masks and resets: the value before, sums and maxima."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hecate.gating.base import Masks


def latest(values: Tensor, state: Tensor, masks: Masks) -> tuple[Tensor, Tensor]:
    """The value `[B, T, ...]` of the last token written before each one, and the value `[B, ...]` after the last token;
    `state` before the first write, and zero after a reset."""
    batch, length = values.shape[:2]
    if not length:
        return values, state
    if masks.write is None and masks.reset is None:
        earlier = torch.cat([state.unsqueeze(1).to(values.dtype), values[:, :-1]], 1)
        return earlier, values[:, -1]
    # Places: 0 for `state`, 1 for the zero after a reset, t + 2 for token t.
    steps = torch.arange(length, device=values.device)
    marks = torch.zeros(batch, length, 2, dtype=torch.int64, device=values.device)
    if masks.reset is not None:
        marks[..., 0] = torch.where(masks.reset, 2 * steps + 1, 0)
    written = torch.ones(batch, length, dtype=torch.bool, device=values.device) if masks.write is None else masks.write
    marks[..., 1] = torch.where(written, 2 * steps + 2, 0)
    newest = marks.flatten(1).cummax(1).values.unflatten(1, (length, 2))
    places = torch.where(newest % 2 == 1, 1, torch.where(newest == 0, 0, newest // 2 + 1))
    before, after = places[..., 0], places[:, -1, 1]

    start = torch.stack([state.to(values.dtype), torch.zeros_like(state, dtype=values.dtype)], 1)
    table, rows = torch.cat([start, values], 1), torch.arange(batch, device=values.device)
    return table[rows.unsqueeze(1), before], table[rows, after]


Join = Callable[..., Tensor]


def running(decay: Tensor, added: Tensor, state: Tensor, masks: Masks) -> Tensor:
    """s_t = decay_t s_{t-1} + added_t, `[B, T, ...]`, from `state`: an unwritten token leaves it, a reset makes it 0.

    A doubling scan: log2(T) passes over the sequence.
    """
    return _doubling_scan(decay, added, state, masks, lambda a, b, later: b * later + a, torch.mul, 1.0, 0.0)


def running_max(fall: Tensor, added: Tensor, state: Tensor, masks: Masks) -> Tensor:
    """m_t = max(m_{t-1} + fall_t, added_t), `[B, T, ...]`, from `state`; masks as in `running`."""

    def join(a: Tensor, b: Tensor, later: Tensor) -> Tensor:
        return torch.maximum(a, b + later)

    return _doubling_scan(fall, added, state, masks, join, torch.add, 0.0, -torch.inf)


def _doubling_scan(
    gate: Tensor, added: Tensor, state: Tensor, masks: Masks, join: Join, chain: Join, one: float, none: float
) -> Tensor:
    wide = [1] * (added.dim() - 2)
    if masks.write is not None:
        write = masks.write.reshape(*masks.write.shape, *wide)
        gate, added = torch.where(write, gate, one), torch.where(write, added, none)
    if masks.reset is not None:
        reset = masks.reset.reshape(*masks.reset.shape, *wide)
        # A reset leaves 0, which then goes through the token's own gate.
        fresh = join(added, torch.zeros_like(added), gate.expand_as(added))
        gate, added = torch.where(reset, none if one == 0.0 else 0.0, gate), torch.where(reset, fresh, added)
    gate = gate.expand_as(added)
    step, length = 1, added.shape[1]
    while step < length:
        head = added[:, :step], gate[:, :step]
        added = torch.cat([head[0], join(added[:, step:], added[:, :-step], gate[:, step:])], 1)
        gate = torch.cat([head[1], chain(gate[:, step:], gate[:, :-step])], 1)
        step *= 2
    return join(added, state.unsqueeze(1).to(added.dtype), gate)
