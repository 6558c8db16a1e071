"""Many contenders on several tasks as one picture: a panel a task, a row a contender, a dot its mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hecate.figure import COLOURS, GREY, MARKERS, finish, one_legend
from studies.study import Spread

Dots = Mapping[str, Sequence[Spread | None]]  # a spread for every row, by the label of its mark


def dot_plot(
    figure: Any, rows: Sequence[str], panels: Mapping[str, Dots], xlabel: str, chance: Sequence[float] = ()
) -> None:
    """Means with standard errors, the first row on top; marks of a row stand one below the other.

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
                xerr=[spread.error if spread.seeds > 1 else 0.0 for spread, _ in known],
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
