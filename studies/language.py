"""Byte models of equal size under equal operations: memories against one another, attention, levels and HOPE."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hecate.checks import readable
from hecate.compare import Budget, Cell, Comparison, compare
from hecate.compare.report import cell_facts
from hecate.data import Bundled
from hecate.data.shards import SIDECAR
from hecate.data.tokenize import tokenize
from hecate.files import make_folder, write_file
from hecate.rule import bytes_of
from hecate.train.config import ExperimentConfig
from hecate.train.estimate import sizes_of
from hecate.train.trainer import Trainer
from studies.study import Cell as Entry
from studies.study import Progress, Result, Study
from studies.timing import step_times

RULES = (
    "linear_attention", "mamba2", "delta", "gated_delta", "kda", "delta_product", "titans_linear", "mesa", "titans",
    "yaad",
)  # fmt: skip
PACKAGES = (
    "asyncio",
    "email",
    "matplotlib",
    "networkx",
    "numpy",
    "pydantic",
    "sympy",
    "torch",
    "transformers",
    "unittest",
)
REFERENCE = "gated_delta"
WINDOW, RATIO, LONGER = 128, 2.667, 4
SHOWN = ("linear_attention", "gated_delta", "titans", "attention", f"mag, window {WINDOW}", "HOPE 16, 128")
COSTS = ("tokens_per_second", "seconds")
RATES, PART = (2e-3, 4e-3, 8e-3, 1.6e-2), 0.2
OPTIMIZERS: dict[str, Any] = {
    "adamw": {"kind": "adamw", "betas": [0.9, 0.95]}, "muon": {"kind": "muon"}, "m3": {"kind": "m3"},
    "phi_momentum, tanh": {"kind": "phi_momentum", "feature_map": "tanh"}, "delta_momentum": {"kind": "delta_momentum"},
    "sgd": {"kind": "sgd"},
}  # fmt: skip
Model = Mapping[str, Any]


class Sizes(NamedTuple):
    """Of the models of a study: width, layers, heads, context, sequences of a step, operations of a run, and batches
    that it is judged on."""

    width: int
    layers: int
    heads: int
    context: int
    batch: int
    flops: float
    judged: int = 32


FAST = {"name": "fast", "memory": REFERENCE}
REFERS = {"chunk": 16, "memory": {"retention": "decay"}}


def linear(period: int, rule: str = REFERENCE, name: str = "slow") -> dict[str, Any]:
    """A level of a plain memory. All writes of one key in a period are 2 together, beyond which they would grow."""
    return {"name": name, "period": period, "memory": {"kind": rule, "algorithm": {"kind": "gd", "lr": 2 / period}}}


def models() -> dict[str, Model]:
    """What a block has, by the name in the table."""

    def level(period: int) -> dict[str, Any]:  # whose writes are as large together, whatever its period
        memory = {"structure": {"kind": "mlp", "residual": True}, "algorithm": {"kind": "gd", "lr": 0.16 / period}}
        return {"name": f"every{period}", "period": period, "memory": memory}

    return {
        **{rule: {"memory": rule} for rule in RULES},
        "attention": {"attention": {"kind": "attention"}},
        f"attention, window {WINDOW}": {"attention": {"kind": "attention", "window": WINDOW}},
        f"mag, window {WINDOW}": {"memory": REFERENCE, "attention": {"kind": "mag", "window": WINDOW}},
        "levels 1, 64": {"levels": [FAST, linear(64)]},
        "levels 1, MLP 16, 128": {"levels": [FAST, level(16), level(128)], "mlp_ratio": 0.0},
        "HOPE 16, 128": {"self_reference": REFERS, "levels": [level(16), level(128)], "mlp_ratio": 0.0},
    }


class Language(Study):
    """At one million parameters."""

    name = "language"
    about = "Which memory models bytes best, at equal parameters and equal operations, and does attention do better?"
    count = 2
    timed = True
    sizes: ClassVar[Sizes] = Sizes(160, 4, 5, 1024, 4, 1.2e13)
    quick_sizes: ClassVar[Sizes] = Sizes(20, 1, 2, 64, 2, 5e8)
    chosen: ClassVar[Sequence[str] | None] = None
    rates: ClassVar[Sequence[float]] = RATES

    def cells(self, quick: bool, sizes: Sizes, data: Mapping[str, Any]) -> list[Cell]:
        """What is compared."""
        wanted = self.chosen or tuple(models())
        return [fitted(name, models()[name], sizes, data) for name in (wanted[:2] if quick else wanted)]

    def data(self, packages: Sequence[str], most: int) -> dict[str, Any]:
        """What is read: the machine's own text."""
        return {"kind": "bundled", "packages": packages, "max_bytes": most, "validation": 0.1}

    def run(self, quick: bool, seeds: Sequence[int], progress: Progress) -> Result:
        """Trains every model from every seed, in processes side by side; what is done is kept in the folder."""
        sizes = self.quick_sizes if quick else self.sizes
        out = self.out / f"{self.name}{'-quick' if quick else ''}-runs"
        data = self.data(() if quick else PACKAGES, 1 << 20 if quick else 32 << 20)
        cells, say = self.cells(quick, sizes, data), partial(print, file=sys.stderr, flush=True)
        found = compare(
            cells, out, budget=Budget(flops=sizes.flops), seeds=len(seeds), lrs=() if quick else self.rates, part=PART,
            jobs=os.cpu_count() or 1, positions=LONGER, say=say,
        )  # fmt: skip
        return told(found, sizes)


class Small(Language):
    """Of one sequence a step."""

    name = "language-small-batches"
    about = "Does the order of models hold with a quarter of the batch and four times the steps?"
    count = 2
    sizes = Sizes(160, 4, 5, 1024, 1, 1.2e13, 128)
    rates = (1e-3, 2e-3, 4e-3, 8e-3)


class Large(Language):
    """At five million parameters, the models that one million leaves ahead."""

    name = "language-large"
    about = "Does what holds at one million parameters hold at five?"
    sizes = Sizes(320, 4, 10, 1024, 4, 6e13)
    count = 2
    chosen = ("gated_delta", "titans_linear", "attention", f"mag, window {WINDOW}", "levels 1, 64")


class Returning(Language):
    """On passages that come twice."""

    name = "language-returning"
    about = "Which memory profits from passages that return, a thousand bytes later?"
    sizes = Sizes(160, 4, 5, 2048, 2, 1.2e13)
    count = 2
    chosen = (
        "linear_attention", "gated_delta", "titans_linear", "attention", f"attention, window {WINDOW}",
        f"mag, window {WINDOW}", "levels 1, 64", "HOPE 16, 128",
    )  # fmt: skip

    def data(self, packages: Sequence[str], most: int) -> dict[str, Any]:
        """The same text, of which each four passages of 256 bytes are followed by these in another order."""
        path = self.out / f"twice-{most}.txt"
        if not path.is_file():
            source = Bundled(packages=tuple(packages), max_bytes=most // 2).load()
            make_folder(self.out)
            write_file(path, _twice(np.concatenate([source.train, source.validation])).tobytes())
        return {"kind": "text", "paths": (str(path),), "validation": 0.1}


class Levels(Language):
    """Two levels with another gate, and carried on."""

    name = "language-levels"
    about = "What could make levels pay on text: a level that forgets nothing, or states that are carried on?"
    count = 2
    rates = (4e-3, 8e-3)

    def cells(self, quick: bool, sizes: Sizes, data: Mapping[str, Any]) -> list[Cell]:
        """What is compared; a row of a carried one goes on, from batch to batch, where it ended in the text."""
        two: Model = {"levels": [FAST, linear(64)]}
        made: dict[str, Model] = {
            REFERENCE: {"memory": REFERENCE},
            "levels 1, 64": two,
            "levels 1, 64, slow forgets nothing": {"levels": [FAST, linear(64, "delta")]},
        }
        carried: dict[str, Model] = {"levels 1, 64, carried": two, f"{REFERENCE}, carried": {"memory": REFERENCE}}
        found = [fitted(name, model, sizes, data) for name, model in list(made.items())[: 1 if quick else None]]
        on = list(carried.items())[: 1 if quick else None]
        return found + [fitted(name, model, sizes, {**data, "state": "carry"}) for name, model in on]

    def data(self, packages: Sequence[str], most: int) -> dict[str, Any]:
        """The same text as tokens, which rows can go on in."""
        folder, path = (self.out / f"bytes-{most}{suffix}" for suffix in ("", ".txt"))
        if not (folder / SIDECAR).is_file():
            source = Bundled(packages=tuple(packages), max_bytes=most).load()
            make_folder(self.out)
            write_file(path, np.concatenate([source.train, source.validation]).tobytes())
            tokenize([str(path)], folder, tokenizer="bytes", validation=0.0)
        return {"kind": "tokens", "path": str(folder), "documents": "ignore", "validation": 0.1}


class Descent(Language):
    """One model under several optimisers."""

    name = "language-optimisers"
    about = "Which optimiser trains a memory of a million parameters best, and what does it hold and cost?"
    count = 2
    sizes = Sizes(160, 4, 5, 512, 1, 1.2e13)
    rates = (5e-4, 2e-3, 8e-3, 3.2e-2, 0.128, 0.512, 2.0)

    def cells(self, quick: bool, sizes: Sizes, data: Mapping[str, Any]) -> list[Cell]:
        """The reference under each, named with the bytes that the optimiser holds for a parameter."""
        plain = fitted(REFERENCE, {"memory": REFERENCE}, sizes, data)
        found = []
        for name, optimizer in list(OPTIMIZERS.items())[: 2 if quick else None]:
            given = plain.config.model_dump(mode="json")
            given["optim"]["optimizer"] = optimizer
            config = ExperimentConfig.model_validate(given)
            found.append(Cell(f"{name}, {held(config):.0f} bytes", (), config))
        return found

    def run(self, quick: bool, seeds: Sequence[int], progress: Progress) -> Result:
        """The comparison, and what a step of each takes."""
        found, sizes = super().run(quick, seeds, progress), self.quick_sizes if quick else self.sizes
        cells = self.cells(quick, sizes, {"kind": "bundled"})
        took = step_times({cell.label: cell.config for cell in cells}, 2 if quick else 12)
        first = next(iter(took.values()))
        rows = [[*row, round(took[str(row[0])] / first, 2)] for row in found.rows]
        columns = [*found.columns, f"CPU time of a step / {next(iter(OPTIMIZERS))}'s"]
        return replace(found, rows=rows, columns=columns)


def held(config: ExperimentConfig) -> float:
    """Bytes of an optimiser's state for a parameter."""
    trainer = Trainer(ExperimentConfig.model_validate(config.model_dump(mode="json") | {"data": "bundled"}))
    trainer.train_step()
    parameters = sum(p.numel() for p in trainer.model.parameters())
    return bytes_of([optimizer.state_dict()["state"] for optimizer in trainer.optimizers.values()]) / parameters


def fitted(name: str, model: Model, sizes: Sizes, data: Mapping[str, Any]) -> Cell:
    """The cell of a model with as many parameters as the reference, by the width of its MLPs, or where it has none by
    its own."""

    def made(model: Model, width: int, ratio: float) -> Cell:
        shape = {"d_model": width, "layers": sizes.layers, "heads": sizes.heads, "mlp_ratio": ratio, **model}
        budget = {
            "batch_size": sizes.batch, "seq_len": sizes.context, "eval_every": 1 << 20, "eval_batches": sizes.judged,
            "checkpoint_every": 200, "threads": 1, "precision": "bfloat16",
        }  # fmt: skip
        given = {"name": "language", "data": data, "model": shape, "budget": budget}
        return Cell(name, (), ExperimentConfig.model_validate(given))

    def size(cell: Cell) -> int:
        return sizes_of(cell.config).parameters

    target = size(made({"memory": REFERENCE}, sizes.width, RATIO))
    if "mlp_ratio" in model:
        widths = range(sizes.width // 2 // sizes.heads * sizes.heads, sizes.width + 1, sizes.heads)
        return min((made(model, width, 0.0) for width in widths), key=lambda cell: abs(size(cell) - target))
    one, two = (size(made(model, sizes.width, ratio)) for ratio in (1.0, 2.0))
    hidden = round((1 + (target - one) / (two - one)) * sizes.width)
    return made(model, sizes.width, max(hidden, 1) / sizes.width)


def _twice(text: NDArray[np.uint8], unit: int = 256, units: int = 4) -> NDArray[np.uint8]:
    passages = text[: len(text) // (unit * units) * unit * units].reshape(-1, units, unit)
    order = np.random.default_rng(0).permuted(np.tile(np.arange(units), (len(passages), 1)), axis=1)
    again = np.take_along_axis(passages, order[..., None], 1)
    return np.concatenate([passages, again], 1).reshape(-1)


def told(found: Comparison, sizes: Sizes) -> Result:
    """The table, best first, and the loss by position."""
    facts = cell_facts(found)
    verdicts: dict[str, str] = {pair.first: pair.verdict for pair in found.pairs if pair.second == facts[0]["cell"]}
    swap = {"better": "worse", "worse": "better"}
    for pair in found.pairs:
        if pair.first == facts[0]["cell"]:
            verdicts[pair.second] = swap.get(pair.verdict, pair.verdict)
    places = {fact["cell"]: _places(found, fact["cell"]) for fact in facts}
    rows: list[list[Entry]] = []
    for fact in facts:
        inside: Entry = _mean(places[fact["cell"]], 0, sizes.context)
        beyond: Entry = _mean(places[fact["cell"]], sizes.context)
        if any("positions_reason" in row for row in found.of(fact["cell"])):
            inside, beyond = None, "diverged"
        spread = "" if math.isnan(fact["loss_half"]) else f" +- {fact['loss_half']:.3f}"
        rows.append([
            fact["cell"], f"{fact['loss']:.3f}{spread}", verdicts.get(fact["cell"]), inside, beyond,
            f"{fact['lr']:g}", fact["steps"], fact["tokens"] / 1e6, fact["parameters"] / 1e6,
            readable(fact["state_bytes"]), *(None if math.isnan(fact[cost]) else round(fact[cost]) for cost in COSTS),
        ])  # fmt: skip
    columns = [
        "model", "loss (nats/byte)", "than the first", f"loss up to {sizes.context:,}",
        f"{sizes.context:,} to {LONGER * sizes.context:,}", "lr", "steps", "tokens (M)", "parameters (M)", "state",
        "tokens/s", "seconds",
    ]  # fmt: skip
    notes = [
        f"{sizes.flops:g} operations a run, forward and backward; context {sizes.context:,}; seeds of a cell share "
        f"their batches with the others; rates chosen on one other seed with {PART:g} of the operations",
        "intervals: 95 %, Student's t over seeds; verdicts: paired over seeds, Holm over all pairs",
        "attention: the state is the cache of all that was read, 0 before the first token",
        *found.notes,
    ]
    wide = 12.5 if any(row.get("curve") for row in found.rows) else 9.0
    return Result(columns, rows, notes, partial(_draw, found, facts, places, sizes), (wide, 4.8), {"positions": places})


Places = list[tuple[float, float, float, float]]


def _places(found: Comparison, cell: str) -> Places:
    """First and last position, loss and labels of every bucket, means over seeds."""
    kept = [row["positions"] for row in found.of(cell) if row.get("positions")]
    return [tuple(map(float, np.mean(each, 0))) for each in zip(*kept, strict=True)]  # type: ignore[misc]


def _mean(places: Places, low: int, high: float = math.inf) -> float | None:
    chosen = [(labels, loss) for first, _, loss, labels in places if low <= first < high]
    return sum(n * loss for n, loss in chosen) / sum(n for n, _ in chosen) if chosen else None


def _draw(
    found: Comparison, facts: Sequence[Mapping[str, Any]], places: Mapping[str, Places], sizes: Sizes, figure: Any
) -> None:
    curves = {fact["cell"]: found.of(fact["cell"])[0].get("curve") for fact in facts}  # of the first seed
    left, right, *more = figure.subplots(1, 3 if any(curves.values()) else 2)
    for height, fact in enumerate(reversed(facts)):
        half = 0.0 if math.isnan(fact["loss_half"]) else fact["loss_half"]
        left.errorbar(fact["loss"], height, xerr=half, fmt="o", color="C0", capsize=3)
        losses = [row["loss"] for row in found.of(fact["cell"])]
        left.plot(losses, [height] * len(losses), "|", color="0.5", markersize=9)
    left.set_yticks(range(len(facts)), [fact["cell"] for fact in reversed(facts)])
    left.set_xlabel("validation loss (nats/byte)")
    left.grid(axis="x", alpha=0.3)
    left.margins(y=0.05)
    shown = [name for name in SHOWN if name in places and len(places) > len(SHOWN)] or list(places)
    for name in shown:
        late = [(math.sqrt(first * last), loss) for first, last, loss, _ in places[name] if first >= 16]
        right.plot(*zip(*late, strict=True), marker=".", label=name)
    right.axvline(sizes.context, color="0.5", linestyle=":", linewidth=1)
    right.set_xscale("log", base=2)
    right.set_xlabel(f"position, trained up to {sizes.context:,}")
    right.set_ylabel("loss (nats/byte)")
    right.grid(alpha=0.3)
    for axes in more:
        for name in shown:
            late = [(tokens, loss) for tokens, loss in curves[name] or () if tokens >= sizes.batch * sizes.context * 16]
            axes.plot(*zip(*late, strict=True), label="_" + name) if late else axes.plot([], [])
        axes.set_xscale("log")
        axes.set_xlabel("tokens read")
        axes.set_ylabel("training loss (nats/byte), seed 0")
        axes.grid(alpha=0.3)
    figure.legend(fontsize=8, loc="outside lower center", ncols=3)
