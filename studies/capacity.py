"""capacity: how many pairs a sum of outer products holds, by feature map, against a bound."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hecate.figure import GREY, PALE, finish
from hecate.phi import DPFP, ELU, Favor, FeatureMap
from studies.associations import BATCH, EPS, WIDTH, Associator, Contender, Pairs, Setting, told
from studies.study import Result, Run, Study

CONTENDERS = (
    Contender(
        "elu", ELU(), 300,
        (8.9e-4, 8.3e-4, 0.0245, 0.1084, 0.1642, 0.2322, 0.3011, 0.3420),
    ),
    Contender(
        "DPFP-1", DPFP(nu=1), 200,
        (7.8e-4, 2.7e-4, 4.3e-4, 1.7e-4, 2.1e-4, 8.3e-3, 0.1020, 0.1732),
    ),
    Contender(
        "DPFP-2", DPFP(nu=2), 200,
        (3.1e-4, 6.3e-4, 9.7e-4, 6.0e-4, 5.0e-4, 2.9e-4, 3.8e-4, 3.7e-4),
    ),
    Contender(
        "FAVOR+ 64",
        Favor(num_features=2 * WIDTH, variant="hyperbolic", scale="none"), 100,
        (0.1174, 0.2740, 0.4833, 0.5, 0.4961, 0.5, 0.5, 0.5),
    ),
    Contender(
        "softmax", None, 200,
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
            params = self.feature_map.init(WIDTH, generator=g, dtype=k.dtype)
            k, q = (self.feature_map(x.unsqueeze(-2), params).squeeze(-2) for x in (k, q))
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


SETTING = Setting(SumRule, CONTENDERS, (20, 40, 60, 80, 100, 120, 160, 200), quick_size=80)


def capacity(run: Run) -> Result:
    """Setting 1, all pairs are written, then all are asked for, beside the floor of the rank."""
    outcomes = SETTING.outcomes(run)
    floors = [1000 * floor(o.contender, o.size) for o in outcomes]
    widths = [d_phi(o.contender) for o in outcomes]
    ends = [(width, width and least) for width, least in zip(widths, floors, strict=True)]
    notes = [
        "rank floor: (1 - d_phi/S)/2; no d_phi features can do better, trained or not",
        *(
            f"published below the floor: {o.contender.name} S={o.size}, {o.published:.4f} < "
            f"{floor(o.contender, o.size):.4f}; that evaluation averages blocks of {BATCH} questions, the shorter "
            "last one with equal weight, ours every question alike"
            for o in outcomes
            if o.published < floor(o.contender, o.size)
        ),
        "FAVOR+ 64: 64 projections, 128 hyperbolic features of k itself (no d^(-1/4)), drawn anew at every call",
    ]
    return told(outcomes, run.quick, ("phi", "d_phi", "floor (1e-3)"), ends, notes, with_floors)


CAPACITY = Study("capacity", "How many pairs does a sum of outer products hold, by feature map?", capacity, seeds=2)


def with_floors(axes: Any) -> None:
    """The floors of all maps."""
    widths = {width: contender for contender in CONTENDERS if (width := d_phi(contender)) is not None}
    for width, contender in sorted(widths.items()):
        sizes, last = range(10, 211), floor(contender, 200)
        axes.plot(sizes, [floor(contender, size) for size in sizes], color=PALE, linewidth=1, zorder=0)
        if last > 0:
            style = {"textcoords": "offset points", "ha": "right", "color": GREY, "fontsize": 8}
            axes.annotate(f"floor, d_phi {width}", (200, last), (-4, 5), **style)
    title = "Trained keys (large open marks: published)"
    finish(axes, title, "pairs S in the sequence", "loss of a question", ylim=(-0.02, 0.56))
