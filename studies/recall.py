"""recall: what trained memories answer: pairs that others replace, and pairs behind more and more of nothing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Generator, Tensor, nn

from hecate.compare import interval
from hecate.nn import SlidingAttention
from hecate.nn.conv import ShortConv
from hecate.nn.sliding import SlidingState
from hecate.rule import bytes_of
from studies.dots import dot_plot
from studies.layers import JUDGE, JUDGED, best_rate, experiment, judged, trained
from studies.study import Cell, Progress, Result, Spread, Study

WIDTH, TAPS, RATES = 32, 2, (2e-2, 5e-3)
ATTENTION, MORE = "attention, the same convolution", 3  # times the steps: it learns later
DEEP = "deep: "  # before the names of memories of more than one layer


class Task(NamedTuple):
    """A task, at the length of training and beyond it; steps of training, and what guessing scores."""

    data: dict[str, Any]
    lengths: tuple[int, ...]
    steps: int
    chance: float

    def at(self, length: int) -> dict[str, Any]:
        """The task at a length; 0 where it has but one."""
        return {**self.data, "seq_len": length} if length else self.data


TASKS = {
    "replaced": Task({"kind": "retrieval", "num_keys": 8, "queries": 4, "replacement": True}, (0,), 300, 1 / 8),
    "far": Task(
        {"kind": "mqar", "vocab_size": 64, "num_pairs": 4, "power": 1.0, "random_filler": False},
        (64, 256, 1024), 300, 1 / 32,
    ),
}  # fmt: skip


class Convolved(nn.Module):
    """Attention over all tokens behind the convolution that memories have, without which it never sees what follows a
    key."""

    def __init__(self, generator: Generator) -> None:
        super().__init__()
        self.conv = ShortConv(WIDTH, TAPS)
        self.conv.reset_parameters(generator)
        self.attention = SlidingAttention(WIDTH, 1, window=None, generator=generator)

    def forward(self, x: Tensor, state: None, **masks: None) -> tuple[Tensor, SlidingState]:
        """From the start of a sequence, without masks: that is how it is trained here."""
        y, after = self.attention(self.conv(x)[0])
        return y, after


def contenders() -> dict[str, dict[str, Any]]:
    """Models by the rule of their memory and the width of its keys, and attention."""

    def memory(rule: str, d_key: int = 16) -> dict[str, Any]:
        return {"memory": rule, "d_key": d_key, "d_value": WIDTH, "conv_kernel": TAPS, "output_gate": False}

    flat = ("linear_attention", "delta", "gated_delta", "mesa", "titans_linear")
    return {
        "gated_delta, d_key 4": memory("gated_delta", 4),
        **{rule: memory(rule) for rule in flat},
        f"{DEEP}titans": memory("titans") | {"d_value": 16},
        ATTENTION: {"attention": {"kind": "attention"}},
    }


QUICK = ("delta", "linear_attention")


class Recall(Study):
    """Overwriting (fast weight programmers, arXiv 2102.11174), and a needle in a haystack."""

    name: ClassVar[str] = "recall"
    about: ClassVar[str] = "What do trained memories answer of pairs that others replaced, and of pairs from long ago?"
    count: ClassVar[int] = 3

    def run(self, quick: bool, seeds: Sequence[int], progress: Progress) -> Result:
        """Trains every contender on every task from every seed, at the rate that is better on a seed of its own."""
        names = QUICK if quick else tuple(contenders())
        tasks = {kind: TASKS[kind] for kind in list(TASKS)[: 1 if quick else None]}
        rates = RATES[:1] if quick else RATES
        found: dict[str, list[tuple[int, float, list[list[float]]]]] = {name: [] for name in names}
        for kind, task in tasks.items():
            for name in progress(names, kind):
                steps = 120 if quick else task.steps * (MORE if name == ATTENTION else 1)
                model = {"d_model": WIDTH, "heads": 1, "mlp_ratio": 0, **contenders()[name]}
                data, since = task.at(task.lengths[0]), 0.0 if len(task.lengths) == 1 else 0.5

                run = partial(trained, model, data, steps=steps, mixer=Convolved if name == ATTENTION else None)
                lr = best_rate(rates, lambda lr: judged(run(JUDGE, lr), data, since))  # noqa: B023
                runs = [run(seed, lr) for seed in seeds]
                scores = [[judged(each, task.at(length), since) for each in runs] for length in task.lengths]
                length = experiment(model, data, 0, lr, steps).seq_len
                with torch.no_grad():
                    _, state = runs[0].model(torch.zeros(1, length, dtype=torch.int64))
                found[name].append((bytes_of(state), lr, scores))
        return report(found, tasks)


def report(found: dict[str, list[tuple[int, float, list[list[float]]]]], tasks: dict[str, Task]) -> Result:
    """The table, with intervals, and the figure."""
    titles = [
        kind if length == 0 else f"{kind}, {length} tokens" for kind, task in tasks.items() for length in task.lengths
    ]
    chances = [task.chance for task in tasks.values() for _ in task.lengths]
    columns = ["memory", "state (bytes)", *(text for title in titles for text in (title, "95 %"))]
    rows: list[list[Cell]] = [["a guess", None, *(cell for chance in chances for cell in (round(chance, 3), None))]]
    spreads: dict[str, list[Spread]] = {}
    for name, outcomes in found.items():
        scores = [values for _, _, lengths in outcomes for values in lengths]
        spreads[name] = [Spread.of(values) for values in scores]
        cells = [cell for values in scores for cell in (Spread.of(values), _interval(values))]
        rows.append([name, outcomes[0][0], *cells])
    steps = ", ".join(f"{kind} {task.steps}" for kind, task in tasks.items())
    notes = [
        "replaced: 16 pairs of 8 keys and 8 values, drawn with replacement, then 4 keys, asked for their last values; "
        "far: 4 pairs of 31 keys and 32 values, then a token that means nothing, again and again, and anywhere in it "
        f"each key once, asked in the later half; trained at {TASKS['far'].lengths[0]} tokens",
        f"one layer of width {WIDTH}, one head, keys of width 16 unless said, a convolution of 2 taps, no MLP, no "
        f"output gate; AdamW, steps of 32 sequences: {steps}, attention {MORE} times as many; the better of "
        f"{len(RATES)} rates on seed {JUDGE}; {JUDGED} sequences judged; not all have converged",
        "mean +- standard error over seeds, and Student's interval of 95 %, cut at 0 and 1; state: all that is carried "
        "after a sequence of the first task, of attention its cache",
        f"{DEEP}memories of two layers, values of width 16; the others are a matrix",
        "rates: " + "; ".join(f"{name} {', '.join(f'{lr:g}' for _, lr, _ in o)}" for name, o in found.items()),
    ]

    def draw(figure: Any) -> None:
        panels = {title: {"": [spreads[name][at] for name in found]} for at, title in enumerate(titles)}
        dot_plot(figure, list(found), panels, "accuracy", chances)

    return Result(columns, rows, notes, draw, size=(2.6 * len(titles) + 2.0, 4.2), data={"scores": found})


def _interval(values: Sequence[float]) -> str | None:
    if len(values) < 2:
        return None
    mean, half = interval(values)[:2]
    return f"{max(0.0, mean - half):.2f} to {min(1.0, mean + half):.2f}"
