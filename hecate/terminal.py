"""Output to a terminal: text that is safe to show, streams that fail, and every failure as one message.

Standard output may be closed, full, or a pipe whose reader has ended: that is an `OutputError`, which ends a command
that only prints, and is a mere warning after work that is done. Output that standard error cannot take is lost.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from hecate.errors import MESSAGE, HecateError, NonFiniteError, printable, shorten
from hecate.files import cure

DEBUG = "HECATE_DEBUG"
"""Environment variable that asks for tracebacks."""
FAILED, REFUSED, UNREAD = 1, 2, 128 + signal.SIGPIPE
"""Exit codes: the run itself failed, its input cannot be used, nobody reads the output."""


class OutputError(HecateError):
    """A failure to write to standard output; `unread` if the program that read it has ended."""

    def __init__(self, message: str = "", *, unread: bool = False) -> None:
        super().__init__(message)
        self.unread = unread


class StandardError:
    """Standard error, as it is at the moment, as a file; failures to write are ignored: they cannot be reported."""

    def __init__(self) -> None:
        self._stream = sys.stderr  # a live display replaces sys.stderr

    def write(self, text: str) -> int:
        """Writes a text if possible."""
        with suppress(AttributeError, OSError, ValueError):  # no stream, a full one, a closed one
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flushes the stream if possible."""
        with suppress(AttributeError, OSError, ValueError):
            self._stream.flush()

    def isatty(self) -> bool:
        """True if it is a terminal."""
        return self._stream is not None and self._stream.isatty()

    @property
    def encoding(self) -> str:
        """The encoding of the stream."""
        return getattr(self._stream, "encoding", None) or "utf-8"


def echo(text: str = "", *, err: bool = False, end: str = "\n") -> None:
    """Prints a `printable` text. Raises OutputError."""
    write(printable(text) + end, err=err)


def write(text: str, *, err: bool = False) -> None:
    """Prints a text unchanged, and flushes. Raises OutputError."""
    if err:
        StandardError().write(text)
        StandardError().flush()
    elif sys.stdout is not None:
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except (OSError, ValueError) as error:
            _abandon(sys.stdout)
            reason = getattr(error, "strerror", None) or str(error)
            unread = getattr(error, "errno", None) == errno.EPIPE
            raise OutputError(f"cannot write to standard output: {reason}", unread=unread) from None


def _abandon(stream: Any) -> None:
    """Points a stream at the null device: at exit Python would try to flush it again, and fail."""
    with suppress(AttributeError, OSError, ValueError), Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


@contextmanager
def afterwards() -> Iterator[None]:
    """Around output about work that is done: a failure to print it is only a warning."""
    try:
        yield
    except OutputError as error:
        if not error.unread:
            echo(f"warning: {error}; the work itself is done", err=True)


def prepare() -> None:
    """Prepares the standard streams of a process: closed ones are opened on the null device, so that no file opened
    later becomes one of them; characters that their encoding lacks are escaped."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free descriptor, which is this one
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def quiet_interrupts() -> None:
    """Suppresses the traceback of Ctrl-C from here on: while modules are imported, while an earlier Ctrl-C is handled,
    and while Python exits. The process still ends by the signal."""
    on_error, on_ignored = sys.excepthook, sys.unraisablehook

    def of_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            on_error(kind, error, trace)

    def of_ignored(event: sys.UnraisableHookArgs) -> None:
        if not issubclass(event.exc_type, KeyboardInterrupt):
            on_ignored(event)

    sys.excepthook, sys.unraisablehook = of_error, of_ignored


def finish() -> None:
    """Flushes the streams at the end of a process, and abandons those that fail: Python would exit with 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            _abandon(stream)


def report(error: BaseException) -> int:
    """Prints a failure as one message on standard error; returns the exit code."""
    unread = isinstance(error, OutputError) and error.unread
    if unread or (isinstance(error, OSError) and error.errno == errno.EPIPE and error.filename is None):
        _abandon(sys.stdout)
        return UNREAD
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    echo(f"error: {message_of(error)}", err=True)
    refused = isinstance(error, HecateError | OSError | MemoryError | UnicodeError | RecursionError)
    return REFUSED if refused and not isinstance(error, NonFiniteError) else FAILED


def message_of(error: BaseException) -> str:
    """The message for a failure, with a remedy where one is known."""
    said = "; ".join([str(error), *getattr(error, "__notes__", ())])
    kind, text = type(error).__name__, printable(" ".join(said.split()), MESSAGE // 4)
    if isinstance(error, HecateError):
        return str(error)
    if isinstance(error, OSError):
        help_ = f"; {cure(error)}" if cure(error) else ""
        what = "" if error.filename is None else f"cannot use {shorten(str(error.filename))}: "
        return f"{what}{error.strerror or text or kind}{help_}"
    if isinstance(error, MemoryError) or kind == "OutOfMemoryError" or "can't allocate memory" in text:
        return f"there is not enough memory for this{f' ({text})' if text else ''}; give less at once, or smaller sizes"
    if isinstance(error, RecursionError):
        return "something here is nested too deeply to be read; give it with fewer levels"
    if isinstance(error, UnicodeError):
        return f"a text has characters that cannot be used here ({text}); give it in UTF-8"
    return f"{kind}: {text}; nothing here expects this: {DEBUG}=1 shows where it comes from, and a report is welcome"
