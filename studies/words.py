"""words and needle: what memories do at lengths beyond those of training: parity, the words of S_3 and S_5, and pairs
to find again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from hecate.data import IGNORED, DataConfig
from hecate.data.tasks import Task
from hecate.rule import bytes_of
from hecate.train.config import ExperimentConfig
from hecate.train.trainer import Trainer
from studies.study import Cell, Progress, Result, Spread, Study
from studies.timing import step_times

WIDTH, HEADS, STEPS, BATCH = 32, 4, 800, 32
RATES, JUDGE = (3e-3, 1e-2), 1000  # rates to choose from, and the seed that they are chosen on
JUDGED = 256  # sequences
TASKS: dict[str, dict[str, Any]] = {
    "parity": {"kind": "parity"},
    "S_3": {"kind": "permutations", "degree": 3},
    "S_5, swaps": {"kind": "permutations", "degree": 5, "elements": "swaps"},
    "S_5, generators": {"kind": "permutations", "degree": 5, "elements": "generators"},
}
MORE_STEPS = {"S_5, generators": 3}  # times the steps
NEEDLES = {"needle": {"kind": "mqar", "vocab_size": 64, "num_pairs": 4, "power": 1.0, "random_filler": False}}
RULES = (
    "linear_attention", "retnet", "mamba2", "hgrn2", "mlstm", "delta", "gated_delta", "kda", "delta_product", "rwkv7",
    "longhorn", "mesa", "titans_linear",
)  # fmt: skip


class Contender(NamedTuple):
    """A memory, and on which tasks theory lets one layer of it follow any length; None where it says nothing."""

    name: str
    model: dict[str, Any]
    able: tuple[str, ...] | None = None


def contenders() -> list[Contender]:
    """From those whose state moves along a diagonal to those that write several times."""

    def rule(kind: str, most: float | None = None, writes: int | None = None) -> dict[str, Any]:
        own: dict[str, Any] = {} if most is None else {"algorithm": {"kind": "gd", "lr": most}}
        own |= {} if writes is None else {"writes": writes}
        return {"memory": {"kind": kind, **own}, "conv_kernel": 0}  # keys of a token alone

    single, every = ("parity", "S_5, swaps"), tuple(TASKS)
    return [
        Contender("linear_attention", rule("linear_attention"), ()),
        Contender("mamba2", rule("mamba2"), ()),
        Contender("delta, lr to 1", rule("delta", 1.0), ()),
        Contender("delta, lr to 2", rule("delta", 2.0), single),
        Contender("gated_delta, lr to 2", rule("gated_delta", 2.0), single),
        Contender("delta_product, 2 writes, lr to 1", rule("delta_product", 1.0)),
        Contender("delta_product, 2 writes, lr to 2", rule("delta_product", 2.0), every[:-1]),
        Contender("delta_product, 4 writes, lr to 2", rule("delta_product", 2.0, 4), every),
        Contender("rwkv7", rule("rwkv7")),
        Contender("mamba3", rule("mamba3")),
        Contender("titans_linear", rule("titans_linear")),
        Contender("attention", {"attention": {"kind": "attention"}}, ()),
    ]


def seekers() -> list[Contender]:
    """Rules as they are named, and attention."""
    attention = {"kind": "attention"}
    kinds = {"attention": attention, "attention, window 32": {**attention, "window": 32}}
    return [
        *(Contender(name, {"memory": name, "conv_kernel": 2}) for name in RULES),
        *(Contender(f"{name}, 2 layers", {"attention": own, "layers": 2}) for name, own in kinds.items()),
    ]


def experiment(contender: Contender, data: Mapping[str, Any], seed: int, lr: float, steps: int) -> ExperimentConfig:
    """A model of one layer with an MLP."""
    model = {"d_model": WIDTH, "layers": 1, "heads": HEADS, "mlp_ratio": 2.0, **contender.model}
    budget = {"steps": steps, "batch_size": BATCH, "eval_batches": 1}
    return ExperimentConfig.model_validate({
        "seed": seed, "model": model, "data": data,
        "optim": {"lr": lr, "warmup": 20, "weight_decay": 0.0}, "budget": budget,
    })  # fmt: skip


def trained(contender: Contender, data: Mapping[str, Any], seed: int, lr: float, steps: int) -> Trainer:
    """Such a model, trained."""
    trainer = Trainer(experiment(contender, data, seed, lr, steps))
    for _ in range(steps):
        trainer.train_step()
    return trainer


@torch.no_grad()
def judged(trainer: Trainer, task: Mapping[str, Any]) -> float:
    """Accuracy on the later half of sequences."""
    data = DataConfig.model_validate(task)
    if not isinstance(data, Task):
        raise TypeError(f"{task} is no task")
    length, right, labels = int(task["seq_len"]), 0, 0
    tokens, targets = (torch.from_numpy(part) for part in data.sample(np.random.default_rng(length), JUDGED))
    trainer.model.eval()
    for inputs, answers in zip(tokens.split(32), targets.split(32), strict=True):
        logits, _ = trainer.model(inputs)
        answers[:, : length // 2] = IGNORED
        right += int((logits.argmax(-1) == answers).sum())
        labels += int((answers != IGNORED).sum())
    trainer.model.train()
    return right / labels


class Words(Study):
    """One layer on words of groups."""

    name = "words"
    about = "Which memories keep count, and beyond the lengths of training?"
    count: ClassVar[int] = 3
    timed = True
    tasks: ClassVar[Mapping[str, Mapping[str, Any]]] = TASKS
    length: ClassVar[int] = 24  # of training
    longer: ClassVar[Sequence[int]] = (1, 2, 4)  # times that
    wanted: ClassVar[Sequence[str]] = ("delta, lr to 1", "delta, lr to 2")  # of a quick study
    told: ClassVar[bool] = True  # by theory, who is able

    def contenders(self) -> list[Contender]:
        """What is compared."""
        return contenders()

    def data(self, task: str, times: int = 1) -> dict[str, Any]:
        """A task at a length."""
        return {**self.tasks[task], "seq_len": times * self.length}

    def run(self, quick: bool, seeds: Sequence[int], progress: Progress) -> Result:
        """Trains every contender on every task, at the rate that is best on a seed of its own."""
        steps, rates, lengths = (60, RATES[1:], self.longer[:2]) if quick else (STEPS, RATES, self.longer)
        chosen = [c for c in self.contenders() if not quick or c.name in self.wanted]
        tasks = tuple(self.tasks)[:1] if quick else tuple(self.tasks)
        rows: list[list[Cell]] = []
        for task in tasks:
            data, own = self.data(task), steps * MORE_STEPS.get(task, 1)
            took = step_times({c.name: experiment(c, data, 0, rates[0], own) for c in chosen}, steps // 20)
            for contender in progress(chosen, f"{task}, {own} steps each"):
                lr = rates[0]
                if len(rates) > 1:
                    lr = max(rates, key=partial(self._tried, contender, data, own))
                runs = [trained(contender, data, seed, lr, own) for seed in seeds]
                scores = [Spread.of(judged(run, self.data(task, times)) for run in runs) for times in lengths]
                _, state = runs[0].model(torch.zeros(1, self.length, dtype=torch.int64))
                able = None if contender.able is None else "yes" if task in contender.able else "no"
                cost = [bytes_of(state), round(1e3 * took[contender.name], 1), own, lr]
                rows.append([task, contender.name, *cost, *[able] * self.told, *scores])
        columns = ["task", "memory", "state (bytes)", "ms of a step", "steps", "outer lr"]
        columns += ["able in theory"] * self.told
        columns += [f"accuracy at {times * self.length}" for times in lengths]
        first = len(columns) - len(lengths)
        draw = partial(_draw, rows, [times * self.length for times in lengths], first)
        return Result(columns, rows, self.notes(steps), draw, (12.0 if len(tasks) > 1 else 6.0, 4.8))

    def _tried(self, contender: Contender, data: Mapping[str, Any], steps: int, rate: float) -> float:
        return judged(trained(contender, data, JUDGE, rate, steps), data)

    def notes(self, steps: int) -> list[str]:
        """What the numbers are of."""
        return [
            f"one layer of width {WIDTH}, {HEADS} heads, no convolution, an MLP; {steps} steps of AdamW, on S_5's "
            f"generators three times as many, on words of {self.length}, batch {BATCH}; accuracy on the later half of "
            f"{JUDGED} words; mean +- standard error over seeds",
            "a guess is right in .5 of parity, .17 of S_3, and .008 of S_5, .017 once its sign is known; generators: a "
            "swap, the cycle of all five letters and its inverse",
            "able: one layer can follow every length in real numbers: a reflection, lr 2, flips a sign or swaps two "
            "letters, the product of two moves three, and of four all five (Grazzi et al., 2411.12537; Siems et al., "
            "2502.10297); a state that moves along a positive diagonal cannot (Merrill et al., 2404.08819)",
            "ms of a step: CPU time of one thread, the median, memories in turn; attention: the state is its cache",
        ]


class Needle(Words):
    """Pairs to find again, behind more and more of nothing."""

    name = "needle"
    about = "Which memories find a pair again, and behind more that means nothing than in training?"
    count: ClassVar[int] = 2
    tasks = NEEDLES
    length = 64
    longer = (1, 4, 16)
    wanted = ("delta", "mamba2")
    told = False

    def contenders(self) -> list[Contender]:
        """Rules and attention."""
        return seekers()

    def notes(self, steps: int) -> list[str]:
        """What the numbers are of."""
        return [
            "4 pairs of 31 keys and 32 values first, then a token that means nothing, again and again, and anywhere "
            "among it each key once, answered by its value; trained at "
            f"{self.length} tokens, asked in the later half of {JUDGED} sequences; a guess is right in 1 of 32; mean "
            "+- standard error over seeds",
            f"one layer of width {WIDTH}, {HEADS} heads, a convolution of 2 taps, an MLP, rules as they are named; "
            f"{steps} steps of AdamW, batch {BATCH}, at the better of two rates",
            f"attention: of two layers, as one does not see what follows a key; the state is its cache, after "
            f"{self.length} tokens",
        ]


def _draw(rows: Sequence[Sequence[Any]], lengths: Sequence[int], first: int, figure: Any) -> None:
    tasks = list(dict.fromkeys(row[0] for row in rows))
    panels = figure.subplots(1, len(tasks), squeeze=False, sharey=True)[0]
    for axes, task in zip(panels, tasks, strict=True):
        own = [row for row in rows if row[0] == task][::-1]
        for index, length in enumerate(lengths):
            scores = [row[first + index] for row in own]
            axes.errorbar(
                [s.mean for s in scores], [y - 0.2 * index for y in range(len(own))], fmt="o", capsize=2,
                xerr=[0 if s.seeds < 2 else s.error for s in scores], label=f"{length} tokens",
            )  # fmt: skip
        axes.set_yticks(range(len(own)), [row[1] for row in own])
        axes.set_xlim(0, 1.03)
        axes.set_title(task)
        axes.set_xlabel("accuracy")
        axes.grid(axis="x", alpha=0.3)
    panels[-1].legend(fontsize=8, loc="lower right")
