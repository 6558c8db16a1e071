"""Bounds of time that other work on the machine, and in the process, does not touch."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Holds a block to seconds of this thread's CPU, without collections of all that a session has made."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        began = time.thread_time()
        yield
        assert (took := time.thread_time() - began) < seconds, f"{took:.2f} s"
    finally:
        if was_on:
            gc.enable()
