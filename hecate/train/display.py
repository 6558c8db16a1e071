"""A run and its terminal: what it shows, a live bar or plain lines, and the signals that end it."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import IO, Any, Self, cast

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column, Table
from rich.text import Text

from hecate.errors import MESSAGE, printable
from hecate.terminal import StandardError, echo, write

PLAIN = 10.0
"""Seconds between two lines of progress where there is no terminal."""
PATIENCE = 2.0
"""Seconds after which a line says there what is being done before the first step."""
FIRST = "the first step compiles kernels, or loads them where they are on disk"


class _Bar(Progress):
    """A bar, and the facts of its task in a line below."""

    def get_renderables(self) -> Iterable[RenderableType]:
        """The bar, then the facts."""
        yield self.make_tasks_table(self.tasks)
        for task in self.tasks:
            if task.visible and task.fields["facts"]:
                yield Text(printable(task.fields["facts"]), no_wrap=True, overflow="ellipsis")


class Display:
    """Progress of a run on a console: a bar on a terminal, elsewhere a line every `PLAIN` seconds; `quiet` shows
    nothing."""

    def __init__(self, console: Console | None = None, *, quiet: bool = False) -> None:
        self.console = console or Console(file=cast(IO[str], StandardError()))
        self._quiet = quiet
        self._bar = _Bar(
            TextColumn("{task.description}", style="bold", markup=False), BarColumn(), MofNCompleteColumn(),
            console=self.console, disable=quiet or not self.console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=None, visible=False, facts="")
        self._waiting = threading.Timer(0, self.say)
        self._steps = 0
        self._told = time.monotonic()

    def doing(self, what: str) -> None:
        """Says what is done before the first step: in the bar, or in a line once it has taken `PATIENCE` seconds."""
        self._waiting.cancel()
        self._bar.update(self._task, description=what, visible=True)
        if self._bar.disable and not self._quiet:
            self._waiting = threading.Timer(PATIENCE, self.say, [what])
            self._waiting.daemon = True
            self._waiting.start()

    def start(self, name: str, step: int, steps: int) -> None:
        """Begins at `step` of `steps`."""
        self._waiting.cancel()
        self._steps, self._told = steps, time.monotonic()
        self._bar.reset(
            self._task, description=printable(name, 80), total=steps, completed=step, visible=True, facts=FIRST
        )

    def step(self, step: int, facts: Callable[[], str]) -> None:
        """Moves the bar; `facts` are asked for when they are shown."""
        if not self._bar.disable:
            self._bar.update(self._task, completed=step, facts=facts())
        elif not self._quiet and time.monotonic() - self._told >= PLAIN:
            self._told = time.monotonic()
            self.say(f"step {step:>6}/{self._steps}  {facts()}")

    def say(self, text: str) -> None:
        """A line above the bar, or a plain line."""
        if not self._quiet:
            self.console.print(printable(text), markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._waiting.cancel()
        if not self._bar.disable:  # versions of rich print an empty line else
            self._bar.stop()


class Interrupted(BaseException):
    """A signal came; no Exception, so that nothing between takes it for a fault of its own."""


class Signals:
    """Remembers the first signal for when its moment has come; a second stops at once.

    Without `interrupts` nothing is cut short: for processes that have to stop at the same place.
    """

    def __init__(self, *, interrupts: bool = True) -> None:
        self._interrupts = interrupts
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
        if not self._interrupts:
            yield
            return
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

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


WRAPPED = 32
"""Columns of a terminal that a cell needs to be read in lines; where a table has fewer, its rows stand one by one."""


def print_tables(tables: Iterable[tuple[Sequence[str], Sequence[Sequence[str]]]]) -> None:
    """Tables one after the other, each with an empty line behind it."""
    for header, rows in tables:
        print_table(header, rows)
        echo("")


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """On a terminal a rich table, or its rows one by one where cells would be too narrow; aligned lines elsewhere.
    Nothing is cut."""
    first, *lines = [[printable(cell, MESSAGE) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(first, *lines, strict=True)]
    if sys.stdout is None or not sys.stdout.isatty():
        for line in (first, *lines):
            cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
            echo("  ".join(cells).rstrip())
        return
    console = Console()
    needed = sum(min(width, WRAPPED) + 3 for width in widths) + 1
    with console.capture() as drawn:
        for line in lines if needed > console.width else ():
            one = Table.grid(Column(no_wrap=True), Column(overflow="fold"), padding=(0, 2, 0, 0))
            for name, cell in zip(first[1:], line[1:], strict=True):
                if cell:
                    one.add_row(Text(f"  {name}", "dim"), Text(cell))
            console.print(Text(line[0], "bold"), one, sep="\n")
        if needed <= console.width:
            table = Table(*(Column(escape(name), overflow="fold") for name in first))
            for line in lines:
                table.add_row(*map(Text, line))
            console.print(table)
    write(drawn.get())
