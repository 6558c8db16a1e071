"""Cells of a comparison: each is a valid experiment of a grid, with its number of steps under the common budget."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path

from hecate.checks import expect_number
from hecate.data import Task
from hecate.errors import ConfigError, HecateError, Problem, retelling, shorten
from hecate.train.compose import load_experiment
from hecate.train.config import ExperimentConfig
from hecate.train.estimate import check_memory, flops_of

RESULT = "result.json"
"""File with the result of a run, in its folder."""
PASSES = 3
"""Cost of a forward and a backward pass together, in forward passes."""
LIMIT = 1 << 31
"""Number of steps above which a budget is taken for a mistake."""


@dataclass(frozen=True)
class Budget:
    """Budget of each cell's run: one of these; if all are None, the steps of the experiments themselves.

    Fields:
        steps: optimiser steps.
        tokens: tokens to train on.
        seconds: seconds of training, converted by each cell's own speed, measured over a few steps.
        flops: operations of forward and backward passes with weights, in memories and in attention; those of a forward
            pass are counted as in `hecate estimate`, and a backward pass counts twice as many.
    """

    steps: float | None = None
    tokens: float | None = None
    seconds: float | None = None
    flops: float | None = None

    def __post_init__(self) -> None:
        units = {name: value for name, value in vars(self).items() if value is not None}
        if len(units) > 1:
            raise ConfigError(f"one budget at a time, got {' and '.join(f'--{name}' for name in units)}; leave one out")
        for name, value in units.items():
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"--{name} must be a number above 0, got {value:g}")
            if name == "steps" and value % 1:
                raise ConfigError(f"--steps must be a whole number, got {value:g}")

    def steps_of(self, cell: Cell, speed: float | None = None) -> int:
        """Number of steps of a run of this cell; a budget of seconds needs `speed`, in steps per second.
        [COMPARE-BUDGET-D1]"""
        config = cell.config
        tokens = config.budget.batch_size * config.seq_len
        if self.flops is not None:
            number = self.flops / (PASSES * flops_of(config) * tokens)
        elif self.seconds is not None:
            if speed is None:
                raise ConfigError("a budget of seconds needs the speed of each cell")
            number = self.seconds * speed
        elif self.tokens is not None:
            number = self.tokens / tokens
        else:
            number = self.steps or config.budget.steps
        if not 1 <= number < LIMIT:
            raise ConfigError(
                f"{cell.label}: the budget comes to {number:g} steps of {tokens:,} tokens; give 1 or more"
            )
        return int(number)


@dataclass(frozen=True)
class Cell:
    """One of the compared experiments: its name, its overrides of a preset or file, and its whole config."""

    label: str
    overrides: tuple[str, ...]
    config: ExperimentConfig

    def at(self, seed: int, steps: int, lr: float | None = None) -> ExperimentConfig:
        """Its experiment with another seed and number of steps, and possibly lr. [COMPARE-PAIR-D1]"""
        tree = self.config.model_dump(mode="json")
        tree["seed"], tree["budget"]["steps"] = seed, steps
        if lr is not None:
            tree["optim"]["lr"] = lr
        with retelling(ConfigError, f"cell {shorten(self.label)}"):
            return ExperimentConfig.model_validate(tree)

    @property
    def folder(self) -> str:
        """A file name, different for every label."""
        plain = re.sub(r"[^A-Za-z0-9._-]+", "-", self.label).strip("-.")[:60]
        return f"{plain}-{hashlib.sha256(self.label.encode()).hexdigest()[:6]}"


def cells_of(sources: Sequence[str], over: Sequence[str] = (), overrides: Sequence[str] = ()) -> list[Cell]:
    """The cells for every experiment and every combination of `over`, texts PATH=VALUE,VALUE; `ConfigError` names every
    cell that is not valid. [COMPARE-GRID-D1]"""
    axes = [_axis(text) for text in over]
    paths = [axis[0].partition("=")[0] for axis in axes]
    if len(set(paths)) < len(paths):
        raise ConfigError(f"--over names {next(p for p in paths if paths.count(p) > 1)!r} twice; give its values once")
    cells: list[Cell] = []
    faults: list[Problem] = []
    for source, *chosen in product(sources, *axes):
        label = ", ".join([*([] if len(sources) == 1 and axes else [Path(source).stem]), *chosen])
        settings = (*overrides, *chosen)
        try:
            config = load_experiment(source, settings)
            check_memory(config, None)
            if config.init_from is not None and not Path(config.init_from).exists():
                raise ConfigError(f"init_from: nothing is at {config.init_from}")
            cells.append(Cell(label, settings, config))
        except HecateError as error:
            faults.append(Problem((), f"cell {shorten(label)}: {error.line}"))
    if faults:
        raise ConfigError(faults)
    _check_fair(cells)
    return cells


def _axis(text: str) -> list[str]:
    path, equals, rest = text.partition("=")
    values = [value.strip() for value in re.split(r",(?![^\[{]*[\]}])", rest)]
    if not equals or not path.strip() or not all(values):
        raise ConfigError(f"--over needs path=value,value, such as memory=titans,gated_delta, got {shorten(text)}")
    if len(set(values)) < len(values):
        raise ConfigError(f"--over gives a value twice: {shorten(text)}")
    return [f"{path.strip()}={value}" for value in values]


def _check_fair(cells: Sequence[Cell]) -> None:
    """Refuses cells that cannot be paired, because their data or batches differ. [COMPARE-PAIR-D1]"""
    if len(cells) < 2:
        raise ConfigError("a comparison needs two configs or more: name several, or give --over path=value,value")
    for one, two in combinations(cells, 2):
        if one.label == two.label:
            raise ConfigError(f"two configs are called {one.label!r}; rename one file")
        same = {"seed": 0, "name": "same"}
        if one.config.model_copy(update=same) == two.config.model_copy(update=same):
            raise ConfigError(f"cells {one.label!r} and {two.label!r} are the same experiment; leave one out")
    first = cells[0]
    for cell in cells:
        if cell.config.budget.minutes is not None:
            raise ConfigError(f"cell {cell.label!r} has budget.minutes, which would end its runs early; leave it out")
        for name, value in _common(cell.config).items():
            if value != _common(first.config)[name]:
                raise ConfigError(
                    f"cells {first.label!r} and {cell.label!r} differ in {name}: their losses are not of the same "
                    "tokens; give every cell the same"
                )


def _common(config: ExperimentConfig) -> dict[str, object]:
    budget, data = config.budget, config.data
    if isinstance(data, Task):  # validation uses the same fresh rows, whatever `examples` is
        data = data.model_copy(update={"examples": None})
    return {
        "data": data, "seq_len": config.seq_len, "budget.batch_size": budget.batch_size,
        "budget.eval_batches": budget.eval_batches,
    }  # fmt: skip


def check_once(cells: Sequence[Cell], budget: Budget, lrs: Sequence[float]) -> None:
    """Refuses overrides of settings that an option of the comparison sets."""
    options = {"seed": "--seeds"}
    if lrs:
        options["optim.lr"] = "--lr"
    for name in (name for name, value in vars(budget).items() if value is not None):
        options["budget.steps"] = f"--{name}"
    for cell in cells:
        for text in cell.overrides:
            if (option := options.get(text.partition("=")[0].strip())) is not None:
                raise ConfigError(f"cell {cell.label!r}: {text} is set by {option}, too; leave one out")


def seeds_of(seeds: int, tuning: int) -> tuple[range, range]:
    """The reported seeds, from 0, and those on which learning rates are chosen, which differ. [COMPARE-LR-D1]"""
    expect_number(seeds, "--seeds", 1, 10_000)
    expect_number(tuning, "--tuning-seeds", 1, 10_000)
    return range(seeds), range(1_000_000, 1_000_000 + tuning)


def rates_of(text: str | None) -> list[float]:
    """Learning rates from a text such as 1e-3,3e-3."""
    try:
        rates = [float(part) for part in text.split(",")] if text is not None else []
    except ValueError:
        raise ConfigError(f"--lr needs numbers such as 1e-3,3e-3, got {text!r}") from None
    if len(set(rates)) < len(rates):
        raise ConfigError("--lr gives a rate twice; give each once")
    return rates
