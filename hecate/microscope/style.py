"""Figures that stay legible in grey and to colour-blind eyes: one palette, shaded errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

# M. Okabe and K. Ito, Color Universal Design, 2008: told apart with any colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)), (0, (3, 1, 1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def curve(axes: Any, x: Any, samples: Tensor, index: int, label: str, **style: Any) -> None:
    """Mean of samples `[seeds, points]` over x, its standard error shaded; look number `index`."""
    mean, error = mean_and_error(samples)
    look = {"color": COLOURS[index % 7], "linestyle": DASHES[index % 7], "label": label}
    (line,) = axes.plot(x, mean, **{**look, **style})
    axes.fill_between(x, mean - error, mean + error, color=line.get_color(), alpha=0.2, linewidth=0)


def mean_and_error(samples: Tensor) -> tuple[Any, Any]:
    """Mean and standard error over the first axis, as arrays; the error of one sample is 0."""
    count = samples.shape[0]
    deviation = samples.std(0) if count > 1 else samples.new_zeros(samples.shape[1:])
    return samples.mean(0).cpu().numpy(), (deviation / count**0.5).cpu().numpy()


def finish(axes: Any, title: str, xlabel: str, ylabel: str, *, legend: bool = True, **settings: Any) -> None:
    """Title, axes with their units, a light grid, and the legend below, where it hides nothing."""
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel, **settings)
    axes.grid(alpha=0.3, linewidth=0.6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if legend:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), fontsize=9, frameon=False)


def one_legend(figure: Any, axes: Any, columns: int) -> None:
    """The legend of one panel, for all of them, below the figure."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=9, frameon=False, loc="outside lower center", ncols=columns)


def ticks(axes: Any, values: Sequence[float]) -> None:
    """Marks the values of a logarithmic axis themselves, written out."""
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.minorticks_off()
