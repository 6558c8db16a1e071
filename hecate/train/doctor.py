"""Report on this machine and the engines that run here; kernels compiled ahead of their first use."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from hecate.engine import Engine, Plan, choose, kernel_verdicts
from hecate.nn import Memory
from hecate.rule import RULES, MemoryConfig, named_rule
from hecate.train.catalogue import Table
from hecate.train.run import versions

PACKAGES = ("torch", "numpy", "pydantic", "numba", "flash-linear-attention", "triton", "matplotlib")
LENGTH = 1024


def machine() -> Table:
    """Versions, threads and devices."""
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    found = [[name, version] for name, version in versions(PACKAGES).items()]
    system = f"{platform.system()} {platform.machine()}, {os.cpu_count()} processors"
    threads = f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    rows = [["python", platform.python_version()], *found, ["machine", system], ["torch on a CPU", threads]]
    return ["what", "here"], [*rows, ["CUDA", ", ".join(devices) or "no device"]]


def engines() -> Table:
    """Numbers of named rules that each engine runs on each device and `auto` takes it for, or why it runs none."""
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    calls = {on: [Plan.sketch(config, length=LENGTH, device=on) for config, *_ in RULES.values()] for on in devices}
    chosen = {on: [choose(call).name for call in asked] for on, asked in calls.items()}

    def of(engine: Engine, on: str) -> str:
        said = [engine.unable(call) for call in calls[on] if engine.excludes(call.config) is None]
        if None in said:
            return f"runs {said.count(None)} of {len(RULES)} rules, auto takes it for {chosen[on].count(engine.name)}"
        return f"runs none: {said[0] if said else 'no named rule is for it'}"

    rows = [[name, *(of(engine, on) for on in devices)] for name, engine in Engine.registry.items()]
    return ["engine", *(f"{LENGTH} tokens on {on}" for on in devices)], rows


def kernels() -> Table:
    """Kernels for a GPU that were tried on this machine, and which are not used and why. [TRAIN-DOCTOR-D2]"""

    def shown(facts: dict[str, Any]) -> list[str]:
        rule = ", ".join(f"{name}={own}" for name, own in facts.get("rule", {}).items()) or "MemoryConfig()"
        widths = " x ".join(map(str, facts.get("widths", ())))
        return [" ".join([rule, *facts.get("beside", ())]), f"{facts.get('dtype')} {widths}", str(facts.get("card"))]

    rows = [[*shown(facts), reason or "passed its parity test"] for facts, reason in kernel_verdicts()]
    return ["kernel", "values", "card", "verdict"], rows


def warm(rules: Iterable[str], width: int) -> Iterator[tuple[str, float]]:
    """Runs rules forward and backward, so that what they compile is kept on disk: the engine and seconds of each.

    Args:
        rules: named rules; all of them if there are none.
        width: of a head. Kernels for small states are compiled for their width.

    Raises:
        ConfigError: For a name that no rule has.
    """
    names = list(rules) or list(RULES)
    for name in names:
        named_rule(name)
    for name in names:
        start = time.perf_counter()
        config = MemoryConfig.model_validate(name)
        layer = Memory(width, heads=1, config=config)
        y, _ = layer(torch.randn(1, 64, width, generator=torch.Generator().manual_seed(0)))
        y.sum().backward()
        call = Plan.sketch(config, length=64, shape=(width, width))
        yield f"{name}: {choose(call).name}", time.perf_counter() - start
