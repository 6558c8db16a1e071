"""speed: linear attention and memories against softmax attention over the length of the sequence."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hecate.engine import memory_scan
from hecate.phi import FeatureMap, Params, PerformerReLU, ReLU
from hecate.rule import Gates, MemoryConfig, named_rule
from studies.pictures import line_plot
from studies.study import Cell, Result, Run, Spread, Study, progress
from studies.timing import Function, cpu_times, forward, forward_backward

WIDTH = 64
FEATURES = 266  # int(64 log 64): the default of Performers
NAIVE_LIMIT = 8192  # above it the scores and their softmax alone take gigabytes
SOFTMAX_LIMIT = 16384  # above it a call takes seconds
CLAIMED = {512: 1.5, 1024: 3.0, 4096: 12.0, 16384: 48.0}
EPS = 1e-6


class Side(NamedTuple):
    """One way of attending, `[B, H, T, D]` each, and the longest sequence that it is given."""

    attend: Function
    longest: float = math.inf


def speed(run: Run) -> Result:
    """Medians over rounds for every seed's inputs; the spread is that over seeds."""
    lengths = [512, 1024, 2048] if run.quick else [512, 1024, 2048, 4096, 8192, 16384, 65536]
    taken: dict[tuple[str, str, int], list[float]] = {}
    for length in progress(lengths, "lengths"):
        for seed, (direction, call) in product(run.seeds, (("forward", forward), ("both", forward_backward))):
            inputs, sides = draw_inputs(length, seed), contenders(seed)
            calls = {name: call(side.attend, inputs) for name, side in sides.items() if length <= side.longest}
            for name, times in cpu_times(calls, 3 if run.quick else 5).items():
                taken.setdefault((name, direction, length), []).append(float(times.median()))
    return report(taken, lengths)


SPEED = Study("speed", "From which length on is linear attention faster than softmax attention?", speed, seeds=3)


def contenders(seed: int) -> dict[str, Side]:
    """All of them, causal and not; those named alike compute the same function."""
    relu, drawn = ReLU(), PerformerReLU(num_features=FEATURES)
    params = drawn.init(WIDTH, generator=torch.Generator().manual_seed(seed))
    nothing: Params = {"learned": {}, "frozen": {}}
    return {
        "naive softmax": Side(naive, NAIVE_LIMIT),
        "torch SDPA": Side(F.scaled_dot_product_attention, SOFTMAX_LIMIT),
        "ReLU": Side(partial(linear, relu, nothing)),
        "266 ReLU features": Side(partial(linear, drawn, params)),
        "naive softmax, causal": Side(partial(naive, causal=True), NAIVE_LIMIT),
        "torch SDPA, causal": Side(partial(F.scaled_dot_product_attention, is_causal=True), SOFTMAX_LIMIT),
        "ReLU, causal": Side(partial(causal, relu, nothing)),
        "266 ReLU features, causal": Side(partial(causal, drawn, params)),
        "gated delta, causal": Side(partial(gated, "gated_delta", 2)),
        "titans_linear, causal": Side(partial(gated, "titans_linear", 3)),
    }


def naive(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Softmax attention by its formula, every score in memory."""
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(ahead, -math.inf)
    return scores.softmax(-1) @ v


def linear(feature_map: FeatureMap, params: Params, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """phi(q) (phi(k)^T v) / phi(q).sum phi(k): every query sees all keys."""
    phi_q, phi_k = (feature_map(x.transpose(1, 2), params).transpose(1, 2) for x in (q, k))
    weight = (phi_q @ phi_k.sum(-2).unsqueeze(-1)) + EPS
    return phi_q @ (phi_k.mT @ v) / weight


def causal(feature_map: FeatureMap, params: Params, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same, every query seeing the keys up to its own, by `memory_scan`."""
    config = MemoryConfig(bias="dot", feature_map=feature_map, normalizer="sum")
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    y, _ = memory_scan(config, q, k, v, Gates(lr=1.0), phi_params=params)
    return y.transpose(1, 2)


def gated(rule: str, count: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A memory whose gates, lr, retain and momentum or the first of them, are made of the values, as layers do it."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    lr, retain, momentum = v[..., :3].sigmoid().unbind(-1)
    y, _ = memory_scan(named_rule(rule), q, k, v, Gates(*(0.1 * lr, 0.9 + 0.1 * retain, 0.9 * momentum)[:count]))
    return y.transpose(1, 2)


def draw_inputs(length: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v `[1, 1, length, 64]` in float32."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 1, length, WIDTH, generator=g) for _ in range(3))
    return q, k, v


Times = Mapping[tuple[str, str, int], list[float]]
RATIOS = (
    ("naive / ReLU", "naive softmax", "ReLU", "forward"),
    ("SDPA / ReLU", "torch SDPA", "ReLU", "forward"),
    ("naive / 266 features", "naive softmax", "266 ReLU features", "forward"),
    ("SDPA / 266 features", "torch SDPA", "266 ReLU features", "forward"),
    ("SDPA / ReLU, f+b", "torch SDPA", "ReLU", "both"),
    ("causal: SDPA / ReLU", "torch SDPA, causal", "ReLU, causal", "forward"),
    ("causal, f+b", "torch SDPA, causal", "ReLU, causal", "both"),
)


TIMED = ("torch SDPA", "ReLU", "gated delta", "titans_linear")


def report(taken: Times, lengths: Sequence[int]) -> Result:
    """Softmax's time over ours, beside what was claimed, and times with the backward pass; the figure has all times."""
    rows: list[list[Cell]] = []
    for length in lengths:
        ratios = (ratio(taken, theirs, ours, direction, length) for _, theirs, ours, direction in RATIOS)
        causal_times = (taken.get((f"{name}, causal", "both", length)) for name in TIMED)
        rows.append([length, CLAIMED.get(length), *ratios, *(Spread.of(own) if own else None for own in causal_times)])
    crossings = [
        f"{heading}: from {text}"
        for heading, theirs, ours, direction in RATIOS
        if (text := crossover(taken, theirs, ours, direction, lengths))
    ]
    notes = [
        "softmax's process CPU time over ours, above 1 ours is faster; one head, width "
        f"{WIDTH}, batch 1, float32, {torch.get_num_threads()} thread(s)",
        "claimed: a document on ReLU linear attention, without a source; its numbers are N / 341, "
        "a straight line, and say 'softmax' without saying which",
        "faster " + "; ".join(crossings),
        f"naive softmax is not run above {NAIVE_LIMIT} tokens, where its scores alone take gigabytes, SDPA not above "
        f"{SOFTMAX_LIMIT}",
        "266 features = int(64 log 64), Performers' own choice, cost four times the products of 64",
        "ms: causal, forward and backward; gates of gated_delta and titans_linear are of each token",
    ]
    columns = ["N", "claimed", *(heading for heading, *_ in RATIOS), *(f"{name} (ms)" for name in TIMED)]
    data: dict[str, dict[int, list[float]]] = {}
    for (name, direction, length), times in taken.items():
        data.setdefault(f"{name}, {direction}", {})[length] = times

    def panel(ending: str, direction: str) -> dict[str, dict[int, float]]:
        kinds = [name for name in contenders(0) if name.endswith(", causal") == bool(ending)]
        times = {kind.removesuffix(ending): data[f"{kind}, {direction}"] for kind in kinds}
        return {kind: {n: Spread.of(own).mean for n, own in by.items()} for kind, by in times.items()}

    def draw(figure: Any) -> None:
        panels = {
            "every query sees all keys": panel("", "forward"), "causal": panel(", causal", "forward"),
            "causal, with the backward pass": panel(", causal", "both"),
        }  # fmt: skip
        line_plot(figure, panels, "length N (tokens)", ["CPU time (ms)", "", ""])

    return Result(columns, rows, notes, draw, (13.0, 4.6), data)


def ratio(taken: Times, theirs: str, ours: str, direction: str, length: int) -> Spread | None:
    """Theirs over ours with its spread over seeds; None where theirs was not run."""
    if (theirs, direction, length) not in taken:
        return None
    pairs = zip(taken[theirs, direction, length], taken[ours, direction, length], strict=True)
    return Spread.of(a / b for a, b in pairs)


def crossover(taken: Times, theirs: str, ours: str, direction: str, lengths: Sequence[int]) -> str | None:
    """Where the ratio rises through 1 for good: a straight line between points of the log plot."""
    known = [(n, r.mean) for n in lengths if (r := ratio(taken, theirs, ours, direction, n))]
    below = [i for i, (_, value) in enumerate(known) if value < 1]
    if not below:
        return f"N = {known[0][0]} or less on"
    if below[-1] == len(known) - 1:
        return f"beyond N = {known[-1][0]}"
    (n0, r0), (n1, r1) = known[below[-1]], known[below[-1] + 1]
    share = -math.log(r0) / math.log(r1 / r0)
    return f"N = {n0 * (n1 / n0) ** share:.0f} on"
