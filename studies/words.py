"""words: which memories keep count, and at lengths beyond those of training: parity and the words of S_3 and S_5."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from hecate.data import DataConfig
from hecate.data.tasks import Task
from hecate.rule import bytes_of
from hecate.train.config import ExperimentConfig
from hecate.train.trainer import Trainer
from studies.study import Cell, Progress, Result, Spread, Study

LENGTH, LONGER = 24, (1, 2, 4)  # of training; how many times that is asked
WIDTH, HEADS, STEPS, BATCH = 32, 4, 800, 32
RATES, JUDGE = (3e-3, 1e-2), 1000  # rates to choose from, and the seed that they are chosen on
JUDGED = 256  # sequences
TASKS: dict[str, dict[str, Any]] = {
    "parity": {"kind": "parity"},
    "S_3": {"kind": "permutations", "degree": 3},
    "S_5, swaps": {"kind": "permutations", "degree": 5, "elements": "swaps"},
}
QUICK = {"delta, lr to 1", "delta, lr to 2"}


class Contender(NamedTuple):
    """A memory, and on which tasks theory lets one layer of it follow any length; None where it says nothing."""

    name: str
    model: dict[str, Any]
    able: tuple[str, ...] | None


def contenders() -> list[Contender]:
    """From those whose state moves along a diagonal to those that write several times."""

    def rule(kind: str, most: float | None = None) -> dict[str, Any]:
        ceiling = {} if most is None else {"algorithm": {"kind": "gd", "lr": most}}
        return {"memory": {"kind": kind, **ceiling}, "conv_kernel": 0}  # keys of a token alone

    single, every = ("parity", "S_5, swaps"), tuple(TASKS)
    return [
        Contender("linear_attention", rule("linear_attention"), ()),
        Contender("mamba2", rule("mamba2"), ()),
        Contender("delta, lr to 1", rule("delta", 1.0), ()),
        Contender("delta, lr to 2", rule("delta", 2.0), single),
        Contender("gated_delta, lr to 2", rule("gated_delta", 2.0), single),
        Contender("delta_product, 2 writes, lr to 1", rule("delta_product", 1.0), None),
        Contender("delta_product, 2 writes, lr to 2", rule("delta_product", 2.0), every),
        Contender("rwkv7", rule("rwkv7"), None),
        Contender("mamba3", rule("mamba3"), None),
        Contender("titans_linear", rule("titans_linear"), None),
        Contender("attention", {"attention": {"kind": "attention"}}, ()),
    ]


def trained(contender: Contender, task: str, seed: int, lr: float, steps: int) -> Trainer:
    """A model of one layer with an MLP, trained on words of `LENGTH`."""
    model = {"d_model": WIDTH, "layers": 1, "heads": HEADS, "mlp_ratio": 2.0, **contender.model}
    budget = {"steps": steps, "batch_size": BATCH, "eval_batches": 1}
    config = ExperimentConfig.model_validate({
        "seed": seed, "model": model, "data": {**TASKS[task], "seq_len": LENGTH},
        "optim": {"lr": lr, "warmup": 20, "weight_decay": 0.0}, "budget": budget,
    })  # fmt: skip
    trainer = Trainer(config)
    for _ in range(steps):
        trainer.train_step()
    return trainer


@torch.no_grad()
def judged(trainer: Trainer, task: str, length: int) -> float:
    """Accuracy on the second half of words of a length."""
    data = DataConfig.model_validate({**TASKS[task], "seq_len": length})
    if not isinstance(data, Task):
        raise TypeError(f"{task} is no task")
    tokens, targets = (torch.from_numpy(part) for part in data.sample(np.random.default_rng(length), JUDGED))
    logits, _ = trainer.model.eval()(tokens)
    trainer.model.train()
    return float((logits.argmax(-1) == targets)[:, length // 2 :].double().mean())


class Words(Study):
    """One layer on words of groups."""

    name = "words"
    about = "Which memories keep count, and beyond the lengths of training?"
    count: ClassVar[int] = 3

    def run(self, quick: bool, seeds: Sequence[int], progress: Progress) -> Result:
        """Trains every contender on every task, at the rate that is best on a seed of its own."""
        steps, rates, lengths = (60, RATES[1:], LONGER[:2]) if quick else (STEPS, RATES, LONGER)
        chosen = [c for c in contenders() if not quick or c.name in QUICK]
        tasks = tuple(TASKS)[:1] if quick else tuple(TASKS)
        rows: list[list[Cell]] = []
        for task in tasks:
            for contender in progress(chosen, f"{task}, {steps} steps each"):
                lr = rates[0]
                if len(rates) > 1:
                    lr = max(rates, key=lambda rate: judged(trained(contender, task, JUDGE, rate, steps), task, LENGTH))
                runs = [trained(contender, task, seed, lr, steps) for seed in seeds]
                scores = [Spread.of(judged(run, task, times * LENGTH) for run in runs) for times in lengths]
                _, state = runs[0].model(torch.zeros(1, LENGTH, dtype=torch.int64))
                able = None if contender.able is None else "yes" if task in contender.able else "no"
                rows.append([task, contender.name, bytes_of(state), lr, able, *scores])
        columns = ["task", "memory", "state (bytes)", "outer lr", "able in theory"]
        columns += [f"accuracy at {times * LENGTH}" for times in lengths]
        notes = [
            f"one layer of width {WIDTH}, {HEADS} heads, no convolution, an MLP; {steps} steps of AdamW on words of "
            f"{LENGTH}, batch {BATCH}; accuracy on the later half of {JUDGED} words; mean +- standard error over seeds",
            "a guess is right in .5 of parity, .17 of S_3, and .017 of S_5 once its sign is known",
            "able: one layer can follow every length in real numbers: a reflection, lr 2, flips a sign or swaps two "
            "letters, and the product of two moves three (Grazzi et al., 2411.12537; Siems et al., 2502.10297); a "
            "state that moves along a positive diagonal cannot (Merrill et al., 2404.08819)",
            "attention: the state is its cache",
        ]
        return Result(columns, rows, notes, partial(_draw, rows, lengths), (11.0, 4.6))


def _draw(rows: Sequence[Sequence[Any]], lengths: Sequence[int], figure: Any) -> None:
    tasks = list(dict.fromkeys(row[0] for row in rows))
    panels = figure.subplots(1, len(tasks), squeeze=False, sharey=True)[0]
    for axes, task in zip(panels, tasks, strict=True):
        own = [row for row in rows if row[0] == task][::-1]
        for index, times in enumerate(lengths):
            scores = [row[5 + index] for row in own]
            axes.errorbar(
                [s.mean for s in scores], [y - 0.2 * index for y in range(len(own))], fmt="o", capsize=2,
                xerr=[0 if s.seeds < 2 else s.error for s in scores], label=f"words of {times * LENGTH}",
            )  # fmt: skip
        axes.set_yticks(range(len(own)), [row[1] for row in own])
        axes.set_xlim(0, 1.03)
        axes.set_title(task)
        axes.set_xlabel("accuracy")
        axes.grid(axis="x", alpha=0.3)
    panels[-1].legend(fontsize=8, loc="lower right")
