"""Progress and speed of a run: tokens, speed, time left, memory, and the share of a GPU's peak it uses."""

from __future__ import annotations

import math
import re
import sys
import time
from typing import Any, NamedTuple

import torch

from hecate.checks import readable
from hecate.distributed import World
from hecate.train.config import ExperimentConfig
from hecate.train.estimate import sizes_of
from hecate.train.evaluate import Score

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


WARMING = 20
"""Steps at the start of a process in which kernels may still be compiled or loaded."""


class _Mark(NamedTuple):
    """Progress of a process: seconds since it began, and steps, tokens and seconds of computing them; duration of the
    latest step."""

    at: float = 0.0
    steps: int = 0
    tokens: int = 0
    computing: float = 0.0
    latest: float = 0.0


class Progress:
    """Counts of a run, which go on over a resume, and rates of this process. [TRAIN-RUN-D8]

    `elapsed` and `tokens` are those up to now: seconds that it was run, tokens that it was trained on. Rates leave out
    the first step, and those after it, of `WARMING` at most, that take more than twice as long as the quickest.
    `metric` is that of the scores, whose unit the loss is shown in.
    """

    def __init__(self, config: ExperimentConfig, world: World, metric: str = "accuracy") -> None:
        self._config, self._world, self._metric = config, world, metric
        self._began = time.monotonic()
        self._before = 0.0
        self.tokens = self.step = 0
        self._now = _Mark()  # of this process
        self._marks: list[_Mark] = []
        self._quickest = math.inf
        self._mean = self._size = 0.0
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

    def take(self, loss: float, tokens: int, seconds: float, bytes_per_label: float = 1.0) -> dict[str, Any]:
        """Notes a step of so many seconds, its loss in nats; what its record says of tokens and speed."""
        self.step, self.tokens = self.step + 1, self.tokens + tokens
        now, took = self._now, time.monotonic() - self._began
        if now.steps:
            self._quickest = min(self._quickest, seconds)
        self._now = _Mark(took, now.steps + 1, now.tokens + tokens, now.computing + seconds, seconds)
        if now.steps < WARMING:
            self._marks.append(self._now)
        self._mean = 0.95 * self._mean + 0.05 * loss
        self._size = 0.95 * self._size + 0.05 * bytes_per_label
        speed = tokens / max(seconds, 1e-9)
        facts = {"tokens": self.tokens, "tokens_per_second": speed, "peak_memory": peak_memory(self._world.device)}
        return facts if self._flops is None else {**facts, "mfu": speed * self._flops}

    def line(self, grad_norm: float) -> str:
        """The state of the run in a line: the loss is an average over some 20 steps, the speed one over the run."""
        start, speed = self._settled(), []
        if start is not None:
            tokens = self._now.tokens - start.tokens
            computing = tokens / max(self._now.computing - start.computing, 1e-9)
            whole = tokens / max(time.monotonic() - self._began - start.at, 1e-9)
            speed = [f"{computing:,.0f} tokens/s ({whole:,.0f} of the run)"]
        parts = [
            self._loss(),
            f"{counted(self.tokens)} tokens",
            *speed,
            f"norm {grad_norm:.2g}",
            readable(peak_memory(self._world.device)),
        ]
        if self._flops is not None and start is not None:
            parts.append(f"MFU {computing * self._flops:.0%}")
        return "  ".join([*parts, f"ETA {duration(self.left())}"])

    def _loss(self) -> str:
        """The mean loss, in the unit of the scores."""
        weight = 1 - 0.95**self._now.steps
        if not weight:
            return "loss -"
        score = Score(self._mean / weight, 0.0, 0, self._size / weight)
        if self._metric == "perplexity":
            return f"perplexity {score.value(self._metric):.3f}"
        bits = self._metric == "bits_per_byte"
        return f"loss {score.value(self._metric):.3f} bits per byte" if bits else f"loss {score.loss:.3f} nats"

    def _settled(self) -> _Mark | None:
        """Where the steps begin that rates are of; None before the first of them."""
        count = len(self._marks)
        warm = next((n for n in range(1, count) if self._marks[n].latest <= 2 * self._quickest), count)
        return self._marks[warm - 1] if 0 < warm < self._now.steps else None

    def left(self) -> float:
        """Seconds to the end, evaluations and checkpoints included, if it goes on as it did."""
        budget, took, start = self._config.budget, time.monotonic() - self._began, self._settled()
        left = math.inf
        if start is not None:
            left = (budget.steps - self.step) * (took - start.at) / (self._now.steps - start.steps)
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
