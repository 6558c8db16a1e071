"""levels: one memory, heads that have a decay each, and levels of the same size together; nothing is trained.

Half the tokens write entries of a table that changes rarely (task A, then B, then A again), each again and again; the
other half bind a key to a value once, to be asked for soon. A level is the delta rule with fixed gates on its own
projections, as a head is; what both say is the nearest value of a codebook.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from hecate.cms import LevelConfig
from hecate.engine import memory_scan
from hecate.figure import COLOURS, GREY, MARKERS, curve, finish, mean_and_error, one_legend
from hecate.phi.random import haar
from hecate.rule import Gates, MemoryState
from studies.study import Cell, Result, Run, Spread, Study, progress

WIDTH = 64  # of keys and values; one level holds WIDTH * WIDTH numbers
VALUES = 128  # in the codebook
TABLE = 16  # entries of a task's table
AGES, RECENT = 64, 16  # tokens back to which bindings are asked for, and what counts as recent
PROBES = 16  # per phase
NEVER = math.inf


class Level(NamedTuple):
    """A square delta-rule memory on its own projections of keys and values."""

    width: int
    lr: float
    half_life: float  # tokens after which half of it is left; NEVER without decay
    period: int = 1

    def __str__(self) -> str:
        life = "" if self.half_life == NEVER else f", half-life {self.half_life:g}"
        period = "" if self.period == 1 else f", every {self.period}"
        return f"{self.width}x{self.width} lr {self.lr:g}{life}{period}"


class System(NamedTuple):
    """Levels or heads from fast to slow; their reads are added up.

    With `residual` a level is written with what the slower ones do not know yet, else, as heads are, with all.
    """

    levels: tuple[Level, ...]
    residual: bool = False


class Stream(NamedTuple):
    """Tokens of A | B | A for S seeds: `keys` [S, T, D] are to recall `values` [S, T] of `code`."""

    code: Tensor  # [S, VALUES, D]
    table_keys: Tensor  # [S, 2 * TABLE, D]; A's, then B's
    table_values: Tensor  # [S, 2 * TABLE]
    keys: Tensor
    values: Tensor
    from_table: Tensor  # [S, T]: whether the token is an entry of a table


class Recall(NamedTuple):
    """Shares recalled."""

    tables: Tensor  # [S, probes, 2]: of the tables of A and of B
    bindings: Tensor  # [S, AGES]: of bindings by age, averaged over the later probes
    bytes: int  # of the states of one sequence

    def shares(self) -> dict[str, Tensor]:
        """Per seed, and last what a memory is chosen by: both kinds of recall count alike."""
        after_a, after_b = (self.tables[:, phases * PROBES - 1] for phases in (1, 2))
        recent, older = self.bindings[:, :RECENT].mean(1), self.bindings[:, RECENT:].mean(1)
        tables = {"A after A": after_a[:, 0], "A after B": after_b[:, 0], "B after B": after_b[:, 1]}
        bindings = {f"bindings, age 1-{RECENT}": recent, f"bindings, age {RECENT + 1}-{AGES}": older}
        return {**tables, **bindings, "score": (after_b[:, 0] + recent) / 2}

    def part(self, seeds: slice) -> Recall:
        """The same of some seeds."""
        return Recall(self.tables[seeds], self.bindings[seeds], self.bytes)


def draw_stream(seeds: Sequence[int], phase: int) -> Stream:
    """Three phases of tokens for every seed."""
    drawn = zip(*(_drawn(seed, phase) for seed in seeds), strict=True)
    return Stream(*(torch.stack(part) for part in drawn))


def _drawn(seed: int, phase: int) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(seed)

    def unit(*shape: int) -> Tensor:
        return normalize(torch.randn(*shape, WIDTH, generator=g, dtype=torch.float32), dim=-1)

    length = 3 * phase
    code, table_keys, fresh = unit(VALUES), unit(2 * TABLE), unit(length)
    table_values = torch.randint(VALUES, (2 * TABLE,), generator=g)
    values = torch.randint(VALUES, (length,), generator=g)
    from_table = torch.rand(length, generator=g) < 0.5
    entry = torch.randint(TABLE, (length,), generator=g)
    entry = entry + TABLE * (torch.arange(length) // phase % 2)
    keys = torch.where(from_table[:, None], table_keys[entry], fresh)
    values = torch.where(from_table, table_values[entry], values)
    return code, table_keys, table_values, keys, values, from_table


class _Running:
    """One level as it goes: its projections, rule, gates and state."""

    def __init__(self, level: Level, number: int) -> None:
        g = torch.Generator().manual_seed(number)
        whole, decays = level.width == WIDTH, level.half_life != NEVER
        eye = torch.eye(WIDTH, dtype=torch.float32)
        self.key, self.value = (eye if whole else haar(WIDTH, g)[:, : level.width].float() for _ in range(2))
        rule = {"retention": "decay" if decays else "none", "read": "before"}
        self.rule = LevelConfig.model_validate({"name": f"level {number}", "period": level.period, "memory": rule}).rule
        self.gates = Gates(lr=level.lr, retain=0.5 ** (1 / level.half_life) if decays else None)
        self.state: MemoryState | None = None

    def __call__(self, keys: Tensor, values: Tensor | None = None) -> Tensor:
        """Predictions [S, T, D] for keys; with values they are those before each was written, else nothing is."""
        k, mask = normalize(keys @ self.key, dim=-1).unsqueeze(2), None
        if values is None:
            mask = torch.zeros(k.shape[:2], dtype=torch.bool)
        v = k.new_zeros(k.shape) if values is None else (values @ self.value).unsqueeze(2)
        y, state = memory_scan(self.rule, k, k, v, self.gates, state=self.state, write_mask=mask)
        self.state = self.state if values is None else state
        return y.squeeze(2) @ self.value.T


@torch.no_grad()
def measure(system: System, stream: Stream) -> Recall:
    """Runs a system over the stream and asks it, PROBES times a phase, what it knows."""
    levels = [_Running(level, number) for number, level in enumerate(system.levels)]
    length = stream.keys.shape[1]
    piece = length // (3 * PROBES)
    tables, bindings = [], []
    for end in range(piece, length + 1, piece):
        now = slice(end - piece, end)
        values = stream.values[:, now, None].expand(-1, -1, WIDTH)
        target = stream.code.gather(1, values)
        for level in reversed(levels):
            known = level(stream.keys[:, now], target)
            target = target - known if system.residual else target
        table, binding = _asked(levels, stream, end)
        tables.append(table)
        if end > AGES + piece * (PROBES // 4):
            bindings.append(binding)
    size = sum(level.state.bytes for level in levels if level.state is not None)
    by_age = torch.stack(bindings).nanmean(0)
    return Recall(torch.stack(tables, 1), by_age, size // stream.keys.shape[0])


def _asked(levels: list[_Running], stream: Stream, end: int) -> tuple[Tensor, Tensor]:
    """Recall of both tables [S, 2] and of recent bindings by age [S, AGES] (NaN: none)."""
    recent = slice(max(0, end - AGES), end)
    keys = torch.cat([stream.table_keys, stream.keys[:, recent]], 1)
    values = torch.cat([stream.table_values, stream.values[:, recent]], 1)
    reads = torch.stack([level(keys) for level in levels]).sum(0)
    right = ((reads @ stream.code.mT).argmax(-1) == values).float()
    tables = right[:, : 2 * TABLE].unflatten(-1, (2, TABLE)).mean(-1)
    by_age = right[:, 2 * TABLE :].masked_fill(stream.from_table[:, recent], math.nan).flip(-1)
    return tables, pad(by_age, (0, AGES - by_age.shape[-1]), value=math.nan)


def families(quick: bool) -> dict[str, list[System]]:
    """Systems that differ in their gates alone, the best of which on other seeds stands in the table; one memory gets
    at least as many to choose from as any other family."""
    rates = [1.0, 0.5, 0.3, 0.25, 0.2, 0.1, 0.05, 0.02]
    lives = [NEVER] if quick else [NEVER, 512]
    slow = [0.1, 0.05] if quick else [0.04, 0.02, 0.01, 0.005]
    fast = [16] if quick else [16, 64]

    def several(widths: Sequence[int], periods: Sequence[int] = (1, 1, 1, 1), residual: bool = False) -> list[System]:
        """The fast one at lr 1, the slow one without decay, others between them."""
        systems = []
        for life, lr in itertools.product(fast, slow):
            rates = [1.0, *[0.2] * (len(widths) - 2), lr]
            halves = [*(8**n * life for n in range(len(widths) - 1)), NEVER]
            levels = map(Level, widths, rates, halves, periods)
            systems.append(System(tuple(levels), residual))
        return systems

    return {
        "one memory": [System((Level(WIDTH, lr, life),)) for life, lr in itertools.product(lives, rates)],
        "two heads, a decay each": several((32, 55)),
        "four heads, a decay each": several((32, 32, 32, 32)),
        "two levels, sum": several((32, 55), (1, 64)),
        "two levels, residual": several((32, 55), (1, 64), True),
        "two levels, residual, period 1": several((32, 55), (1, 1), True),
        "three levels, residual": several((28, 28, 50), (1, 8, 64), True),
    }


class Outcome(NamedTuple):
    """A family's recalls on the seeds shown, one per system, and which was chosen."""

    systems: list[System]
    recalls: list[Recall]
    chosen: int


def levels(run: Run) -> Result:
    """Every setting on the seeds shown and, to choose by, on as many others."""
    phase, seeds = 512 if run.quick else 2048, run.seeds
    stream = draw_stream([*seeds, *(1000 + seed for seed in seeds)], phase)
    shown, others = slice(0, len(seeds)), slice(len(seeds), None)
    outcomes = {}
    for name, systems in families(run.quick).items():
        recalls = [measure(system, stream) for system in progress(systems, name)]
        scores = [float(recall.part(others).shares()["score"].mean()) for recall in recalls]
        outcomes[name] = Outcome(systems, [recall.part(shown) for recall in recalls], scores.index(max(scores)))
    best = {name: outcome.recalls[outcome.chosen] for name, outcome in outcomes.items()}
    heads = best["two heads, a decay each"].shares()
    rows: list[list[Cell]] = []
    for name, recall in best.items():
        shares = recall.shares()
        less = shares["score"] - heads["score"]
        rows.append([name, recall.bytes, *(Spread.of(share.tolist()) for share in (*shares.values(), less))])
    notes = [
        f"shares recalled; phases of {phase} tokens; a guess is right in 1 of {VALUES}; minus two heads: seed by seed",
        "a level with a period also carries the sum of its window",
        "claimed (Nested Learning, 2025): levels of several frequencies forget less; nothing is published here",
        *(f"gates of {name}: {'; '.join(map(str, o.systems[o.chosen].levels))}" for name, o in outcomes.items()),
    ]
    data = {}
    for name, outcome in outcomes.items():
        gates = [list(map(str, system.levels)) for system in outcome.systems]
        data[name] = {"gates": gates, "scores": [recall.shares()["score"].tolist() for recall in outcome.recalls]}
    columns = ["memory", "state (bytes)", *heads, "minus two heads"]
    return Result(columns, rows, notes, partial(draw, outcomes, phase), (11, 4.6), data)


ABOUT = "Do levels forget less than heads that have a decay each, and than one memory of the same size?"
LEVELS = Study("levels", ABOUT, levels, seeds=8)


def draw(outcomes: dict[str, Outcome], phase: int, figure: Any) -> None:
    """Table A over time, and both kinds of recall at every setting."""
    over_time, trade = figure.subplots(1, 2)
    tokens = torch.arange(1, 3 * PROBES + 1).numpy() * phase / PROBES
    of_age = f"bindings, age 1-{RECENT}"
    for index, (name, outcome) in enumerate(outcomes.items()):
        curve(over_time, tokens, outcome.recalls[outcome.chosen].tables[:, :, 0], index, name)
        shares = [recall.shares() for recall in outcome.recalls]
        (x, dx), (y, dy) = (mean_and_error(torch.stack([s[kind] for s in shares], 1)) for kind in (of_age, "A after B"))
        trade.errorbar(x, y, dy, dx, label=name, elinewidth=0.8, fmt=MARKERS[index], color=COLOURS[index])
    for number, task in enumerate("ABA"):
        over_time.axvline(number * phase, color=GREY, linewidth=0.8)
        over_time.text((number + 0.5) * phase, 1.05, f"task {task}", ha="center")
    label = "share of table A recalled"
    finish(over_time, "Table A over time", "tokens", label, ylim=(-0.03, 1.14), legend=False)
    one_legend(figure, over_time, 4)
    title, ages = "Both kinds of recall, every setting of the gates", f"age 1-{RECENT} tokens"
    limits = {"xlim": (-0.03, 1.03), "ylim": (-0.03, 1.03)}
    finish(trade, title, f"share of bindings recalled, {ages}", f"{label} after B", legend=False, **limits)
