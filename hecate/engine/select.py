"""Which engine runs a config: the fastest that is exact for it, with reasons."""

from __future__ import annotations

from typing import Literal, get_args

import torch

from hecate.engine.compiled import compiled_refusal
from hecate.engine.parallel import parallel_refusal
from hecate.errors import ConfigError
from hecate.rule import MemoryConfig

Engine = Literal["auto", "sequential", "parallel", "compiled"]
ENGINES = get_args(Engine)
Chosen = Literal["sequential", "parallel", "compiled"]

# Measured, see benchmarks: from this length on kernels are worth loading, and up to this size of a
# state (128 x 128 in float32) they beat block products, forward and backward together.
COMPILED_TOKENS = 32
COMPILED_BYTES = 1 << 16


def choose_engine(
    config: MemoryConfig,
    asked: Engine,
    *,
    length: int = 2,
    channelwise: bool = False,
    cells: int = 0,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    traced: bool = False,
) -> tuple[Chosen, str]:
    """The engine to run and why; `ConfigError` if the one asked for is not exact here.

    Beside the config: the number of tokens, whether retain is per phi channel, V x P of a state,
    where tensors are and in which dtype the state is, and whether torch has to see every operation.
    """
    if asked not in ENGINES:
        raise ConfigError(f"engine must be one of {ENGINES}, got {asked!r}")
    if asked == "sequential":
        return "sequential", "asked for"
    parallel = parallel_refusal(config, channelwise)
    if asked == "auto" and length < COMPILED_TOKENS:
        compiled: str | None = f"{length} tokens are too few to load kernels for"
    elif asked == "auto" and parallel is None and cells * dtype.itemsize > COMPILED_BYTES:
        compiled = f"block products are faster for states of {cells} numbers"
    else:
        compiled = compiled_refusal(config, device=device, dtype=dtype, traced=traced)
    refused = {"parallel": parallel, "compiled": compiled}.get(asked)
    if refused is not None:
        raise ConfigError(
            f"engine={asked!r} cannot run this memory exactly: {refused}; "
            "use engine='auto' or 'sequential'"
        )
    if asked != "auto":
        return asked, "asked for"
    if compiled is None:
        return "compiled", "a kernel keeps the state in cache"
    if parallel is not None:
        return "sequential", parallel
    if length == 1:
        return "sequential", "a single token"
    return "parallel", f"linear memory with linear retention: exact in blocks ({compiled})"
