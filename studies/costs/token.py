"""One token of one sequence: what decoding costs beside the bare arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from hecate import Gates, MemoryConfig, named_rule, stepper
from hecate.nn import Memory
from studies.costs.harness import HEADS, WIDTH, Row, Size, gates, sequence, timed

TURNS = 20  # times as many samples as of a sequence


def token(size: Size) -> Iterator[Row]:
    """One token of one sequence over the same arithmetic in five torch calls: by name, and as fast as torch has it."""
    rules: dict[str, tuple[MemoryConfig, int]] = {
        "MemoryConfig()": (MemoryConfig(), 0),
        "delta": (named_rule("delta"), 1),
        "gated delta": (named_rule("gated_delta"), 2),
        "momentum": (named_rule("titans_linear"), 3),
    }
    q, k, v = (item[:, 0] for item in sequence(1, batch=1))
    given = [gate[:, 0] for gate in gates(1, batch=1)]
    layer = Memory(HEADS * WIDTH, HEADS, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    x = v.reshape(1, 1, -1)
    with torch.no_grad():
        state = layer(x)[1]
        runs: dict[str, Callable[[], object]] = {
            name: _stepper(config, (q, k, v, Gates(*given[:count]))) for name, (config, count) in rules.items()
        }
        runs["nn.Memory"] = lambda: layer(x, state)
        memory = torch.zeros(1, HEADS, WIDTH, WIDTH)
        peers: dict[str, Callable[[], object]] = {
            "five calls": lambda: _five(memory, q, k, v),
            "five calls on rows": lambda: _five_rows(memory, q, k, v),
        }
        for name, run in runs.items():
            for peer, theirs in peers.items():
                cost = timed(run, theirs, TURNS * size.repeats)
                note = f"{1e3 * cost.ours:.0f} and {1e3 * cost.theirs:.0f} us per token"
                yield Row(name, peer, forward=cost, note=note)


def _stepper(config: MemoryConfig, token: tuple[Tensor, Tensor, Tensor, Gates]) -> Callable[[], object]:
    made = stepper(config)
    return lambda: made(*token)


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
