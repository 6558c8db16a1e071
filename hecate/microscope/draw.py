"""The figure of one memory: attention maps above; state, gates and recall below."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from hecate.errors import ConfigError
from hecate.figure import COLOURS, DASHES, GREY, INK, PALE, figure_type, finish, styled

RING: dict[str, Any] = {"markeredgecolor": INK, "markeredgewidth": 0.8}
LEGEND: dict[str, Any] = {  # below the axes, where it covers nothing
    "loc": "upper center", "bbox_to_anchor": (0.5, -0.17), "ncols": 3, "columnspacing": 1, "handlelength": 1.8,
}  # fmt: skip
STANDS_OUT, MOST_LOOKS = 3.0, 3


def draw_memory(view: Any, figure: Any, *, row: int, heads: int) -> Any:
    """Draws a `MemoryView` on a figure, by default a new one; returns the figure."""
    batch = view.scans[0].v.shape[0]
    if not 0 <= row < batch:
        raise ConfigError(f"there are {batch} sequences, got row {row}")
    if heads < 1:
        raise ConfigError(f"at least one head is drawn, got {heads}")
    mapped, new = view.refusal is None, figure_type("drawing")
    with styled():
        if figure is None:
            figure = new(figsize=(13, 8.2 if mapped else 4.6), layout="constrained")
        below = figure
        if mapped:
            above, below = figure.subfigures(2, 1, height_ratios=(1.2, 1), hspace=0.04)
            _maps(above, view, row, heads)
        axes = below.subplots(1, 4)
        _over_time(axes[0], view, view.norms, row, "memory: norm", "Frobenius norm")
        _over_time(axes[1], view, view.ranks, row, "memory: effective rank", "effective rank")
        _gates(axes[2], view, row)
        _recall(axes[3], view, row)
        figure.suptitle(_title(view))
    return figure


def _title(view: Any) -> str:
    rule = view.config
    fields = ("structure", "bias", "retention", "algorithm", "feature_map")
    knobs = [f"{field} {getattr(rule, field).kind}" for field in fields]
    if rule.chunk > 1:
        knobs.append(f"{'commits' if rule.commit == 'chunk' else 'gradients'} once in {rule.chunk} tokens")
    refusal = "" if view.refusal is None else f"\nno attention map: {view.refusal}"
    return f"{view.name}\n{', '.join(knobs)}{refusal}"


def _maps(figure: Any, view: Any, row: int, most: int) -> None:
    """Draws a map per head, with the share that comes from the initial state in a strip on its left."""
    attention, answers = view.attention, view.answers[row].transpose(0, 1)
    maps = attention.map[row]
    if maps.dim() == 4:  # one map per coordinate
        maps = maps.mean(-1)
    start = attention.start[row].norm(dim=-1)
    total = start + (answers - attention.start[row]).norm(dim=-1)
    share = start / torch.where(total > 0, total, 1.0)
    count = min(view.heads, most)  # number of heads shown, evenly spaced
    shown = [round(index * (view.heads - 1) / max(count - 1, 1)) for index in range(count)]
    norm, colours, extend = _scale(maps[shown])
    grid = figure.add_gridspec(1, 2 * len(shown), width_ratios=(0.045, 1) * len(shown), wspace=0.01)
    causal = torch.ones(maps.shape[1:], dtype=torch.bool).tril()
    axes: list[Any] = []
    for place, head in enumerate(shown):
        side = figure.add_subplot(grid[2 * place])
        side.imshow(share[head][:, None].cpu().numpy(), cmap="Greys", vmin=0, vmax=1, aspect="auto")
        side.set(xticks=[], ylabel="reading token" if place == 0 else "")
        side.set_xlabel("start", fontsize=8, rotation=90)
        axis = figure.add_subplot(grid[2 * place + 1])
        axis.set_facecolor(PALE)
        masked = torch.where(causal, maps[head].cpu(), torch.nan)
        image = axis.imshow(masked.numpy(), cmap=colours, norm=norm, aspect="auto", interpolation="nearest")
        rows, columns = outstanding(maps[head].cpu())
        axis.plot(columns.numpy(), rows.numpy(), "o", markersize=3.5, markerfacecolor="none", **RING)
        axis.set(title=f"head {head}", xlabel="written token", yticks=[])
        axes.append(axis)
    figure.colorbar(image, ax=axes, label="weight of a value (root scale)", shrink=0.9, pad=0.01, extend=extend)
    figure.supxlabel(
        "implicit attention: how much of each written token's value is in each answer; ring: an earlier token that "
        "stands out;\nstrip 'start': share of the answer that comes from the state before, blank 0, solid 1",
        fontsize=9,
    )


def outstanding(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns of outstanding weights in a map `[T, T]` of up to 128 tokens, else none: the largest weight of a
    row on an earlier token, if it exceeds 3 times the root mean square of that row, and at most 3 rows have it at the
    same token."""
    past, length = weights.tril(-1).abs(), len(weights)
    earlier = torch.arange(length).clamp(min=1)
    usual = (past.square().sum(1) / earlier).sqrt()
    most, columns = past.max(1)
    peaks = (most > STANDS_OUT * usual) & (length <= 128)
    looks = columns[peaks].bincount(minlength=length)
    rows = (peaks & (looks[columns] <= MOST_LOOKS)).nonzero().flatten()
    return rows, columns[rows]


def _scale(maps: Tensor) -> tuple[Any, Any, str]:
    """A square root colour scale, symmetric about zero if signs differ, its colours, and the ends at which weights
    exceed it.

    Its range is that of weights on earlier tokens; a token's weight in its own answer, often the largest, may exceed
    it."""
    from matplotlib import colormaps
    from matplotlib.colors import FuncNorm, PowerNorm

    past = maps.abs().tril(-1).flatten(1)
    past = past[:, :: max(1, past.numel() // 2**22)].flatten()
    past = past[past > 0]
    most = float(maps.abs().max())
    top = float(torch.quantile(past, 0.998)) if past.numel() else most
    top, beyond = top or 1.0, most > top
    if float(maps.min()) >= -1e-9 * top:
        colours = colormaps["magma"].with_extremes(bad=PALE)
        return PowerNorm(0.5, vmin=0, vmax=top), colours, "max" if beyond else "neither"
    colours = colormaps["PuOr_r"].with_extremes(bad=PALE)
    root, square = (lambda x: np.sign(x) * np.sqrt(np.abs(x))), (lambda x: np.sign(x) * np.square(x))
    return FuncNorm((root, square), vmin=-top, vmax=top), colours, "both" if beyond else "neither"


def _over_time(axis: Any, view: Any, items: dict[str, Tensor], row: int, title: str, label: str) -> None:
    """Draws a curve for each weight: the mean over heads, in a band from the smallest to the largest."""
    for index, (name, values) in enumerate(items.items()):
        _band(axis, view.times, values[row], index, name)
    finish(axis, title, "tokens read", label, legend=False, ylim=(0, None))
    if not items:
        axis.text(0.5, 0.5, "no weight is a matrix", ha="center", transform=axis.transAxes)
    if len(items) > 1:
        axis.legend(**LEGEND)


def _gates(axis: Any, view: Any, row: int) -> None:
    for index, (name, gate) in enumerate(view.gates.items()):
        values = gate[row] if gate.dim() == 3 else gate[row].mean(-1)
        _band(axis, torch.arange(view.length), values.T, index, name)
    most = max(float(gate[row].max()) for gate in view.gates.values())
    finish(axis, "gates", "token", "gate", legend=False, ylim=(0, max(1.02, 1.05 * most)))
    axis.legend(**LEGEND)


def _recall(axis: Any, view: Any, row: int) -> None:
    finish(axis, "recall against age", "age in tokens, 1 the newest", "cosine of answer and value", legend=False)
    if view.unasked or not view.recall.known(row):
        axis.text(0.5, 0.5, view.unasked or "nothing was written", ha="center", wrap=True, transform=axis.transAxes)
        return
    cosine, chance = (view.recall.by_age(name, row) for name in ("cosine", "chance"))
    _band(axis, cosine.ages + 1, cosine.means, 0, "its own value")
    _band(axis, chance.ages + 1, chance.means, 6, "other values (chance)")
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(lambda age, _: f"{age:g}")
    low = min(0.0, *(float(item.means.nan_to_num().min()) for item in (cosine, chance)))
    axis.set_ylim(1.1 * low, 1.05)
    axis.axhline(0, color=GREY, linewidth=0.6)
    axis.legend(**LEGEND)


def _band(axis: Any, x: Tensor, values: Tensor, index: int, label: str) -> None:
    """Draws the mean over heads of values `[H, N]`, and a band from the smallest to the largest; NaN is left out."""
    look = {"color": COLOURS[index % 7], "linestyle": DASHES[index % 7]}
    least, most = (values.nan_to_num(nan=torch.inf).amin(0), values.nan_to_num(nan=-torch.inf).amax(0))
    at, mean, low, high = (item.cpu().numpy() for item in (x, values.nanmean(0), least, most))
    axis.plot(at, mean, label=label, **look)
    if len(values) > 1:
        axis.fill_between(at, low, high, color=look["color"], alpha=0.2, linewidth=0)
