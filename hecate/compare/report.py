"""Output of a comparison: tables, runs.csv, cells.csv, pairs.csv, comparison.json and a figure."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hecate.checks import readable
from hecate.compare.run import Comparison
from hecate.compare.statistics import Interval, interval
from hecate.errors import printable
from hecate.figure import COLOURS, DASHES, GREY, finish, images, one_legend, write_images
from hecate.files import make_folder, refusing, write_file
from hecate.train.display import counted
from hecate.train.report import Table, csv_text
from hecate.train.run import versions


def of_plan(rows: Sequence[tuple[str, int, int, float]]) -> tuple[Table, float]:
    """The table of a plan, and its total hours."""
    texts = [[name, str(runs), f"{steps:,}", f"{hours:.2f}"] for name, runs, steps, hours in rows]
    return (("cell", "runs", "steps", "hours"), texts), sum(hours for *_, hours in rows)


def tables(comparison: Comparison) -> list[Table]:
    """Tables of cells, from the lowest loss to the highest, and of the verdict on every pair."""
    cells = [
        [
            fact["cell"], Interval(fact["loss"], fact["loss_half"]).text(), fact["shown"], f"{fact['lr']:g}",
            f"{fact['seeds']}" + (f" ({fact['diverged']} diverged)" if fact["diverged"] else ""),
            f"{fact['steps']:,}", counted(fact["tokens_per_second"]), f"{fact['seconds']:,.0f}",
            f"{fact['parameters']:,}", readable(fact["state_bytes"]), f"{fact['flops']:.2g}",
        ]
        for fact in cell_facts(comparison)
    ]  # fmt: skip
    header = [
        "cell", "loss (nats)", "metric", "lr", "seeds", "steps", "tokens/s", "seconds", "parameters", "state", "FLOP",
    ]  # fmt: skip
    verdicts = [
        [pair.first, pair.verdict, pair.second, pair.difference.text(), f"{pair.p:.3g}", f"{pair.adjusted:.3g}"]
        for pair in comparison.pairs
    ]
    return [(header, cells), (["cell", "is", "than", "difference", "p", "p (Holm)"], verdicts)]


def cell_facts(comparison: Comparison) -> list[dict[str, Any]]:
    """Records of cells, by their loss: means and half widths of 95 % t intervals over seeds; costs are medians."""
    facts = []
    for cell in comparison.cells:
        rows = comparison.of(cell.label)
        loss = interval([row["loss"] for row in rows])
        finished = [row for row in rows if row["status"] == "finished"]
        shown = "-"
        if finished:
            metric = finished[0]["metric"]
            shown = f"{statistics.fmean(row[metric] for row in finished):.4f} {metric.replace('_', ' ')}"
        same = {name: rows[0][name] for name in ("lr", "steps", "tokens", "parameters", "state_bytes", "flops")}
        costs = {
            name: statistics.median(row[name] for row in finished) if finished else math.nan
            for name in ("tokens_per_second", "seconds")
        }
        facts.append({
            "cell": cell.label, "loss": loss.mean, "loss_half": loss.half, "shown": shown, "seeds": len(rows),
            "diverged": len(rows) - len(finished), **same, **costs,
        })  # fmt: skip
    return sorted(facts, key=lambda fact: fact["loss"])


def write(comparison: Comparison, out: Path) -> list[Path]:
    """Writes all files, the figure only if matplotlib is installed; returns their paths. [COMPARE-REPORT-D1]"""
    verdicts = [{**p._asdict(), "difference": p.difference.mean, "half": p.difference.half} for p in comparison.pairs]
    cells = cell_facts(comparison)
    facts = {
        "cells": cells, "pairs": verdicts, "runs": list(comparison.rows), "tuning": list(comparison.tuning),
        "notes": list(comparison.notes), "versions": versions(),
    }  # fmt: skip
    groups = ("report", comparison.rows), ("rate", comparison.tuning)
    runs = [{"for": kind, **row} for kind, rows in groups for row in rows]
    contents = {
        "cells.csv": csv_text(cells, _columns(cells)), "pairs.csv": csv_text(verdicts, _columns(verdicts)),
        "runs.csv": csv_text(runs, _columns(runs)),
        "comparison.json": json.dumps(finite(facts), indent=1, allow_nan=False) + "\n",
    }  # fmt: skip
    return write_results(out, contents, "comparison", _images(comparison))


def write_results(out: Path, texts: Mapping[str, str], stem: str, pictures: dict[str, bytes]) -> list[Path]:
    """Writes texts by their file names and pictures by their endings; returns the paths, pictures last."""
    with refusing(f"write {out}", then="call the same line again"):
        make_folder(out)
        for name, text in texts.items():
            write_file(out / name, text)
        return [*(out / name for name in texts), *write_images(out / stem, pictures)]


def _columns(rows: Sequence[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row if name not in ("positions", "curve")))


def finite(value: Any) -> Any:
    """A value for JSON, with None for numbers that are not finite."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


SHORT = 24
"""Longest name, in characters, that fits beside its curve."""


def label(name: str, most: int = 80) -> str:
    """A text for a figure, with dollars escaped, so that it is not read as a formula."""
    return printable(name, most).replace("$", r"\$")


def _images(comparison: Comparison) -> dict[str, bytes]:
    """The figure: for each cell the mean with its interval and every seed as a stroke; and the training losses of the
    first seed by tokens read."""
    facts = [fact for fact in cell_facts(comparison) if math.isfinite(fact["loss"])][::-1]
    curves = {fact["cell"]: comparison.of(fact["cell"])[0].get("curve") for fact in reversed(facts)}
    drawn = any(curves.values())

    def draw(figure: Any) -> None:
        axes, *beside = figure.subplots(1, 1 + drawn, squeeze=False)[0]
        for height, fact in enumerate(facts):
            half = 0.0 if math.isnan(fact["loss_half"]) else fact["loss_half"]
            axes.errorbar(fact["loss"], height, xerr=half, fmt="o", color=COLOURS[0])
            seeds = [row["loss"] for row in comparison.of(fact["cell"])]
            axes.plot(seeds, [height] * len(seeds), "|", color=GREY, markersize=9)
        axes.set_yticks(range(len(facts)), [label(fact["cell"]) for fact in facts])
        axes.margins(y=0.2)
        finish(axes, "mean and 95 % interval, each seed a stroke", "validation loss (nats)", "", legend=False)
        for other in beside:
            for index, (name, points) in enumerate(curves.items()):
                if points:
                    other.plot(
                        *zip(*points, strict=True), color=COLOURS[index % 7], ls=DASHES[index % 7], label=label(name)
                    )
            short = max(len(label(name)) for name in curves) <= SHORT
            finish(other, "first seed", "tokens read", "training loss (nats)", xscale="log", legend=short)
            if not short:  # names on both sides would leave no room for the axes
                one_legend(figure, other, 1)

    return images((12 if drawn else 8, 1.5 + max(0.4 * len(facts), 2.5 * drawn)), draw)
