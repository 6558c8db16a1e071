"""decode: what one more token costs after a context, by memories and by attention over a cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch.nn import functional as F

from hecate.engine import memory_scan, memory_step
from hecate.rule import Gates, MemoryConfig, bytes_of, named_rule
from studies.costs.harness import HEADS, WIDTH, drawn
from studies.pictures import line_plot
from studies.study import Cell, Result, Run, Spread, Study, progress
from studies.timing import Call, cpu_times

TOKENS = 8  # to a call that is timed

Times = Mapping[tuple[str, int], list[float]]


def decode(run: Run) -> Result:
    """Every way of decoding after every context, in turn; the spread is that over seeds."""
    contexts = [64, 1024, 8192] if run.quick else [64, 256, 1024, 4096, 16384, 65536]
    taken: dict[tuple[str, int], list[float]] = {}
    held: dict[tuple[str, int], int] = {}
    for seed in progress(run.seeds, "seeds"):
        calls = {}
        for context, (name, make) in product(contexts, WAYS.items()):
            calls[name, context], held[name, context] = make(context, seed)
        torch.set_flush_denormal(True)  # a decayed state drifts into them
        try:
            times = cpu_times(calls, 5 if run.quick else 9)
        finally:
            torch.set_flush_denormal(False)
        for key, own in times.items():
            taken.setdefault(key, []).append(float(own.median()) / TOKENS)
    return report(taken, held, contexts)


DECODE = Study("decode", "What does one more token cost after a long context?", decode, seeds=3)


Way = Callable[[int, int], tuple[Call, int]]  # (context, seed) -> call, bytes


def stepping(config: MemoryConfig) -> Way:
    """Steps of a memory from the state that a context left.

    The context is written in chunks where the rule has a deep memory: faster, other weights, and
    what stands in the weights changes no time.
    """
    deep = config.structure.kind != "matrix"
    fill = config.model_copy(update={"chunk": 64}) if deep else config

    def make(context: int, seed: int) -> tuple[Call, int]:
        tokens = drawn(context + TOKENS, batch=1, seed=seed)
        with torch.no_grad():
            q, k, v = (x[:, :context] for x in tokens)
            _, state = memory_scan(fill, q, k, v, Gates(lr=0.01))
            if deep:
                state = state._replace(anchor={}, pending={}, position=torch.zeros_like(state.position))
        singles = [[x[:, at] for x in tokens] for at in range(context, context + TOKENS)]

        def run() -> None:
            carried = state
            with torch.no_grad():
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


def report(taken: Times, held: Mapping[tuple[str, int], int], contexts: Sequence[int]) -> Result:
    """Milliseconds per token for every way and context, and what is kept in memory for it."""
    rows: list[list[Cell]] = []
    for name in WAYS:
        times = [Spread.of(taken[name, context]) for context in contexts]
        pairs = zip(taken[name, contexts[-1]], taken[name, contexts[0]], strict=True)
        growth = Spread.of(last / first for last, first in pairs)
        claimed = "grows" if name == next(iter(WAYS)) else "constant"
        sizes = f"{held[name, contexts[0]]:,} ... {held[name, contexts[-1]]:,}"
        rows.append([name, *times, growth, claimed, sizes])
    span = f"{contexts[-1]} / {contexts[0]}"
    columns = ["what holds the context", *(f"ms after {n}" for n in contexts), span, "published", "state bytes"]
    notes = [
        f"process CPU time per token, {HEADS} heads of width {WIDTH}, batch 1, float32, "
        f"{torch.get_num_threads()} thread(s), {TOKENS} tokens to a call",
        "published: linear attention decodes in constant time and memory, softmax attention in "
        "both linear in the context (Katharopoulos et al., 2020, arXiv 2006.16236)",
        "a step of a memory passes through Python's checks and torch's small operations, a cached "
        "attention is one call: " + crossing(taken, contexts),
    ]
    data = {name: {context: taken[name, context] for context in contexts} for name in WAYS}

    def draw(figure: Any) -> None:
        panels = {
            "time": {name: {n: Spread.of(taken[name, n]).mean for n in contexts} for name in WAYS},
            "memory": {name: {n: held[name, n] / 1024 for n in contexts} for name in WAYS},
        }
        line_plot(figure, panels, "context (tokens)", ["CPU time per token (ms)", "state (KiB)"])

    return Result(columns, rows, notes, draw, (13, 4.2), data)


def crossing(taken: Times, contexts: Sequence[int]) -> str:
    """From which of the contexts on each memory is the faster one."""
    cache, *memories = WAYS
    parts = []
    for name in memories:
        ahead = [n for n in contexts if Spread.of(taken[name, n]) < Spread.of(taken[cache, n])]
        where = f"from {ahead[0]} tokens on" if ahead else f"not up to {contexts[-1]} tokens"
        parts.append(f"{name} is ahead {where}")
    return "; ".join(parts)
