"""The library against itself and bare arithmetic: the tape against autograd's record, every engine against the token
loop, a token against the operations that it cannot do without."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hecate import ConfigError, Gates, MemoryConfig, memory_scan, named_rule, retention, stepper, structure
from hecate.nn import Memory
from studies.costs.harness import HEADS, WIDTH, Peer, Row, Size, compare, cost, cost_of, drawn, scan, timed
from studies.costs.loops import matrix_loop, mlp_loop
from studies.timing import Call, Function, forward_backward, peak_mib

TAPE: dict[str, Any] = {"engine": "sequential", "autodiff": "tape"}
TURNS = 20  # times as many samples of a token as of a sequence


@cost
def tape(size: Size) -> Iterator[Row]:
    """`autodiff="tape"` keeps of the order of sqrt(T) states; autograd keeps all of them."""
    length = size.short(512)
    inputs = drawn(length, 2, largest=0.1)
    deep = structure.MLP(layers=2, expansion=1, activation="silu")
    weights = deep.init(WIDTH, WIDTH, heads=4).values()
    for name, ours, theirs, given in (
        ("MLP memory (64-64-64)", partial(_mlp, deep), mlp_loop, (*inputs, *weights)),
        ("matrix memory, gated", scan(MemoryConfig(retention="decay"), **TAPE), matrix_loop, inputs),
    ):
        peer = Peer("plain torch loop under autograd", theirs)
        row = compare(f"{name}, token loop, T={length}", ours, peer, given, size.fewer(3), directions="b")
        yield row._replace(memory=cost_of(*(_peak(function, given) for function in (ours, theirs))))


def _peak(function: Function, inputs: tuple[Tensor, ...]) -> float:
    run = forward_backward(function, inputs)
    run()
    gc.collect()
    return peak_mib(run)


def _mlp(deep: structure.MLP, *inputs: Tensor) -> Tensor:
    config = MemoryConfig(structure=deep, retention=retention.Decay(towards="zero"))
    q, k, v, lr, retain, w1, w2 = inputs
    return memory_scan(config, q, k, v, Gates(lr, retain), initial={"w1": w1, "w2": w2}, **TAPE)[0]


@cost
def engines(size: Size) -> Iterator[Row]:
    """What `engine="auto"` has to choose from."""
    length, ttt = size.short(512), named_rule("ttt_linear")
    rules = {name: named_rule(name) for name in ("hebbian", "delta", "gated_delta", "titans_linear")}
    rules |= {name: MemoryConfig.model_validate({"bias": name, "retention": "decay"}) for name in ("huber", "lp")}
    rules |= {"ttt_linear, chunk 16": ttt, "ttt_linear, chunk 64": ttt.model_copy(update={"chunk": 64})}
    for name, config in rules.items():
        count = 1 + config.retention.uses_retain + config.algorithm.uses_momentum
        inputs = drawn(length, count, largest=0.02 if config.chunk > 1 else 0.1)
        for engine in ("compiled", "parallel", "chunk"):
            run, peer = scan(config, engine=engine), Peer("engine sequential", scan(config, engine="sequential"))
            try:
                run(*drawn(1, count))
            except ConfigError:  # not exact for this rule
                continue
            yield compare(f"{name}, engine {engine}, T={length}", run, peer, inputs, size.fewer(4))


@cost
def token(size: Size) -> Iterator[Row]:
    """One token of one sequence over the same arithmetic in five torch calls: by name, and as fast as torch has it."""
    rules = {
        "MemoryConfig()": MemoryConfig(), "delta": named_rule("delta"), "gated delta": named_rule("gated_delta"),
        "momentum": named_rule("titans_linear"),
    }  # fmt: skip
    q, k, v, *given = (item[:, 0] for item in drawn(1, 3, batch=1))
    layer = Memory(HEADS * WIDTH, HEADS, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    x, memory = v.reshape(1, 1, -1), torch.zeros(1, HEADS, WIDTH, WIDTH)
    with torch.no_grad():
        state = layer(x)[1]
        runs: dict[str, Call] = {
            name: partial(stepper(config), q, k, v, Gates(*given[:count]))
            for count, (name, config) in enumerate(rules.items())
        }
        runs["nn.Memory"] = partial(layer, x, state)
        for name, run in runs.items():
            for peer, theirs in (("five calls", _five), ("five calls on rows", _five_rows)):
                taken = timed(run, partial(theirs, memory, q, k, v), TURNS * size.repeats)
                note = f"{1e3 * taken['ours']:.0f} and {1e3 * taken['theirs']:.0f} us per token"
                yield Row(name, peer, forward=taken, note=note)


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
