"""Which engine runs a config: the fastest that is exact for it, with reasons."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Literal, get_args

import torch

from hecate.bias import L2
from hecate.engine.call import Call
from hecate.engine.chunk import chunk_refusal
from hecate.engine.cpu import compiled_refusal, compiled_unfit
from hecate.engine.fla import fla_refusal, fla_unfit
from hecate.engine.parallel import parallel_refusal
from hecate.errors import ConfigError
from hecate.rule import MemoryConfig

EngineName = Literal["auto", "sequential", "parallel", "chunk", "compiled", "fla"]
Chosen = Literal["sequential", "parallel", "chunk", "compiled", "fla"]
ENGINES = get_args(EngineName)

# Why an engine is not exact for a config, and why it cannot run a call of it here.
REFUSALS: dict[Chosen, Callable[[MemoryConfig], str | None]] = {
    "fla": fla_refusal,
    "compiled": compiled_refusal,
    "parallel": parallel_refusal,
    "chunk": chunk_refusal,
}
UNFIT: dict[Chosen, Callable[[MemoryConfig, Call], str | None]] = {"fla": fla_unfit, "compiled": compiled_unfit}
# Why `auto` is content with an engine that refuses nothing.
REASONS: dict[Chosen, str] = {
    "fla": "a kernel of flash-linear-attention that has passed its parity test",
    "compiled": "a kernel keeps the state in cache",
    "parallel": "linear memory with linear retention: exact in blocks",
    "chunk": "gradients of a chunk at one state: exact in chunks",
}

# Measured by `python -m studies cost-engines`: from this length on kernels are worth loading, and up to this size of a
# l2 state (128 x 128 in float32) they beat block products, forward and backward together; with dot, whose rows go in
# tiles, up to 256 x 256 at least.
COMPILED_TOKENS = 32
COMPILED_BYTES = 1 << 16
# Tokens that a step of the chunk engine has to take on average to beat as many of the token loop.
CHUNK_TOKENS = 2


def check_exact(config: MemoryConfig, asked: EngineName) -> None:
    """`ConfigError` for an engine that is not exact for a config, whatever it is called with."""
    if asked not in ENGINES:
        known = ", ".join(repr(name) for name in ENGINES)
        raise ConfigError(f"engine must be one of {known}, got {asked!r}")
    if asked != "auto" and asked != "sequential":
        _refuse(asked, REFUSALS[asked](config))


def choose_engine(config: MemoryConfig, asked: EngineName, call: Call | None = None) -> tuple[Chosen, str]:
    """The engine to run a call and why; `ConfigError` if the one asked for is not exact here."""
    call = call or Call()
    check_exact(config, asked)
    if asked != "auto":
        _refuse(asked, _unfit(config, asked, call))
        return asked, "asked for"
    if call.length == 1:
        return "sequential", "a single token"
    if CHUNK_TOKENS * call.steps > call.length and config.chunk > 1:
        return "sequential", (f"{call.steps} chunks for {call.length} tokens: resets leave too little in each")
    left = dict(REFUSALS)
    # Before anything loads numba: few tokens, or states for which block products are faster.
    size = math.prod(call.shape) * call.dtype.itemsize
    large = isinstance(config.bias, L2) and size > COMPILED_BYTES
    if call.length < COMPILED_TOKENS or (large and parallel_refusal(config) is None):
        del left["compiled"]
    if call.values == torch.float32:
        del left["fla"]  # its products of float32 are rounded more than ours
    refused = {}
    for name, refusal in left.items():
        refused[name] = refusal(config) or _unfit(config, name, call)
        if refused[name] is None:
            return name, REASONS[name]
    return "sequential", refused["chunk" if config.chunk > 1 else "parallel"] or ""


def _unfit(config: MemoryConfig, name: Chosen, call: Call) -> str | None:
    return UNFIT[name](config, call) if name in UNFIT else None


def _refuse(name: str, reason: str | None) -> None:
    if reason is not None:
        raise ConfigError(
            f"engine={name!r} cannot run this memory exactly: {reason}; use engine='auto' or 'sequential'"
        )


def exact_engines(config: MemoryConfig, *, length: int = 2) -> list[Chosen]:
    """The engines beside the token loop that are exact for a config on the CPU."""
    found: list[Chosen] = []
    for engine in REASONS:
        with suppress(ConfigError):
            found.append(choose_engine(config, engine, Call(length))[0])
    return found
