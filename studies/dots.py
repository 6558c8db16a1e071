"""Many optimisers on several tasks as one picture: a row each, the best on top."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hecate.microscope.style import COLOURS, MARKERS, finish, mean_and_error


class Panel(NamedTuple):
    """A task: samples `[seeds]` per row, lower is better; `also` beside them, if anything."""

    title: str
    label: str
    samples: Sequence[Tensor]
    names: tuple[str, str]  # of the marks: of each kind of row, or of samples and `also`
    also: Sequence[Tensor] = ()


def dot_plot(figure: Any, rows: Sequence[str], marked: Sequence[bool], panels: list[Panel]) -> None:
    """A panel per task, rows in the order given; marked rows have a look of their own."""
    places = torch.arange(len(rows), 0, -1).tolist()
    all_axes = figure.subplots(1, len(panels), sharey=True)
    for axes, panel in zip(all_axes, panels, strict=True):
        if panel.also:
            _dots(axes, places, panel.samples, 2, panel.names[0])
            _dots(axes, places, panel.also, 1, panel.names[1], fillstyle="none")
        else:
            for look, wanted in enumerate((True, False)):
                kept = [i for i, mark in enumerate(marked) if mark is wanted]
                chosen = [panel.samples[i] for i in kept]
                _dots(axes, [places[i] for i in kept], chosen, look, panel.names[look])
        finish(axes, panel.title, panel.label, "", legend=False)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.06), fontsize=9, frameon=False)
    all_axes[0].set_yticks(places, rows)
    all_axes[0].set_ylim(0.3, len(rows) + 0.7)


def ranked(samples: Sequence[Sequence[Tensor]]) -> list[int]:
    """Rows by their mean rank over tasks, each a list of samples per row; the best first."""
    ranks = torch.stack([
        torch.stack([x.double().mean() for x in task]).argsort().argsort().double()
        for task in samples
    ])  # fmt: skip
    return ranks.mean(0).argsort(stable=True).tolist()


def _dots(axes: Any, rows: list[int], samples: Sequence[Tensor], index: int, name: str, **look: Any) -> None:
    if not rows:
        return
    x, dx = mean_and_error(torch.stack(list(samples), 1))
    look = {"fmt": MARKERS[index], "color": COLOURS[index], "markersize": 5, **look}
    axes.errorbar(x, rows, None, dx, label=name, elinewidth=1.2, **look)
