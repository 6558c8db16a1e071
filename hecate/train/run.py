"""A run folder: training with files, display, signals and a report at the end."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import nn

from hecate.data import Source
from hecate.errors import CheckpointError
from hecate.train.checkpoint import (
    best_checkpoint,
    load_checkpoint,
    newest_checkpoint,
    prune_checkpoints,
    save_checkpoint,
)
from hecate.train.compose import dump_experiment, load_experiment
from hecate.train.config import ExperimentConfig
from hecate.train.display import Display
from hecate.train.estimate import check_memory
from hecate.train.evaluate import UNIT, Score
from hecate.train.files import write_file
from hecate.train.metrics import MetricsWriter
from hecate.train.report import write_report
from hecate.train.samples import sample_text
from hecate.train.state import restore_model
from hecate.train.trainer import Trainer

Status = Literal["finished", "interrupted", "out of time"]


class RunResult(NamedTuple):
    """How a run ended; `signal` is the number that interrupted it."""

    status: Status
    step: int
    folder: Path
    metric: str
    score: Score
    baselines: dict[str, float]
    signal: int | None = None


def run_experiment(
    config: ExperimentConfig,
    folder: Path,
    *,
    resume: bool = False,
    display: Display | None = None,
    source: Source | None = None,
    model: nn.Module | None = None,
    mem_limit: int | None = None,
) -> RunResult:
    """Trains, evaluates, saves and reports into `folder`. [TRAIN-RUN-D1]

    The caller's global random state is left as it was: the run has its own, seeded by the config.
    What takes more than `mem_limit` bytes (None: the device's memory) is refused. [TRAIN-EST-D3]
    """
    config = config.validated()
    _check_folder(folder, resume)
    if model is None:
        check_memory(config, mem_limit)
    devices = [torch.cuda.current_device()] if config.budget.device == "cuda" else []
    with torch.random.fork_rng(devices=devices), display or Display() as shown:
        torch.manual_seed(config.seed)
        trainer = Trainer(config, source=source, model=model)
        if resume:
            _restore(trainer, folder, shown)
        _describe(config, folder)
        board = folder / "tensorboard" if config.tensorboard else None
        with MetricsWriter(folder / "metrics.jsonl", board) as metrics, _Signals() as signals:
            return _Run(trainer, folder, shown, metrics, signals).go()


def _check_folder(folder: Path, resume: bool) -> None:
    """Refuses to write over another run, or to resume what is none."""
    exists = (folder / "config.yaml").exists()
    if resume and not exists:
        raise CheckpointError(
            f"{folder} is not a run folder: it has no config.yaml; leave --resume out"
        )
    if exists and not resume:
        raise CheckpointError(
            f"{folder} already holds a run; continue it with --resume or choose another --out"
        )


def _describe(config: ExperimentConfig, folder: Path) -> None:
    """Writes config.yaml and env.json, once a resumed config is found to fit its checkpoint."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / "config.yaml", dump_experiment(config))
        write_file(folder / "env.json", json.dumps(environment(config), indent=1) + "\n")
    except OSError as error:
        raise CheckpointError(
            f"cannot write run folder {folder}: {error}; choose another --out"
        ) from None


def environment(config: ExperimentConfig) -> dict[str, Any]:
    """Versions, platform and threads: what a reader needs to repeat the numbers."""
    return {
        "python": platform.python_version(), "platform": platform.platform(),
        "machine": platform.machine(), "cpus": os.cpu_count(), "threads": torch.get_num_threads(),
        "device": config.budget.device, "versions": versions(), "command": sys.argv,
    }  # fmt: skip


def versions() -> dict[str, str]:
    """Of the packages that numbers depend on."""
    found = {}
    for name in ("hecate", "torch", "numpy", "pydantic", "safetensors", "PyYAML"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed as a package"
    return found


def open_run(folder: Path, which: str = "best") -> tuple[Trainer, int]:
    """The trainer of a run folder with the parameters of its `best` or `newest` checkpoint."""
    if not (folder / "config.yaml").exists():
        raise CheckpointError(f"{folder} is not a run folder: it has no config.yaml")
    config = load_experiment(folder / "config.yaml")
    best = best_checkpoint(folder / "checkpoints") if which == "best" else None
    if best is not None:
        path, checkpoint = best, load_checkpoint(best)
    else:
        found = newest_checkpoint(folder / "checkpoints")
        if found is None:
            raise CheckpointError(f"{folder} has no checkpoint yet; train it first")
        path, checkpoint, _ = found
    trainer = Trainer(config)
    restore_model(trainer.model, checkpoint.tensors, str(path))
    return trainer, int(checkpoint.facts["step"])


def _restore(trainer: Trainer, folder: Path, display: Display) -> None:
    found = newest_checkpoint(folder / "checkpoints")
    if found is None:
        display.say("no checkpoint yet: starting from the beginning")
        return
    path, checkpoint, skipped = found
    for item in skipped:
        display.say(f"skipped {item.path.name}: {item.reason}")
    trainer.restore(checkpoint, str(path))
    display.say(f"resumed from {path} at step {trainer.step}")


class _Run:
    """The loop over steps, and what happens between them."""

    def __init__(
        self,
        trainer: Trainer,
        folder: Path,
        display: Display,
        metrics: MetricsWriter,
        signals: _Signals,
    ) -> None:
        self.trainer, self.folder, self.display = trainer, folder, display
        self.metrics, self.signals = metrics, signals
        self.metric = trainer.source.metric
        self.began = time.monotonic()
        self.scored: tuple[int, Score] | None = None

    def go(self) -> RunResult:
        trainer, budget = self.trainer, self.trainer.config.budget
        self.metrics.write({"event": "resume" if trainer.step else "start", "step": trainer.step})
        self.display.start(trainer.config.name, trainer.step, budget.steps)
        while trainer.step < budget.steps and self._status() == "finished":
            began = time.monotonic()
            result = trainer.train_step()
            speed = result.tokens / max(time.monotonic() - began, 1e-9)
            self.metrics.write({
                "event": "train", "step": trainer.step, "loss": result.loss, "lr": result.lr,
                "grad_norm": result.grad_norm, "tokens_per_second": speed,
            })  # fmt: skip
            self.display.step(trainer.step, f"loss {result.loss:.3f}  {speed:,.0f} tokens/s")
            self._between()
        return self._finish(self._status())

    def _status(self) -> Status:
        minutes = self.trainer.config.budget.minutes
        if self.signals.received is not None:
            return "interrupted"
        if minutes is not None and time.monotonic() - self.began > 60 * minutes:
            return "out of time"
        return "finished"

    def _between(self) -> None:
        trainer, budget = self.trainer, self.trainer.config.budget
        if trainer.step >= budget.steps:
            return  # the end does all of this
        if trainer.step % budget.eval_every == 0:
            self._evaluate()
        if trainer.step % budget.checkpoint_every == 0:
            self._save()
        every = trainer.config.sample.every
        if every and trainer.step % every == 0:
            self._sample()

    def _evaluate(self) -> Score:
        trainer = self.trainer
        if self.scored is None or self.scored[0] != trainer.step:
            score = trainer.evaluate()
            self.scored = (trainer.step, score)
            self.metrics.write({"event": "eval", "step": trainer.step, **score.record(self.metric)})
            seconds = time.monotonic() - self.began
            self.display.say(
                f"step {trainer.step:>6}/{trainer.config.budget.steps}  validation "
                f"{score.value(self.metric):.4f} {UNIT[self.metric]}  [{seconds:.0f} s]"
            )
        return self.scored[1]

    def _save(self) -> None:
        folder = self.folder / "checkpoints"
        fresh = self.scored is not None and self.scored[0] == self.trainer.step
        metrics = self.scored[1].record(self.metric) if fresh and self.scored else {}
        save_checkpoint(folder, self.trainer.step, self.trainer.checkpoint(metrics))
        prune_checkpoints(folder, self.trainer.config.budget.keep)

    def _sample(self) -> None:
        text = sample_text(self.trainer)
        with (self.folder / "samples.txt").open("a", encoding="utf-8") as file:
            file.write(f"--- step {self.trainer.step}\n{text}\n")

    def _finish(self, status: Status) -> RunResult:
        score = self._evaluate()
        self._save()
        self._sample()
        baselines = self.trainer.baselines()
        self.metrics.write({
            "event": "end", "step": self.trainer.step, "status": status,
            "seconds": time.monotonic() - self.began,
        })  # fmt: skip
        result = RunResult(
            status,
            self.trainer.step,
            self.folder,
            self.metric,
            score,
            baselines,
            self.signals.received,
        )
        write_report(self.trainer, self.folder, score, baselines, status)
        return result


class _Signals:
    """Remembers SIGINT and SIGTERM so that the run saves and stops; a second stops at once."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        for known, handler in self._before.items():
            signal.signal(known, handler)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
