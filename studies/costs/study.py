"""A group of comparisons as a study: ratios ours / peer, floors and goals beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch

from hecate.figure import COLOURS, GREY, INK, finish, one_legend
from studies.costs.harness import NONE, Pair, Row, Size, matmul_gflops
from studies.study import Cell, Progress, Result, Study

COLUMNS = (
    "case", "peer", "forward", "f + b", "floor", "goal", "peak memory", "error", "note",
)  # fmt: skip
NOTES = (
    "ratios are ours / peer in process CPU time (peak memory: in bytes), medians of interleaved "
    "runs; floor: what a rough prototype reached, goal: where we want to be: forward, forward with "
    "backward (f + b)",
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
        threads = f"{torch.get_num_threads()} thread(s)"
        return Result(
            COLUMNS,
            [cells(row) for row in rows],
            (*NOTES, f"one matrix product: {matmul_gflops():.0f} GFLOP/s on {threads}"),
            lambda figure: draw(figure, rows),
            size=(9.0, 1.6 + 0.28 * len(rows)),
            data={"matmul_gflops": matmul_gflops(), "rows": [record(row) for row in rows]},
        )


def group(name: str, cases: Callable[[Size], Iterator[Row]]) -> type[Costs]:
    """A study `cost-NAME` of the rows that `cases` yields; its question is their docstring's."""
    about = (cases.__doc__ or "").partition("\n")[0]
    return type(f"Cost_{name}", (Costs,), {"name": f"cost-{name}", "about": about, "cases": staticmethod(cases)})


def cells(row: Row) -> tuple[Cell, ...]:
    """A row of the table."""
    times = [None if cost is None else cost.ratio for cost in (row.forward, row.both)]
    note = row.note if row.ceiling is None else f"{row.ceiling:.0%} of matmul {row.note}".strip()
    memory = None if row.memory is None else row.memory.ratio
    limits = [_pair(row.floor), _pair(row.goal)]
    error = None if row.error is None else f"{row.error:.0e}"
    return row.case, row.peer, *times, *limits, memory, error, note or None


def record(row: Row) -> dict[str, Any]:
    """A row with its times, sizes and ratios by the clock."""
    fields = row._asdict()
    for name in ("forward", "both", "memory"):
        cost = fields[name]
        if cost is not None:
            ratios = {"ratio": cost.ratio, "wall_ratio": cost.wall_ratio}
            fields[name] = {**cost._asdict(), **ratios}
    return fields


def draw(figure: Any, rows: Sequence[Row]) -> None:
    """A bar per ratio, its floor (|) and goal (o) on it."""
    axes = figure.subplots()
    for index, name in enumerate(("forward", "both")):
        if not any(getattr(row, name) for row in rows):
            continue
        found = [(at, getattr(row, name), row) for at, row in enumerate(rows) if getattr(row, name)]
        places = [at + 0.4 * index - 0.2 for at, _, _ in found]
        label = "forward" if index == 0 else "forward + backward"
        ratios = [cost.ratio for _, cost, _ in found]
        axes.barh(places, ratios, 0.38, color=COLOURS[index], label=label)
        for place, (_, _, row) in zip(places, found, strict=True):
            for limit, marker in ((row.floor[index], "|"), (row.goal[index], "o")):
                if limit is not None:
                    axes.plot(limit, place, marker, color=INK, markersize=5, fillstyle="none")
    axes.set_yticks(range(len(rows)), [f"{row.case} / {row.peer}" for row in rows], fontsize=7)
    axes.invert_yaxis()
    axes.axvline(1.0, color=GREY, linewidth=1)
    title = "ours / peer, less is better; | floor, o goal"
    finish(axes, title, "ratio", "", legend=False, xscale="log")
    one_legend(figure, axes, 2)


def _pair(pair: Pair) -> str | None:
    if pair == NONE:
        return None
    return ", ".join("-" if value is None else f"{value:g}" for value in pair)
