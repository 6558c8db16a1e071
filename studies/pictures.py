"""Pictures that studies share: contenders as dots, as bars, and as lines over what is varied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hecate.figure import COLOURS, GREY, MARKERS, finish, one_legend, ticks
from studies.study import Spread

Dots = Mapping[str, Sequence[Spread | None]]  # a spread for every row, by the label of its mark
Lines = Mapping[str, Mapping[Any, float]]  # what a line has at every place, by its label


def dot_plot(
    figure: Any, rows: Sequence[str], panels: Mapping[str, Dots], xlabel: str, chance: Sequence[float] = ()
) -> None:
    """A panel a task, a row a contender, the first on top: means with standard errors; marks of a row stand one below
    the other.

    Args:
        panels: the dots of each panel by its title.
        chance: what guessing scores in each panel, drawn as a line.
    """
    all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for number, (axes, (title, dots)) in enumerate(zip(all_axes, panels.items(), strict=True)):
        for index, (label, spreads) in enumerate(dots.items()):
            shift = 0.5 * (index / max(1, len(dots) - 1) - 0.5) if len(dots) > 1 else 0.0
            known = [(spread, len(rows) - place - shift) for place, spread in enumerate(spreads) if spread is not None]
            axes.errorbar(
                [spread.mean for spread, _ in known], [place for _, place in known],
                xerr=[spread.standard_error if spread.seeds > 1 else 0.0 for spread, _ in known],
                fmt=MARKERS[index], color=COLOURS[index], markersize=5, elinewidth=1.2, label=label,
            )  # fmt: skip
        if chance:
            axes.axvline(chance[number], color=GREY, linestyle=":", linewidth=1)
        finish(axes, title, xlabel, "", legend=False)
        axes.locator_params(axis="x", nbins=5)
        axes.set_yticks(range(len(rows), 0, -1), rows)
        axes.set_ylim(0.3, len(rows) + 0.7)
    if len(dots) > 1:
        one_legend(figure, axes, len(dots))


def bars(
    figure: Any, rows: Sequence[str], series: Mapping[str, Sequence[float | None]], title: str, xlabel: str,
    *, line: float | None = None, xscale: str = "log",
) -> None:  # fmt: skip
    """A group of bars a row, the first on top: one of each series that knows the row; `line` is what they stand
    beside."""
    axes, height = figure.subplots(), 0.8 / len(series)
    for index, (label, values) in enumerate(series.items()):
        known = [(row + (index - (len(series) - 1) / 2) * height, x) for row, x in enumerate(values) if x is not None]
        axes.barh([at for at, _ in known], [x for _, x in known], 0.95 * height, color=COLOURS[index], label=label)
    axes.set_yticks(range(len(rows)), rows, fontsize=7)
    axes.invert_yaxis()
    if line is not None:
        axes.axvline(line, color=GREY, linewidth=1)
    finish(axes, title, xlabel, "", legend=False, xscale=xscale if any(map(any, series.values())) else "linear")
    if len(series) > 1:
        one_legend(figure, axes, len(series))


def line_plot(figure: Any, panels: Mapping[str, Lines], xlabel: str, ylabels: Sequence[str]) -> None:
    """A panel a quantity, both axes logarithmic; one without a label shares the y axis of the first. A line looks the
    same in all of them, and the last has every one."""
    labels = dict.fromkeys(label for lines in panels.values() for label in lines)
    looks = {label: (COLOURS[at], MARKERS[at]) for at, label in enumerate(labels)}
    all_axes = figure.subplots(1, len(panels), sharey=not all(ylabels))
    for axes, ylabel, (title, lines) in zip(all_axes, ylabels, panels.items(), strict=True):
        for label, points in lines.items():
            colour, marker = looks[label]
            axes.loglog(list(points), list(points.values()), color=colour, marker=marker, label=label)
        ticks(axes, sorted({x for points in lines.values() for x in points}))
        finish(axes, title, xlabel, ylabel, legend=False)
    one_legend(figure, axes, len(looks))
