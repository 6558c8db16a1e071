"""Which engine runs a config: the fastest that is exact for it, with reasons."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Literal, get_args

import torch

from hecate.bias import L2
from hecate.engine.chunk import chunk_refusal
from hecate.engine.compiled import compiled_refusal
from hecate.engine.fla import FlaScan, fla_refusal
from hecate.engine.parallel import parallel_refusal
from hecate.errors import ConfigError
from hecate.rule import MemoryConfig

Engine = Literal["auto", "sequential", "parallel", "chunk", "compiled", "fla"]
Chosen = Literal["sequential", "parallel", "chunk", "compiled", "fla"]
ENGINES = get_args(Engine)

# Why `auto` is content with an engine that refuses nothing.
REASONS: dict[Chosen, str] = {
    "fla": "a kernel of flash-linear-attention that has passed its parity test",
    "compiled": "a kernel keeps the state in cache",
    "parallel": "linear memory with linear retention: exact in blocks",
    "chunk": "gradients of a chunk at one state: exact in chunks",
}

# Measured, see benchmarks: from this length on kernels are worth loading, and up to this size of a
# l2 state (128 x 128 in float32) they beat block products, forward and backward together; with dot,
# whose rows go in tiles, up to 256 x 256 at least.
COMPILED_TOKENS = 32
COMPILED_BYTES = 1 << 16
# Tokens that a step of the chunk engine has to take on average to beat as many of the token loop.
CHUNK_TOKENS = 2


def choose_engine(
    config: MemoryConfig,
    asked: Engine,
    *,
    length: int = 2,
    steps: int = 0,
    cells: int = 0,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    traced: bool = False,
    scan: FlaScan | None = None,
) -> tuple[Chosen, str]:
    """The engine to run and why; `ConfigError` if the one asked for is not exact here.

    Beside the config: the number of tokens, in how many steps the chunk engine takes them, V x P of
    a state, where tensors are and in which dtype the state is, whether torch has to see every
    operation, and what flash-linear-attention has to know of the inputs.
    """
    if asked not in ENGINES:
        known = ", ".join(repr(name) for name in ENGINES)
        raise ConfigError(f"engine must be one of {known}, got {asked!r}")
    refusal_of: dict[Chosen, Callable[[], str | None]] = {
        "fla": lambda: fla_refusal(config, scan or FlaScan(), device=device, traced=traced),
        "compiled": lambda: compiled_refusal(config, device=device, dtype=dtype, traced=traced),
        "parallel": lambda: parallel_refusal(config),
        "chunk": lambda: chunk_refusal(config),
    }
    if asked != "auto":
        refusal = None if asked == "sequential" else refusal_of[asked]()
        if refusal is not None:
            raise ConfigError(
                f"engine={asked!r} cannot run this memory exactly: {refusal}; "
                "use engine='auto' or 'sequential'"
            )
        return asked, "asked for"
    if length == 1:
        return "sequential", "a single token"
    if CHUNK_TOKENS * steps > length and config.chunk > 1:
        return "sequential", f"{steps} chunks for {length} tokens: resets leave too little in each"
    # Before anything loads numba: few tokens, or states for which block products are faster.
    large = isinstance(config.bias, L2) and cells * dtype.itemsize > COMPILED_BYTES
    if length < COMPILED_TOKENS or (large and parallel_refusal(config) is None):
        del refusal_of["compiled"]
    if scan is None or scan.values == torch.float32:
        del refusal_of["fla"]  # its products of float32 are rounded more than ours
    refused = {}
    for name, ask in refusal_of.items():
        refused[name] = ask()
        if refused[name] is None:
            return name, REASONS[name]
    return "sequential", refused["chunk" if config.chunk > 1 else "parallel"] or ""


def exact_engines(config: MemoryConfig, *, length: int = 2) -> list[Chosen]:
    """The engines beside the token loop that are exact for a config on the CPU."""
    found: list[Chosen] = []
    for engine in REASONS:
        with suppress(ConfigError):
            found.append(choose_engine(config, engine, length=length)[0])
    return found
