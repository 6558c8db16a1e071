"""Which engine runs a config: the fastest that is exact for it, with reasons."""

from __future__ import annotations

from typing import Literal, get_args

from hecate.engine.chunk import chunk_refusal
from hecate.engine.parallel import parallel_refusal
from hecate.errors import ConfigError
from hecate.rule import MemoryConfig

Engine = Literal["auto", "sequential", "parallel", "chunk"]
Chosen = Literal["sequential", "parallel", "chunk"]

REASONS: dict[Chosen, str] = {
    "parallel": "linear memory with linear retention: exact in blocks",
    "chunk": "gradients of a chunk at one state: exact in chunks",
}


def choose_engine(
    config: MemoryConfig,
    asked: Engine,
    *,
    length: int = 2,
    channelwise: bool = False,
    masked: bool = False,
    position: int | None = 0,
) -> tuple[Chosen, str]:
    """The engine to run and why; `ConfigError` if the one asked for is not exact here."""
    if asked not in get_args(Engine):
        known = ", ".join(repr(name) for name in get_args(Engine))
        raise ConfigError(f"engine must be one of {known}, got {asked!r}")
    refusals: dict[Chosen, str | None] = {
        "parallel": parallel_refusal(config),
        "chunk": chunk_refusal(config, channelwise=channelwise, masked=masked, position=position),
    }
    if asked != "auto":
        refusal = None if asked == "sequential" else refusals[asked]
        if refusal is not None:
            raise ConfigError(
                f"engine={asked!r} cannot run this memory exactly: {refusal}; "
                "use engine='auto' or 'sequential'"
            )
        return asked, "asked for"
    for name, refusal in refusals.items():
        if refusal is None:
            return ("sequential", "a single token") if length == 1 else (name, REASONS[name])
    return "sequential", refusals["chunk" if config.chunk > 1 else "parallel"] or ""
