"""hopfield: how many patterns a matrix memory holds, and how many one that keeps them all."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import torch

from hecate.microscope.style import COLOURS, DASHES, MARKERS, curve, finish
from studies.patterns import (
    BETAS,
    CLASSICAL,
    IDENTITY,
    POLYNOMIALS,
    QUERIES,
    SOFTMAX,
    Memory,
    Outcome,
    capacity,
    expected_capacity,
    expected_growth,
    favor,
    flips,
    grid,
    growth,
    nearest,
    recovered,
)
from studies.study import Cell, Progress, Result, Spread, Study

SHOWN = 32  # the width of the table and of two panels
CLAIMS = {
    CLASSICAL.name: "d / (2 ln d)",
    IDENTITY.name: "d",
    POLYNOMIALS[0].name: "d^2",
    POLYNOMIALS[1].name: "d^3",
    SOFTMAX[-1].name: "exponential in d",
}


class Budget(NamedTuple):
    """How much a run does."""

    widths: tuple[int, ...]  # of matrix memories
    sharp: tuple[int, ...]  # of softmax with the largest beta
    features: tuple[int, ...]
    most: int  # patterns in a matrix
    many: int  # patterns kept as they are

    @classmethod
    def of(cls, quick: bool) -> Budget:
        """A quick run takes two widths."""
        if quick:
            return cls((16, SHOWN, 48), (8, 16, SHOWN), (64, 1024), 2**9, 2**11)
        widths, features = (16, 24, SHOWN, 48, 64), (64, 256, 1024, 4096)
        return cls(widths, (8, 12, 16, 20, 24, SHOWN), features, 2**11, 2**17)


class Hopfield(Study):
    """Associative recall of random patterns."""

    name: ClassVar[str] = "hopfield"
    about: ClassVar[str] = "How many patterns does a memory recover in one update, as a matrix and as softmax?"

    def run(self, quick: bool, seeds: Sequence[int], progress: Progress) -> Result:
        """Every memory at every width."""
        budget = Budget.of(quick)
        others = [1000 + seed for seed in seeds]
        outcomes = [
            _outcome(memory, budget, seeds)
            for memory in progress([CLASSICAL, IDENTITY, *POLYNOMIALS, *SOFTMAX], "memories")
        ]
        for features in progress(budget.features, "random features"):
            outcomes.append(_outcome(_best(features, budget, others), budget, seeds))
        return report(outcomes, budget)


def _outcome(memory: Memory, budget: Budget, seeds: Sequence[int]) -> Outcome:
    if memory.phi is None:
        counts = grid(budget.many)
        widths = budget.sharp if memory is SOFTMAX[-1] else (SHOWN,)
    else:
        counts = grid(budget.most)
        widths = budget.widths if memory.name in CLAIMS else (SHOWN,)
    shares = {d: [recovered(memory, d, counts, seed) for seed in seeds] for d in widths}
    return Outcome(memory, counts, shares)


def _best(features: int, budget: Budget, seeds: Sequence[int]) -> Memory:
    """The beta with the largest mean capacity on these seeds."""
    counts = grid(budget.most)

    def merit(memory: Memory) -> float:
        return sum(capacity(counts, recovered(memory, SHOWN, counts, seed)) for seed in seeds)

    return max((favor(features, beta) for beta in BETAS), key=merit)


def report(outcomes: Sequence[Outcome], budget: Budget) -> Result:
    """The table, what it means and the figure."""
    columns = [
        "memory", f"numbers kept, d = {SHOWN}", "claimed capacity", f"claimed, d = {SHOWN}",
        f"expected, d = {SHOWN}", f"ours, d = {SHOWN}", f"ours, d = {budget.widths[0]}",
        f"ours, d = {budget.widths[-1]}", "growth: power of d", "growth: doublings per d",
    ]  # fmt: skip

    def draw(figure: Any) -> None:
        over_count, over_width, over_size = figure.subplots(1, 3)
        _draw_shares(over_count, outcomes)
        _draw_widths(over_width, outcomes)
        _draw_sizes(over_size, outcomes)

    data = {o.memory.name: {"beta": o.memory.beta, "counts": o.counts, "shares": o.shares} for o in outcomes}
    rows = [_row(o, budget) for o in outcomes]
    return Result(columns, rows, list(_notes(outcomes, budget)), draw, size=(17, 7), data=data)


def _row(outcome: Outcome, budget: Budget) -> list[Cell]:
    memory = outcome.memory
    hoped = expected_capacity(memory, SHOWN)
    claimed = None
    if memory is CLASSICAL:
        claimed = round(SHOWN / (2 * math.log(SHOWN)), 1)
    matrix = memory.phi is not None
    power = growth(outcome, math.log) if matrix else None
    doublings = None if matrix else growth(outcome, float)
    ends = (SHOWN, budget.widths[0], budget.widths[-1])
    return [
        memory.name,
        memory.numbers(SHOWN) if matrix else f"{SHOWN} per pattern",
        CLAIMS.get(memory.name), claimed,
        None if hoped is None else float(f"{hoped:.3g}"),
        *(_cell(outcome, d) for d in ends),
        *(None if slopes is None else Spread.of(slopes) for slopes in (power, doublings)),
    ]  # fmt: skip


def _cell(outcome: Outcome, d: int) -> Cell:
    if d not in outcome.shares:
        return None
    if d not in outcome.reached():
        return f">= {outcome.counts[-1]}"
    return Spread.of(outcome.capacities(d))


def _notes(outcomes: Sequence[Outcome], budget: Budget) -> Iterator[str]:
    wrong = ", ".join(f"{flips(d)} of {d}" for d in sorted({*budget.widths, *budget.sharp}))
    yield (
        "ours: number of random +-1 patterns of which one update recovers half without a wrong "
        f"bit, {QUERIES} queries, about a tenth of the bits flipped ({wrong}); interpolated between"
        " numbers a factor of sqrt(2) apart, mean +- standard error over seeds"
    )
    yield (
        "claimed: classical, McEliece et al., 1987, for most patterns exactly and d without end "
        "(the often quoted 0.14 d is for few wrong bits); matrices, of order d^p (ATLAS, 2025); "
        "softmax, exponential (Hopfield Networks is All You Need, 2021)"
    )
    yield (
        "expected: by our own estimate, for matrices from the mean and variance of what the other "
        "patterns add to a bit, taken for normal; for softmax, half the queries have another "
        f"pattern as near as their own ({nearest(24):.0f} at d = 24, {nearest(48):.1e} at d = 48)"
    )
    yield (
        "a matrix holds d times d_phi numbers whatever it stores, softmax d for each pattern: its "
        "capacity is bought with memory that grows; polynomial: phi has every lower degree too "
        "(coefficients 1), the highest dominates; identity keeps the diagonal, as linear attention "
        "does, which pulls every bit towards the query's"
    )
    powers = [
        f"{o.memory.name} {Spread.of(slopes)}, expected {expected_growth(o):.2f}"
        for o in outcomes
        if o.memory.phi is not None and (slopes := growth(o, math.log)) is not None
    ]
    yield (
        "growth: least squares over the widths that every seed saw the end of; powers of d beside "
        f"those of the expected capacities: {'; '.join(powers)}; recovering every bit costs a "
        "logarithm, and the share of flipped bits is not the same at every width"
    )
    drawn = [o for o in outcomes if o.memory.is_random]
    chosen = [f"{o.memory.name}: {o.memory.beta:g}" for o in drawn]
    yield (
        f"favor: beta with the most patterns on other seeds (1000 and up) of {BETAS}: "
        f"{', '.join(chosen)}; from 1 on it matters little, until exp(-beta d / 2) leaves float32"
    )
    best = max(drawn, key=lambda o: sum(o.capacities(SHOWN)))
    yield (
        f"{best.memory.name}, {best.memory.numbers(SHOWN)} numbers, hold "
        f"{Spread.of(best.capacities(SHOWN))}; polynomial of degree 2, "
        f"{POLYNOMIALS[0].numbers(SHOWN)} numbers, "
        f"{next(_cell(o, SHOWN) for o in outcomes if o.memory is POLYNOMIALS[0])}"
    )


def _looks(outcomes: Sequence[Outcome]) -> dict[str, dict[str, Any]]:
    """By memory, the same in every panel: random features in greys, the others in colours."""
    known = [o.memory.name for o in outcomes if not o.memory.is_random]
    greys = [o.memory.name for o in outcomes if o.memory.is_random]
    looks = {name: {"color": COLOURS[i], "linestyle": "-"} for i, name in enumerate(known)}
    shades = {
        name: {"color": f"{0.75 - 0.55 * i / max(1, len(greys) - 1):.2f}", "linestyle": DASHES[1]}
        for i, name in enumerate(greys)
    }
    return {**looks, **shades}


def _draw_shares(axes: Any, outcomes: Sequence[Outcome]) -> None:
    looks = _looks(outcomes)
    for outcome in outcomes:
        name, samples = outcome.memory.name, torch.tensor(outcome.shares[SHOWN])
        curve(axes, outcome.counts, samples, 0, name, **looks[name])
    finish(
        axes, f"Recall, d = {SHOWN}, {flips(SHOWN)} bits flipped", "patterns stored (log)",
        "share recovered without a wrong bit", xscale="log", ylim=(-0.03, 1.03),
        legend=False,
    )  # fmt: skip
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), fontsize=8.5, frameon=False, ncols=2)


def _draw_widths(axes: Any, outcomes: Sequence[Outcome]) -> None:
    """Ours as marks, what is expected as lines; an arrow where the end was not seen."""
    looks = _looks(outcomes)
    for number, outcome in enumerate(o for o in outcomes if o.memory.name in CLAIMS):
        widths, colour = outcome.reached(), looks[outcome.memory.name]["color"]
        spreads = [Spread.of(outcome.capacities(d)) for d in widths]
        look = {"fmt": MARKERS[number], "color": colour, "label": outcome.memory.name}
        axes.errorbar(widths, [s.mean for s in spreads], [s.error for s in spreads], **look)
        for d in set(outcome.shares) - set(widths):
            last = outcome.counts[-1]
            ends = {"color": colour, "arrowstyle": "->", "linewidth": 1.8}
            axes.annotate("", (d, last * 4), (d, last), arrowprops=ends)
        line = [expected_capacity(outcome.memory, d) for d in sorted(outcome.shares)]
        axes.plot(sorted(outcome.shares), line, color=colour, linewidth=1, alpha=0.7)
    finish(
        axes, "Capacity over width (lines: expected)", "width d of a pattern",
        "patterns, half of them recovered (log)", yscale="log",
    )  # fmt: skip


def _draw_sizes(axes: Any, outcomes: Sequence[Outcome]) -> None:
    looks = _looks(outcomes)
    kinds: dict[str, list[tuple[float, Spread]]] = {}
    colours: dict[str, str] = {}
    for outcome in outcomes:
        if SHOWN not in outcome.reached():
            continue
        found = Spread.of(outcome.capacities(SHOWN))
        kind = outcome.memory.name.split(",")[0]
        size = outcome.memory.numbers(SHOWN) or SHOWN * found.mean
        kinds.setdefault(kind, []).append((size, found))
        colours.setdefault(kind, looks[outcome.memory.name]["color"])
    for number, (kind, points) in enumerate(kinds.items()):
        sizes, spreads = zip(*sorted(points), strict=True)
        look = {"fmt": f"{MARKERS[number]}-", "color": colours[kind], "label": kind}
        axes.errorbar(sizes, [s.mean for s in spreads], [s.error for s in spreads], **look)
    ends = [4 * SHOWN, 2**14 * SHOWN]
    label = "as many numbers as the patterns have"
    axes.plot(ends, [end / SHOWN for end in ends], color="0.4", linestyle=":", label=label)
    finish(
        axes, f"Capacity over memory, d = {SHOWN}", "numbers kept (log)",
        "patterns, half of them recovered (log)", xscale="log", yscale="log",
    )  # fmt: skip
