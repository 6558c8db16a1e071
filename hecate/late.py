"""Looks at numbers on a device that are put off, so that the host never waits for it on the way.

What is to be looked at is copied to the host as the device comes to it. `look()` sees what has arrived, and
`look(wait=True)` waits for the rest. [ENG-FINITE-D4]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class _Look(NamedTuple):
    """A number on its way to the host, when it is there, and what to do with it."""

    value: Tensor
    arrived: torch.Event | None
    then: Callable[[Tensor], None]


_WAITING: deque[_Look] = deque()  # in the order in which devices were asked


def put_off(value: Tensor, then: Callable[[Tensor], None]) -> None:
    """Calls `then(value)` at a later `look`, with the value on the host; `then` may raise."""
    if value.device.type == "cpu":
        _WAITING.append(_Look(value, None, then))
        return
    if value.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return  # a graph's numbers are seen by nobody while it is recorded
    host = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=value.device.type == "cuda")
    host.copy_(value, non_blocking=True)
    arrived = torch.Event(value.device)
    arrived.record()
    _WAITING.append(_Look(host, arrived, then))


def look(*, wait: bool = False) -> None:
    """Looks at what was put off and has arrived; with `wait` at all of it."""
    while _WAITING:
        arrived = _WAITING[0].arrived
        if arrived is not None and not arrived.query():
            if not wait:
                return
            arrived.synchronize()
        found = _WAITING.popleft()
        found.then(found.value)
