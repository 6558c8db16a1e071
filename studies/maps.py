"""maps: every feature map of the library measured, beside what a chapter claims of some."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from hecate import phi
from hecate.microscope.style import COLOURS, finish
from hecate.phi import FeatureMap
from hecate.phi.elementwise import Elementwise
from studies.map_claims import CLAIMS
from studies.map_measures import (
    KEYS,
    LONG,
    MAPS,
    NOTHING,
    PRECISION,
    QUERIES,
    ROWS,
    SPREADS,
    WIDTH,
    Measured,
    costs,
    measure,
    title,
)
from studies.study import Cell, Progress, Result, Spread, Study


class Maps(Study):
    """A table of all maps, by the same measures."""

    name: ClassVar[str] = "maps"
    about: ClassVar[str] = "Which feature map reads like softmax, what does it cost, and is it safe?"
    timed: ClassVar[bool] = True

    def run(self, quick: bool, seeds: Sequence[int], progress: Progress) -> Result:
        """Every map; the best scale is chosen on other seeds."""
        steps = range(-6, 3, 2) if quick else range(-8, 4)
        scales = [2.0 ** (step / 2) for step in steps]
        others = [1000 + seed for seed in seeds]
        found = [measure(m, seeds, others, scales) for m in progress(MAPS, "feature maps")]
        return report(found, costs(MAPS), (scales[0], scales[-1]))


def report(found: Sequence[Measured], times: Sequence[float], ends: tuple[float, float]) -> Result:
    """The table, what it means and the figure."""
    columns = [
        "map", "d_phi", "error as is", "error, best scale", "correlation, best scale",
        f"error, best scale, tokens x{LONG:g}", "phi < 0", "K < 0", "declared",
        "|phi|^2 (log10)", "steepest (log10)", "flattest (log10)", "lost float32", "lost bfloat16",
        f"rank of {KEYS}", "floor", "CPU time / identity's", "claimed", "verdict",
    ]  # fmt: skip
    notes = [*_how(), *_findings(found), _at_the_ends(found, ends)]

    def draw(figure: Any) -> None:
        upper, lower = figure.subfigures(2, 1, height_ratios=(0.62, 1))
        _draw_shapes(upper)
        _draw_maps(lower, found, times)

    data = {
        title(m.map_): {
            "facts": m.facts._asdict(), "scales": m.scales,
            **{name: [q._asdict() for q in rows] for name, rows in (
                ("as is", m.as_is), ("scaled", m.scaled), ("long", m.long))},
        }
        for m in found
    }  # fmt: skip
    return Result(
        columns, [_row(m, time) for m, time in zip(found, times, strict=True)], notes, draw, size=(14, 17), data=data
    )


def _row(m: Measured, time: float) -> list[Cell]:
    f = m.facts
    declared = " ".join(
        text
        for text, holds in (
            ("phi >= 0", m.map_.non_negative),
            ("K >= 0", m.map_.kernel_non_negative and not m.map_.non_negative),
        )
        if holds
    )
    claim = CLAIMS.get(title(m.map_))
    errors = [Spread.of(q.error for q in rows) for rows in (m.as_is, m.scaled, m.long)]
    return [
        title(m.map_), m.map_.output_dim(WIDTH), errors[0], errors[1],
        Spread.of(q.correlation for q in m.scaled), errors[2],
        *(round(share, 3) for share in (f.negative, f.negative_kernel)),
        f"{declared or 'nothing'}: {'kept' if m.kept else 'BROKEN'}" if declared else "nothing",
        *(round(value, 1) + 0.0 for value in (f.size, f.steepest, f.flattest)),
        *(round(share, 2) for share in (f.lost32, f.lost16)), f.rank, round(f.floor, 3),
        time,
        *(claim[:2] if claim else (None, None)),
    ]  # fmt: skip


def _how() -> Iterator[str]:
    yield (
        f"d = {WIDTH}, {QUERIES} queries and {KEYS} keys with normal entries; error: of what is "
        "read with normalised kernel values instead of softmax(q.k / sqrt(d)), median over queries,"
        " as a multiple of the error of the plain mean of all values: 0 is softmax, 1 is no "
        "attention at all; mean +- standard error over seeds"
    )
    yield (
        "best scale: one number by which phi sees q and k multiplied, chosen on other seeds (1000 "
        f"and up); tokens x{LONG:g}: q and k themselves longer, so that softmax is sharper"
    )
    yield (
        f"the rest on one seed: signs and rank (singular values above {PRECISION:g} of the "
        f"largest) at spread 1; |phi|^2, the largest over spreads {SPREADS}; steepest and flattest:"
        f" largest and smallest of the Jacobian's first singular value at {ROWS} points of each "
        f"spread ({NOTHING:g} for none); lost: features that are neither 0 nor infinite in float64 "
        f"but are so in the type named, at spread {SPREADS[-1]:g}"
    )
    yield (
        f"floor: least mean 1/2 |v - M phi(k)|^2 of any M, {KEYS} one-hot values: "
        f"1/2 (1 - rank / {KEYS}); CPU time: phi and both products with "
        "the state, a multiple of identity's; declared: signs that the map promises (phi >= 0 "
        "implies a kernel >= 0), kept if none was broken"
    )
    yield (
        "learned maps (linear, mlp, t2r, hadamard, hedgehog, rebased) stand as initialised, nothing"
        " is trained, so their errors say little about what they can learn; cosformer also weighs "
        "by position; m: num_features, d_phi or num_centres"
    )


def _findings(found: Sequence[Measured]) -> Iterator[str]:
    ordered = sorted(found, key=lambda m: m.error)
    for name, group in (
        ("any width", ordered),
        (f"d_phi <= {2 * WIDTH}", [m for m in ordered if m.map_.output_dim(WIDTH) <= 2 * WIDTH]),
    ):
        shown = ", ".join(f"{title(m.map_)} ({m.error:.2f})" for m in group[:5])
        yield f"least error at the best scale, {name}: {shown}"
    worse = [title(m.map_) for m in ordered if m.error >= 1]
    yield f"no better than the plain mean even at the best scale: {', '.join(worse) or 'none'}"
    for m in found:
        claim = CLAIMS.get(title(m.map_))
        if claim is not None:
            yield f"{title(m.map_)}, claimed (a chapter): {claim.claimed}; {claim.because(m)}"
    broken = [title(m.map_) for m in found if not m.kept]
    yield f"declared signs broken: {', '.join(broken) or 'none'}"
    lost = [title(m.map_) for m in found if m.facts.lost32 > 0.01]
    yield f"more than 1 % of features lost in float32: {', '.join(lost) or 'none'}"


def _at_the_ends(found: Sequence[Measured], ends: tuple[float, float]) -> str:
    """Who may have wanted another scale; one whose weights no scale changes takes the first."""
    names = [title(m.map_) for m in found if m.map_.traits().degree is None and m.scales[0] in ends]
    return (
        f"best scale at an end of {ends[0]:g} to {ends[1]:g}: {', '.join(names) or 'none'}; "
        "homogeneous maps have the same weights at every scale"
    )


def _draw_shapes(figure: Any) -> None:
    shapes = [m for m in MAPS if isinstance(m, Elementwise | phi.ELU | phi.Identity)]
    shapes = list({m.kind: m for m in reversed(shapes)}.values())[::-1]
    figure.suptitle("Componentwise maps: phi (line) and its derivative (dashes)", fontsize=13)
    all_axes = figure.subplots(2, (len(shapes) + 1) // 2).flatten()
    x = torch.linspace(-4, 4, 321, dtype=torch.float64)
    for axes, map_ in zip(all_axes, shapes, strict=False):
        value, slope = value_and_slope(map_, x)
        axes.axhline(0, color="0.6", linewidth=0.8)
        axes.plot(x.numpy(), value.numpy(), color=COLOURS[0], linewidth=2)
        axes.plot(x.numpy(), slope.numpy(), color=COLOURS[1], linestyle="--", linewidth=1.6)
        axes.set(title=title(map_), xlabel="x", ylim=(-1.3, 4.3), xlim=(-4, 4))
        axes.grid(alpha=0.3, linewidth=0.6)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    for axes in all_axes[len(shapes) :]:
        axes.set_visible(False)


def value_and_slope(map_: FeatureMap, x: Tensor) -> tuple[Tensor, Tensor]:
    """phi and phi' of a componentwise map at the entries of x, by its own VJP."""
    column = x[:, None]
    value, residuals = map_.forward(column, {"learned": {}, "frozen": {}})
    return value[:, 0], map_.vjp(residuals, torch.ones_like(column))[0][:, 0]


def _draw_maps(figure: Any, found: Sequence[Measured], times: Sequence[float]) -> None:
    """Best at the top."""
    means = [Spread.of(q.error for q in m.scaled) for m in found]
    order = sorted(range(len(found)), key=lambda i: -means[i].mean)
    rows = list(range(len(order)))
    quality_axes, rank_axes, cost_axes = figure.subplots(1, 3, sharey=True, width_ratios=(1.5, 1, 1))
    for index, (name, fill) in enumerate((("scaled", "full"), ("as_is", "none"), ("long", "none"))):
        spreads = [Spread.of(q.error for q in getattr(found[i], name)) for i in order]
        label = ("best scale", "as is", f"best scale, tokens x{LONG:g}")[index]
        quality_axes.errorbar(
            [s.mean for s in spreads], rows, None, [s.error for s in spreads], fmt="osD"[index],
            color=COLOURS[(0, 6, 1)[index]], fillstyle=fill, markersize=5, elinewidth=1,
            label=label,
        )  # fmt: skip
    quality_axes.axvline(1, color="0.4", linestyle="--", linewidth=0.8)
    finish(
        quality_axes, "Reads like softmax", "error (0: softmax; 1, dashed: plain mean), log", "",
        xscale="log", ylim=(-1, len(rows)),
    )  # fmt: skip
    rank_axes.barh(rows, [found[i].facts.rank for i in order], color=COLOURS[2], label="rank")
    widths = [found[i].map_.output_dim(WIDTH) for i in order]
    rank_axes.plot(widths, rows, "k|", markersize=8, label="d_phi")
    finish(rank_axes, "Capacity", f"rank of {KEYS} random keys, log", "", xscale="log")
    cost_axes.barh(rows, [times[i] for i in order], color=COLOURS[4], label="phi and both products")
    finish(cost_axes, "Cost", "CPU time / that of identity, log", "", xscale="log")
    quality_axes.set_yticks(rows, [title(found[i].map_) for i in order], fontsize=8.5)
    for axes in (quality_axes, rank_axes, cost_axes):
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.06), fontsize=9, frameon=False)
