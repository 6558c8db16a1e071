"""How far a run is and how fast it goes: tokens, speed, time left, memory, and the share of a GPU's peak it uses."""

from __future__ import annotations

import math
import re
import sys
import time
from typing import Any

import torch

from hecate.checks import readable
from hecate.distributed import World
from hecate.train.config import ExperimentConfig
from hecate.train.estimate import sizes_of

PASSES = 6
"""Operations of a training step for each weight that a token meets: a multiplication and an addition, forward once and
backward twice."""
PEAKS = {
    "B200": (2250.0, 80.0), "B100": (1750.0, 60.0), "GH200": (989.0, 67.0), "H200": (989.0, 67.0),
    "H100 PCIe": (756.0, 51.0), "H100 NVL": (835.0, 60.0), "H100": (989.0, 67.0), "H800": (989.0, 67.0),
    "A100": (312.0, 19.5),
    "A800": (312.0, 19.5), "L40S": (362.0, 91.6), "L40": (181.0, 90.5), "L4": (121.0, 30.3), "A40": (149.7, 37.4),
    "A30": (165.0, 10.3), "A10": (125.0, 31.2), "RTX 6000 Ada": (364.0, 91.1), "RTX A6000": (154.8, 38.7),
    "RTX 4090": (165.2, 82.6), "RTX 3090": (71.0, 35.6),
}  # fmt: skip
"""Dense TFLOP/s of GPUs in bfloat16 and in float32 (without TF32) by words of their names, as their makers state."""


def peak_flops(name: str, precision: str) -> float | None:
    """Operations per second that a GPU of this name can do; None where they are not known."""
    if re.search(r"\b(MIG|Laptop|Max-Q)\b", name):  # a part of one, or a slower one
        return None
    found = next((peaks for words, peaks in PEAKS.items() if re.search(rf"\b{words}\b", name)), None)
    return None if found is None else found[precision == "float32"] * 1e12


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has held at once: on a GPU of tensors, else of everything."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


class Progress:
    """Counts of a run, which go on over a resume, and rates of this process. [TRAIN-RUN-D8]

    `elapsed` and `tokens` are those up to now: seconds that it was run, tokens that it was trained on.
    """

    def __init__(self, config: ExperimentConfig, world: World) -> None:
        self._config, self._world = config, world
        self._began = time.monotonic()
        self._before = 0.0
        self.tokens = self.step = 0
        self._done = self._computed = 0  # steps and tokens of this process
        self._seconds = 0.0  # of computing them
        self._mean = 0.0
        self._flops = self._peak()

    def go_on(self, step: int, last: dict[str, Any]) -> None:
        """From a step on, after the last record of it; one of another writer may tell neither time nor tokens."""
        whole = step * self._config.budget.batch_size * self._config.seq_len
        tokens, elapsed = last.get("tokens", math.nan), last.get("elapsed", math.nan)
        self.step, self.tokens = step, int(tokens) if 0 <= tokens < math.inf else whole
        self._before = elapsed if 0 <= elapsed < math.inf else 0.0

    def clock(self) -> dict[str, float]:
        """When it is, in seconds since 1970, and for how many seconds the run has been going on."""
        return {"time": round(time.time(), 3), "elapsed": round(self._before + time.monotonic() - self._began, 3)}

    def take(self, loss: float, tokens: int, seconds: float) -> dict[str, Any]:
        """Notes a step of so many seconds; what its record says of tokens and speed."""
        self.step, self.tokens = self.step + 1, self.tokens + tokens
        self._done, self._computed = self._done + 1, self._computed + tokens
        self._seconds += seconds
        self._mean = 0.95 * self._mean + 0.05 * loss
        speed = tokens / max(seconds, 1e-9)
        facts = {"tokens": self.tokens, "tokens_per_second": speed, "peak_memory": peak_memory(self._world.device)}
        return facts if self._flops is None else {**facts, "mfu": speed * self._flops}

    def line(self, grad_norm: float) -> str:
        """The state of the run in a line: the loss is an average over some 20 steps, the speed one over the run."""
        took = max(time.monotonic() - self._began, 1e-9)
        computing = self._computed / max(self._seconds, 1e-9)
        loss = self._mean / (1 - 0.95**self._done) if self._done else math.nan
        parts = [
            f"loss {loss:.3f}",
            f"{counted(self.tokens)} tokens",
            f"{computing:,.0f} tokens/s ({self._computed / took:,.0f} of the run)",
            f"norm {grad_norm:.2g}",
            readable(peak_memory(self._world.device)),
        ]
        if self._flops is not None:
            parts.append(f"MFU {computing * self._flops:.0%}")
        return "  ".join([*parts, f"ETA {duration(self.left())}"])

    def left(self) -> float:
        """Seconds to the end, evaluations and checkpoints included, if it goes on as it did."""
        budget, took = self._config.budget, time.monotonic() - self._began
        left = (budget.steps - self.step) * took / self._done if self._done else math.inf
        return left if budget.minutes is None else max(min(left, 60 * budget.minutes - took), 0.0)

    def _peak(self) -> float | None:
        """The share of the peak of all processes' GPUs that a token per second takes."""
        device = self._world.device
        if device.type != "cuda":
            return None
        peak = peak_flops(torch.cuda.get_device_name(device), self._config.budget.precision)
        return None if peak is None else PASSES * sizes_of(self._config).work / (peak * self._world.size)


def counted(number: float) -> str:
    """12,345,678 as `12.3M`."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}" if number < 999.5 * size else f"{number / size:.0f}{unit}"
    return f"{number:.0f}"


def duration(seconds: float) -> str:
    """Seconds as `H:MM:SS`, days before it."""
    if not math.isfinite(seconds):
        return "-"
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return (f"{days} d " if days else "") + f"{hour}:{minute:02}:{second:02}"
