"""Output of the gym: one table, gym.csv, gym.json and a figure with a panel per task."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from hecate.compare.report import finite, label, write_results
from hecate.figure import COLOURS, GREY, finish, images
from hecate.gym.contenders import Contender
from hecate.gym.run import Result
from hecate.gym.tasks import tasks
from hecate.train.report import Table, csv_text
from hecate.train.run import versions

LEAST, MOST = 3e-4, 4.0
"""Range of errors in the figure; errors outside are drawn at its edge."""


def table(results: Sequence[Result]) -> Table:
    """Table with a row for each task and contender, the best first and flagged ones last."""
    header = ("task", "contender", "score", "chance", "verdict", "p", "default", "setting", "state size", "seconds")
    return header, [_row(result) for result in _rank(results)]


def _rank(results: Sequence[Result]) -> list[Result]:
    kinds = list(dict.fromkeys(result.task.kind for result in results))

    def rank(result: Result) -> tuple[int, bool, float]:
        sign = 1 if result.task.metric == "error" else -1
        mean = result.spread.mean
        return kinds.index(result.task.kind), bool(result.reason), math.inf if math.isnan(mean) else sign * mean

    return sorted(results, key=rank)


def _row(result: Result) -> list[str]:
    task, mean = result.task, result.spread.mean
    score = "" if math.isnan(mean) else f"{result.task.metric} {result.spread.text()}"
    default = "" if math.isnan(result.default) else f"{result.default:.3g}"
    floor = f" (floor {result.floor:.3g})" if result.floor else ""
    verdict = result.verdict + (f": {result.reason}" if result.reason else "")
    shown = (
        f"{path.split('.')[-1]} {value:g}" if isinstance(value, float) else f"{path} {value}"
        for path, value in result.setting.items()
    )
    setting = f"{', '.join(shown)} (of {result.settings})".strip() if result.scores else ""
    return [
        task.kind, result.contender, score, f"{task.chance():.3g}{floor}", verdict,
        "" if result.pair is None else f"{result.pair.adjusted:.2g}", default, setting,
        f"{result.state:,}" if result.state else "", f"{result.seconds:.2f}" if result.scores else "",
    ]  # fmt: skip


def facts(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Records of numbers for each task and contender; None for missing numbers."""
    rows = []
    for one in results:
        pair = one.pair
        row = {
            "task": one.task.kind, "metric": one.task.metric, "contender": one.contender, "verdict": one.verdict,
            "reason": one.reason, "mean": one.spread.mean, "half": one.spread.half, "seeds": len(one.scores),
            "chance": one.task.chance(), "floor": one.floor, "difference": pair and pair.difference.mean,
            "difference_half": pair and pair.difference.half, "p": pair and pair.p, "p_dunnett": pair and pair.adjusted,
            "default": one.default, "setting": json.dumps(dict(one.setting), default=str), "settings": one.settings,
            "state": one.state, "seconds": one.seconds, "scores": list(one.scores), "parts": dict(one.parts),
        }  # fmt: skip
        rows.append(finite(row))
    return rows


def write(results: Sequence[Result], out: Path) -> list[Path]:
    """Writes gym.json, gym.csv and, if matplotlib is installed, gym.png and gym.svg; returns the paths. [GYM-RUN-D1]"""
    rows, asked = facts(results), {result.task.kind: result.task for result in results}
    entries = {name: {**task.model_dump(mode="json"), "known": task.known()} for name, task in asked.items()}
    whole = {"tasks": entries, "results": rows, "versions": versions()}
    contents = {
        "gym.json": json.dumps(whole, indent=1, allow_nan=False) + "\n",
        "gym.csv": csv_text(rows, [name for name in rows[0] if name not in ("scores", "parts")]),
    }
    return write_results(out, contents, "gym", _images(results))


def _images(results: Sequence[Result]) -> dict[str, bytes]:
    """The figure: a panel for each task, contenders from top to bottom; flagged ones are grey crosses."""
    kinds = list(dict.fromkeys(one.task.kind for one in results))
    names = list(dict.fromkeys(one.contender for one in results))
    columns = min(3, len(kinds))
    rows = -(-len(kinds) // columns)

    def draw(figure: Any) -> None:
        grid = figure.subplots(rows, columns, squeeze=False, sharey=True)
        for axes, kind in zip(grid.flat, kinds, strict=False):
            _panel(axes, [one for one in results if one.task.kind == kind], names)
        for axes in grid.flat[len(kinds) :]:
            axes.set_visible(False)
        grid[0, 0].set_yticks(range(len(names)), [label(name, 40) for name in names])
        grid[0, 0].set_ylim(len(names) - 0.4, -0.6)
        figure.suptitle("dashed: chance; dotted: known scores; grey: flagged")

    return images((2.6 + 3.7 * columns, rows * (1.1 + 0.23 * len(names))), draw)


def _panel(axes: Any, results: Sequence[Result], names: Sequence[str]) -> None:
    task = results[0].task
    errors = task.metric == "error"
    for one in results:
        mean, half = one.spread
        if math.isnan(mean):
            continue
        height, half = names.index(one.contender), 0.0 if math.isnan(half) else half
        place = min(max(mean, LEAST), MOST) if errors else mean
        low = place - max(mean - half, LEAST) if errors else half
        flagged = {"fmt": "x", "color": GREY} if one.reason else {"fmt": "o", "color": COLOURS[0]}
        axes.errorbar(place, height, xerr=[[max(low, 0.0)], [half if place == mean else 0.0]], markersize=5, **flagged)
    axes.axvline(task.chance(), color=COLOURS[1], linestyle="--", linewidth=1)
    for value in task.known().values():
        axes.axvline(max(value, LEAST) if errors else value, color=COLOURS[2], linestyle=":", linewidth=1)
    limits = {"xscale": "log", "xlim": (0.8 * LEAST, 1.2 * MOST)} if errors else {"xlim": (-0.03, 1.03)}
    better = "relative error (left is better)" if errors else "accuracy (right is better)"
    finish(axes, f"{label(task.kind)}\n{fill(label(task.about, 200), 46)}", better, "", legend=False, **limits)
    axes.title.set_fontsize(9)
    axes.tick_params(labelsize=8)


def listing(known: Sequence[Contender]) -> list[Table]:
    """Tables of all tasks, with chance and known scores, and of contenders, with their number of settings and anything
    that is missing here."""
    asked = []
    for kind, family in tasks().items():
        task = family.model_validate({})
        scores = ", ".join(f"{name} {value:.3g}" for name, value in task.known().items())
        asked.append((kind, task.about, f"{task.metric}, chance {task.chance():.3g}", scores))
    rows = [[one.name, str(len(one.settings)), one.missing or "runs here"] for one in known]
    return [(("task", "stream", "metric", "known scores"), asked), (("contender", "settings", "status"), rows)]
