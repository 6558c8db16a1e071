"""Bounds on what one case may take, by this process alone and not by the machine's load."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from numba.core import event

SECONDS, BYTES = 5.0, 64 << 20


class TooSlow(Exception):
    """A case used its seconds of CPU."""


class Compiling(event.Listener):  # type: ignore[misc]
    """Stops the clock of a case while numba compiles, once for all cases, or loads what it had compiled."""

    def __init__(self) -> None:
        self.depth, self.left = 0, 0.0

    def on_start(self, _: Any) -> None:
        if not self.depth:
            self.left = signal.setitimer(signal.ITIMER_PROF, 0)[0]
        self.depth += 1

    def on_end(self, _: Any) -> None:
        self.depth -= 1
        if not self.depth:
            signal.setitimer(signal.ITIMER_PROF, self.left)


@contextmanager
def within(seconds: float = SECONDS, allowed: int | None = BYTES) -> Iterator[None]:
    """Raises TooSlow after so many seconds of CPU, compiling apart; more memory than allowed is a MemoryError.

    The limit is on address space, so that what is asked for counts, touched or not.
    """

    def stop(*_: Any) -> None:
        raise TooSlow(f"more than {seconds:g} s of CPU")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    if allowed is not None:
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + allowed, limits[1]))
    try:
        with event.install_listener("numba:compile", Compiling()):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
