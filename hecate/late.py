"""Looks at numbers on a device that are put off, so that the host never waits for it on the way.

What is to be looked at is copied to the host as the device comes to it. `look()` sees what has arrived, and
`look(wait=True)` waits for the rest. [ENG-FINITE-D4]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# Numbers on their way to the host, in the order in which devices were asked; when they are there, what to do then, and
# where they come from.
_WAITING: deque[tuple[Tensor, torch.Event | None, Callable[[Tensor], None], torch.device]] = deque()
# Places on the host, with their events, that were looked at: to pin memory anew costs more than all else here.
_FREE: dict[Any, list[tuple[Tensor, torch.Event]]] = {}
MOST = 64  # of one shape


HELD: list[None] = []  # not empty while looks are held back


@contextmanager
def holding() -> Iterator[None]:
    """Within it nothing raises before a `look` that waits, on no device: for processes that have to keep step, which
    one that leaves in the middle of a pass would leave waiting."""
    HELD.append(None)
    try:
        yield
    finally:
        HELD.pop()


def put_off(value: Tensor, then: Callable[[Tensor], None]) -> None:
    """Calls `then(value)` at a later `look`, with the value on the host, for as long as `then` runs; it may raise."""
    if value.device.type == "cpu":
        _WAITING.append((value, None, then, value.device))
        return
    if value.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return  # a graph's numbers are seen by nobody while it is recorded
    like = value.shape, value.dtype, value.device
    if free := _FREE.get(like):
        host, arrived = free.pop()
    else:
        with torch.inference_mode(False):  # outside of which it may be written to again
            host = torch.empty(like[0], dtype=like[1], device="cpu", pin_memory=value.device.type == "cuda")
        arrived = torch.Event(value.device)
    host.copy_(value, non_blocking=True)
    arrived.record()
    _WAITING.append((host, arrived, then, value.device))


def look(*, wait: bool = False) -> None:
    """Looks at what was put off and has arrived; with `wait` at all of it."""
    if HELD and not wait:
        return
    while _WAITING:
        value, arrived, then, device = _WAITING[0]
        if arrived is not None and not arrived.query():
            if not wait:
                return
            arrived.synchronize()
        _WAITING.popleft()
        then(value)
        if arrived is not None:
            free = _FREE.setdefault((value.shape, value.dtype, device), [])
            free[MOST:] = ()
            free.append((value, arrived))


def forget() -> None:
    """Drops what was put off, unseen."""
    _WAITING.clear()
