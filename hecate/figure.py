"""Figures in one style, as PNG and SVG: colours for any colour vision, curves labelled at their ends, shaded errors;
SVGs follow the reader's light or dark theme."""

from __future__ import annotations

import colorsys
import io
import math
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from pathlib import Path
from typing import Any

from torch import Tensor

from hecate.errors import ConfigError, install_line
from hecate.files import write_file

INK, GREY, PALE = "#222222", "#767676", "#dcdcdc"
# M. Okabe and K. Ito, Color Universal Design, 2008: distinct for any colour vision.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", INK)
DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)), (0, (3, 1, 1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
NAMES, GAP = 8.5, 1.4  # font size of curve labels in points, and their distance in multiples of it
LOOK: dict[str, Any] = {
    "axes.axisbelow": True, "axes.edgecolor": GREY, "axes.labelcolor": INK,
    "axes.prop_cycle": f"cycler('color', {list(COLOURS)})", "axes.titlelocation": "left", "axes.titlesize": 10,
    "errorbar.capsize": 2, "figure.titlesize": 11, "font.size": 9, "legend.fontsize": NAMES, "legend.frameon": False,
    "lines.linewidth": 1.6, "lines.markersize": 4, "svg.fonttype": "none", "text.color": INK, "xtick.color": GREY,
    "xtick.labelcolor": INK, "ytick.color": GREY, "ytick.labelcolor": INK,
}  # fmt: skip


def figure_type(needed_for: str | None = None) -> Any:
    """matplotlib's `Figure`; if it is not installed None, or with `needed_for` a `ConfigError` that names it."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        if needed_for is None:
            return None
        raise ConfigError(f"{needed_for} needs matplotlib, which is not installed: {install_line('plot')}") from None
    return Figure


def styled() -> AbstractContextManager[None]:
    """Context in which matplotlib has hecate's settings, whatever the user's are; they are restored afterwards."""
    from matplotlib import style

    return style.context(["default", LOOK])


def images(size: tuple[float, float], draw: Callable[[Any], object]) -> dict[str, bytes]:
    """PNG and SVG, by ending, of a figure on which `draw` draws; its size is in inches. Empty without matplotlib."""
    new = figure_type()
    if new is None:
        return {}
    with styled():
        draw(figure := new(figsize=size, layout="constrained"))
    return images_of(figure)


def images_of(figure: Any) -> dict[str, bytes]:
    """PNG and SVG of a figure, by ending; the same bytes every time."""
    png, svg = io.BytesIO(), io.StringIO()
    with styled():
        figure.savefig(png, format="png", dpi=120)
        figure.savefig(svg, format="svg", dpi=120, metadata={"Date": None})
    return {"png": png.getvalue(), "svg": in_the_dark(numbered(svg.getvalue())).encode()}


def numbered(svg: str) -> str:
    """An SVG with numbered ids: matplotlib's are hashes that depend on the last bits of the layout, which vary by
    run."""
    for number, name in enumerate(dict.fromkeys(re.findall(r'id="([a-zA-Z]+[0-9a-f]{10})"', svg))):
        svg = svg.replace(name, f"id{number}")
    return svg


def write_images(path: Path, files: dict[str, bytes]) -> list[Path]:
    """Writes each file under the path's name with its own ending, atomically; returns the paths. Raises OSError."""
    stem = path.name.removesuffix(".png").removesuffix(".svg")
    paths = [path.with_name(f"{stem}.{ending}") for ending in files]
    for place, image in zip(paths, files.values(), strict=True):
        write_file(place, image)
    return paths


def in_the_dark(svg: str) -> str:
    """An SVG with a style that changes the lightness of every colour if the reader prefers a dark theme."""
    ink = _dark("#000000")  # matplotlib writes no colour for black, so it is set on the root element
    rules = [f"svg{{fill:{ink}}}image{{filter:invert(0.93) hue-rotate(180deg)}}"]
    for what, colour in sorted(set(re.findall(r"(fill|stroke): (#[0-9a-f]{6})", svg))):
        rules.append(f'[style*="{what}: {colour}"]{{{what}:{_dark(colour)}!important}}')
    style = f"<style>@media (prefers-color-scheme: dark){{{''.join(rules)}}}</style>"
    return re.sub(r"(<svg [^>]*>)", lambda tag: f"{tag[1]}\n {style}", svg, count=1)


def _dark(colour: str) -> str:
    """The same hue for a dark page: greys and dark colours have their lightness inverted, others become lighter."""
    hue, light, full = colorsys.rgb_to_hls(*(int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)))
    parts = colorsys.hls_to_rgb(hue, 0.93 - 0.86 * light if full < 0.1 or light < 0.3 else 0.2 + 0.6 * light, full)
    return "#" + "".join(f"{round(255 * part):02x}" for part in parts)


def curve(axes: Any, x: Any, samples: Tensor, index: int, label: str, **style: Any) -> None:
    """Plots the mean of samples `[seeds, points]` over x, its standard error shaded, in style number `index`."""
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
    """Sets the title, axis labels, a light grid and the labels of curves."""
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel, **settings)
    axes.grid(color=PALE, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if legend:
        _name_curves(axes)


def _name_curves(axes: Any) -> None:
    """Writes the label of every curve to the right of the axes, without overlap, with a line to the curve's end. If
    the axes have more than curves, or the figure's layout leaves no room, a legend below instead."""
    figure, (handles, names) = axes.figure.canvas.figure, axes.get_legend_handles_labels()
    lines = [getattr(handle, "lines", (handle,))[0] for handle in handles]  # curves, with error bars or without
    if figure.get_layout_engine() is None or not all(hasattr(line, "get_xydata") for line in lines):
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), fontsize=NAMES, frameon=False)
        return
    figure.draw_without_rendering()  # computes the layout, so that heights are known
    ends = []
    for line, name in zip(lines, names, strict=True):
        known = [point for point in line.get_xydata() if all(map(math.isfinite, point))]
        if known:
            x, y = axes.transAxes.inverted().transform(line.get_transform().transform(known[-1]))
            ends.append((min(max(y, 0.0), 1.0), x, name, line.get_color()))
    ends.sort(key=lambda end: end[0])
    heights = [end[0] for end in ends]
    gap = GAP * NAMES / 72 * axes.figure.dpi / axes.get_window_extent().height
    above = accumulate(heights, lambda last, height: max(height, last + gap))
    below = [*accumulate(heights[::-1], lambda last, height: min(height, last - gap))][::-1]
    style = {"annotation_clip": False, "textcoords": "axes fraction", "xycoords": "axes fraction", "va": "center"}
    leader = {"arrowstyle": "-", "linewidth": 1.2, "relpos": (0, 0.5), "shrinkA": 1, "shrinkB": 0}
    for (y, x, name, colour), up, down in zip(ends, above, below, strict=True):
        place = (1.05, (up + down) / 2)
        axes.annotate(name, (x, y), place, arrowprops={**leader, "color": colour}, fontsize=NAMES, **style)


def one_legend(figure: Any, axes: Any, columns: int) -> None:
    """Draws one panel's legend below the figure, for all panels."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def ticks(axes: Any, values: Sequence[float]) -> None:
    """Puts ticks at these values of a logarithmic axis, labelled with plain numbers."""
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.minorticks_off()
