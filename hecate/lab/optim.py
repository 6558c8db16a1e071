"""optim: optimisers that are memories of gradients beside those that everybody uses."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.optim import AdamW

from hecate.lab.contenders import ENTRANTS, FORMS, Entrant, costs, state_bytes, zero_gradient
from hecate.lab.descents import (
    CEILING,
    CONDITION,
    ENOUGH,
    JITTER,
    SIDE,
    Score,
    Sweep,
    Text,
    Warp,
    draw_text,
    quadratic,
    rosenbrock,
    score,
    score_text,
    sweep,
)
from hecate.lab.draw import COLOURS, MARKERS, finish, mean_and_error
from hecate.lab.study import Cell, Progress, Result, Spread, Study
from hecate.train.display import print_table

ROUNDING = 1e-9  # updates of a gradient of zero below this are rounding
GRID = tuple(10.0 ** (half / 2 - 4) for half in range(11))  # learning rates


class Outcome(NamedTuple):
    """What an entrant did."""

    entrant: Entrant
    quadratic: Score
    rosenbrock: Score
    sweep: Sweep
    text: Score | None
    bytes: float  # of state, per parameter of the text model


class Budget(NamedTuple):
    """How much a run does."""

    grid: tuple[float, ...]
    quadratic: int = 200
    rosenbrock: int = 300
    warps: tuple[Warp, ...] = ()
    sweep: int = 300
    text: int = 0

    @classmethod
    def of(cls, quick: bool) -> Budget:
        """A quick run takes every other learning rate, few surfaces and no text."""
        if quick:
            return cls(GRID[::2], 100, 200, _warps((1, 10), (0.5, 1), (1, 3)), 200)
        return cls(GRID, warps=_warps((1, 5, 10, 20), (0.5, 1, 2), (1, 3, 5, 10)), text=200)


def _warps(*axes: Sequence[float]) -> tuple[Warp, ...]:
    return tuple(Warp(*given) for given in itertools.product(*axes))


class Optim(Study):
    """Memories of gradients against momentum, AdamW and Muon, each at its best learning rate."""

    name: ClassVar[str] = "optim"
    about: ClassVar[str] = (
        "Do optimisers whose momentum is a memory descend faster than plain momentum and AdamW?"
    )
    count: ClassVar[int] = 4

    def run(self, quick: bool, seeds: Sequence[int], progress: Progress) -> Result:
        """Every entrant on every task."""
        budget = Budget.of(quick)
        others = [1000 + seed for seed in seeds]
        text = draw_text([*seeds, others[0]], budget.text) if budget.text else None
        outcomes = [
            _outcome(entrant, budget, seeds, others, text)
            for entrant in progress(ENTRANTS, "optimisers")
        ]
        print_table(("optimiser", "CPU time of a step / that of SGD"), costs())
        return report(outcomes, budget, text)


def _outcome(
    entrant: Entrant,
    budget: Budget,
    seeds: Sequence[int],
    others: Sequence[int],
    text: Text | None,
) -> Outcome:
    make, grid = entrant.make, budget.grid
    return Outcome(
        entrant,
        score(make, grid, quadratic(others), quadratic(seeds), budget.quadratic),
        score(make, grid, rosenbrock(others), rosenbrock(seeds), budget.rosenbrock),
        sweep(make, grid, budget.warps, seeds, budget.sweep),
        score_text(make, grid, seeds, others[0], text) if text else None,
        state_bytes(entrant),
    )


def report(outcomes: Sequence[Outcome], budget: Budget, text: Text | None) -> Result:
    """The table, what it means and the figure."""
    base = outcomes[0]
    columns = [
        "optimiser", "quadratic (log10 loss)", "Rosenbrock (log10 loss)", "warped: reached",
        "warped: won", "warped: lost", "text (bits per byte)", "state (bytes per parameter)",
    ]  # fmt: skip
    rows = [_row(outcome, base) for outcome in outcomes]
    if text is None:
        columns, rows = _without(columns, 6), [_without(row, 6) for row in rows]
    moved = zero_gradient()

    def draw(figure: Any) -> None:
        _draw(figure, outcomes, base, text.unigram if text else math.inf)

    notes = [*_settings(budget, text), *_leads(outcomes), *_published(outcomes, base)]
    notes += [*_edges(outcomes, budget.grid), *_at_zero(moved)]
    data = {"results": _data(outcomes), "update of a zero gradient": moved}
    return Result(columns, rows, notes, draw, size=(14.0, 7.0), data=data)


def _without(cells: Sequence[Any], place: int) -> list[Any]:
    return [cell for number, cell in enumerate(cells) if number != place]


def _row(outcome: Outcome, base: Outcome) -> list[Cell]:
    reached, won, lost = outcome.sweep.against(base.sweep)
    shares = [Spread.of(share.tolist()) for share in (reached, won, lost)]
    scores = [
        None if found is None else Spread.of(found.values.tolist())
        for found in (outcome.quadratic, outcome.rosenbrock, outcome.text)
    ]
    return [outcome.entrant.name, *scores[:2], *shares, scores[2], round(outcome.bytes, 2)]


def _settings(budget: Budget, text: Text | None) -> Iterator[str]:
    """What was done."""
    yield (
        f"mean +- standard error over seeds, each optimiser at the best of {len(budget.grid)} "
        f"learning rates from {budget.grid[0]:g} to {budget.grid[-1]:.3g}, chosen on other seeds "
        "(1000 and up); momentum 0.9, nothing decays weights, no schedule"
    )
    yield (
        "phi: PhiMomentum, random Fourier (256 features) and polynomial (degree 2) of rows of "
        "length 1; kernel: KernelMomentum, keyed by rows; delta: DeltaMomentum, erasing by lr; "
        "deep, M3 and Muon as they come but for momentum"
    )
    yield (
        f"quadratic: a matrix of {SIDE} x {SIDE}, condition {CONDITION:g}, basis and start drawn, "
        f"{budget.quadratic} steps; Rosenbrock: starts drawn around (-1.2, 1), "
        f"{budget.rosenbrock} steps; lower is better"
    )
    yield (
        f"warped: psi = r^2 + k (r - theta + a sin(w r))^2, {len(budget.warps)} surfaces (k, a, w),"
        f" at most {budget.sweep} steps to a loss of {ENOUGH:g}; starts (-3.5, 2) + {JITTER:g} "
        "normal draws, learning rates chosen per surface at (-3.5, 2); won, lost: share of surfaces"
        " reached in fewer, more steps than by SGD with momentum from the same start"
    )
    if text is not None:
        yield (
            f"text: three matrices read {text.facts['training bytes']} bytes that Python "
            f"{text.facts['python']} carries, {budget.text} batches of 128, learning rate chosen on"
            f" one other seed; loss held out; single bytes alone give {text.unigram:.2f}"
        )


def _leads(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """By task: the memory that was best on other seeds against each of torch's."""
    rivals = [o.entrant.name for o in outcomes if not o.entrant.is_memory]
    for task in ("quadratic", "rosenbrock", "text"):
        found = {o.entrant.name: getattr(o, task) for o in outcomes}
        if None in found.values():
            continue
        ours = {o.entrant.name for o in outcomes if o.entrant.is_memory}
        best = min(sorted(ours), key=lambda name: found[name].merit)
        for rival in rivals:
            gap = Spread.of((found[best].values - found[rival].values).tolist())
            behind = [n for n in found if n in ours and found[n].mean > found[rival].mean]
            verdict = "ahead of" if gap.mean < 0 else "behind"
            verdict = "level with" if abs(gap.mean) <= 2 * gap.error else verdict
            yield (
                f"{task}: the best memory by other seeds, {best}, is {verdict} {rival} ({gap}); "
                f"memories behind {rival}: {', '.join(behind) or 'none'}"
            )


def _published(outcomes: Sequence[Outcome], base: Outcome) -> Iterator[str]:
    """The sweep at the paper's start, where learning rates were chosen."""
    count = len(base.sweep.published)
    wins = {
        o.entrant.name: int((o.sweep.published < base.sweep.published).sum())
        for o in outcomes
        if o.entrant.name.startswith("delta") or o.entrant.kind is AdamW
    }
    shown = ", ".join(f"{name} {number}" for name, number in wins.items())
    yield (
        "claimed (Nested Learning, 2025, eq. 53): a picture of delta momentum ahead of momentum, "
        f"its k, a, w and learning rates not given; at that start, of {count} surfaces won against "
        f"tuned momentum: {shown}"
    )
    behind = []
    for outcome in outcomes[1:]:
        _, won, lost = outcome.sweep.against(base.sweep)
        behind += [outcome.entrant.name] if won.mean() < lost.mean() else []
    yield (
        f"warped: {base.entrant.name} wins more often than it loses against: "
        f"{', '.join(behind) or 'none'}"
    )


def _edges(outcomes: Sequence[Outcome], grid: tuple[float, ...]) -> Iterator[str]:
    """Who may have wanted another grid, and who was lost."""
    for task in ("quadratic", "rosenbrock", "text"):
        found = [(o.entrant.name, s) for o in outcomes if (s := getattr(o, task)) is not None]
        edge = [f"{name} {s.lr:.3g}" for name, s in found if s.lr in (grid[0], grid[-1])]
        lost = [name for name, s in found if (s.values >= math.log10(CEILING)).any()]
        if edge:
            yield f"{task}: learning rates chosen at the edge of the grid: {', '.join(edge)}"
        if lost and task != "text":
            yield f"{task}: lost from some start: {', '.join(lost)}"


def _at_zero(moved: Mapping[str, Mapping[str, float | str]]) -> Iterator[str]:
    for form in FORMS:
        by_kind = {kind: forms[form] for kind, forms in moved.items()}
        moving = [kind for kind, by in by_kind.items() if isinstance(by, float) and by > ROUNDING]
        still = [kind for kind, by in by_kind.items() if isinstance(by, float) and by <= ROUNDING]
        names = ", ".join(moving) or "none"
        refused = [kind for kind, by in by_kind.items() if isinstance(by, str)]
        yield (
            f"moved by a gradient of zero, phi {form} with the lift it chooses: {names}; not "
            f"moved: {', '.join(still)}; refused: {', '.join(refused) or 'none'}"
        )


def _data(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return {
        o.entrant.name: {
            "quadratic": o.quadratic._asdict(),
            "rosenbrock": o.rosenbrock._asdict(),
            "warped": o.sweep._asdict(),
            "text": None if o.text is None else o.text._asdict(),
        }
        for o in outcomes
    }


def _draw(figure: Any, outcomes: Sequence[Outcome], base: Outcome, worst: float) -> None:
    """Texts read worse than `worst` are drawn there, so as not to hide the others."""
    lower = "log10 of the loss (lower is better)"
    bits = f"bits per byte (lower is better;\n{worst:.2f}: that or worse)"
    panels: list[tuple[str, str, list[Any]]] = [
        ("Quadratic", lower, [o.quadratic.values for o in outcomes]),
        ("Rosenbrock", lower, [o.rosenbrock.values for o in outcomes]),
        ("Warped surfaces", "share of surfaces", [o.sweep.against(base.sweep) for o in outcomes]),
    ]
    read = [o.text.values.clamp(max=worst) for o in outcomes if o.text is not None]
    panels += [("Text", bits, read)] if read else []
    rows = torch.arange(len(outcomes), 0, -1).tolist()
    all_axes = figure.subplots(1, len(panels), sharey=True)
    for axes, (title, label, found) in zip(all_axes, panels, strict=True):
        if title == "Warped surfaces":
            _dots(axes, rows, [won for _, won, _ in found], 2, "won against SGD with momentum")
            _dots(axes, rows, [lost for _, _, lost in found], 1, "lost", fillstyle="none")
        else:
            ours = [o.entrant.is_memory for o in outcomes]
            for index, (memory, name) in enumerate(((True, "memories"), (False, "torch"))):
                kept = [i for i, is_one in enumerate(ours) if is_one is memory]
                _dots(axes, [rows[i] for i in kept], [found[i] for i in kept], index, name)
            axes.axvline(float(found[0].mean()), color="0.5", linestyle="--", linewidth=0.8)
        finish(axes, title, label, "")
    all_axes[0].set_yticks(rows, [o.entrant.name for o in outcomes])


def _dots(
    axes: Any, rows: list[int], samples: list[Tensor], index: int, name: str, **look: Any
) -> None:
    x, dx = mean_and_error(torch.stack(samples, 1))
    look = {"fmt": MARKERS[index], "color": COLOURS[index], "markersize": 6, **look}
    axes.errorbar(x, rows, None, dx, label=name, elinewidth=1.2, **look)
