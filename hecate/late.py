"""Deferred checks of numbers on a device, so that the host does not wait for it.

Numbers are copied to the host asynchronously. `look()` calls the checks of those that have arrived, and
`look(wait=True)` waits for all. [ENG-FINITE-D4]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# Copies on their way to the host, oldest first: the tensor on the host, the event that marks its arrival, the function
# to call with it, and the device that it comes from.
_WAITING: deque[tuple[Tensor, torch.Event | None, Callable[[Tensor], None], torch.device]] = deque()
# Host tensors and their events for reuse: pinning new memory costs more than everything else here.
_FREE: dict[Any, list[tuple[Tensor, torch.Event]]] = {}
MOST = 64  # kept for each shape, dtype and device


HELD: list[None] = []  # one entry for every `holding` that is active


@contextmanager
def holding() -> Iterator[None]:
    """Context in which only `look(wait=True)` runs deferred checks, on any device: for processes that have to keep
    step, as one that raised in the middle of a pass would leave the others waiting."""
    HELD.append(None)
    try:
        yield
    finally:
        HELD.pop()


def put_off(value: Tensor, then: Callable[[Tensor], None]) -> None:
    """Calls `then(value)` at a later `look`, with the value on the host; `then` may raise, and must not keep the value,
    whose memory is reused."""
    if value.device.type == "cpu":
        _WAITING.append((value, None, then, value.device))
        return
    if value.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return  # while a graph is recorded there are no numbers to check
    like = value.shape, value.dtype, value.device
    if free := _FREE.get(like):
        host, arrived = free.pop()
    else:
        with torch.inference_mode(False):  # an inference tensor could not be written to outside of inference mode
            host = torch.empty(like[0], dtype=like[1], device="cpu", pin_memory=value.device.type == "cuda")
        arrived = torch.Event(value.device)
    host.copy_(value, non_blocking=True)
    arrived.record()
    _WAITING.append((host, arrived, then, value.device))


def look(*, wait: bool = False) -> None:
    """Runs the deferred checks whose numbers have arrived; with `wait` all of them."""
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
    """Drops all deferred checks."""
    _WAITING.clear()
