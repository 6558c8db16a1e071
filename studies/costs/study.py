"""A group of comparisons as a study: ratios ours / peer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch

from hecate.figure import COLOURS, GREY, finish, one_legend
from studies.costs.harness import Row, Size
from studies.study import Cell, Progress, Result, Study

COLUMNS = ("case", "peer", "forward", "f + b", "peak memory", "error", "note")
NOTES = (
    "ratios are ours / peer in process CPU time (peak memory: in bytes), medians of interleaved runs: forward, and "
    "forward with backward (f + b)",
    "results agree within the printed error, or the row compares two functions and prints none",
)


class Costs(Study, abstract=True):
    """One pass in float32, on inputs of its own: the seeds given change nothing."""

    count: ClassVar[int] = 1
    timed: ClassVar[bool] = True
    cases: ClassVar[Callable[[Size], Iterator[Row]]]  # the comparisons, one by one

    def run(self, quick: bool, seeds: Sequence[int], progress: Progress) -> Result:
        size = Size(64, 1, quick=True) if quick else Size()
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        torch.set_flush_denormal(True)  # a decayed state drifts into them, on either side
        try:
            rows = [row for _ in progress([self.name], "cases") for row in type(self).cases(size)]
        finally:
            torch.set_flush_denormal(False)
            torch.set_default_dtype(before)
        return Result(
            COLUMNS,
            [cells(row) for row in rows],
            (*NOTES, f"{torch.get_num_threads()} thread(s)"),
            lambda figure: draw(figure, rows),
            size=(9.0, 1.6 + 0.28 * len(rows)),
            data={"rows": [record(row) for row in rows]},
        )


def group(name: str, cases: Callable[[Size], Iterator[Row]]) -> type[Costs]:
    """A study `cost-NAME` of the rows that `cases` yields; its question is their docstring's."""
    about = (cases.__doc__ or "").partition("\n")[0]
    return type(f"Cost_{name}", (Costs,), {"name": f"cost-{name}", "about": about, "cases": staticmethod(cases)})


def cells(row: Row) -> tuple[Cell, ...]:
    """A row of the table."""
    times = [None if cost is None else cost.ratio for cost in (row.forward, row.both)]
    memory = None if row.memory is None else row.memory.ratio
    error = None if row.error is None else f"{row.error:.0e}"
    return row.case, row.peer, *times, memory, error, row.note or None


def record(row: Row) -> dict[str, Any]:
    """A row with its times and sizes."""
    fields = row._asdict()
    for name in ("forward", "both", "memory"):
        cost = fields[name]
        if cost is not None:
            fields[name] = {**cost._asdict(), "ratio": cost.ratio}
    return fields


def draw(figure: Any, rows: Sequence[Row]) -> None:
    """A bar per ratio."""
    axes = figure.subplots()
    for index, name in enumerate(("forward", "both")):
        if not any(getattr(row, name) for row in rows):
            continue
        found = [(at, getattr(row, name)) for at, row in enumerate(rows) if getattr(row, name)]
        places = [at + 0.4 * index - 0.2 for at, _ in found]
        label = "forward" if index == 0 else "forward + backward"
        ratios = [cost.ratio for _, cost in found]
        axes.barh(places, ratios, 0.38, color=COLOURS[index], label=label)
    axes.set_yticks(range(len(rows)), [f"{row.case} / {row.peer}" for row in rows], fontsize=7)
    axes.invert_yaxis()
    axes.axvline(1.0, color=GREY, linewidth=1)
    finish(axes, "ours / peer, less is better", "ratio", "", legend=False, xscale="log")
    one_legend(figure, axes, 2)
