"""Rows as lines while they come, as tables for the README, as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.harness import NONE, Cost, Pair, Row


def line(row: Row, *, wall: bool = False) -> str:
    """One row as printed; `wall` adds the ratio by the clock."""
    parts = [f"{row.group:<11} {row.case:<46} / {row.peer:<44}"]
    for label, cost in (("f", row.forward), ("f+b", row.both)):
        if cost is not None:
            parts.append(f"{label} {cost.ours:.4g} / {cost.theirs:.4g} ms = {cost.ratio:.3f}")
            if wall and cost.wall_ratio is not None:
                parts[-1] += f" (wall {cost.wall_ratio:.3f})"
    if row.slopes != NONE:
        parts.append("slopes {:.3f}, {:.3f}".format(*row.slopes))
    if row.memory is not None:
        parts.append(f"peak {row.memory.ours:.3g} / {row.memory.theirs:.3g} MiB")
        parts[-1] += f" = {row.memory.ratio:.3f}"
    if row.error is not None:
        parts.append(f"error {row.error:.0e}")
    if row.ceiling is not None:
        parts.append(f"{row.ceiling:.0%} of matmul")
    if row.note:
        parts.append(row.note)
    return "  ".join(parts)


def speed(rows: Sequence[Row]) -> str:
    """Ratios of time, of the rows that have a floor or a goal."""
    head = ("case", "peer", "forward", "forward + backward", "floor", "goal")
    return _table(
        head,
        [
            (
                row.case,
                row.peer + (f" ({row.note})" if row.note else ""),
                _ratio(row.forward, row.slopes[0]),
                _ratio(row.both, row.slopes[1]),
                _pair(row.floor),
                _pair(row.goal),
            )
            for row in rows
            if row.memory is None and (row.floor != NONE or row.goal != NONE)
        ],
    )


def memory(rows: Sequence[Row]) -> str:
    """Time and peak memory of the tape."""
    head = ("case", "peer", "time", "floor, goal", "peak MiB", "ratio", "floor, goal")
    return _table(
        head,
        [
            (
                row.case,
                row.peer + (f" ({row.note})" if row.note else ""),
                _ratio(row.both),
                _pair((row.floor[1], row.goal[1])),
                f"{row.memory.ours:.3g} / {row.memory.theirs:.3g}",
                _ratio(row.memory),
                _pair(row.memory_goal),
            )
            for row in rows
            if row.memory is not None
        ],
    )


def record(row: Row) -> dict[str, Any]:
    """One row for JSON."""
    fields = row._asdict()
    for name in ("forward", "both", "memory"):
        cost = fields[name]
        fields[name] = cost and {
            **cost._asdict(),
            "ratio": cost.ratio,
            "wall_ratio": cost.wall_ratio,
        }
    return fields


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _ratio(cost: Cost | None, slope: float | None = None) -> str:
    value = slope if cost is None else cost.ratio
    return "-" if value is None else _number(value)


def _pair(pair: Pair) -> str:
    if pair == (None, None):
        return "-"
    return ", ".join("-" if value is None else f"{value:g}" for value in pair)


def _number(value: float) -> str:
    return f"{value:.3f}" if value < 0.1 else f"{value:.2f}"
