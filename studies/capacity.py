"""capacity: how many pairs a sum of outer products holds, by feature map, against a bound."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hecate.compare import interval
from hecate.figure import COLOURS, GREY, MARKERS, PALE, finish
from hecate.phi import DPFP, ELU, Favor, FeatureMap
from studies.associations import BATCH, EPS, EVAL_ROWS, PATIENCE, WIDTH, Associator, Pairs, Trained, shown, train
from studies.study import Cell, Progress, Result, Spread, Study

SIZES = (20, 40, 60, 80, 100, 120, 160, 200)
QUICK = (80,)


class Contender(NamedTuple):
    """What weighs the values: a feature map, or softmax where there is none."""

    name: str
    feature_map: FeatureMap | None
    steps: int  # of a full run, and of a quick one
    quick_steps: int
    published: tuple[float, ...]  # best evaluation in the logs of arXiv 2102.11174, by SIZES

    @property
    def d_phi(self) -> int | None:
        """Width of the features; None for softmax, whose kernel has no finite one."""
        return None if self.feature_map is None else self.feature_map.output_dim(WIDTH)

    def floor(self, count: int) -> float:
        """The lowest loss that features of this width allow."""
        return 0.0 if self.d_phi is None else rank_floor(self.d_phi, count)


CONTENDERS = (
    Contender(
        "elu", ELU(), 900, 300,
        (8.9e-4, 8.3e-4, 0.0245, 0.1084, 0.1642, 0.2322, 0.3011, 0.3420),
    ),
    Contender(
        "DPFP-1", DPFP(nu=1), 1000, 200,
        (7.8e-4, 2.7e-4, 4.3e-4, 1.7e-4, 2.1e-4, 8.3e-3, 0.1020, 0.1732),
    ),
    Contender(
        "DPFP-2", DPFP(nu=2), 1200, 200,
        (3.1e-4, 6.3e-4, 9.7e-4, 6.0e-4, 5.0e-4, 2.9e-4, 3.8e-4, 3.7e-4),
    ),
    Contender(
        "FAVOR+ 64",
        Favor(num_features=2 * WIDTH, variant="hyperbolic", scale="none"), 500, 100,
        (0.1174, 0.2740, 0.4833, 0.5, 0.4961, 0.5, 0.5, 0.5),
    ),
    Contender(
        "softmax", None, 400, 200,
        (6.3e-4, 3.2e-4, 7.2e-5, 3.0e-5, 2.0e-5, 1.1e-5, 5.7e-6, 8.6e-6),
    ),
)  # fmt: skip


class SumRule(Associator):
    """y = sum_s v_s w_s / (sum_s w_s + EPS), w_s = phi(k_s).phi(q): all writes at once.

    Random maps are drawn anew at every call, as the published code does. Without a map w is
    softmax's.
    """

    def __init__(self, count: int, feature_map: FeatureMap | None, g: torch.Generator) -> None:
        super().__init__(count, g, xavier=feature_map is None)
        self.feature_map = feature_map

    def answers(self, pairs: Pairs, asked: Tensor, g: torch.Generator) -> Tensor:
        """Scores of the values `[B, Q, count]`."""
        k, q = self.keys(pairs), self.queries()
        if self.feature_map is None:
            weights = (F.embedding(asked, q) @ k.mT * WIDTH**-0.5).softmax(-1)
        else:
            k, q = features(self.feature_map, g, k, q)
            weights = F.embedding(asked, q) @ k.mT
            weights = weights / (weights.sum(-1, keepdim=True) + EPS)
        values = pairs.values.unsqueeze(1).expand_as(weights)
        return weights.new_zeros(*asked.shape, pairs.size).scatter_add(-1, values, weights)


def features(feature_map: FeatureMap, g: torch.Generator, *inputs: Tensor) -> list[Tensor]:
    """phi of inputs `[..., WIDTH]`, one fresh draw for all of them."""
    params = feature_map.init(WIDTH, generator=g, dtype=inputs[0].dtype)
    return [feature_map(x.unsqueeze(-2), params).squeeze(-2) for x in inputs]


def rank_floor(d_phi: int, count: int) -> float:
    """(1 - d_phi / S) / 2, at least 0: the S x S table of answers has at most rank d_phi, and the
    identity is at a squared distance of S - d_phi from all of those."""
    return max(0.0, 1 - d_phi / count) / 2


class Outcome(NamedTuple):
    """One feature map at one number of pairs."""

    contender: Contender
    size: int
    trained: list[Trained]

    @property
    def published(self) -> float:
        """The published loss."""
        return self.contender.published[SIZES.index(self.size)]

    @property
    def ours(self) -> Spread:
        """Our loss over seeds."""
        return Spread.of(trained.best for trained in self.trained)

    def row(self) -> list[Cell]:
        """Its line in the table."""
        contender = self.contender
        ours = Spread.of(1000 * trained.best for trained in self.trained)
        mean, half = interval([1000 * trained.best for trained in self.trained])
        floor = None if contender.d_phi is None else 1000 * contender.floor(self.size)
        return [
            contender.name, self.size, contender.d_phi, round(1000 * self.published, 4), ours,
            f"{max(0.0, mean - half):.3g} to {mean + half:.3g}", len(self.trained), shown(self.trained), floor,
        ]  # fmt: skip


class Capacity(Study):
    """Setting 1 of Schlag, Irie and Schmidhuber, Linear Transformers Are Secretly Fast Weight
    Programmers (2021, arXiv 2102.11174)."""

    name: ClassVar[str] = "capacity"
    about: ClassVar[str] = "How many pairs does a sum of outer products hold, by feature map?"
    count: ClassVar[int] = 2

    def run(self, quick: bool, seeds: Sequence[int], progress: Progress) -> Result:
        """Trains every map at every size."""
        outcomes = []
        for contender in CONTENDERS:
            steps = contender.quick_steps if quick else contender.steps
            for count in progress(QUICK if quick else SIZES, contender.name):
                trained = [_trained(contender.feature_map, count, seed, steps) for seed in seeds]
                outcomes.append(Outcome(contender, count, trained))
        return report(outcomes, quick)


def _trained(feature_map: FeatureMap | None, count: int, seed: int, steps: int) -> Trained:
    model = SumRule(count, feature_map, torch.Generator().manual_seed(seed))
    return train(model, count, count, False, seed, steps)


def report(outcomes: list[Outcome], quick: bool) -> Result:
    """The table, what it means and the figure."""
    columns = [
        "phi", "pairs S", "d_phi", "published (1e-3)", "ours (1e-3)", "95 %", "seeds", "steps", "floor (1e-3)",
    ]  # fmt: skip
    cut = [f"{o.contender.name} S={o.size}" for o in outcomes if not all(trained.finished for trained in o.trained)]
    below = [o for o in outcomes if o.published < o.contender.floor(o.size)]
    caps = ", ".join(f"{c.name} {c.quick_steps if quick else c.steps}" for c in CONTENDERS)
    notes = [
        "losses in thousandths: |one-hot value - answer|^2 / 2 of a question, best evaluation of a "
        "training; 500 is saying nothing; mean +- standard error over seeds",
        f"k of width {WIDTH} from [one-hot value, embedding of the key], q from the latter; Adam "
        f"1e-3, batch {BATCH}, evaluated every 100 steps on {EVAL_ROWS} sequences asked for every "
        f"key, until 1e-3 or {PATIENCE} evaluations without progress; the published runs had one "
        "seed and 100,000 steps to stop within, up to 7,000 of which they took",
        f"cut: steps are at most {caps}; this ended {', '.join(cut) or 'no training'}",
        "rank floor: (1 - d_phi/S)/2; no d_phi features can do better, trained or not",
        *(
            f"published below the floor: {o.contender.name} S={o.size}, {o.published:.4f} < "
            f"{o.contender.floor(o.size):.4f}; that evaluation averages blocks of {BATCH} "
            "questions, the shorter last one with equal weight, ours every question alike"
            for o in below
        ),
        "FAVOR+ 64: 64 projections, 128 hyperbolic features of k itself (no d^(-1/4)), drawn anew at every call",
    ]

    data = {f"{o.contender.name} S={o.size}": {"evaluations": [t.losses for t in o.trained]} for o in outcomes}
    rows = [o.row() for o in outcomes]
    return Result(columns, rows, notes, lambda figure: draw(figure, outcomes), size=(8, 4.8), data=data)


def draw(figure: Any, outcomes: list[Outcome]) -> None:
    """Losses over the number of pairs, and the floors of the maps."""
    axes = figure.subplots()
    for index, contender in enumerate(CONTENDERS):
        own = [o for o in outcomes if o.contender is contender]
        sizes = [o.size for o in own]
        means = [o.ours.mean for o in own]
        errors = [o.ours.error if len(o.trained) > 1 else 0 for o in own]
        look = {"color": COLOURS[index], "marker": MARKERS[index]}
        axes.errorbar(sizes, means, errors, label=contender.name, markersize=6, **look)
        open_ = {"markersize": 11, "fillstyle": "none", "linestyle": ""}
        axes.plot(sizes, [o.published for o in own], **look, **open_)
    for d_phi in sorted({c.d_phi for c in CONTENDERS if c.d_phi is not None}):
        sizes = list(range(10, 211))
        axes.plot(sizes, [rank_floor(d_phi, s) for s in sizes], color=PALE, linewidth=1, zorder=0)
        if rank_floor(d_phi, 200) > 0:
            axes.annotate(
                f"floor, d_phi {d_phi}", (200, rank_floor(d_phi, 200)), xytext=(-4, 5),
                textcoords="offset points", ha="right", color=GREY, fontsize=8,
            )  # fmt: skip
    finish(
        axes, "Trained keys (large open marks: published)", "pairs S in the sequence",
        "loss of a question", ylim=(-0.02, 0.56),
    )  # fmt: skip
