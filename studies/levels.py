"""levels: one memory against several of the same size together, in a world of two paces."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch

from hecate.microscope.style import COLOURS, MARKERS, curve, finish, mean_and_error
from studies.study import Cell, Progress, Result, Spread, Study
from studies.two_paces import (
    AGES,
    NEVER,
    PROBES,
    RECENT,
    TABLE,
    VALUES,
    WIDTH,
    Level,
    Recall,
    System,
    draw_stream,
    measure,
)

BIN = 4  # ages to a point of the figure


class Family(NamedTuple):
    """Systems that differ in their gates alone; the best on other seeds stands in the table."""

    name: str
    systems: list[System]


class Outcome(NamedTuple):
    """A family's recalls on the seeds shown, one per system, and which was chosen."""

    family: Family
    recalls: list[Recall]
    chosen: int
    merit: float  # of the chosen system on the other seeds

    @property
    def best(self) -> Recall:
        """That of the chosen system."""
        return self.recalls[self.chosen]

    def gates(self, number: int) -> str:
        """Widths and gates of a system, from fast to slow."""
        return "; ".join(map(str, self.family.systems[number].levels))


class Levels(Study):
    """Several levels against one, under equal state."""

    name: ClassVar[str] = "levels"
    about: ClassVar[str] = "Do several memory levels forget less than one of the same size, task A | B | A?"

    def run(self, quick: bool, seeds: Sequence[int], progress: Progress) -> Result:
        """Every setting on the seeds shown and, to choose by, on as many others."""
        phase = 512 if quick else 2048
        stream = draw_stream([*seeds, *(1000 + seed for seed in seeds)], phase)
        shown, others = slice(0, len(seeds)), slice(len(seeds), None)
        outcomes = []
        for family in families(quick):
            recalls = [measure(s, stream) for s in progress(family.systems, family.name)]
            scores = [float(recall.part(others).score().mean()) for recall in recalls]
            kept = [recall.part(shown) for recall in recalls]
            outcomes.append(Outcome(family, kept, scores.index(max(scores)), max(scores)))
        return report(outcomes, phase)


def families(quick: bool) -> list[Family]:
    """One level gets at least as many settings to choose from as any other family."""
    rates = [1.0, 0.5, 0.3, 0.25, 0.2, 0.1, 0.05, 0.02]
    lives = [NEVER] if quick else [NEVER, 512]
    slow = [0.1, 0.05] if quick else [0.04, 0.02, 0.01, 0.005]
    fast = [16] if quick else [16, 64]

    def several(widths: tuple[int, ...], periods: tuple[int, ...], residual: bool) -> list[System]:
        middle = list(zip(widths, periods, strict=True))[1:-1]
        return [
            System(
                (
                    Level(widths[0], 1.0, life),
                    *(Level(w, 0.2, 8 * life, p) for w, p in middle),
                    Level(widths[-1], lr, NEVER, periods[-1]),
                ),
                residual,
            )
            for life, lr in itertools.product(fast, slow)
        ]

    return [
        Family("one level, fast gates", [System((Level(WIDTH, 1.0, 16),))]),
        Family("one level, slow gates", [System((Level(WIDTH, slow[1], NEVER, 64),))]),
        Family(
            "one level, best gates", [System((Level(WIDTH, lr, life),)) for life, lr in itertools.product(lives, rates)]
        ),
        Family("two levels, sum", several((32, 55), (1, 64), False)),
        Family("two levels, residual", several((32, 55), (1, 64), True)),
        Family("two levels, period 1", several((32, 55), (1, 1), True)),
        Family("two levels, window counted", several((32, 39), (1, 64), True)),
        Family("three levels", several((28, 28, 50), (1, 8, 64), True)),
    ]


def report(outcomes: list[Outcome], phase: int) -> Result:
    """The table, what it means and the figure."""
    one = outcomes[2]
    several = max(outcomes[3:], key=lambda outcome: outcome.merit)
    columns = [
        "memory", "state (bytes)", "A after A", "A after B", f"A {phase // PROBES} tokens later",
        "B after B", f"bindings, age 1-{RECENT}", f"bindings, age {RECENT + 1}-{AGES}", "score",
    ]  # fmt: skip
    notes = [
        f"shares recalled, mean +- standard error over seeds, phases of {phase} tokens; a guess is "
        f"right in 1 of {VALUES}",
        f"score: mean of A after B and bindings, age 1-{RECENT}; gates were chosen by it, on other "
        "seeds, so older bindings did not count",
        f"size: at most {WIDTH * WIDTH} weights everywhere; a level with a period also carries the "
        "sum of its window, which 'window counted' fits into the bytes of one level",
        "reads are added up; but for 'sum' a level is written with what slower ones do not know; nothing is trained",
        "claimed (Nested Learning, 2025): levels of several frequencies forget less; nothing is "
        "published for this world",
        f"best of several ({several.family.name}) minus best of one level: {_gap(several, one)}",
        *(
            f"behind one level: {outcome.family.name}, {_gap(outcome, one)}"
            for outcome in outcomes[3:]
            if _gap(outcome, one).mean < 0
        ),
        *(f"gates of {o.family.name}: {o.gates(o.chosen)}" for o in outcomes),
    ]

    def draw(figure: Any) -> None:
        (over_time, trade), (once, often) = figure.subplots(2, 2)
        _draw_time(over_time, [one, several, *outcomes[:2]], phase)
        _draw_trade(trade, [one, several, *(o for o in outcomes[3:] if o is not several)])
        _draw_ages(once, one, several)
        _draw_table_ages(often, one, several, phase)

    return Result(columns, [_row(o) for o in outcomes], notes, draw, size=(11, 10), data=_data(outcomes))


def _row(outcome: Outcome) -> list[Cell]:
    best, tables = outcome.best, outcome.best.tables[0]
    shares = [
        tables[:, PROBES - 1, 0], best.kept(), tables[:, 2 * PROBES, 0],
        tables[:, 2 * PROBES - 1, 1], best.recent(), best.bindings[0, :, RECENT:].mean(1),
        best.score(),
    ]  # fmt: skip
    spreads = [Spread.of(share.tolist()) for share in shares]
    return [outcome.family.name, best.bytes, *spreads]


def _gap(left: Outcome, right: Outcome) -> Spread:
    """Difference of scores, seed by seed: both saw the same tokens."""
    return Spread.of((left.best.score() - right.best.score()).tolist())


def _data(outcomes: list[Outcome]) -> dict[str, Any]:
    return {
        outcome.family.name: {
            "tables": outcome.best.tables,
            "bindings": outcome.best.bindings,
            "settings": [outcome.gates(number) for number in range(len(outcome.recalls))],
            "kept": [recall.kept() for recall in outcome.recalls],
            "recent": [recall.recent() for recall in outcome.recalls],
        }
        for outcome in outcomes
    }


def _draw_time(axes: Any, outcomes: list[Outcome], phase: int) -> None:
    tokens = torch.arange(1, 3 * PROBES + 1).numpy() * phase / PROBES
    for index, outcome in enumerate(outcomes):
        label = f"{outcome.family.name} (bindings {float(outcome.best.recent().mean()):.2f})"
        curve(axes, tokens, outcome.best.tables[0, :, :, 0], index, label)
    for number, task in enumerate("ABA"):
        if number:
            axes.axvline(number * phase, color="0.5", linewidth=0.8)
        axes.text((number + 0.5) * phase, 1.05, f"task {task}", ha="center")
    finish(axes, "Table A over time", "tokens", "share of table A recalled", ylim=(-0.03, 1.14))


def _draw_trade(axes: Any, outcomes: list[Outcome]) -> None:
    for index, outcome in enumerate(outcomes):
        x, dx = mean_and_error(torch.stack([r.recent() for r in outcome.recalls], 1))
        y, dy = mean_and_error(torch.stack([r.kept() for r in outcome.recalls], 1))
        name = outcome.family.name.replace("best", "all")
        look = {"fmt": MARKERS[index], "color": COLOURS[index], "markersize": 5}
        axes.errorbar(x, y, dy, dx, label=name, elinewidth=0.8, **look)
    finish(
        axes, "Both kinds of recall, every setting of the gates",
        f"share of bindings recalled, age 1-{RECENT} tokens", "share of table A recalled after B",
        xlim=(-0.03, 1.03), ylim=(-0.03, 1.03),
    )  # fmt: skip


def _draw_ages(axes: Any, one: Outcome, several: Outcome) -> None:
    ages = torch.arange(AGES // BIN).numpy() * BIN + (BIN + 1) / 2
    for index, (label, recall) in enumerate(_parts(one, several)):
        samples = recall.bindings[0].unflatten(-1, (-1, BIN)).mean(-1)
        curve(axes, ages, samples, index, label)
    finish(
        axes, "Bindings, each written once", f"age: tokens since it was written, in bins of {BIN}",
        "share of bindings recalled", ylim=(-0.03, 1.03),
    )  # fmt: skip


def _draw_table_ages(axes: Any, one: Outcome, several: Outcome, phase: int) -> None:
    ages = torch.arange(PROBES + 1).numpy() * phase / PROBES
    for index, (label, recall) in enumerate(_parts(one, several)):
        curve(axes, ages, recall.tables[0, :, PROBES - 1 : 2 * PROBES, 0], index, label)
    finish(
        axes, f"Table A, each entry written about {phase // (2 * TABLE)} times",
        "age: tokens since task A ended", "share of table A recalled", ylim=(-0.03, 1.03),
    )  # fmt: skip


def _parts(one: Outcome, several: Outcome) -> list[tuple[str, Recall]]:
    """One level, several together, and each of those alone; index 0 is the one to draw."""
    levels = several.family.systems[several.chosen].levels
    alone = [(f"of these, alone: {level}", several.best.alone(number)) for number, level in enumerate(levels, 1)]
    return [(one.family.name, one.best), (several.family.name, several.best), *alone]
