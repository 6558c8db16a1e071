"""What calls cost: process CPU time, calls of all sides in turn, a sample of each per round, and memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

K = TypeVar("K", bound=Hashable)
Call = Callable[[], object]
Function = Callable[..., Tensor]

LEAST = 0.005  # seconds that a sample lasts at least: the clock's own resolution does not show


def cpu_times(runs: Mapping[K, Call], rounds: int) -> dict[K, Tensor]:
    """Milliseconds of process CPU time per call, `[rounds]` for every run.

    Every run is called once to warm up, then as often per sample as makes it last; the runs take
    turns, so that whatever else the machine does falls on all of them.
    """
    calls = {}
    for name, run in runs.items():
        run()
        calls[name] = max(1, round(1e3 * LEAST / max(_sample(run, 1), 1e-3)))
    samples: dict[K, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            samples[name].append(_sample(run, calls[name]))
    return {name: torch.tensor(taken, dtype=torch.float64) for name, taken in samples.items()}


def _sample(run: Call, calls: int) -> float:
    start = time.process_time()
    for _ in range(calls):
        run()
    return 1e3 * (time.process_time() - start) / calls


def forward(function: Function, inputs: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    """The output alone, without recording."""

    def run() -> list[Tensor]:
        with torch.no_grad():
            return [function(*inputs)]

    return run


def forward_backward(function: Function, inputs: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    """The output and the gradients of all inputs for one fixed cotangent; 0 where unused."""
    cotangent: list[Tensor] = []

    def run() -> list[Tensor]:
        leaves = [item.detach().requires_grad_() for item in inputs]
        y = function(*leaves)
        if not cotangent:
            generator = torch.Generator().manual_seed(1)
            cotangent.append(torch.randn(y.shape, generator=generator, dtype=y.dtype))
        found = torch.autograd.grad(y, leaves, cotangent[0], allow_unused=True)
        grads = [grad for grad in found if grad is not None]
        return [y, *grads]

    return run


def peak_mib(run: Call) -> float:
    """Most memory that torch's CPU allocator holds at once during a run, beyond what it held.

    The profiler's record of every allocation, temporaries inside operators and the backward pass
    included; memory that does not come from torch is not seen.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    changes = [
        (event.start_ns(), event.nbytes())
        for event in profile.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    held = peak = 0
    for _, change in sorted(changes, key=lambda item: item[0]):
        held += change
        peak = max(peak, held)
    return peak / 2**20
