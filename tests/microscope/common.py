"""Scans to look at."""

from __future__ import annotations

from typing import Any

from hecate import MemoryConfig, MemoryState
from hecate.nn.rule import ScanArguments
from tests.memories import case_of, config_of


def asked_of(config: MemoryConfig | None = None, **options: Any) -> ScanArguments:
    """A random scan in float64; see `case_of`."""
    config = config_of() if config is None else config
    case = case_of(config, **options)
    d = case.k.shape[-1]
    params = config.feature_map.init(d, heads=case.k.shape[2])
    own = {"phi_params": params, "initial": case.initial}
    masks = {"write_mask": case.write, "reset_mask": case.reset}
    return ScanArguments(config, case.q, case.k, case.v, case.gates, **own, **masks)


def second_half(asked: ScanArguments) -> tuple[ScanArguments, MemoryState]:
    """The rest of a scan from the state after its first tokens, and that state."""
    length = asked.v.shape[1]
    _, state = asked.between(0, length // 2 + 1, None).scan()
    return asked.between(length // 2 + 1, length, state), state
