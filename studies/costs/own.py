"""The library against itself: the tape against autograd's record, and every engine against the token loop."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from hecate import ConfigError, Gates, MemoryConfig, memory_scan, named_rule, retention, structure
from studies.costs.harness import (
    WIDTH,
    Cost,
    Function,
    Row,
    Size,
    compare,
    forward_backward,
    gates,
    peak_mib,
    scan,
    sequence,
)
from studies.costs.loops import matrix_loop, mlp_loop

TAPE: dict[str, Any] = {"engine": "sequential", "autodiff": "tape"}


def tape(size: Size) -> Iterator[Row]:
    """`autodiff="tape"` keeps of the order of sqrt(T) states; autograd keeps all of them."""
    length = size.short(512)
    q, k, v = sequence(length)
    lr, retain, _ = gates(length, largest=0.1)
    deep = structure.MLP(layers=2, expansion=1, activation="silu")
    initial = deep.init(WIDTH, WIDTH, heads=4)
    inputs = (q, k, v, lr, retain)
    loops: list[tuple[str, Function, Function, tuple[Tensor, ...]]] = [
        ("MLP memory (64-64-64)", _mlp(deep), mlp_loop, (*inputs, *initial.values())),
        ("matrix memory, gated", scan(MemoryConfig(retention="decay"), **TAPE), matrix_loop, inputs),
    ]
    for name, ours, theirs, given in loops:
        row = compare(
            f"{name}, token loop, T={length}",
            ours,
            "plain torch loop under autograd",
            theirs,
            given,
            repeats=size.fewer(3),
            directions="b",
        )
        yield row._replace(memory=Cost(*(_peak(function, given) for function in (ours, theirs))))


def _peak(function: Function, inputs: tuple[Tensor, ...]) -> float:
    run = forward_backward(function, inputs)
    run()
    gc.collect()
    return peak_mib(run)


def _mlp(deep: structure.MLP) -> Function:
    config = MemoryConfig(structure=deep, retention=retention.Decay(towards="zero"))

    def run(q: Tensor, k: Tensor, v: Tensor, lr: Tensor, retain: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return memory_scan(config, q, k, v, Gates(lr, retain), initial={"w1": w1, "w2": w2}, **TAPE)[0]

    return run


def engines(size: Size) -> Iterator[Row]:
    """What `engine="auto"` has to choose from."""
    length = size.short(512)
    ttt = named_rule("ttt_linear")
    rules = {
        "hebbian": named_rule("hebbian"),
        "delta": named_rule("delta"),
        "gated_delta": named_rule("gated_delta"),
        "titans_linear": named_rule("titans_linear"),
        "huber": MemoryConfig.model_validate({"bias": "huber", "retention": "decay"}),
        "lp": MemoryConfig.model_validate({"bias": "lp", "retention": "decay"}),
        "ttt_linear, chunk 16": ttt,
        "ttt_linear, chunk 64": ttt.model_copy(update={"chunk": 64}),
    }
    for name, config in rules.items():
        given = gates(length, largest=0.02 if config.chunk > 1 else 0.1)
        count = 1 + config.retention.uses_retain + config.algorithm.uses_momentum
        for engine in ("compiled", "parallel", "chunk"):
            run = scan(config, engine=engine)
            try:
                run(*sequence(1), *(gate[:, :1] for gate in given[:count]))
            except ConfigError:  # not exact for this rule
                continue
            yield compare(
                f"{name}, engine {engine}, T={length}",
                run,
                "engine sequential",
                scan(config, engine="sequential"),
                (*sequence(length), *given[:count]),
                repeats=size.fewer(4),
            )
