"""Pairs of a key and a value, held by fast weights whose keys are trained.

The synthetic task of the fast weight programmers: a sequence of pairs is written, then a key is
asked for, and the answer is the value that it was written with last. Values are one-hot and fixed;
trained are an embedding of the keys and the projections to k (of the pair), q and the gate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hecate.figure import COLOURS, MARKERS
from studies.study import Cell, Result, Run, Spread, progress, reach

WIDTH = 64  # of k and q, before phi
BATCH, LR = 32, 1e-3  # of Adam
EVERY, EVAL_ROWS, PATIENCE = 100, 20, 11  # evaluations: steps between, sequences, without progress
ENOUGH = 1e-3  # the loss at which training stops
STEPS = 3000  # of a full run at most
EPS = 1e-6  # added to what an answer is divided by


class Pairs(NamedTuple):
    """Sequences of pairs: `keys` and `values` are int64 `[B, T]`, both below `size`."""

    keys: Tensor
    values: Tensor
    size: int

    def last(self) -> tuple[Tensor, Tensor]:
        """The value that each key was written with last `[B, size]`, and whether it was."""
        place = torch.arange(self.keys.shape[1]).expand_as(self.keys)
        none = torch.full((len(self.keys), self.size), -1)
        at = none.scatter_reduce(1, self.keys, place, "amax")
        return self.values.gather(1, at.clamp(min=0)), at >= 0


def draw_pairs(count: int, length: int, rows: int, replace: bool, g: torch.Generator) -> Pairs:
    """Keys and values drawn from `count` each, with replacement or without."""

    def drawn() -> Tensor:
        if replace:
            return torch.randint(count, (rows, length), generator=g)
        return torch.rand(rows, count, generator=g).argsort(1)[:, :length]

    return Pairs(drawn(), drawn(), count)


class Associator(nn.Module):
    """Keys, queries and gates of pairs; a subclass says what a memory of them answers.

    The initialisation is that of the published code: embeddings N(0, 1), projections to k and q
    uniform within 1 / sqrt(WIDTH) (`xavier` for softmax), biases and the gate as torch draws them.
    """

    def __init__(self, count: int, g: torch.Generator, *, xavier: bool = False) -> None:
        super().__init__()
        width = int(1.1 * 2 * count)
        fan = width + count

        def uniform(bound: float, *shape: int) -> nn.Parameter:
            drawn = torch.rand(*shape, generator=g, dtype=torch.float32)
            return nn.Parameter((2 * drawn - 1) * bound)

        self.embedding = nn.Parameter(torch.randn(count, width, generator=g, dtype=torch.float32))
        self.key, self.query = (
            uniform(math.sqrt(6 / (n + WIDTH)) if xavier else WIDTH**-0.5, n, WIDTH) for n in (fan, width)
        )
        self.key_bias, self.query_bias = (uniform(n**-0.5, WIDTH) for n in (fan, width))
        self.gate, self.gate_bias = uniform(fan**-0.5, fan, 1), uniform(fan**-0.5, 1)

    def keys(self, pairs: Pairs) -> Tensor:
        """k of every pair, `[B, T, WIDTH]`."""
        return self._of_pairs(self.key, pairs) + self.key_bias

    def queries(self) -> Tensor:
        """q of every key, `[count, WIDTH]`."""
        return self.embedding @ self.query + self.query_bias

    def lr(self, pairs: Pairs) -> Tensor:
        """The inner learning rate of every pair, `[B, T, 1]`."""
        return torch.sigmoid(self._of_pairs(self.gate, pairs) + self.gate_bias)

    def _of_pairs(self, weight: Tensor, pairs: Pairs) -> Tensor:
        """[one-hot value, embedding of the key] times a weight, without building either."""
        of_key = self.embedding @ weight[pairs.size :]
        return F.embedding(pairs.keys, of_key) + F.embedding(pairs.values, weight)

    def answers(self, pairs: Pairs, asked: Tensor, g: torch.Generator) -> Tensor:
        """Scores of the values `[B, Q, count]` for the keys asked for, int64 `[B, Q]`."""
        raise NotImplementedError


def loss_of(answers: Tensor, values: Tensor) -> Tensor:
    """|one-hot value - answer|^2 / 2 of every question."""
    off = answers - F.one_hot(values, answers.shape[-1])
    return off.square().sum(-1) / 2


class Trained(NamedTuple):
    """Evaluations of one training, and why it ended."""

    losses: list[float]
    steps: int
    finished: bool  # by its own rule, not by the budget

    @property
    def best(self) -> float:
        """The lowest loss evaluated; that of saying nothing where there is none."""
        return min((loss for loss in self.losses if math.isfinite(loss)), default=0.5)

    @property
    def lost(self) -> bool:
        """Whether it ended in something that is no number."""
        return not math.isfinite(self.losses[-1])


def train(
    model: Associator, count: int, length: int, replace: bool, seed: int, steps: int, eval_length: int | None = None
) -> Trained:
    """Adam until the loss is ENOUGH, PATIENCE evaluations brought nothing, or the budget is used.

    Sequences of `length` pairs, one question each, about the key of a drawn position; evaluated on
    fresh ones of `eval_length`, asked for every key that they hold.
    """
    g = torch.Generator().manual_seed(1_000_000 + seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR, fused=True)
    losses: list[float] = []
    best, strikes, step = math.inf, 0, 0
    while step < steps:
        step += 1
        pairs = draw_pairs(count, length, BATCH, replace, g)
        at = torch.randint(length, (BATCH, 1), generator=g)
        asked = pairs.keys.gather(1, at)
        value = pairs.last()[0].gather(1, asked)
        loss = loss_of(model.answers(pairs, asked, g), value).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % EVERY:
            continue
        pairs = draw_pairs(count, eval_length or length, EVAL_ROWS, replace, g)
        losses.append(evaluate(model, pairs, g))
        strikes = 0 if losses[-1] < best else strikes + 1
        best = min(best, losses[-1])
        if losses[-1] <= ENOUGH or strikes >= PATIENCE or not math.isfinite(losses[-1]):
            return Trained(losses, step, True)
    return Trained(losses, step, False)


@torch.no_grad()
def evaluate(model: Associator, pairs: Pairs, g: torch.Generator) -> float:
    """Mean loss over every key that a sequence holds."""
    values, held = pairs.last()
    asked = torch.arange(pairs.size).expand_as(values)
    losses = loss_of(model.answers(pairs, asked, g), values)
    return float(losses[held].mean())


class Contender(NamedTuple):
    """What is trained: a memory's config, a feature map, or None for softmax."""

    name: str
    rule: Any
    quick_steps: int  # of a quick run; 0 leaves it out
    published: tuple[float, ...]  # best evaluation in the logs of arXiv 2102.11174, by size
    remark: str | None = None  # on those logs


class Outcome(NamedTuple):
    """A contender at one number of keys: its trainings by seed, and losses on sequences of another length if any."""

    contender: Contender
    size: int
    published: float
    trained: list[Trained]
    other: Sequence[float] = ()

    @property
    def ours(self) -> Spread:
        """Our loss over seeds, in thousandths."""
        return Spread.of(1000 * trained.best for trained in self.trained)

    def cells(self) -> list[Cell]:
        """Its line in the table, up to what a study has of its own."""
        losses, steps = [1000 * trained.best for trained in self.trained], [trained.steps for trained in self.trained]
        low, high = min(steps), max(steps)
        return [
            self.contender.name, self.size, round(1000 * self.published, 4), self.ours, reach(losses, ".3g"),
            len(losses), str(low) if low == high else f"{low}-{high}",
        ]  # fmt: skip


class Setting(NamedTuple):
    """A setting of Schlag, Irie and Schmidhuber, Linear Transformers Are Secretly Fast Weight Programmers (2021, arXiv
    2102.11174): contenders trained at every number of pairs.

    Fields:
        model: what is trained, of a number of keys, a contender's rule and a generator.
        contenders, sizes, quick_size: who, at how many pairs, and at how many in a quick run.
        again: whether keys are written again: sequences are then drawn with replacement.
    """

    model: Callable[[int, Any, torch.Generator], Associator]
    contenders: tuple[Contender, ...]
    sizes: tuple[int, ...]
    quick_size: int
    again: bool = False

    def outcomes(self, run: Run) -> list[Outcome]:
        """Trains every contender at every size; what is trained is kept."""
        kept, found = run.kept(), []
        for contender in [c for c in self.contenders if c.quick_steps or not run.quick]:
            steps = contender.quick_steps if run.quick else STEPS
            for count in progress((self.quick_size,) if run.quick else self.sizes, contender.name):
                published = contender.published[self.sizes.index(count)]
                fitted = [
                    kept([contender.name, count, seed, steps], partial(self.fit, contender.rule, count, seed, steps))
                    for seed in run.seeds
                ]
                trained, other = [Trained(*own) for own, _ in fitted], [loss for _, loss in fitted if self.again]
                found.append(Outcome(contender, count, published, trained, other))
        return found

    def fit(self, rule: Any, count: int, seed: int, steps: int) -> tuple[Trained, float | None]:
        """A training; where keys are written again, its last loss on sequences as long as those of training."""
        model = self.model(count, rule, torch.Generator().manual_seed(seed))
        if not self.again:
            return train(model, count, count, False, seed, steps), None
        trained = train(model, count, 2 * count, True, seed, steps, eval_length=count)
        g = torch.Generator().manual_seed(2_000_000 + seed)
        return trained, evaluate(model, draw_pairs(count, 2 * count, EVAL_ROWS, True, g), g)


def told(
    outcomes: Sequence[Outcome], quick: bool, columns: Sequence[str], ends: Sequence[Sequence[Cell]],
    notes: Sequence[str], complete: Callable[[Any], None],
) -> Result:  # fmt: skip
    """The table, what it means and the figure: full marks are ours, large open ones published.

    Args:
        columns: the name of contenders, and what a study has of its own.
        ends: of the lines of the table.
        notes: what this setting is, and what was claimed of it.
        complete: finishes the axes of the figure.
    """
    used = {o.contender.name: o.contender for o in outcomes}
    caps = ", ".join(f"{c.name} {c.quick_steps}" for c in used.values()) if quick else f"{STEPS:,}"
    cut = [f"{o.contender.name} S={o.size}" for o in outcomes if not all(trained.finished for trained in o.trained)]
    notes = [
        "losses in thousandths: |one-hot value - answer|^2 / 2 of a question, best evaluation of a training; 500 is "
        "saying nothing; mean +- standard error over seeds",
        f"k of width {WIDTH} from [one-hot value, embedding of the key], q from the latter; Adam {LR:g}, batch "
        f"{BATCH}, evaluated every {EVERY} steps on {EVAL_ROWS} sequences asked for every key, until {ENOUGH:g} or "
        f"{PATIENCE} evaluations without progress; the published runs had one seed and 100,000 steps to stop within",
        f"cut: steps are at most {caps}; this ended {', '.join(cut) or 'no training'}",
        *(f"published, {c.name}: {c.remark}" for c in used.values() if c.remark),
        *notes,
    ]

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for index, name in enumerate(used):
            own = [o for o in outcomes if o.contender.name == name]
            sizes, ours = [o.size for o in own], [o.ours for o in own]
            look = {"color": COLOURS[index], "marker": MARKERS[index]}
            errors = [spread.error / 1000 if spread.seeds > 1 else 0.0 for spread in ours]
            axes.errorbar(sizes, [spread.mean / 1000 for spread in ours], errors, label=name, capsize=2, **look)
            axes.plot(sizes, [o.published for o in own], markersize=11, fillstyle="none", linestyle="", **look)
        complete(axes)

    data: dict[str, dict[str, Any]] = {}
    for o in outcomes:
        again = {"2S pairs": o.other} if o.other else {}
        data[f"{o.contender.name} S={o.size}"] = {"evaluations": [trained.losses for trained in o.trained], **again}
    first, *last = columns
    rows = [[*o.cells(), *end] for o, end in zip(outcomes, ends, strict=True)]
    headings = (first, "pairs S", "published (1e-3)", "ours (1e-3)", "95 %", "seeds", "steps", *last)
    return Result(headings, rows, notes, draw, size=(8, 5), data=data)
