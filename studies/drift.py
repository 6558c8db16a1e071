"""drift: gradients frozen at a chunk's start against exact ones: how far apart, for what cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from hecate.activation import GELU
from hecate.engine import memory_scan
from hecate.microscope.style import curve, finish
from hecate.retention import Decay
from hecate.rule import Gates, MemoryConfig
from hecate.structure import MLP, Matrix, Structure
from studies.study import Cell, Progress, Result, Spread, Study
from studies.timing import cpu_times

TOKENS, WIDTH = 256, 32
PAIRS, CODE = 24, 64  # pairs of a key and a value; values to choose from
CHUNKS = (1, 2, 4, 8, 16, 32, 64)
QUICK = (1, 4, 16, 64)
SHOWN = (4, 16, 64)  # chunks in the table
MOMENTUM, RETAINS = 0.8, (1.0, 0.97)
LOST = 10.0  # relative errors count as at most this, as does what is no number


class Kind(NamedTuple):
    """A memory, and its learning rates from weak to strong."""

    name: str
    structure: Structure
    algorithm: str
    lrs: tuple[float, float, float]

    def config(self, chunk: int) -> MemoryConfig:
        """Its rule with gradients frozen for `chunk` tokens."""
        return MemoryConfig(
            structure=self.structure, algorithm=self.algorithm, retention=Decay(towards="zero"), chunk=chunk,
            on_nonfinite="propagate",
        )  # fmt: skip

    def gates(self, lr: float, retain: float) -> Gates:
        """The same gates for every token."""
        return Gates(lr, retain, MOMENTUM if self.algorithm == "momentum" else None)


KINDS = (
    Kind("matrix", Matrix(), "gd", (0.05, 0.2, 0.5)),
    Kind("matrix, momentum", Matrix(), "momentum", (0.02, 0.05, 0.1)),
    Kind(
        "MLP, momentum", MLP(layers=2, expansion=2, activation=GELU()), "momentum",
        (0.01, 0.03, 0.1),
    ),
)  # fmt: skip


class World(NamedTuple):
    """For S seeds: tokens that write drawn pairs again and again, and the pairs."""

    code: Tensor  # [S, CODE, D]
    keys: Tensor  # [S, PAIRS, D], of unit length as the code is
    values: Tensor  # [S, PAIRS]
    k: Tensor  # [S, T, 1, D]
    v: Tensor  # [S, T, 1, D]


def draw_world(seeds: Sequence[int]) -> World:
    """One world per seed."""
    return World(*(torch.stack(part) for part in zip(*map(_drawn, seeds), strict=True)))


def _drawn(seed: int) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(seed)

    def unit(count: int) -> Tensor:
        return normalize(torch.randn(count, WIDTH, generator=g, dtype=torch.float32), dim=-1)

    code, keys = unit(CODE), unit(PAIRS)
    values = torch.randint(CODE, (PAIRS,), generator=g)
    at = torch.randint(PAIRS, (TOKENS,), generator=g)
    return code, keys, values, keys[at, None], code[values[at], None]


def initial(kind: Kind, seeds: Sequence[int]) -> dict[str, Tensor]:
    """Weights `[S, 1, ...]` where memories start."""
    drawn = [kind.structure.init(WIDTH, WIDTH, generator=torch.Generator().manual_seed(1000 + seed)) for seed in seeds]
    return {name: torch.stack([one[name] for one in drawn]) for name in drawn[0]}


class Answers(NamedTuple):
    """What a memory says at every token `[S, T, D]`, and its share of pairs known at the end."""

    y: Tensor
    recalled: Tensor  # [S]


@torch.no_grad()
def answers(kind: Kind, chunk: int, gates: Gates, world: World, start: dict[str, Tensor]) -> Answers:
    """Writes a world and asks for every pair."""
    config, q = kind.config(chunk), world.keys.unsqueeze(2)
    y, state = memory_scan(config, world.k, world.k, world.v, gates, initial=start)
    unwritten = torch.zeros(q.shape[:2], dtype=torch.bool)
    known, _ = memory_scan(config, q, q, q, gates, state=state, write_mask=unwritten)
    said = (known.squeeze(2) @ world.code.mT).nan_to_num(-math.inf).argmax(-1)
    return Answers(y.squeeze(2), (said == world.values).float().mean(1))


def apart(y: Tensor, exact: Tensor) -> Tensor:
    """|y - exact| / |exact| of each sequence `[S]`, at most LOST."""
    error = (y - exact).flatten(1).double().norm(dim=1) / exact.flatten(1).double().norm(dim=1)
    return error.nan_to_num(LOST, LOST).clamp(max=LOST)


def curvature(k: Tensor, chunk: int) -> float:
    """Largest eigenvalue of sum k k^T over a chunk, of all chunks of keys `[S, T, 1, D]`."""
    chunks = k.squeeze(2).unflatten(1, (-1, chunk))
    return float(torch.linalg.matrix_norm(chunks, 2).square().max())


class Outcome(NamedTuple):
    """A memory under some gates, by chunk."""

    kind: Kind
    lr: float
    retain: float
    errors: Tensor  # [chunks, S]
    recalled: Tensor  # [chunks, S]
    step: float | None  # lr / (1 - momentum) times the curvature of a chunk of the last size


class Drift(Study):
    """What freezing costs in faith and saves in time."""

    name: ClassVar[str] = "drift"
    about: ClassVar[str] = "How far is a memory with gradients frozen per chunk from the exact one?"
    timed: ClassVar[bool] = True

    def run(self, quick: bool, seeds: Sequence[int], progress: Progress) -> Result:
        """Every memory under all gates by every chunk; then what a scan costs."""
        chunks, world = QUICK if quick else CHUNKS, draw_world(seeds)
        outcomes = []
        for kind in KINDS:
            start = initial(kind, seeds)
            settings = [(lr, retain) for retain in RETAINS for lr in kind.lrs]
            for lr, retain in progress(settings, kind.name):
                gates = kind.gates(lr, retain)
                found = [answers(kind, chunk, gates, world, start) for chunk in chunks]
                errors = torch.stack([apart(one.y, found[0].y) for one in found])
                share = MOMENTUM if kind.algorithm == "momentum" else 0.0
                linear = isinstance(kind.structure, Matrix)
                step = lr / (1 - share) * curvature(world.k, chunks[-1]) if linear else None
                recalled = torch.stack([one.recalled for one in found])
                outcomes.append(Outcome(kind, lr, retain, errors, recalled, step))
        costs = {kind.name: _costs(kind, chunks, 2 if quick else 5) for kind in progress(KINDS, "CPU time")}
        return report(outcomes, chunks, costs)


Times = tuple[list[float], list[float]]  # forward, forward and backward, by chunk: ms


def _costs(kind: Kind, chunks: Sequence[int], rounds: int) -> Times:
    """CPU time of scans of one sequence."""
    world, start, gates = draw_world([0]), initial(kind, [0]), kind.gates(kind.lrs[0], 0.97)
    q, k = (world.k.clone().requires_grad_() for _ in range(2))

    def scan(chunk: int) -> Tensor:
        return memory_scan(kind.config(chunk), q, k, world.v, gates, initial=start)[0]

    def forward(chunk: int) -> None:
        with torch.no_grad():
            scan(chunk)

    def both(chunk: int) -> None:
        torch.autograd.grad(scan(chunk).square().sum(), (q, k))

    def least(work: Callable[[int], None]) -> list[float]:
        runs = {str(chunk): partial(work, chunk) for chunk in chunks}
        return [float(times.min()) for times in cpu_times(runs, rounds).values()]

    return least(forward), least(both)


def report(outcomes: list[Outcome], chunks: Sequence[int], costs: dict[str, Times]) -> Result:
    """The table, what it means and the figure."""
    at = [chunks.index(chunk) for chunk in SHOWN]
    columns = [
        "memory", "lr", "retain", *(f"error, chunk {c}" for c in SHOWN), "recalled, chunk 1",
        *(f"recalled, chunk {c}" for c in SHOWN), f"lr x curvature, chunk {chunks[-1]}",
        *(f"CPU time, chunk {c} / 1" for c in SHOWN),
    ]  # fmt: skip
    rows: list[list[Cell]] = [
        [
            o.kind.name, o.lr, o.retain, *(Spread.of(o.errors[i].tolist()) for i in at),
            *(Spread.of(o.recalled[i].tolist()) for i in (0, *at)), o.step,
            *(round(costs[o.kind.name][1][i] / costs[o.kind.name][1][0], 2) for i in at),
        ]
        for o in outcomes
    ]  # fmt: skip
    plain = [(o, o.step) for o in outcomes if o.kind is KINDS[0] and o.retain == 1]
    over, under = ([o for o, step in plain if step and (step > 2) is so] for so in (True, False))
    notes = [
        f"{TOKENS} tokens write {PAIRS} pairs of unit keys and values of width {WIDTH}, drawn with "
        "replacement; y is read after each write; mean +- standard error over seeds",
        f"error: |y - y of chunk 1| / |y of chunk 1| over all tokens, at most {LOST:g}; recalled: "
        f"share of pairs answered at the end by the nearest of {CODE} values",
        f"momentum is {MOMENTUM:g} where there is one; the MLP has two layers, hidden width "
        f"{2 * WIDTH}, gelu; every token has the same gates",
        "nothing is published for this world; keys that return within a chunk are what it is about",
        "lr x curvature: lr / (1 - momentum) times the largest eigenvalue of sum k k^T in a chunk; "
        "beyond 2 a step with frozen gradients overshoots for a matrix with gd and retain 1: here "
        f"with errors of {_last(over)} at chunk {chunks[-1]}, against {_last(under)} below 2",
        "retain below 1 bounds what is lost, and forgets pairs whatever the chunk",
        f"CPU time: forward and backward, {torch.get_num_threads()} thread(s), at the first lr; "
        "a matrix needs no chunks for speed, its exact rule runs as a kernel",
    ]  # fmt: skip

    def draw(figure: Any) -> None:
        panels = figure.subplots(2, 1 + len(KINDS))
        for number, kind in enumerate(KINDS):
            own = [o for o in outcomes if o.kind is kind]
            _draw(panels[0, number], own, chunks, "errors")
            _draw(panels[1, number], own, chunks, "recalled")
        for row, what in enumerate(("forward", "forward and backward")):
            _draw_costs(panels[row, -1], costs, chunks, row, what)

    data = {
        f"{o.kind.name}, lr {o.lr:g}, retain {o.retain:g}": {
            "chunks": list(chunks), "errors": o.errors, "recalled": o.recalled,
        }
        for o in outcomes
    }  # fmt: skip
    return Result(columns, rows, notes, draw, size=(17, 9), data=data)


def _last(outcomes: list[Outcome]) -> str:
    return ", ".join(f"{float(o.errors[-1].mean()):.3g}" for o in outcomes) or "none"


def _draw(axes: Any, outcomes: list[Outcome], chunks: Sequence[int], what: str) -> None:
    for outcome in outcomes:
        index = outcome.kind.lrs.index(outcome.lr)
        solid = outcome.retain == 1
        first = 1 if what == "errors" else 0
        curve(
            axes, chunks[first:], getattr(outcome, what)[first:].T, index,
            f"lr {outcome.lr:g}, retain {outcome.retain:g}", linestyle="-" if solid else "--",
            marker="o" if solid else "s", markersize=4,
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    looks: dict[str, tuple[str, dict[str, Any]]] = {
        "errors": ("relative error of the outputs", {"yscale": "log", "ylim": (1e-3, 15)}),
        "recalled": ("share of pairs recalled", {"ylim": (-0.03, 1.03)}),
    }
    label, limits = looks[what]
    title = outcomes[0].kind.name
    limits |= {"xticks": chunks, "xticklabels": chunks}
    own = what == "recalled"  # the panel above has the same lines
    finish(axes, title, "chunk (tokens)", label, legend=own, **limits)


def _draw_costs(axes: Any, costs: dict[str, Times], chunks: Sequence[int], row: int, what: str) -> None:
    for index, (name, times) in enumerate(costs.items()):
        ratios = torch.tensor([times[row]], dtype=torch.float64) / times[row][0]
        curve(axes, chunks, ratios, 3 + index, name, marker="^", markersize=4)
    axes.set_xscale("log", base=2)
    finish(
        axes, f"CPU time, {what}", "chunk (tokens)", "CPU time / that of chunk 1", yscale="log",
        xticks=chunks, xticklabels=chunks,
    )  # fmt: skip
