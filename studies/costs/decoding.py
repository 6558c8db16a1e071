"""Milliseconds per token after a long context: a memory's state does not grow, a cache does."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from hecate import Gates, MemoryConfig, memory_scan, memory_step, named_rule, retention, stepper, structure
from hecate.nn import Memory
from studies.costs.cases import BATCH, HEADS, WIDTH, gates, sequence
from studies.costs.harness import Cost, Row, Size, timed

Steps = Callable[[], None]
TOKENS = 20  # per sample
TURNS = 20  # times as many samples of one token: what else a machine does only adds, so the least of many is steady


def decode(size: Size) -> Iterator[Row]:
    """A step after 64, 1k and 64k tokens, against itself after 64 and against a KV cache."""
    contexts = sorted({64, size.short(1024), size.short(65536)})
    deep = MemoryConfig(
        structure=structure.MLP(layers=2, expansion=1), retention=retention.Decay(towards="zero"), chunk=64
    )
    makers: dict[str, Callable[[int], Steps]] = {
        "memory_step, gated delta": lambda n: _step(MemoryConfig(retention="decay"), n),
        "memory_step, MLP": lambda n: _step(deep.model_copy(update={"chunk": 1}), n, deep),
        "nn.Memory, gated delta": _layer,
        "torch SDPA with a KV cache": _cache,
    }
    with torch.no_grad():
        steps = {name: [make(n) for n in contexts] for name, make in makers.items()}
        for name, by_context in steps.items():
            cost = _per_token(timed(by_context[-1], by_context[0], size.repeats))
            yield Row(
                "decode",
                f"{name}, context {contexts[-1]}",
                f"itself at context {contexts[0]}",
                forward=cost,
                floor=(1.05, None) if name.startswith("memory_step") else (None, None),
                goal=(1.00, None) if name.startswith("memory_step") else (None, None),
                note=f"{cost.ours:.3f} and {cost.theirs:.3f} ms per token",
            )
        *ours, cache = steps
        for name in ours:
            for index, context in enumerate(contexts):
                sides = steps[name][index], steps[cache][index]
                yield Row(
                    "decode", f"{name}, context {context}", cache, forward=_per_token(timed(*sides, size.repeats))
                )


def token(size: Size) -> Iterator[Row]:
    """One token of one sequence over the same arithmetic in five torch calls: by name, and as fast as torch has it."""
    rules: dict[str, tuple[MemoryConfig, int, float]] = {
        "MemoryConfig()": (MemoryConfig(), 0, 1.3),
        "delta": (named_rule("delta"), 1, 2.2),
        "gated delta": (named_rule("gated_delta"), 2, 2.5),
        "momentum": (named_rule("titans_linear"), 3, 2.7),
    }
    q, k, v = (item[:, 0] for item in sequence(1, batch=1))
    given = [gate[:, 0] for gate in gates(1, batch=1)]
    layer = Memory(HEADS * WIDTH, HEADS, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    x = v.reshape(1, 1, -1)
    with torch.no_grad():
        state = layer(x)[1]
        runs: dict[str, tuple[Callable[[], object], float]] = {
            name: (_stepper(config, (q, k, v, Gates(*given[:count]))), goal)
            for name, (config, count, goal) in rules.items()
        }
        runs["nn.Memory"] = (lambda: layer(x, state), 6.5)
        memory = torch.zeros(1, HEADS, WIDTH, WIDTH)
        peers: dict[str, Callable[[], object]] = {
            "five calls": lambda: _five(memory, q, k, v),
            "five calls on rows": lambda: _five_rows(memory, q, k, v),
        }
        for name, (run, goal) in runs.items():
            for peer, theirs in peers.items():
                cost = _per_token(timed(_often(run), _often(theirs), TURNS * size.repeats, min))
                note = f"{1e3 * cost.ours:.0f} and {1e3 * cost.theirs:.0f} us per token"
                wanted = goal if peer == "five calls" else None
                yield Row("token", name, peer, forward=cost, goal=(wanted, None), note=note)


def _stepper(config: MemoryConfig, token: tuple[Tensor, Tensor, Tensor, Gates]) -> Callable[[], object]:
    made = stepper(config)
    return lambda: made(*token)


def _often(run: Callable[[], object]) -> Steps:
    def repeated() -> None:
        for _ in range(TOKENS):
            run()

    return repeated


def _five(memory: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A delta rule as it is written down: predict, error, outer product, write, read."""
    error = (memory @ k.unsqueeze(-1)).squeeze(-1) - v
    memory = memory - error.unsqueeze(-1) * k.unsqueeze(-2)
    return memory @ q.unsqueeze(-1)


def _five_rows(memory: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same with vectors as rows and the write fused, which is as fast as torch has it."""
    rows, memory = [x.view(HEADS, 1, WIDTH) for x in (q, k, v)], memory.flatten(0, 1)
    error = -1.0 * (torch.bmm(rows[1], memory.mT) - rows[2])
    return torch.bmm(rows[0], torch.addcmul(memory, error.mT, rows[1]).mT)


def _per_token(cost: Cost) -> Cost:
    walls = tuple(None if wall is None else wall / TOKENS for wall in cost.wall)
    return Cost(cost.ours / TOKENS, cost.theirs / TOKENS, walls)


def _step(config: MemoryConfig, context: int, reader: MemoryConfig | None = None) -> Steps:
    """Steps from the state after `context` tokens; `reader` reads them where that is faster."""
    q, k, v = sequence(context)
    lr, retain, _ = gates(context, largest=0.1 if reader is None else 0.01)
    state = memory_scan(reader or config, q, k, v, Gates(lr, retain))[1]
    state = state._replace(anchor={}, position=torch.zeros_like(state.position))
    last = [item[:, -1] for item in (q, k, v)]
    given = Gates(lr[:, -1], retain[:, -1])

    def run() -> None:
        current = state
        for _ in range(TOKENS):
            _, current = memory_step(config, *last, given, state=current)

    return run


def _layer(context: int) -> Steps:
    layer = Memory(
        HEADS * WIDTH,
        HEADS,
        MemoryConfig(retention="decay", decay_order="before_gradient"),
        generator=torch.Generator().manual_seed(0),
        dtype=torch.float32,
    )
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, context, HEADS * WIDTH, generator=generator, dtype=torch.float32)
    _, state = layer(x)

    def run() -> None:
        current = state
        for _ in range(TOKENS):
            _, current = layer(x[:, -1:], current)

    return run


def _cache(context: int) -> Steps:
    """Attention over all tokens so far; the cache has room, so nothing is copied per token."""
    q, k, v = (item.transpose(1, 2).contiguous() for item in sequence(context + TOKENS))

    def run() -> None:
        for t in range(context, context + TOKENS):
            k[:, :, t : t + 1] = k[:, :, :1]
            v[:, :, t : t + 1] = v[:, :, :1]
            new: Tensor = q[:, :, :1]
            torch.nn.functional.scaled_dot_product_attention(new, k[:, :, : t + 1], v[:, :, : t + 1])

    return run
