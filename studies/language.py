"""Byte models of equal size on equal text: memories, levels, and attention with what memories have around it."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from hecate.checks import readable
from hecate.compare import Budget, Cell, Comparison, compare
from hecate.compare.report import cell_facts
from hecate.compare.statistics import Interval, against, pooled_intervals
from hecate.figure import COLOURS, DASHES, GREY, finish
from hecate.train.compose import load_experiment
from hecate.train.config import ExperimentConfig
from hecate.train.estimate import sizes_of
from studies.study import Cell as Entry
from studies.study import Result, Run, Study

PACKAGES = (
    "asyncio", "email", "matplotlib", "networkx", "numpy", "pydantic", "sympy", "torch", "transformers", "unittest",
)  # fmt: skip
REFERENCE, TRANSFORMER = "gated_delta", "attention with the same convolution and gate"
WINDOW, RATIO, LONGER = 128, 2.667, 4
COSTS = ("tokens_per_second", "seconds")
RATES = (2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)
Model = Mapping[str, Any]


class Sizes(NamedTuple):
    """Of the models of a study: width, layers, heads, context, sequences of a step, and bytes of a run."""

    width: int
    layers: int
    heads: int
    context: int
    batch: int
    tokens: float


def models() -> dict[str, Model]:
    """Token mixing of a block, by the name in the table."""
    around = {"conv_kernel": 4, "output_gate": True}  # what a memory layer has around it by default
    hope = load_experiment("hope").model.model_dump(include={"self_reference", "levels"}, exclude_unset=True)
    levels = [{"name": "deep", "memory": "titans"}, {"name": "fast", "memory": REFERENCE}]
    return {
        **{rule: {"memory": rule} for rule in (REFERENCE, "kda", "titans", "delta_product")},
        "levels: titans, then gated_delta": {"levels": levels},
        TRANSFORMER: {"attention": {"kind": "attention", **around}},
        f"the same, window {WINDOW}": {"attention": {"kind": "attention", "window": WINDOW, **around}},
        "plain GPT": {"attention": {"kind": "attention"}},
        "HOPE": {"d_model": 48, "mlp_ratio": 0, **hope},  # no MLP: its width makes the size
    }


SIZES, QUICK_SIZES = Sizes(64, 2, 2, 512, 4, 5e6), Sizes(20, 1, 2, 64, 2, 4e3)


def language(run: Run) -> Result:
    """Trains every model from every seed, in processes side by side; what is done is kept in the folder."""
    quick, sizes = run.quick, QUICK_SIZES if run.quick else SIZES
    packages: Sequence[str] = () if quick else PACKAGES
    data = {"kind": "bundled", "packages": packages, "max_bytes": 1 << (20 if quick else 25), "validation": 0.1}
    cells = [fitted(name, model, sizes, data) for name, model in list(models().items())[: 2 if quick else None]]
    comparison = compare(
        cells, run.out / f"{run.stem}-runs", budget=Budget(tokens=sizes.tokens), seeds=len(run.seeds),
        lrs=() if quick else RATES, jobs=os.cpu_count() or 1, positions=LONGER,
        say=partial(print, file=sys.stderr, flush=True),
    )  # fmt: skip
    return report(comparison, sizes)


ABOUT = "Which token mixing models bytes best, at equal parameters, equal bytes and the best of five rates each?"
LANGUAGE = Study("language", ABOUT, language, seeds=3)


def fitted(name: str, model: Model, sizes: Sizes, data: Mapping[str, Any]) -> Cell:
    """The cell of a model with as many parameters as the reference, by the width of its MLPs if it has any."""

    def config(model: Model, ratio: float = RATIO) -> ExperimentConfig:
        shape = {"d_model": sizes.width, "layers": sizes.layers, "heads": sizes.heads, "mlp_ratio": ratio, **model}
        budget = {"batch_size": sizes.batch, "seq_len": sizes.context, "threads": 1}
        budget |= {"eval_every": 1 << 20, "eval_batches": 32, "checkpoint_every": 1000}
        fields = {"name": "language", "data": data, "model": shape, "budget": budget, "optim": {"warmup": 100}}
        return ExperimentConfig.model_validate(fields)

    if "mlp_ratio" in model:
        return Cell(name, (), config(model))
    configs = (config({"memory": REFERENCE}), config(model, 1.0), config(model, 2.0))
    target, one, two = (sizes_of(config).parameters for config in configs)
    hidden = round((1 + (target - one) / (two - one)) * sizes.width)
    return Cell(name, (), config(model, max(hidden, 1) / sizes.width))


def report(comparison: Comparison, sizes: Sizes) -> Result:
    """The table, best first, and the loss by position. Deviations are pooled over models; differences to the reference
    have Dunnett's intervals, which hold for all of them together."""
    facts = cell_facts(comparison)
    converged = [fact["cell"] for fact in facts if not fact["diverged"]]
    losses = {name: [row["loss"] for row in comparison.of(name)] for name in converged}
    spreads = pooled_intervals(losses)
    beside = {pair.first: pair for pair in against(losses, REFERENCE)} if REFERENCE in losses else {}
    places = {fact["cell"]: _places(comparison, fact["cell"]) for fact in facts}
    rows: list[list[Entry]] = []
    for fact in facts:
        name, pair = fact["cell"], beside.get(fact["cell"])
        inside, beyond = _mean(places[name], 0, sizes.context), _mean(places[name], sizes.context)
        rows.append([
            name, spreads[name].text(".3f") if name in spreads else f"diverged from {fact['diverged']} seeds",
            None if pair is None else pair.difference.text("+.3f"), None if pair is None else pair.verdict,
            inside, beyond, f"{fact['lr']:g}", fact["steps"], fact["tokens"] / 1e6, fact["parameters"] / 1e3,
            readable(fact["state_bytes"]), *(None if math.isnan(fact[cost]) else round(fact[cost]) for cost in COSTS),
        ])  # fmt: skip
    columns = [
        "model", "loss (nats/byte)", f"less {REFERENCE}'s", "verdict", f"loss up to {sizes.context:,}",
        f"{sizes.context:,} to {LONGER * sizes.context:,}", "lr", "steps", "tokens (M)", "parameters (thousand)",
        "state", "tokens/s", "seconds",
    ]  # fmt: skip
    notes = [
        f"{sizes.tokens:g} bytes a run, context {sizes.context:,}; rates chosen from "
        f"{', '.join(f'{rate:g}' for rate in RATES)} on one other seed; the state of attention is its cache",
        "intervals: 95 %, deviations pooled over models; differences and verdicts: Dunnett's, for all of them together",
        *comparison.notes,
    ]
    draw = partial(_draw, comparison, spreads, places, sizes)
    return Result(columns, rows, notes, draw, (12.5, 4.8), {"positions": places})


Places = list[tuple[float, float, float, float]]
Intervals = Mapping[str, Interval]


def _places(comparison: Comparison, cell: str) -> Places:
    """First and last position, loss and labels of every bucket, means over seeds."""
    seeds = [row["positions"] for row in comparison.of(cell) if row.get("positions")]
    return [tuple(map(float, np.mean(each, 0))) for each in zip(*seeds, strict=True)]  # type: ignore[misc]


def _mean(places: Places, low: int, high: float = math.inf) -> float | None:
    chosen = [(labels, loss) for first, _, loss, labels in places if low <= first < high]
    return sum(n * loss for n, loss in chosen) / sum(n for n, _ in chosen) if chosen else None


def _draw(comparison: Comparison, spreads: Intervals, places: Mapping[str, Places], sizes: Sizes, figure: Any) -> None:
    names = sorted(spreads, key=lambda name: spreads[name].mean)
    curves = {name: comparison.of(name)[0].get("curve") or () for name in names}  # of the first seed
    losses_axes, middle, right = figure.subplots(1, 3, width_ratios=(1.2, 1, 1))
    for height, name in enumerate(reversed(names)):
        mean, half, *_ = spreads[name]
        losses_axes.errorbar(mean, height, xerr=0.0 if math.isnan(half) else half, fmt="o", color=COLOURS[0])
        losses = [row["loss"] for row in comparison.of(name)]
        losses_axes.plot(losses, [height] * len(losses), "|", color=GREY, markersize=9)
    losses_axes.set_yticks(range(len(names)), list(reversed(names)))
    losses_axes.margins(y=0.05)
    for index, name in enumerate(names):
        look = {"color": COLOURS[index % 7], "linestyle": DASHES[(index + index // 7) % 7], "label": name}
        late = [(math.sqrt(first * last), loss) for first, last, loss, _ in places[name] if first >= 16]
        right.plot(*zip(*late, strict=True), marker=".", **look)
        read = [(tokens, loss) for tokens, loss in curves[name] if tokens >= sizes.tokens / 10]
        middle.plot(*zip(*read, strict=True), **look)
    right.axvline(sizes.context, color=GREY, linestyle=":", linewidth=1)
    right.set_xscale("log", base=2)
    unit = "loss (nats/byte)"
    finish(losses_axes, "validation", unit, "", legend=False)
    finish(middle, "training, seed 0", "bytes read", unit, legend=False)
    least = min((loss for each in places.values() for _, _, loss, _ in each), default=1.0)
    finish(right, "by position", f"position, trained up to {sizes.context:,}", unit, ylim=(0.98 * least, 1.3 * least))
