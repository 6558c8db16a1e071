"""What calls cost: process CPU time, calls of all sides in turn, a sample of each per round."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median

import torch

from hecate.train.config import ExperimentConfig
from hecate.train.trainer import Trainer

LEAST = 0.005  # seconds that a sample lasts at least: the clock's own resolution does not show


def cpu_times(runs: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, torch.Tensor]:
    """Milliseconds of process CPU time per call, `[rounds]` for every run.

    Every run is called once to warm up, then as often per sample as makes it last; the runs take
    turns, so that whatever else the machine does falls on all of them.
    """
    calls = {name: _calls(run) for name, run in runs.items()}
    samples: dict[str, list[float]] = {name: [] for name in runs}
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


def step_times(configs: Mapping[str, ExperimentConfig], steps: int) -> dict[str, float]:
    """Seconds of process CPU time of a training step, the median of `steps`; the runs take turns here too."""
    trainers = {name: Trainer(config) for name, config in configs.items()}
    took: dict[str, list[float]] = {name: [] for name in trainers}
    for _ in range(steps):
        for name, trainer in trainers.items():
            began = time.process_time()
            trainer.train_step()
            took[name].append(time.process_time() - began)
    return {name: median(each) for name, each in took.items()}
