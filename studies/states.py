"""state and phi: what a memory answers for the bytes of its state, where pairs come once and where others replace them;
and whether a feature map is worth its bytes and its time."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, ClassVar, NamedTuple

import torch

from hecate.rule import bytes_of
from hecate.train.config import ExperimentConfig
from hecate.train.trainer import Trainer
from studies.study import Cell, Progress, Result, Spread, Study
from studies.timing import step_times

WIDTH, BATCH, STEPS, QUICK_STEPS = 32, 32, 600, 30
RATES, JUDGE = (5e-3, 2e-2), 1000  # rates to choose from, and the seed that they are chosen on
TASKS: dict[str, dict[str, Any]] = {
    "recall": {"kind": "retrieval", "num_keys": 8, "queries": 4},
    "overwriting": {"kind": "retrieval", "num_keys": 8, "queries": 4, "replacement": True},
}
RULES = (
    "linear_attention", "retnet", "mamba2", "hgrn2", "mlstm", "delta", "gated_delta", "gated_delta_2", "kda",
    "delta_product", "rwkv7", "comba", "efla", "longhorn", "dgd", "pgdn", "pkda", "osdn", "mesa", "gated_mesa",
    "gated_kalmanet", "gsa", "abc", "raven", "lattice", "mamba3", "momentum_delta", "titans_linear",
)  # fmt: skip
KEYS = (4, 16)
BASES: dict[str, dict[str, Any]] = {
    "sum": {"bias": "dot", "key_norm": "l2"},
    "delta": {"key_norm": "l2"},
    "gated delta": {"kind": "gated_delta"},
    "momentum": {"kind": "titans_linear"},
}
MAPS: dict[str, tuple[Any, int]] = {  # with the width of keys that gives 16 features, or 15
    "identity": ("identity", 16), "elu": ("elu", 16), "squared_relu": ("squared_relu", 16), "crelu": ("crelu", 8),
    "dpfp, nu 1": ({"kind": "dpfp", "nu": 1}, 8), "taylor": ("taylor", 4),
    "polynomial, 2": ({"kind": "polynomial", "degree": 2}, 4),
    "random_fourier": ({"kind": "random_fourier", "d_phi": 16}, 16),
}  # fmt: skip


class Trained(NamedTuple):
    """What a training came to: accuracy, bytes of the state after a sequence, and milliseconds of a step."""

    accuracy: float
    bytes: int
    step: float


def experiment(
    memory: Mapping[str, Any] | str, task: str, d_key: int, seed: int, lr: float, steps: int
) -> ExperimentConfig:
    """One layer with one head, values of 32 and a convolution of two taps, without MLP and output gate."""
    model = {
        "d_model": WIDTH, "layers": 1, "heads": 1, "mlp_ratio": 0, "d_key": d_key, "d_value": WIDTH,
        "conv_kernel": 2, "output_gate": False, "memory": memory,
    }  # fmt: skip
    return ExperimentConfig.model_validate({
        "seed": seed, "model": model, "data": TASKS[task],
        "optim": {"lr": lr, "weight_decay": 0.0, "warmup": min(20, steps // 2)},
        "budget": {"steps": steps, "batch_size": BATCH, "eval_batches": 16},
    })  # fmt: skip


def trained(memory: Mapping[str, Any] | str, task: str, d_key: int, seed: int, lr: float, steps: int) -> Trained:
    """What an experiment comes to."""
    config = experiment(memory, task, d_key, seed, lr, steps)
    trainer, took = Trainer(config), []
    for _ in range(steps):
        began = time.process_time()
        trainer.train_step()
        took.append(time.process_time() - began)
    with torch.no_grad():
        _, state = trainer.model(torch.zeros(1, config.seq_len, dtype=torch.int64))
    return Trained(trainer.evaluate().accuracy, bytes_of(state), 1e3 * median(took))


class Outcome(NamedTuple):
    """Of a cell: the rate that was better on a seed of its own, and what it came to from every seed."""

    lr: float
    runs: list[Trained]

    @property
    def accuracy(self) -> Spread:
        """Over seeds."""
        return Spread.of(run.accuracy for run in self.runs)

    @property
    def step(self) -> float:
        """Milliseconds, the median over runs."""
        return median(run.step for run in self.runs)


def outcomes(
    memory: Mapping[str, Any] | str, d_key: int, seeds: Sequence[int], steps: int, tasks: Sequence[str] = tuple(TASKS)
) -> dict[str, Outcome]:
    """Trained on every task from every seed, at the rate that is better on the last."""
    tried = {}
    if steps > QUICK_STEPS:
        tried = {lr: trained(memory, tasks[-1], d_key, JUDGE, lr, steps).accuracy for lr in RATES}
    lr = max(tried, key=tried.__getitem__) if tried else RATES[0]
    return {task: Outcome(lr, [trained(memory, task, d_key, seed, lr, steps) for seed in seeds]) for task in tasks}


class State(Study):
    """Named rules at two sizes of keys."""

    name = "state"
    about = "What do the rules answer for a byte of state, after pairs and after pairs that others replace?"
    count: ClassVar[int] = 2
    timed = True

    def run(self, quick: bool, seeds: Sequence[int], progress: Progress) -> Result:
        """Trains every rule at every size on every task."""
        steps, rules = (QUICK_STEPS, RULES[5:7]) if quick else (STEPS, RULES)
        cells = [(rule, d) for rule in rules for d in KEYS[: 1 if quick else None]]
        rows: list[list[Cell]] = []
        for rule, d in progress(cells, f"{steps} steps each"):
            found = outcomes(rule, d, seeds, steps)
            last = list(found.values())[-1]
            rows.append([rule, d, last.runs[0].bytes, round(last.step, 1), *(own.accuracy for own in found.values())])
        columns = ["rule", "d_key", "state (bytes)", "ms of a step", *(f"accuracy, {task}" for task in TASKS)]
        notes = [
            "8 keys and 8 values; recall: each pair once, 4 keys are asked; overwriting: 16 pairs, keys and values "
            "drawn with replacement, asked for the last; a guess is right in 1 of 8; mean +- standard error over "
            "seeds",
            f"one layer of width {WIDTH}, one head, a convolution of 2 taps, no MLP, no output gate; {steps} steps of "
            f"AdamW, batch {BATCH}, of the rates {', '.join(f'{lr:g}' for lr in RATES)} the one that was better at "
            f"overwriting on seed {JUDGE}; some have not converged",
            "rules as they are named; their state has what they carry beside the memory: momentum, a matrix of keys, a "
            "convolution's last token",
        ]
        return Result(columns, rows, notes, partial(_draw_rules, rows), (9.0, 0.3 * len(rules) + 2.0))


class Phi(Study):
    """Maps at equal bytes, and at equal time."""

    name = "phi"
    about = "Is a feature map worth its state and its time, and to which rule?"
    count: ClassVar[int] = 2
    timed = True

    def run(self, quick: bool, seeds: Sequence[int], progress: Progress) -> Result:
        """Trains every map under every rule for equal steps, and again for the time that identity took."""
        steps, maps = (QUICK_STEPS, list(MAPS)[:2]) if quick else (STEPS, list(MAPS))
        bases = list(BASES)[1:2] if quick else list(BASES)
        task = "overwriting"
        rows: list[list[Cell]] = []
        for base in progress(bases, f"{len(maps)} maps, {steps} steps each"):
            memories = {name: {**BASES[base], "feature_map": MAPS[name][0]} for name in maps}
            configs = {name: experiment(memories[name], task, MAPS[name][1], 0, RATES[0], steps) for name in maps}
            took = step_times(configs, steps // 10)
            for name in maps:
                memory, d = memories[name], MAPS[name][1]
                found = outcomes(memory, d, seeds, steps, (task,))[task]
                slower = took[name] / took[maps[0]]
                fewer = max(2, min(steps, round(steps / slower)))
                timely = found.accuracy
                if fewer < steps:
                    timely = Spread.of(trained(memory, task, d, seed, found.lr, fewer).accuracy for seed in seeds)
                rows.append([
                    base, name, found.runs[0].bytes, round(slower, 2), found.accuracy, fewer, timely,
                ])  # fmt: skip
        columns = [
            "rule", "phi", "state (bytes)", "step / identity's", f"accuracy after {steps} steps",
            "steps in identity's time", "accuracy then",
        ]  # fmt: skip
        notes = [
            "overwriting, as in `state`: 16 pairs of 8 keys and 8 values, asked for the last; keys are as wide as "
            "gives 16 features (15 for taylor and polynomial), brought to unit length behind phi",
            f"{steps} steps of AdamW at the better of two rates; the last column trains anew, for as many steps as fit "
            "into the time of identity's; mean +- standard error over seeds",
        ]
        return Result(columns, rows, notes, partial(_draw_maps, rows), (10.0, 4.5))


def _spread(axes: Any, rows: Sequence[Sequence[Any]], column: int, heights: Sequence[float], **style: Any) -> None:
    scores = [row[column] for row in rows]
    errors = [0.0 if score.seeds < 2 else score.error for score in scores]
    axes.errorbar([score.mean for score in scores], heights, xerr=errors, capsize=2, **style)


def _draw_rules(rows: Sequence[Sequence[Any]], figure: Any) -> None:
    panels = figure.subplots(1, len(TASKS), sharey=True)
    names = list(dict.fromkeys(row[0] for row in rows))[::-1]
    for column, (axes, task) in enumerate(zip(panels, TASKS, strict=True), 4):
        for d in sorted({row[1] for row in rows}):
            own = [row for row in rows if row[1] == d]
            _spread(axes, own, column, [names.index(row[0]) for row in own], fmt="o", label=f"d_key {d}")
        sizes = {name: [f"{row[2] / 1000:.1f}" for row in rows if row[0] == name] for name in names}
        _label(axes, task, [f"{name} ({', '.join(sizes[name])} kB)" for name in names])
    panels[-1].legend(fontsize=8, loc="lower left")


def _label(axes: Any, title: str, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.set_xlim(0, 1.03)
    axes.set_title(title)
    axes.set_xlabel("accuracy")
    axes.grid(axis="x", alpha=0.3)


def _draw_maps(rows: Sequence[Sequence[Any]], figure: Any) -> None:
    bases = list(dict.fromkeys(row[0] for row in rows))
    panels = figure.subplots(1, len(bases), sharey=True, squeeze=False)[0]
    for axes, base in zip(panels, bases, strict=True):
        own = [row for row in rows if row[0] == base][::-1]
        for column, shift, label in ((4, 0.1, "equal steps"), (6, -0.1, "equal time")):
            _spread(axes, own, column, [y + shift for y in range(len(own))], fmt="o", label=label)
        _label(axes, base, [row[1] for row in own])
    panels[-1].legend(fontsize=8, loc="lower left")
