"""optim: optimisers that are memories of gradients beside those that everybody uses."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, ClassVar

from hecate.train.display import print_table
from studies.contenders import FORMS, AtZero, Entrant, costs, state_bytes, zero_gradient
from studies.descents import quadratic, rosenbrock, score, sweep
from studies.dots import Panel, dot_plot, ranked
from studies.lessons import Lesson, draw_recall, draw_text, score_lesson
from studies.outcomes import TASKS, Budget, Lessons, Outcome, at_zero, has, settings, verdicts
from studies.study import Cell, Progress, Result, Spread, Study


class Optim(Study):
    """Memories of gradients against momentum, AdamW and Muon, each at its best learning rate."""

    name: ClassVar[str] = "optim"
    about: ClassVar[str] = "Do optimisers whose momentum is a memory descend faster than plain momentum and AdamW?"
    count: ClassVar[int] = 4

    def run(self, quick: bool, seeds: Sequence[int], progress: Progress) -> Result:
        """Every entrant on every task."""
        budget = Budget.of(quick)
        others = [1000 + seed for seed in seeds]
        lessons: dict[str, Lesson] = {}
        if budget.text:
            lessons["text"] = draw_text([*seeds, others[0]], budget.text)
        if budget.recall:
            lessons["recall"] = draw_recall([*seeds, others[0]], budget.recall)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "phi sees")  # which maps are linear is a result here
            outcomes = [
                _outcome(entrant, budget, seeds, others, lessons) for entrant in progress(budget.entrants, "optimisers")
            ]
        times = costs(budget.entrants)  # they differ from run to run: printed, not filed
        rows = [(e.name, f"{t:.1f}") for e, t in zip(budget.entrants, times, strict=True)]
        print_table(("optimiser", "CPU time of a step / that of SGD"), rows)
        return report(outcomes, budget, lessons)


def _outcome(
    entrant: Entrant, budget: Budget, seeds: Sequence[int], others: Sequence[int], lessons: Lessons
) -> Outcome:
    make, grid = entrant.make, budget.grid
    learned = {task: score_lesson(make, grid, seeds, others[0], lesson) for task, lesson in lessons.items()}
    return Outcome(
        entrant,
        score(make, grid, quadratic(others), quadratic(seeds), budget.quadratic),
        score(make, grid, rosenbrock(others), rosenbrock(seeds), budget.rosenbrock),
        sweep(make, grid, budget.warps, seeds, budget.sweep),
        learned.get("text"),
        learned.get("recall"),
        state_bytes(entrant),
    )


def report(outcomes: Sequence[Outcome], budget: Budget, lessons: Lessons) -> Result:
    """The table, what it means and the figure."""
    base = outcomes[0]
    columns = ["optimiser", "quadratic (log10 loss)", "Rosenbrock (log10 loss)"]
    columns += ["warped: reached", "warped: won", "warped: lost"]
    columns += [f"{TASKS[task]} (bits per answer)" for task in lessons]
    columns += ["state (bytes per parameter)"]
    rows = [_row(outcome, base, lessons) for outcome in outcomes]
    still = zero_gradient()
    print_table(*_fixed_points(still))

    def draw(figure: Any) -> None:
        _draw(figure, outcomes, base, lessons)

    notes = [*settings(budget, lessons), *verdicts(outcomes, budget.grid), *at_zero(still)]
    found = {at.kind: at._asdict() | {"verdict": at.verdict} for at in still}
    data = {"results": _data(outcomes), "update of a zero gradient": found}
    tall = 2.0 + 0.24 * len(outcomes)
    return Result(columns, rows, notes, draw, size=(16.0, max(tall, 5.0)), data=data)


def _row(outcome: Outcome, base: Outcome, lessons: Lessons) -> list[Cell]:
    reached, won, lost = outcome.sweep.against(base.sweep)
    shares = [Spread.of(share.tolist()) for share in (reached, won, lost)]
    scores = [Spread.of(getattr(outcome, task).values.tolist()) for task in ("quadratic", "rosenbrock", *lessons)]
    return [outcome.entrant.name, *scores[:2], *shares, *scores[2:], round(outcome.bytes, 2)]


def _fixed_points(still: Sequence[AtZero]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Which phi move weights at a gradient of zero, as a table."""
    header = ("phi", "lift", "largest feature of 0", *(f"moved, {form}" for form in FORMS), "")
    rows = []
    for at in still:
        value = "-" if at.value is None else f"{at.value:.2g}"
        moved = ["-" if isinstance(by, str) else f"{by:.2g}" for by in at.moved.values()]
        rows.append((at.kind, at.lift, value, *moved, at.verdict))
    return header, rows


def _data(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return {
        o.entrant.name: {
            "quadratic": o.quadratic._asdict(),
            "rosenbrock": o.rosenbrock._asdict(),
            "warped": o.sweep._asdict(),
            "text": None if o.text is None else o.text._asdict(),
            "recall": None if o.recall is None else o.recall._asdict(),
        }
        for o in outcomes
    }


def _draw(figure: Any, outcomes: Sequence[Outcome], base: Outcome, lessons: Lessons) -> None:
    """What is learned no better than by chance is drawn there, so as not to hide the others."""
    tasks = [[getattr(o, task).values for o in outcomes] for task in TASKS if has(outcomes, task)]
    order = [outcomes[i] for i in ranked(tasks)]
    names, lower = ("memories", "torch"), "log10 of the loss"
    panels = [
        Panel("Quadratic", lower, [o.quadratic.values for o in order], names),
        Panel("Rosenbrock", lower, [o.rosenbrock.values for o in order], names),
    ]
    for task, lesson in lessons.items():
        worst = lesson.chance
        label = f"bits ({worst:.2f}: chance or worse)"
        found = [getattr(o, task).values.clamp(max=worst) for o in order]
        panels.append(Panel(TASKS[task], label, found, names))
    shares = [o.sweep.against(base.sweep) for o in order]
    won, lost = [share[1] for share in shares], [share[2] for share in shares]
    label = "share of surfaces"
    panels.append(Panel("Warped surfaces", label, won, ("won against momentum", "lost"), lost))
    dot_plot(figure, [o.entrant.name for o in order], [o.entrant.is_memory for o in order], panels)
