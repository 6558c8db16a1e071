"""What a run shows: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text


class Display:
    """Progress of a run on a console; `quiet` shows nothing."""

    def __init__(self, console: Console | None = None, *, quiet: bool = False) -> None:
        self.console = console or Console(stderr=True)
        self._quiet = quiet
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        if self.console.is_terminal and not quiet:
            self._bar = Progress(
                TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn(),
                TextColumn("{task.fields[facts]}"), TimeRemainingColumn(), console=self.console,
            )  # fmt: skip

    def start(self, name: str, step: int, steps: int) -> None:
        """Begins at `step` of `steps`."""
        if self._bar is not None:
            self._task = self._bar.add_task(name, total=steps, completed=step, facts="")

    def step(self, step: int, facts: str) -> None:
        """Moves the bar."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step, facts=facts)

    def say(self, text: str) -> None:
        """A line above the bar, or a plain line."""
        if not self._quiet:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A rich table on standard output if that is a terminal, aligned lines elsewhere."""
    if not sys.stdout.isatty():
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        for row in (header, *rows):
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            print("  ".join(cells).rstrip())
        return
    table = Table(*header)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)
