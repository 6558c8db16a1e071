"""speed, decode: linear attention and memories against softmax attention over the length of the sequence, and what one
more token costs after a context."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional as F

from hecate.engine import memory_scan, memory_step
from hecate.phi import FeatureMap, Params, PerformerReLU, ReLU
from hecate.rule import Gates, MemoryConfig, bytes_of, named_rule
from studies.costs.harness import HEADS, WIDTH, Call, Function, drawn, flushed, forward, forward_backward, medians
from studies.study import Cell, Result, Run, Spread, Study, line_plot, progress

FEATURES = 266  # int(64 log 64): the default of Performers
# Above it the scores of naive softmax and their softmax alone take gigabytes, and a call of SDPA takes seconds.
NAIVE, SDPA = 8192, 16384
LONGEST = {"naive softmax": NAIVE, "naive softmax, causal": NAIVE, "torch SDPA": SDPA, "torch SDPA, causal": SDPA}
CLAIMED = {512: 1.5, 1024: 3.0, 4096: 12.0, 16384: 48.0}
EPS = 1e-6
TOKENS = 8  # to a call that decodes

Times = Mapping[tuple[str, str, int], list[float]]  # by name, direction and length
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


def speed(run: Run) -> Result:
    """Softmax's time over ours, medians over rounds for every seed's inputs, beside what was claimed, and times with
    the backward pass; the figure has all times."""
    lengths = [512, 1024, 2048] if run.quick else [512, 1024, 2048, 4096, 8192, 16384, 65536]
    taken: dict[tuple[str, str, int], list[float]] = {}
    for length in progress(lengths, "lengths"):
        for seed, (direction, call) in product(run.seeds, (("forward", forward), ("both", forward_backward))):
            inputs, sides = draw_inputs(length, seed), contenders(seed)
            calls = {name: call(side, inputs) for name, side in sides.items() if length <= LONGEST.get(name, length)}
            for name, time in medians(calls, 3 if run.quick else 5).items():
                taken.setdefault((name, direction, length), []).append(time)
    rows: list[list[Cell]] = []
    for length in lengths:
        ratios = (ratio(taken, theirs, ours, direction, length) for _, theirs, ours, direction in RATIOS)
        causal_times = (taken.get((f"{name}, causal", "both", length)) for name in TIMED)
        rows.append(
            [length, CLAIMED.get(length), *ratios, *(Spread.of(times) if times else None for times in causal_times)]
        )
    crossings = [f"{heading}: from {crossover(taken, a, b, way, lengths)}" for heading, a, b, way in RATIOS]
    notes = [
        f"softmax's process CPU time over ours; one head, width {WIDTH}, {torch.get_num_threads()} thread(s)",
        "claimed: a document on ReLU linear attention, without a source; its numbers are N / 341",
        "faster " + "; ".join(crossings),
        f"naive softmax is not run above {NAIVE} tokens, SDPA not above {SDPA}; ms: causal, forward and backward",
    ]
    columns = ["N", "claimed", *(heading for heading, *_ in RATIOS), *(f"{name} (ms)" for name in TIMED)]
    titles = {"forward": "every query sees all keys", "forward, causal": "causal"}
    titles |= {"both, causal": "causal, with the backward pass"}
    panels: dict[str, dict[str, dict[int, float]]] = {title: {} for title in titles.values()}
    data: dict[str, dict[int, list[float]]] = {}
    for (name, direction, length), every in taken.items():
        data.setdefault(f"{name}, {direction}", {})[length] = every
        kind, ending, _ = name.partition(", causal")
        if (title := titles.get(direction + ending)) is not None:
            panels[title].setdefault(kind, {})[length] = Spread.of(every).mean
    draw = partial(line_plot, panels=panels, xlabel="length N (tokens)", ylabels=["CPU time (ms)", "", ""])
    return Result(columns, rows, notes, draw, (13.0, 4.6), data)


SPEED = Study("speed", "From which length on is linear attention faster than softmax attention?", speed, seeds=3)


def contenders(seed: int) -> dict[str, Function]:
    """Ways of attending, `[B, H, T, D]` each, causal and not; those named alike compute the same function."""
    features, nothing = PerformerReLU(num_features=FEATURES), Params(learned={}, frozen={})
    params = features.init(WIDTH, generator=torch.Generator().manual_seed(seed))
    ways: dict[str, Function] = {
        "naive softmax": naive,
        "torch SDPA": F.scaled_dot_product_attention,
        "ReLU": partial(linear, ReLU(), nothing),
        "266 ReLU features": partial(linear, features, params),
    }
    return {
        **ways,
        **{f"{name}, causal": partial(way, is_causal=True) for name, way in ways.items()},
        "gated delta, causal": partial(gated, "gated_delta", 2),
        "titans_linear, causal": partial(gated, "titans_linear", 3),
    }


def naive(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """Softmax attention by its formula, every score in memory."""
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if is_causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(ahead, -math.inf)
    return scores.softmax(-1) @ v


def linear(feature_map: FeatureMap, params: Params, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """phi(q) (phi(k)^T v) / phi(q).sum phi(k): every query sees all keys, or by `memory_scan` those up to its own."""
    q, k, tokens = (x.transpose(1, 2) for x in (q, k, v))
    if is_causal:
        config = MemoryConfig(bias="dot", feature_map=feature_map, normalizer="sum")
        return memory_scan(config, q, k, tokens, Gates(lr=1.0), phi_params=params)[0].transpose(1, 2)
    phi_q, phi_k = (feature_map(x, params).transpose(1, 2) for x in (q, k))
    weight = (phi_q @ phi_k.sum(-2).unsqueeze(-1)) + EPS
    return phi_q @ (phi_k.mT @ v) / weight


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


def ratio(taken: Times, theirs: str, ours: str, direction: str, length: int) -> Spread | None:
    """Theirs over ours with its spread over seeds; None where theirs was not run."""
    if (theirs, direction, length) not in taken:
        return None
    pairs = zip(taken[theirs, direction, length], taken[ours, direction, length], strict=True)
    return Spread.of(a / b for a, b in pairs)


def crossover(taken: Times, theirs: str, ours: str, direction: str, lengths: Sequence[int]) -> str:
    """The length at which the ratio rises through 1 for good: a straight line between points of the log plot."""
    known = [(n, r.mean) for n in lengths if (r := ratio(taken, theirs, ours, direction, n))]
    below = [i for i, (_, value) in enumerate(known) if value < 1]
    if not below:
        return f"N = {known[0][0]} or less on"
    if below[-1] == len(known) - 1:
        return f"beyond N = {known[-1][0]}"
    (n0, r0), (n1, r1) = known[below[-1]], known[below[-1] + 1]
    share = -math.log(r0) / math.log(r1 / r0)
    return f"N = {n0 * (n1 / n0) ** share:.0f} on"


def decode(run: Run) -> Result:
    """Milliseconds per token for every way of decoding after every context, in turn, and what is kept in memory for it;
    the spread is that over seeds."""
    contexts = [64, 1024, 8192] if run.quick else [64, 256, 1024, 4096, 16384, 65536]
    taken: dict[tuple[str, int], list[float]] = {}
    sizes: dict[tuple[str, int], int] = {}
    for seed in progress(run.seeds, "seeds"):
        calls = {}
        for context, (name, make) in product(contexts, WAYS.items()):
            calls[name, context], sizes[name, context] = make(context, seed)
        with flushed():
            for way, time in medians(calls, 5 if run.quick else 9).items():
                taken.setdefault(way, []).append(time / TOKENS)
    rows: list[list[Cell]] = []
    spreads = {name: {context: Spread.of(taken[name, context]) for context in contexts} for name in WAYS}
    first, last = contexts[0], contexts[-1]
    for name, times_of in spreads.items():
        growth = Spread.of(after / before for after, before in zip(taken[name, last], taken[name, first], strict=True))
        claimed = "grows" if name == next(iter(WAYS)) else "constant"
        rows.append([name, *times_of.values(), growth, claimed, f"{sizes[name, first]:,} ... {sizes[name, last]:,}"])
    columns = ["what holds the context", *(f"ms after {n}" for n in contexts), f"{last} / {first}", "published"]
    notes = [
        f"process CPU time per token, {HEADS} heads of width {WIDTH}, {torch.get_num_threads()} thread(s)",
        "published: time and memory over the context (Katharopoulos et al., 2020, arXiv 2006.16236)",
    ]
    panels = {
        "time": {name: {n: spread.mean for n, spread in times_of.items()} for name, times_of in spreads.items()},
        "memory": {name: {n: sizes[name, n] / 1024 for n in contexts} for name in WAYS},
    }
    labels = ["CPU time per token (ms)", "state (KiB)"]
    draw = partial(line_plot, panels=panels, xlabel="context (tokens)", ylabels=labels)
    data = {name: {context: taken[name, context] for context in contexts} for name in WAYS}
    return Result([*columns, "state bytes"], rows, notes, draw, (13, 4.2), data)


DECODE = Study("decode", "What does one more token cost after a long context?", decode, seeds=3)

Way = Callable[[int, int], tuple[Call, int]]  # (context, seed) -> call, bytes


def stepping(config: MemoryConfig) -> Way:
    """Steps of a memory from the state that a context left.

    The context is written in chunks where the rule has a deep memory: faster, other weights, and
    what stands in the weights changes no time.
    """
    deep = config.structure.kind != "matrix"
    fill = config.model_copy(update={"chunk": 64}) if deep else config

    @torch.no_grad()
    def make(context: int, seed: int) -> tuple[Call, int]:
        tokens = drawn(context + TOKENS, batch=1, seed=seed)
        q, k, v = (x[:, :context] for x in tokens)
        _, state = memory_scan(fill, q, k, v, Gates(lr=0.01))
        if deep:
            state = state._replace(anchor={}, pending={}, position=torch.zeros_like(state.position))
        singles = [[x[:, at] for x in tokens] for at in range(context, context + TOKENS)]

        @torch.no_grad()
        def run() -> None:
            carried = state
            for q, k, v in singles:
                _, carried = memory_step(config, q, k, v, Gates(lr=0.01), state=carried)

        return run, bytes_of(state)

    return make


def attending(context: int, seed: int) -> tuple[Call, int]:
    """Softmax attention over a cache of keys and values that has room for what comes."""
    q, k, v = (x.transpose(1, 2).contiguous() for x in drawn(context + TOKENS, batch=1, seed=seed))

    def run() -> None:
        for end in range(context + 1, context + TOKENS + 1):
            for cache in (k, v):
                cache[:, :, end - 1 : end] = cache[:, :, :1]
            F.scaled_dot_product_attention(q[:, :, -1:], k[:, :, :end], v[:, :, :end])

    return run, 2 * HEADS * WIDTH * context * k.element_size()


WAYS: dict[str, Way] = {
    "softmax attention over a cache": attending,
    "linear attention": stepping(named_rule("linear_attention")),
    "gated delta": stepping(named_rule("gated_delta")),
    "Titans, MLP memory": stepping(named_rule("titans")),
}
