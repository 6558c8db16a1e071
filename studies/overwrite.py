"""overwrite: a sum of outer products against the delta rule, where keys get new values."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hecate.engine import memory_scan
from hecate.figure import finish
from hecate.phi import DPFP, Favor, FeatureMap
from hecate.rule import Gates, MemoryConfig
from studies.associations import WIDTH, Associator, Contender, Outcome, Pairs, Setting, told
from studies.study import Cell, Result, Run, Spread, Study


def sum_rule(feature_map: FeatureMap) -> MemoryConfig:
    """Linear attention: every value is added, the answer divided by the sum of weights."""
    return MemoryConfig(feature_map=feature_map, bias="dot", normalizer="sum", on_nonfinite="propagate")


def delta_rule(feature_map: FeatureMap) -> MemoryConfig:
    """The delta rule on features that sum to 1."""
    return MemoryConfig(feature_map=feature_map, key_norm="sum", on_nonfinite="propagate")


FAVOR = Favor(num_features=2 * WIDTH, variant="hyperbolic", scale="none")
CONTENDERS = (
    Contender("sum, DPFP-1", sum_rule(DPFP()), 200, (0.0973, 0.1039, 0.1026)),
    Contender("delta, DPFP-1", delta_rule(DPFP()), 200, (7.7e-4, 9.7e-4, 4.9e-3)),
    Contender("delta, DPFP-2", delta_rule(DPFP(nu=2)), 0, (9.7e-4, 5.3e-4, 4.9e-4)),
    Contender(
        "delta, FAVOR+ 64", delta_rule(FAVOR), 100, (0.1023, 0.1832, 0.3976),
        "no number from step 1900 on at S=40 and 900 at S=60",
    ),
)  # fmt: skip
SUM, DELTA, WIDE, RANDOM = CONTENDERS


class Remembering(Associator):
    """A memory scanned over the pairs, then read; the delta rule's lr is a gate of the pair."""

    def __init__(self, count: int, config: MemoryConfig, g: torch.Generator) -> None:
        super().__init__(count, g)
        self.config = config

    def answers(self, pairs: Pairs, asked: Tensor, g: torch.Generator) -> Tensor:
        """Scores of the values `[B, Q, count]`; random maps are drawn anew at every call."""
        k, q = self.keys(pairs).unsqueeze(2), F.embedding(asked, self.queries()).unsqueeze(2)
        v = F.one_hot(pairs.values, pairs.size).to(k.dtype).unsqueeze(2)
        gates = Gates(lr=self.lr(pairs)) if self.config.bias.kind == "l2" else None
        params = self.config.feature_map.init(WIDTH, generator=g, dtype=k.dtype)
        if asked.shape[1] == 1:  # the last token asks
            q = q.expand_as(k)
            y, _ = memory_scan(self.config, q, k, v, gates, phi_params=params)
            return y[:, -1:, 0]
        _, state = memory_scan(self.config, k, k, v, gates, phi_params=params)
        unwritten = torch.zeros(asked.shape, dtype=torch.bool)
        nothing = q.new_zeros(*q.shape[:3], pairs.size)
        y, _ = memory_scan(self.config, q, q, nothing, state=state, phi_params=params, write_mask=unwritten)
        return y.squeeze(2)


SETTING = Setting(Remembering, CONTENDERS, (20, 40, 60), quick_size=20, again=True)


def overwrite(run: Run) -> Result:
    """Setting 2, keys are drawn again and again, each time with a value, beside the claims of the paper."""
    outcomes = SETTING.outcomes(run)
    notes = [
        "trained on 2S pairs drawn from S keys and S values with replacement; the answer is the key's last value",
        "published: the code of the paper evaluates on S pairs, not on the 2S that it trains on; "
        "ours does the same, and the column beside it is the last model's loss on 2S pairs",
        *claims(outcomes),
    ]

    def complete(axes: Any) -> None:
        limits: dict[str, Any] = {"yscale": "log", "xticks": sorted({o.size for o in outcomes}), "ylim": (2e-4, 1)}
        what, loss = "keys S; 2S pairs are written in training", "loss of a question"
        finish(axes, "Best loss (large open marks: published)", what, loss, **limits)

    columns = ("rule, phi", "ours, 2S pairs (1e-3)", "diverged")
    return told(outcomes, run.quick, columns, [end(o) for o in outcomes], notes, complete)


OVERWRITE = Study(
    "overwrite", "Which rule still answers when keys are written again with new values?", overwrite, seeds=2
)


def end(outcome: Outcome) -> tuple[Cell, ...]:
    """Losses on sequences as long as those of training, and how many trainings were lost."""
    lost = sum(trained.lost for trained in outcome.trained)
    whole = [1000 * loss for loss in outcome.other if math.isfinite(loss)]
    return Spread.of(whole) if whole else None, f"{lost} of {len(outcome.trained)}"


def claims(outcomes: list[Outcome]) -> list[str]:
    """What the paper says of this setting, and whether it is so here."""
    found = {(o.contender.name, o.size): o for o in outcomes}
    sizes = sorted({o.size for o in outcomes})

    def worst(contender: Contender, count: int) -> float:
        return max(trained.best for trained in found[contender.name, count].trained)

    def least(contender: Contender, count: int) -> float:
        return min(trained.best for trained in found[contender.name, count].trained)

    below = all(worst(DELTA, n) < least(SUM, n) for n in sizes)
    said = [f"claimed: delta below sum at every S; here {_holds(below)} (every seed)"]
    if (WIDE.name, sizes[0]) in found:
        near = all(worst(WIDE, n) < 0.01 for n in sizes)
        said.append(f"claimed: delta with DPFP-2 stays near 0; here {_holds(near)} (below 0.01)")
    lost = sum(t.lost for n in sizes for t in found[RANDOM.name, n].trained)
    total = sum(len(found[RANDOM.name, n].trained) for n in sizes)
    ratio = min(least(RANDOM, n) / worst(DELTA, n) for n in sizes)
    said.append(
        f"claimed: delta with FAVOR+ diverges; here {lost} of {total} trainings ended in no number "
        f"within their steps; its best loss is at least {ratio:.0f} times that of DPFP-1"
    )
    return said


def _holds(so: bool) -> str:
    return "it holds" if so else "it does NOT hold"
