"""Which engine runs a config: the fastest that is exact for it, with reasons."""

from __future__ import annotations

from typing import Literal

from hecate.engine.parallel import parallel_refusal
from hecate.errors import ConfigError
from hecate.rule import MemoryConfig

Engine = Literal["auto", "sequential", "parallel"]


def choose_engine(
    config: MemoryConfig, asked: Engine, *, length: int = 2
) -> tuple[Literal["sequential", "parallel"], str]:
    """The engine to run and why; `ConfigError` if the one asked for is not exact here."""
    if asked not in ("auto", "sequential", "parallel"):
        raise ConfigError(f"engine must be 'auto', 'sequential' or 'parallel', got {asked!r}")
    refusal = parallel_refusal(config)
    if asked == "parallel" and refusal is not None:
        raise ConfigError(
            f"engine='parallel' cannot run this memory exactly: {refusal}; "
            "use engine='auto' or 'sequential'"
        )
    if asked == "sequential":
        return "sequential", "asked for"
    if asked == "parallel":
        return "parallel", "asked for"
    if refusal is not None:
        return "sequential", refusal
    if length == 1:
        return "sequential", "a single token"
    return "parallel", "linear memory with linear retention: exact in blocks"
