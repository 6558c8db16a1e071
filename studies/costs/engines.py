"""The engines against each other: each exact one against the token loop of the same rule."""

from __future__ import annotations

from collections.abc import Iterator

from hecate import ConfigError, MemoryConfig, named_rule
from studies.costs.cases import gates, scan, sequence
from studies.costs.harness import Row, Size, compare


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
                "engines",
                f"{name}, engine {engine}, T={length}",
                run,
                "engine sequential",
                scan(config, engine="sequential"),
                (*sequence(length), *given[:count]),
                repeats=size.fewer(4),
            )
