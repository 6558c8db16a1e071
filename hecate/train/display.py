"""A run's terminal output: speed, time left, memory, a live bar or plain lines, tables; and the signals that end it."""

from __future__ import annotations

import math
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import IO, Any, NamedTuple, Self, cast

import torch
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Column, Table
from rich.text import Text

from hecate.checks import readable
from hecate.distributed import World
from hecate.errors import MESSAGE, printable
from hecate.terminal import StandardError, echo, write
from hecate.train.config import ExperimentConfig
from hecate.train.estimate import sizes_of
from hecate.train.evaluate import Score

PASSES = 6
"""Operations of a training step per token and weight: a multiplication and an addition, once in the forward pass and
twice in the backward pass."""
PEAKS = {
    "B200": (2250.0, 80.0), "B100": (1750.0, 60.0), "GH200": (989.0, 67.0), "H200": (989.0, 67.0),
    "H100 PCIe": (756.0, 51.0), "H100 NVL": (835.0, 60.0), "H100": (989.0, 67.0), "H800": (989.0, 67.0),
    "A100": (312.0, 19.5),
    "A800": (312.0, 19.5), "L40S": (362.0, 91.6), "L40": (181.0, 90.5), "L4": (121.0, 30.3), "A40": (149.7, 37.4),
    "A30": (165.0, 10.3), "A10": (125.0, 31.2), "RTX 6000 Ada": (364.0, 91.1), "RTX A6000": (154.8, 38.7),
    "RTX 4090": (165.2, 82.6), "RTX 3090": (71.0, 35.6),
}  # fmt: skip
"""Dense TFLOP/s of GPUs in bfloat16 and in float32 (without TF32), by a part of their names, from the data sheets."""


def peak_flops(name: str, precision: str) -> float | None:
    """Peak operations per second of a GPU of this name; None if not known."""
    if re.search(r"\b(MIG|Laptop|Max-Q)\b", name):  # a slice of a GPU, or a slower version
        return None
    # The first match counts: in the table longer names, as of the H100, come first.
    rates = next((peaks for words, peaks in PEAKS.items() if re.search(rf"\b{words}\b", name)), None)
    return None if rates is None else rates[precision == "float32"] * 1e12


def peak_memory(device: torch.device) -> int:
    """Peak memory of this process in bytes: of tensors on a GPU, else of the whole process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


WARMING = 20
"""Number of first steps of a process in which kernels may still be compiled or loaded."""


class _Mark(NamedTuple):
    """Progress of a process: seconds since it began; steps, tokens, and seconds spent computing them; duration of the
    latest step."""

    at: float = 0.0
    steps: int = 0
    tokens: int = 0
    computing: float = 0.0
    latest: float = 0.0


class Progress:
    """Counts of a run, which continue after a resume, and rates of this process. [TRAIN-RUN-D8]

    `elapsed` and `tokens` are totals of the run so far: seconds of running, tokens trained on. Rates leave out the
    first step, and the following ones, at most `WARMING`, up to the first that takes at most twice as long as the
    quickest. `metric` is the metric of the scores; the loss is shown in its unit.
    """

    def __init__(self, config: ExperimentConfig, world: World, metric: str = "accuracy") -> None:
        self._config, self._world, self._metric = config, world, metric
        self._began = time.monotonic()
        self._before = 0.0
        self.tokens = self.step = 0
        self._now = _Mark()  # progress of this process
        self._marks: list[_Mark] = []
        self._quickest = math.inf
        self._mean = self._size = 0.0
        self._flops = self._peak()

    def go_on(self, step: int, last: dict[str, Any]) -> None:
        """Continues from a step, with the totals in the run's last record, which may lack time and tokens."""
        whole = step * self._config.budget.batch_size * self._config.seq_len
        tokens, elapsed = last.get("tokens", math.nan), last.get("elapsed", math.nan)
        self.step, self.tokens = step, int(tokens) if 0 <= tokens < math.inf else whole
        self._before = elapsed if 0 <= elapsed < math.inf else 0.0

    def clock(self) -> dict[str, float]:
        """Seconds since 1970, and seconds that the run has taken so far."""
        return {"time": round(time.time(), 3), "elapsed": round(self._before + time.monotonic() - self._began, 3)}

    def take(self, loss: float, tokens: int, seconds: float, bytes_per_label: float = 1.0) -> dict[str, Any]:
        """Counts a step, with its loss in nats; returns the facts for its record: tokens, speed, memory."""
        self.step, self.tokens = self.step + 1, self.tokens + tokens
        now, took = self._now, time.monotonic() - self._began
        # The first step does not count, as it compiles.
        if now.steps:
            self._quickest = min(self._quickest, seconds)
        self._now = _Mark(took, now.steps + 1, now.tokens + tokens, now.computing + seconds, seconds)
        if now.steps < WARMING:
            self._marks.append(self._now)
        # Moving averages that start at 0, divided by 1 - .95^n when shown.
        self._mean = 0.95 * self._mean + 0.05 * loss
        self._size = 0.95 * self._size + 0.05 * bytes_per_label
        speed = tokens / max(seconds, 1e-9)
        facts = {"tokens": self.tokens, "tokens_per_second": speed, "peak_memory": peak_memory(self._world.device)}
        return facts if self._flops is None else {**facts, "mfu": speed * self._flops}

    def line(self, grad_norm: float) -> str:
        """The state of the run in one line: loss averaged over about 20 steps, speed averaged over the run."""
        start, speed = self._rates_start(), []
        if start is not None:
            tokens = self._now.tokens - start.tokens
            computing = tokens / max(self._now.computing - start.computing, 1e-9)
            whole = tokens / max(time.monotonic() - self._began - start.at, 1e-9)
            speed = [f"{computing:,.0f} tokens/s ({whole:,.0f} of the run)"]
        memory = readable(peak_memory(self._world.device))
        parts = [self._loss(), f"{counted(self.tokens)} tokens", *speed, f"norm {grad_norm:.2g}", memory]
        if self._flops is not None and start is not None:
            parts.append(f"MFU {computing * self._flops:.0%}")
        return "  ".join([*parts, f"ETA {duration(self.seconds_left())}"])

    def _loss(self) -> str:
        """The averaged loss, in the unit of the scores."""
        weight = 1 - 0.95**self._now.steps
        if not weight:
            return "loss -"
        score = Score(self._mean / weight, 0.0, 0, self._size / weight)
        if self._metric == "perplexity":
            return f"perplexity {score.value(self._metric):.3f}"
        bits = self._metric == "bits_per_byte"
        return f"loss {score.value(self._metric):.3f} bits per byte" if bits else f"loss {score.loss:.3f} nats"

    def _rates_start(self) -> _Mark | None:
        """The mark from which rates are measured; None while warming up."""
        count = len(self._marks)
        # Later steps may compile for new shapes: the first quick one ends the warm-up.
        warm = next((n for n in range(1, count) if self._marks[n].latest <= 2 * self._quickest), count)
        return self._marks[warm - 1] if 0 < warm < self._now.steps else None

    def seconds_left(self) -> float:
        """Estimated seconds to the end, including evaluations and checkpoints."""
        budget, took, start = self._config.budget, time.monotonic() - self._began, self._rates_start()
        seconds = math.inf
        if start is not None:
            # Wall time, which includes evaluations and checkpoints.
            seconds = (budget.steps - self.step) * (took - start.at) / (self._now.steps - start.steps)
        return seconds if budget.minutes is None else max(min(seconds, 60 * budget.minutes - took), 0.0)

    def _peak(self) -> float | None:
        """Share of the peak of all processes' GPUs that one token per second uses; None if the peak is not known."""
        device = self._world.device
        if device.type != "cuda":
            return None
        peak = peak_flops(torch.cuda.get_device_name(device), self._config.budget.precision)
        return None if peak is None else PASSES * sizes_of(self._config).work / (peak * self._world.size)


def counted(number: float) -> str:
    """A number in short, such as `12.3M` for 12,345,678."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}" if number < 999.5 * size else f"{number / size:.0f}{unit}"
    return f"{number:.0f}"


def duration(seconds: float) -> str:
    """Seconds as `H:MM:SS`, with days in front if there are any; "-" for what no clock would show."""
    return str(timedelta(seconds=int(seconds))) if seconds < 1e13 else "-"


PLAIN = 10.0
"""Seconds between two lines of progress if there is no terminal."""
PATIENCE = 2.0
"""Seconds after which, without a terminal, a line says what is being done before the first step."""
FIRST = "the first step compiles kernels, or loads them where they are on disk"


class _Bar(Bar):
    """A bar with the facts of its task in a line below."""

    def get_renderables(self) -> Iterable[RenderableType]:
        """The renderables: the bar, then the facts."""
        yield self.make_tasks_table(self.tasks)
        for task in self.tasks:
            if task.visible and task.fields["facts"]:
                yield Text(printable(task.fields["facts"]), no_wrap=True, overflow="ellipsis")


class Display:
    """Display of a run's progress: a bar on a terminal, else a line every `PLAIN` seconds; nothing if `quiet`."""

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
        """Shows what is being done before the first step: in the bar, or in a line after `PATIENCE` seconds."""
        self._waiting.cancel()
        self._bar.update(self._task, description=what, visible=True)
        if self._bar.disable and not self._quiet:
            self._waiting = threading.Timer(PATIENCE, self.say, [what])
            self._waiting.daemon = True
            self._waiting.start()

    def start(self, name: str, step: int, steps: int) -> None:
        """Begins the display of a run at `step` of `steps`."""
        self._waiting.cancel()
        self._steps, self._told = steps, time.monotonic()
        self._bar.reset(
            self._task, description=printable(name, 80), total=steps, completed=step, visible=True, facts=FIRST
        )

    def step(self, step: int, facts: Callable[[], str]) -> None:
        """Moves the bar; `facts` is only called when they are shown."""
        if not self._bar.disable:
            self._bar.update(self._task, completed=step, facts=facts())
        elif not self._quiet and time.monotonic() - self._told >= PLAIN:
            self._told = time.monotonic()
            self.say(f"step {step:>6}/{self._steps}  {facts()}")

    def say(self, text: str) -> None:
        """Prints a line, above the bar if there is one."""
        if not self._quiet:
            self.console.print(printable(text), markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._waiting.cancel()
        if not self._bar.disable:  # otherwise some versions of rich print an empty line
            self._bar.stop()


class Interrupted(BaseException):
    """A signal arrived; not an Exception, so that `except Exception` does not catch it."""


class Signals:
    """Context that records the first SIGINT or SIGTERM until the run checks for it; a second acts as usual.

    Without `interrupts` nothing is cut short, for processes that have to stop at the same step.
    """

    def __init__(self, *, interrupts: bool = True) -> None:
        self._interrupts = interrupts
        self.received: int | None = None
        self._raises = False
        self._before: dict[int, Any] = {}

    def check(self) -> None:
        """Raises `Interrupted` if a signal has arrived that may cut work short."""
        if self._interrupts and self.received is not None:
            raise Interrupted

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Around work that may be abandoned: a signal, earlier or during it, raises `Interrupted` at once."""
        self.check()
        self._raises = self._interrupts
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
        self.__exit__()  # a second signal gets the original handler
        if self._raises:
            raise Interrupted

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


WRAPPED = 32
"""Columns to which a cell may be wrapped; if a terminal is too narrow for that, rows are printed one by one."""


def print_tables(tables: Iterable[tuple[Sequence[str], Sequence[Sequence[str]]]]) -> None:
    """Prints tables, with an empty line after each."""
    for header, rows in tables:
        print_table(header, rows)
        echo("")


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table: on a terminal by rich, or row by row if cells would be too narrow; else as aligned columns.
    Nothing is truncated."""
    first, *lines = [[printable(cell, MESSAGE) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(first, *lines, strict=True)]
    # Files and pipes get plain columns, for other programs to split.
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
