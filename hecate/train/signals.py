"""SIGINT and SIGTERM: a run saves and stops."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self


class Interrupted(BaseException):
    """A signal came; no Exception, so that nothing between takes it for a fault of its own."""


class Signals:
    """Remembers the first signal for when its moment has come; a second stops at once."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._raises = False
        self._before: dict[int, Any] = {}

    def check(self) -> None:
        """Raises `Interrupted` if a signal has come."""
        if self.received is not None:
            raise Interrupted

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Around what may be left undone: a signal, past or present, ends it at once."""
        self.check()
        self._raises = True
        try:
            yield
        finally:
            self._raises = False
        self.check()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        for known, handler in self._before.items():
            signal.signal(known, handler)
        if self._raises:
            raise Interrupted

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
