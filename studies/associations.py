"""capacity, overwrite: pairs of a key and a value, held by fast weights whose keys are trained.

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

from hecate.engine import memory_scan
from hecate.figure import COLOURS, GREY, MARKERS, PALE, finish
from hecate.phi import DPFP, ELU, Favor, FeatureMap
from hecate.rule import Gates, MemoryConfig
from studies.study import Cell, Result, Run, Spread, Study, progress, reach, spread_line

WIDTH = 64  # of k and q, before phi
BATCH, LR = 32, 1e-3  # of Adam
EVERY, EVAL_ROWS, PATIENCE = 100, 20, 11  # evaluations: steps between, sequences, without progress
ENOUGH = 1e-3  # the loss at which training stops
STEPS = 3000  # of a full run at most
LOSS = "loss of a question"
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
    if replace:
        keys, values = (torch.randint(count, (rows, length), generator=g) for _ in range(2))
    else:
        keys, values = (torch.rand(rows, count, generator=g).argsort(1)[:, :length] for _ in range(2))
    return Pairs(keys, values, count)


class Associator(nn.Module):
    """Keys, queries and gates of pairs; a subclass says what a memory of them answers.

    The initialisation is that of the published code: embeddings N(0, 1), projections to k and q
    uniform within 1 / sqrt(WIDTH) (Xavier's for softmax, whose rule is None), biases and the gate as torch draws them.
    """

    def __init__(self, count: int, rule: Any, g: torch.Generator) -> None:
        super().__init__()
        self.rule, width = rule, int(1.1 * 2 * count)
        fan = width + count

        def uniform(bound: float, *shape: int) -> nn.Parameter:
            return nn.Parameter((2 * torch.rand(*shape, generator=g, dtype=torch.float32) - 1) * bound)

        self.embedding = nn.Parameter(torch.randn(count, width, generator=g, dtype=torch.float32))
        bounds = {n: math.sqrt(6 / (n + WIDTH)) if rule is None else WIDTH**-0.5 for n in (fan, width)}
        self.key, self.query = (uniform(bound, n, WIDTH) for n, bound in bounds.items())
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
        """True if the last loss is not finite."""
        return not math.isfinite(self.losses[-1])


def train(model: Associator, count: int, again: bool, seed: int, steps: int) -> Trained:
    """Adam until the loss is ENOUGH, PATIENCE evaluations brought nothing, or the budget is used.

    Sequences of `count` pairs, twice as many where keys are written again, one question each, about the key of a drawn
    position; evaluated on fresh ones of `count`, asked for every key that they hold.
    """
    length = 2 * count if again else count
    g = torch.Generator().manual_seed(1_000_000 + seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR, fused=True)
    losses: list[float] = []
    best, strikes = math.inf, 0
    for step in range(1, steps + 1):
        pairs = draw_pairs(count, length, BATCH, again, g)
        at = torch.randint(length, (BATCH, 1), generator=g)
        asked = pairs.keys.gather(1, at)
        value = pairs.last()[0].gather(1, asked)
        loss = loss_of(model.answers(pairs, asked, g), value).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % EVERY:
            continue
        losses.append(evaluate(model, draw_pairs(count, count, EVAL_ROWS, again, g), g))
        strikes = 0 if losses[-1] < best else strikes + 1
        best = min(best, losses[-1])
        if losses[-1] <= ENOUGH or strikes >= PATIENCE or not math.isfinite(losses[-1]):
            return Trained(losses, step, True)
    return Trained(losses, steps, False)


@torch.no_grad()
def evaluate(model: Associator, pairs: Pairs, g: torch.Generator) -> float:
    """Mean loss over every key that a sequence holds."""
    values, written = pairs.last()
    asked = torch.arange(pairs.size).expand_as(values)
    losses = loss_of(model.answers(pairs, asked, g), values)
    return float(losses[written].mean())


class Contender(NamedTuple):
    """The contender to train: a memory's config, a feature map, or None for softmax."""

    name: str
    rule: Any
    quick_steps: int  # of a quick run; 0 leaves it out
    published: tuple[float, ...]  # best evaluation in the logs of arXiv 2102.11174, by size


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
        store, outcomes = run.kept(), []
        for contender in [c for c in self.contenders if c.quick_steps or not run.quick]:
            steps = contender.quick_steps if run.quick else STEPS
            for count in progress((self.quick_size,) if run.quick else self.sizes, contender.name):
                published = contender.published[self.sizes.index(count)]
                fit = partial(self.fit, contender.rule, count, steps)
                fitted = [store([contender.name, count, seed, steps], partial(fit, seed)) for seed in run.seeds]
                trained, other = [Trained(*fields) for fields, _ in fitted], [x for _, x in fitted if self.again]
                outcomes.append(Outcome(contender, count, published, trained, other))
        return outcomes

    def fit(self, rule: Any, count: int, steps: int, seed: int) -> tuple[Trained, float | None]:
        """A training; where keys are written again, its last loss on sequences as long as those of training."""
        model = self.model(count, rule, torch.Generator().manual_seed(seed))
        trained = train(model, count, self.again, seed, steps)
        if not self.again:
            return trained, None
        g = torch.Generator().manual_seed(2_000_000 + seed)
        return trained, evaluate(model, draw_pairs(count, 2 * count, EVAL_ROWS, True, g), g)


def report(
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
    used = {o.contender.name: o.contender.quick_steps for o in outcomes}
    caps = ", ".join(f"{name} {steps}" for name, steps in used.items()) if quick else f"{STEPS:,}"
    cut = [f"{o.contender.name} S={o.size}" for o in outcomes if not all(trained.finished for trained in o.trained)]
    notes = [
        "losses in thousandths: |one-hot value - answer|^2 / 2 of a question, best evaluation; 500 is saying nothing",
        f"cut: steps are at most {caps}, published 100,000; this ended {', '.join(cut) or 'no training'}",
        *notes,
    ]

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for index, name in enumerate(used):
            several = [o for o in outcomes if o.contender.name == name]
            sizes, losses = [o.size for o in several], [Spread.of(fit.best for fit in o.trained) for o in several]
            spread_line(axes, index, name, sizes, losses)
            look = {"color": COLOURS[index], "markersize": 11, "fillstyle": "none"}
            axes.plot(sizes, [o.published for o in several], MARKERS[index], **look)
        complete(axes)

    data: dict[str, dict[str, Any]] = {}
    for o in outcomes:
        again = {"2S pairs": o.other} if o.other else {}
        data[f"{o.contender.name} S={o.size}"] = {"evaluations": [fit.losses for fit in o.trained], **again}
    first, *last = columns
    rows = [[*o.cells(), *end] for o, end in zip(outcomes, ends, strict=True)]
    headings = (first, "pairs S", "published (1e-3)", "ours (1e-3)", "95 %", "seeds", "steps", *last)
    return Result(headings, rows, notes, draw, size=(8, 5), data=data)


FAVOR = Favor(num_features=2 * WIDTH, variant="hyperbolic", scale="none")
MAPS = (
    Contender("elu", ELU(), 300, (8.9e-4, 8.3e-4, 0.0245, 0.1084, 0.1642, 0.2322, 0.3011, 0.3420)),
    Contender("DPFP-1", DPFP(nu=1), 200, (7.8e-4, 2.7e-4, 4.3e-4, 1.7e-4, 2.1e-4, 8.3e-3, 0.1020, 0.1732)),
    Contender("DPFP-2", DPFP(nu=2), 200, (3.1e-4, 6.3e-4, 9.7e-4, 6.0e-4, 5.0e-4, 2.9e-4, 3.8e-4, 3.7e-4)),
    Contender("FAVOR+ 64", FAVOR, 100, (0.1174, 0.2740, 0.4833, 0.5, 0.4961, 0.5, 0.5, 0.5)),
    Contender("softmax", None, 200, (6.3e-4, 3.2e-4, 7.2e-5, 3.0e-5, 2.0e-5, 1.1e-5, 5.7e-6, 8.6e-6)),
)


class SumRule(Associator):
    """y = sum_s v_s w_s / (sum_s w_s + EPS), w_s = phi(k_s).phi(q): all writes at once.

    Random maps are drawn anew at every call, as the published code does. Without a map w is
    softmax's.
    """

    def answers(self, pairs: Pairs, asked: Tensor, g: torch.Generator) -> Tensor:
        """Scores of the values `[B, Q, count]`."""
        k, q = self.keys(pairs), self.queries()
        if self.rule is None:
            weights = (F.embedding(asked, q) @ k.mT * WIDTH**-0.5).softmax(-1)
        else:
            params = self.rule.init(WIDTH, generator=g, dtype=k.dtype)
            k, q = (self.rule(x.unsqueeze(-2), params).squeeze(-2) for x in (k, q))
            weights = F.embedding(asked, q) @ k.mT
            weights = weights / (weights.sum(-1, keepdim=True) + EPS)
        values = pairs.values.unsqueeze(1).expand_as(weights)
        return weights.new_zeros(*asked.shape, pairs.size).scatter_add(-1, values, weights)


def d_phi(contender: Contender) -> int | None:
    """Width of the features; None for softmax, whose kernel has no finite one."""
    return None if contender.rule is None else int(contender.rule.output_dim(WIDTH))


def floor(contender: Contender, count: int) -> float:
    """(1 - d_phi / S) / 2, at least 0: the S x S table of answers has at most rank d_phi, and the identity is at a
    squared distance of S - d_phi from all of those."""
    width = d_phi(contender)
    return 0.0 if width is None else max(0.0, 1 - width / count) / 2


SUMS = Setting(SumRule, MAPS, (20, 40, 60, 80, 100, 120, 160, 200), quick_size=80)


def capacity(run: Run) -> Result:
    """Setting 1, all pairs are written, then all are asked for, beside the floor of the rank."""
    outcomes = SUMS.outcomes(run)
    ends = [(width := d_phi(o.contender), width and 1000 * floor(o.contender, o.size)) for o in outcomes]
    notes = [
        "rank floor: (1 - d_phi/S)/2; no d_phi features can do better, trained or not",
        "FAVOR+ 64: 64 projections, 128 hyperbolic features of k itself (no d^(-1/4)), drawn anew at every call",
    ]
    return report(outcomes, run.quick, ("phi", "d_phi", "floor (1e-3)"), ends, notes, with_floors)


CAPACITY = Study("capacity", "How many pairs does a sum of outer products hold, by feature map?", capacity, seeds=5)


def with_floors(axes: Any) -> None:
    """The floors of all maps."""
    widths = {width: contender for contender in MAPS if (width := d_phi(contender)) is not None}
    for width, contender in sorted(widths.items()):
        sizes, last = range(10, 211), floor(contender, 200)
        axes.plot(sizes, [floor(contender, size) for size in sizes], color=PALE, linewidth=1, zorder=0)
        if last > 0:
            style = {"textcoords": "offset points", "ha": "right", "color": GREY, "fontsize": 8}
            axes.annotate(f"floor, d_phi {width}", (200, last), (-4, 5), **style)
    title = "Trained keys (large open marks: published)"
    finish(axes, title, "pairs S in the sequence", LOSS, ylim=(-0.02, 0.56))


def delta_rule(feature_map: FeatureMap) -> MemoryConfig:
    """The delta rule on features that sum to 1."""
    return MemoryConfig(feature_map=feature_map, key_norm="sum", on_nonfinite="propagate")


SUM_RULE = MemoryConfig(feature_map=DPFP(), bias="dot", normalizer="sum", on_nonfinite="propagate")
RULES = (
    Contender("sum, DPFP-1", SUM_RULE, 200, (0.0973, 0.1039, 0.1026)),
    Contender("delta, DPFP-1", delta_rule(DPFP()), 200, (7.7e-4, 9.7e-4, 4.9e-3)),
    Contender("delta, DPFP-2", delta_rule(DPFP(nu=2)), 0, (9.7e-4, 5.3e-4, 4.9e-4)),
    Contender("delta, FAVOR+ 64", delta_rule(FAVOR), 100, (0.1023, 0.1832, 0.3976)),
)
SUM, DELTA, WIDE, RANDOM = RULES


class Remembering(Associator):
    """A memory scanned over the pairs, then read; the delta rule's lr is a gate of the pair."""

    def answers(self, pairs: Pairs, asked: Tensor, g: torch.Generator) -> Tensor:
        """Scores of the values `[B, Q, count]`; random maps are drawn anew at every call."""
        k, q = self.keys(pairs).unsqueeze(2), F.embedding(asked, self.queries()).unsqueeze(2)
        v = F.one_hot(pairs.values, pairs.size).to(k.dtype).unsqueeze(2)
        gates = Gates(lr=self.lr(pairs)) if self.rule.bias.kind == "l2" else None
        params = self.rule.feature_map.init(WIDTH, generator=g, dtype=k.dtype)
        if asked.shape[1] == 1:  # the last token asks
            q = q.expand_as(k)
            y, _ = memory_scan(self.rule, q, k, v, gates, phi_params=params)
            return y[:, -1:, 0]
        _, state = memory_scan(self.rule, k, k, v, gates, phi_params=params)
        unwritten = torch.zeros(asked.shape, dtype=torch.bool)
        nothing = q.new_zeros(*q.shape[:3], pairs.size)
        y, _ = memory_scan(self.rule, q, q, nothing, state=state, phi_params=params, write_mask=unwritten)
        return y.squeeze(2)


REMEMBERED = Setting(Remembering, RULES, (20, 40, 60), quick_size=20, again=True)


def overwrite(run: Run) -> Result:
    """Setting 2, keys are drawn again and again, each time with a value, beside the claims of the paper."""
    outcomes = REMEMBERED.outcomes(run)
    ticks = sorted({o.size for o in outcomes})
    notes = [
        "trained on 2S pairs, evaluated on S as the published code does; beside it the last model's loss on 2S",
        *claims(outcomes),
    ]
    title, what = "Best loss (large open marks: published)", "keys S; 2S pairs are written in training"
    complete = partial(finish, title=title, xlabel=what, ylabel=LOSS, yscale="log", xticks=ticks, ylim=(2e-4, 1))
    columns = ("rule, phi", "ours, 2S pairs (1e-3)", "diverged")
    return report(outcomes, run.quick, columns, [end(o) for o in outcomes], notes, complete)


ABOUT = "Which rule still answers when keys are written again with new values?"
OVERWRITE = Study("overwrite", ABOUT, overwrite, seeds=5)


def end(outcome: Outcome) -> tuple[Cell, ...]:
    """Losses on sequences as long as those of training, and how many trainings were lost."""
    lost = sum(trained.lost for trained in outcome.trained)
    whole = [1000 * loss for loss in outcome.other if math.isfinite(loss)]
    return Spread.of(whole) if whole else None, f"{lost} of {len(outcome.trained)}"


def claims(outcomes: list[Outcome]) -> list[str]:
    """Claims of the paper for this setting, each with a verdict."""
    losses = {(o.contender.name, o.size): [trained.best for trained in o.trained] for o in outcomes}
    lost = [trained.lost for o in outcomes if o.contender.name == RANDOM.name for trained in o.trained]
    sizes = sorted({size for _, size in losses})
    below = all(max(losses[DELTA.name, n]) < min(losses[SUM.name, n]) for n in sizes)
    said = [f"claimed: delta below sum at every S; here {_holds(below)} (every seed)"]
    if (WIDE.name, sizes[0]) in losses:
        near = all(max(losses[WIDE.name, n]) < 0.01 for n in sizes)
        said.append(f"claimed: delta with DPFP-2 stays near 0; here {_holds(near)} (below 0.01)")
    ratio = min(min(losses[RANDOM.name, n]) / max(losses[DELTA.name, n]) for n in sizes)
    random = f"{sum(lost)} of {len(lost)} trainings ended in no number within their steps"
    times = f"its best loss is at least {ratio:.0f} times that of DPFP-1"
    return [*said, f"claimed: delta with FAVOR+ diverges; here {random}; {times}"]


def _holds(so: bool) -> str:
    return "it holds" if so else "it does NOT hold"
