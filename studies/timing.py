"""What calls cost: process CPU time, calls of all sides in turn, a sample of each per round."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import torch

K = TypeVar("K", bound=Hashable)

LEAST = 0.005  # seconds that a sample lasts at least: the clock's own resolution does not show


def cpu_times(runs: Mapping[K, Callable[[], object]], rounds: int) -> dict[K, torch.Tensor]:
    """Milliseconds of process CPU time per call, `[rounds]` for every run.

    Every run is called once to warm up, then as often per sample as makes it last; the runs take
    turns, so that whatever else the machine does falls on all of them.
    """
    calls = {name: _calls(run) for name, run in runs.items()}
    samples: dict[K, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            samples[name].append(_sample(run, calls[name]))
    return {name: torch.tensor(taken, dtype=torch.float64) for name, taken in samples.items()}


def _calls(run: Callable[[], object]) -> int:
    run()
    once = _sample(run, 1)
    return max(1, round(1e3 * LEAST / max(once, 1e-3)))


def _sample(run: Callable[[], object], calls: int) -> float:
    start = time.process_time()
    for _ in range(calls):
        run()
    return 1e3 * (time.process_time() - start) / calls
