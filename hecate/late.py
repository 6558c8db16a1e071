"""Looks at numbers on a device that are put off, so that the host never waits for it on the way.

What is to be looked at is copied to the host as the device comes to it. `look()` sees what has arrived, and
`look(wait=True)` waits for the rest. [ENG-FINITE-D4]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

# Numbers on their way to the host, in the order in which devices were asked; when they are there, and what to do then.
_WAITING: deque[tuple[Tensor, torch.Event | None, Callable[[Tensor], None]]] = deque()


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
    """Calls `then(value)` at a later `look`, with the value on the host; `then` may raise."""
    if value.device.type == "cpu":
        _WAITING.append((value, None, then))
        return
    if value.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return  # a graph's numbers are seen by nobody while it is recorded
    host = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=value.device.type == "cuda")
    host.copy_(value, non_blocking=True)
    arrived = torch.Event(value.device)
    arrived.record()
    _WAITING.append((host, arrived, then))


def look(*, wait: bool = False) -> None:
    """Looks at what was put off and has arrived; with `wait` at all of it."""
    if HELD and not wait:
        return
    while _WAITING:
        value, arrived, then = _WAITING[0]
        if arrived is not None and not arrived.query():
            if not wait:
                return
            arrived.synchronize()
        _WAITING.popleft()
        then(value)


def forget() -> None:
    """Drops what was put off, unseen."""
    _WAITING.clear()
