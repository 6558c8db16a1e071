"""How much a study of optimisers does, what each did, and what that says in words."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch.optim import AdamW

from studies.contenders import ENTRANTS, QUICK, AtZero, Entrant
from studies.descents import CEILING, CONDITION, ENOUGH, JITTER, SIDE, Score, Sweep, Warp
from studies.lessons import PAIRS, SYMBOLS, WIDTH, Lesson
from studies.study import Spread

GRID = tuple(10.0 ** (half / 2 - 4) for half in range(11))  # learning rates
TASKS = {"quadratic": "Quadratic", "rosenbrock": "Rosenbrock", "text": "Text", "recall": "MQAR"}
Lessons = Mapping[str, Lesson]


class Outcome(NamedTuple):
    """What an entrant did."""

    entrant: Entrant
    quadratic: Score
    rosenbrock: Score
    sweep: Sweep
    text: Score | None
    recall: Score | None
    bytes: float  # of state, per parameter of the text model


class Budget(NamedTuple):
    """How much a run does."""

    grid: tuple[float, ...]
    quadratic: int = 200
    rosenbrock: int = 300
    warps: tuple[Warp, ...] = ()
    sweep: int = 150
    text: int = 0
    recall: int = 0
    entrants: tuple[Entrant, ...] = ENTRANTS

    @classmethod
    def of(cls, quick: bool) -> Budget:
        """A quick run takes every other learning rate, few surfaces and maps, and no lessons."""
        if quick:
            few = tuple(e for e in ENTRANTS if e.name in QUICK)
            warps = _warps((1, 10), (0.5, 1), (1, 3))
            return cls(GRID[::2], 100, 100, warps, 100, entrants=few)
        warps = _warps((1, 5, 10, 20), (0.5, 1, 2), (1, 3, 5, 10))
        return cls(GRID, warps=warps, text=100, recall=60)


def _warps(*axes: Sequence[float]) -> tuple[Warp, ...]:
    return tuple(Warp(*given) for given in itertools.product(*axes))


def has(outcomes: Sequence[Outcome], task: str) -> bool:
    """Whether a task was given."""
    return all(getattr(o, task) is not None for o in outcomes)


def settings(budget: Budget, lessons: Lessons) -> Iterator[str]:
    """What was done."""
    yield (
        f"mean +- standard error over seeds, each optimiser at the best of {len(budget.grid)} "
        f"learning rates from {budget.grid[0]:g} to {budget.grid[-1]:.3g}, chosen on other seeds "
        "(1000 and up); momentum 0.9, nothing decays weights, no schedule"
    )
    yield (
        "phi: PhiMomentum with every map of the library and the lift it chooses, however much of a row it misses "
        "(slay: .93), maps of rows at length 1; kernel: KernelMomentum, keyed by rows; delta: DeltaMomentum, erasing "
        "by lr; deep, M3 and Muon as they come but for momentum"
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
    if (text := lessons.get("text")) is not None:
        yield (
            f"text: three matrices read {text.facts['training bytes']} bytes that Python "
            f"{text.facts['python']} carries, {budget.text} batches of 128, learning rate chosen on"
            f" one other seed; loss held out; single bytes alone give {text.chance:.2f}"
        )
    if (recall := lessons.get("recall")) is not None:
        yield (
            f"MQAR: {PAIRS} pairs of {SYMBOLS} symbols, one layer of attention of width {WIDTH} "
            f"whose keys are of the token before, {budget.recall} batches of 32, chosen and held "
            f"out likewise; a guess costs {recall.chance:.2f} bits"
        )


def verdicts(outcomes: Sequence[Outcome], grid: tuple[float, ...]) -> Iterator[str]:
    """Who won, what was claimed, and what the grid may hide."""
    yield from _leads(outcomes)
    yield from _published(outcomes, outcomes[0])
    yield from _edges(outcomes, grid)


def _leads(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """By task: the memory that was best on other seeds against each of torch's."""
    rivals = [o.entrant.name for o in outcomes if not o.entrant.is_memory]
    for task in TASKS:
        if not has(outcomes, task):
            continue
        found = {o.entrant.name: getattr(o, task) for o in outcomes}
        ours = {o.entrant.name for o in outcomes if o.entrant.is_memory}
        best = min(sorted(ours), key=lambda name: found[name].merit)
        for rival in rivals:
            gap = Spread.of((found[best].values - found[rival].values).tolist())
            behind = sum(found[n].mean > found[rival].mean for n in ours)
            verdict = "ahead of" if gap.mean < 0 else "behind"
            verdict = "level with" if abs(gap.mean) <= 2 * gap.error else verdict
            yield (
                f"{task}: the best memory by other seeds, {best}, is {verdict} {rival} ({gap}); "
                f"memories behind {rival}: {behind} of {len(ours)}"
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
    yield (f"warped: {base.entrant.name} wins more often than it loses against: {', '.join(behind) or 'none'}")


def _edges(outcomes: Sequence[Outcome], grid: tuple[float, ...]) -> Iterator[str]:
    """Who may have wanted another grid, and who was lost."""
    for task in TASKS:
        found = [(o.entrant.name, s) for o in outcomes if (s := getattr(o, task)) is not None]
        edge = [f"{name} {s.lr:.3g}" for name, s in found if s.lr in (grid[0], grid[-1])]
        lost = [name for name, s in found if (s.values >= math.log10(CEILING)).any()]
        if edge:
            yield f"{task}: learning rates chosen at the edge of the grid: {', '.join(edge)}"
        if lost and task not in ("text", "recall"):
            yield f"{task}: lost from some start: {', '.join(lost)}"


def at_zero(still: Sequence[AtZero]) -> Iterator[str]:
    """Which phi move weights at a gradient of zero."""
    verdicts: dict[str, list[str]] = {}
    for at in still:
        verdicts.setdefault(at.verdict, []).append(at.kind)
    told = "; ".join(f"{verdict}: {', '.join(kinds)}" for verdict, kinds in verdicts.items())
    yield f"a gradient of zero and phi in its literal form, with the lift it chooses: {told}"
    for form in ("centred", "odd"):
        by = {at.kind: at.moved[form] for at in still}
        moving = [k for k, x in by.items() if not isinstance(x, str) and x > 0]
        refused = [k for k, x in by.items() if isinstance(x, str)]
        names = [", ".join(kinds) or "none" for kinds in (moving, refused)]
        yield f"{form}, it moves {names[0]}; refused: {names[1]}"
