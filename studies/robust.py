"""robust: which bias withstands wrong values, which retention follows pairs that change, and a million tokens."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from hecate.engine import memory_scan
from hecate.rule import Gates, MemoryConfig, named_rule
from studies.study import Cell, Progress, Result, Spread, Study

WIDTH, PAIRS, ROUNDS = 32, 24, 16
OUTLIERS, CHANGED = 0.1, 0.3  # shares: of values that are wrong, of pairs that others replace between two rounds
RATES, RETAINS = (0.01, 0.03, 0.1, 0.3, 1.0), (0.9, 0.97, 0.99, 0.997, 0.999)
LOST = 10.0  # a relative error counts as at most this, as does what is no number
TUNING = 1000  # seeds from here on choose rates
BIASES: dict[str, Any] = {
    "l2": "l2", "l1": {"kind": "l1", "eps": 0.1}, "lp, p = 1.5": {"kind": "lp", "p": 1.5, "eps": 0.1},
    "lp, p = 3": {"kind": "lp", "p": 3.0}, "huber": "huber", "yaad": "yaad", "robust": "robust",
}  # fmt: skip
RETENTIONS: dict[str, Any] = {
    "none": "none", "decay": "decay", "l2": "l2", "elastic_net": {"kind": "elastic_net", "threshold": 1e-3},
    "lq": "lq", "bregman, lq 1.5": {"kind": "bregman", "link": {"kind": "lq", "q": 1.5}},
    "kl": {"kind": "kl", "scale": 48.0}, "kl, signed": {"kind": "kl", "scale": 48.0, "signed": True},
    "bounded": {"kind": "bounded", "low": -4.0, "high": 4.0}, "norm_cap": {"kind": "norm_cap", "norm": 24.0},
    "sphere": {"kind": "sphere", "slot": "row"}, "sphere, divide": {"kind": "sphere", "slot": "row", "form": "divide"},
}  # fmt: skip
LONG = {"float32": torch.float32, "bfloat16 inputs": torch.bfloat16, "float64": torch.float64}


class Stream(NamedTuple):
    """Tokens `[S, T, 1, D]` that write pairs round after round, and what is asked in the end, with its answers, both
    `[S, N, D]`."""

    k: Tensor
    v: Tensor
    asked: Tensor
    answers: Tensor


def _clean(k: Tensor, v: Tensor, g: torch.Generator) -> tuple[Tensor, Tensor]:
    return k, v


def _noise(k: Tensor, v: Tensor, g: torch.Generator) -> tuple[Tensor, Tensor]:
    return k, v + torch.randn(v.shape, generator=g)


def _outliers(k: Tensor, v: Tensor, g: torch.Generator) -> tuple[Tensor, Tensor]:
    wrong = torch.rand(len(v), 1, generator=g) < OUTLIERS
    return k, torch.where(wrong, 10 * torch.randn(v.shape, generator=g), v)


def _tails(k: Tensor, v: Tensor, g: torch.Generator) -> tuple[Tensor, Tensor]:
    normal, chi = torch.randn(v.shape, generator=g), torch.randn(len(v), 2, generator=g).square().sum(-1, keepdim=True)
    return k, v + normal / (chi / 2).sqrt().clamp(min=1e-3)


def _keys(k: Tensor, v: Tensor, g: torch.Generator) -> tuple[Tensor, Tensor]:
    return normalize(k + 0.5 * torch.randn(k.shape, generator=g) / math.sqrt(WIDTH), dim=-1), v


CASES: dict[str, Callable[[Tensor, Tensor, torch.Generator], tuple[Tensor, Tensor]]] = {
    "clean": _clean, "normal noise": _noise, "10 % outliers": _outliers, "t noise, 2 df": _tails,
    "noise in keys": _keys,
}  # fmt: skip


def drawn(seeds: Sequence[int], case: str) -> Stream:
    """One stream a seed; under `drift` some pairs make way for others between two rounds."""
    return Stream(*(torch.stack(part) for part in zip(*(_drawn(seed, case) for seed in seeds), strict=True)))


def _drawn(seed: int, case: str) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    keys = normalize(torch.randn(PAIRS, WIDTH, generator=g), dim=-1)
    values = torch.randn(PAIRS, WIDTH, generator=g)
    rounds: list[tuple[Tensor, Tensor]] = []
    for _ in range(ROUNDS):
        if case == "drift":
            new = torch.rand(PAIRS, 1, generator=g) < CHANGED
            keys = torch.where(new, normalize(torch.randn(keys.shape, generator=g), dim=-1), keys)
            values = torch.where(new, torch.randn(values.shape, generator=g), values)
        order = torch.randperm(PAIRS, generator=g)
        rounds.append((keys[order], values[order]))
    k, v = (torch.cat(part) for part in zip(*rounds, strict=True))
    k, v = CASES.get(case, _clean)(k, v, g)
    return k.unsqueeze(1), v.unsqueeze(1), keys, values


def errors(config: MemoryConfig, stream: Stream, lr: float, retain: float | None) -> list[float]:
    """|y - v|^2 / |v|^2 of every seed, asked when all is written."""
    gates = Gates(lr, retain)
    _, state = memory_scan(config, stream.k, stream.k, stream.v, gates)
    asked = stream.asked.unsqueeze(2)
    unwritten = torch.zeros(asked.shape[:2], dtype=torch.bool)
    read = config.model_copy(update={"read": "before"})
    y, _ = memory_scan(read, asked, asked, asked, gates, state=state, write_mask=unwritten)
    wrong = (y.squeeze(2) - stream.answers).square().sum((1, 2)) / stream.answers.square().sum((1, 2))
    return [min(x, LOST) if math.isfinite(x) else LOST for x in wrong.tolist()]


def found(config: MemoryConfig, case: str, seeds: Sequence[int]) -> tuple[Spread, float, float | None]:
    """The error at the rate and retain that other seeds chose."""
    tuning = drawn([TUNING + seed for seed in seeds], case)
    retains: Sequence[float | None] = RETAINS if config.retention.uses_retain else (None,)
    grid = [(lr, retain) for lr in RATES for retain in retains]
    lr, retain = min(grid, key=lambda each: sum(errors(config, tuning, *each)))
    return Spread.of(errors(config, drawn(seeds, case), lr, retain)), lr, retain


def endured(tokens: int, dtype: torch.dtype, points: Sequence[int]) -> tuple[list[float], float]:
    """A gated delta memory read as it is written, in pieces on its state: mean relative errors up to each point, and
    tokens a second."""
    g = torch.Generator().manual_seed(0)
    keys, values = normalize(torch.randn(PAIRS, WIDTH, generator=g), dim=-1), torch.randn(PAIRS, WIDTH, generator=g)
    config = named_rule("gated_delta").model_copy(update={"read": "before"})
    said: list[float] = []
    state, at, since, began = None, 0, [0.0, 0.0], time.perf_counter()
    while at < tokens:
        index = torch.randint(PAIRS, (min(1 << 14, points[len(said)] - at),), generator=g)
        k, v = (part[index].to(dtype).view(1, -1, 1, WIDTH) for part in (keys, values))
        y, state = memory_scan(config, k, k, v, Gates(0.5, 0.999), state=state)
        since[0] += float((y.double() - v.double()).square().sum())
        since[1] += float(v.double().square().sum())
        at += len(index)
        if at == points[len(said)]:
            said.append(since[0] / since[1])
            since = [0.0, 0.0]
    return said, tokens / (time.perf_counter() - began)


class Robust(Study):
    """What a training run never shows by itself."""

    name = "robust"
    about = (
        "Which bias withstands wrong values, which retention follows pairs that change, and does a long stream hurt?"
    )
    count: ClassVar[int] = 32
    timed = True

    def run(self, quick: bool, seeds: Sequence[int], progress: Progress) -> Result:
        """Every rate and retain is chosen on as many other seeds."""
        rows: list[list[Cell]] = []
        cases = ("clean", "10 % outliers") if quick else tuple(CASES)
        with torch.no_grad():
            for name in progress(tuple(BIASES), "biases"):
                config = MemoryConfig(bias=BIASES[name], on_nonfinite="propagate")
                for case in cases:
                    rows.append(["bias", name, case, *found(config, case, seeds), None])
            for name in progress(tuple(RETENTIONS), "retentions"):
                config = MemoryConfig(retention=RETENTIONS[name], on_nonfinite="propagate")
                for case in ("clean", "drift"):
                    rows.append(["retention", name, case, *found(config, case, seeds), None])
            points = [10**n for n in range(3, 5 if quick else 7)]
            long = {}
            for name in progress(tuple(LONG), "long streams"):
                long[name], speed = endured(points[-1], LONG[name], points)
                for point, error in zip(points, long[name], strict=True):
                    rows.append(["stream", name, f"{point:,} tokens", error, 0.5, 0.999, round(speed)])
        columns = ["part", "variant", "case", "error |y - v|^2 / |v|^2", "lr", "retain", "tokens/s"]
        notes = [
            f"{PAIRS} pairs of width {WIDTH}, each written {ROUNDS} times, then all are asked; a matrix under gradient "
            "descent; lr and retain chosen on as many other seeds; a lost memory counts as 10",
            f"drift: between rounds others replace {CHANGED:.0%} of the pairs, and the last ones are asked",
            "stream: gated delta, keys drawn at random; the error of answers ahead of each write since the last point",
        ]
        return Result(columns, rows, notes, partial(_draw, rows, long, points), (12.0, 4.4), {"stream": long})


def _draw(rows: Sequence[Sequence[Any]], long: dict[str, list[float]], points: Sequence[int], figure: Any) -> None:
    left, middle, right = figure.subplots(1, 3, width_ratios=(1.8, 1.4, 1.3))
    for axes, part, title in (
        (left, "bias", "biases, what was wrong with values"), (middle, "retention", "retentions, pairs that change"),
    ):  # fmt: skip
        own = [row for row in rows if row[0] == part]
        names = list(dict.fromkeys(row[1] for row in own))
        for case in dict.fromkeys(row[2] for row in own):
            spreads = [row[3] for row in own if row[2] == case]
            axes.errorbar(names, [s.mean for s in spreads], [s.error for s in spreads], fmt="o", capsize=3, label=case)
        axes.set_yscale("log")
        axes.set_xticks(range(len(names)), names, rotation=45, ha="right", rotation_mode="anchor")
        axes.set_ylabel("error |y - v|^2 / |v|^2")
        axes.set_title(title, fontsize="medium")
        axes.grid(axis="y", alpha=0.3)
        axes.legend(fontsize=8)
    for name, errors in long.items():
        right.plot(points, errors, marker=".", label=name, linestyle=":" if name == "float64" else "-")
    right.set_title("a long stream, gated delta", fontsize="medium")
    right.set_ylabel("error of the tokens so far")
    right.set_xscale("log")
    right.set_yscale("log")
    right.set_xlabel("tokens read")
    right.grid(alpha=0.3)
    right.legend(fontsize=8)
