"""Training in a run folder: files, display, hooks, signals, and a report at the end."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from hecate.checks import expect_choice
from hecate.data import Source
from hecate.data.shards import TOKENIZER
from hecate.distributed import World
from hecate.errors import CheckpointError, ConfigError, HecateError, printable, shorten
from hecate.files import commit_of, make_folder, refusing, sweep, write_file
from hecate.train.checkpoint import data_of
from hecate.train.compose import dump_experiment, load_experiment
from hecate.train.config import ExperimentConfig
from hecate.train.display import Display, Interrupted, Progress, Signals
from hecate.train.estimate import check_memory, check_opening
from hecate.train.evaluate import Score
from hecate.train.loggers import MetricsWriter, Record, add_sample, check_loggers, open_loggers, rewind_samples, telling
from hecate.train.report import write_report
from hecate.train.sharded import Saver, group_of
from hecate.train.state import allowing, check_allowed, model_state, run_facts
from hecate.train.trained import CHECKPOINTS, CONFIG, METRICS, begin_from, check_entries, chosen_checkpoint, expect_run
from hecate.train.trainer import Trainer


class Hooks:
    """Callbacks of a run, which do nothing unless a subclass overrides them. [TRAIN-HOOK-D1]

        class Shout(Hooks):
            def on_eval(self, trainer, record):
                print(record["step"], record["validation_loss"])

        run_experiment(config, folder, hooks=[Shout()])

    Records are those of metrics.jsonl. With several processes, each calls its hooks; `trainer.world` says which process
    it is. An exception ends the run, which can then be resumed. A hook that changes the trainer changes the run; random
    numbers should come from a generator of its own.
    """

    def on_step(self, trainer: Trainer, record: Mapping[str, Any]) -> None:
        """Called after each step; its record has loss, lr, grad_norm and tokens."""

    def on_eval(self, trainer: Trainer, record: Mapping[str, Any]) -> None:
        """Called after each evaluation; its record has validation_loss."""

    def on_checkpoint(self, trainer: Trainer, path: Path) -> None:
        """Called after a checkpoint is complete on disk; with budget.save=async, before the next one is written."""


Status = Literal["finished", "interrupted", "out of time"]


class RunResult(NamedTuple):
    """Result of a run; `signal` is the number of the signal that interrupted it, if any; then `score` may be None."""

    status: Status
    step: int
    folder: Path
    metric: str
    score: Score | None
    baselines: dict[str, float]
    signal: int | None = None


def run_experiment(
    config: ExperimentConfig,
    folder: Path | str,
    *,
    resume: bool = False,
    display: Display | None = None,
    source: Source | None = None,
    model: nn.Module | None = None,
    mem_limit: int | None = None,
    world: World | None = None,
    hooks: Sequence[Hooks] = (),
    allow: Sequence[str] = (),
) -> RunResult:
    """Trains, evaluates, saves and reports into `folder`. [TRAIN-RUN-D1]

    The caller's global random state is restored afterwards; the run has its own, seeded by the config. An experiment
    that needs more than `mem_limit` bytes (None: the device's memory) is refused. [TRAIN-EST-D3] In a `world` of
    several processes, each calls this with the same arguments; only rank 0 writes and displays. `hooks` are called
    during the run. In a resumed run, the settings named in `allow` may differ from its checkpoint's. [DIST-RUN-D1]"""
    if not isinstance(config, ExperimentConfig):
        cure = "load_experiment makes one of a preset or a file"
        raise ConfigError(f"config must be an ExperimentConfig, got {shorten(config)}; {cure}")
    config, folder, world = config.validated(), Path(folder), world or World.alone(config.budget.device)
    world.agree({"out": str(folder), "resume": resume, "allow": list(allow)})
    check_allowed(allow, config, resume)
    # Before data and model are loaded, which may take minutes: a wrong path is reported at once.
    world.from_main(lambda: check_folder(folder, resume))
    if model is None:
        check_memory(config, mem_limit, world.size)
    here = config.budget.device == "cuda" and torch.cuda.is_available()  # `Trainer` refuses a device that is missing
    devices = [torch.cuda.current_device()] if here else []
    # The caller's random state is as before afterwards.
    with torch.random.fork_rng(devices=devices), ExitStack() as stack:
        shown = stack.enter_context((display or Display()) if world.main else Display(quiet=True))
        torch.manual_seed(config.seed)
        shown.doing(f"loading data ({config.data.kind}) and building the model")
        trainer = Trainer(config, source=source, model=model, world=world)
        if trainer.source.metric != "accuracy":
            trainer.prompt()  # now, as the first sample may come after days of training

        def open_writer() -> None:
            check_loggers(config.asked_loggers())
            with refusing(f"write run folder {folder}", "choose another --out"):
                make_folder(folder)
            writers.append(stack.enter_context(MetricsWriter(folder / METRICS)))
            check_folder(folder, resume)  # again: another process may have trained here since

        def begin() -> None:
            _begin(config, folder)
            for logger in open_loggers(config.asked_loggers(), folder, config.model_dump(mode="json")):
                writers[0].loggers.append(logger)

        writers: list[MetricsWriter] = []
        world.from_main(open_writer)
        signals = stack.enter_context(Signals(interrupts=world.size == 1))
        behind, group = config.budget.save == "async", group_of(world)
        saver = stack.enter_context(Saver(folder / CHECKPOINTS, config.budget.keep, behind=behind, group=group))
        run = _Run(trainer, folder, shown, writers[0] if writers else None, signals, saver, hooks, allow)
        # Files are only written once the checkpoint is known to be of this run: nothing of another run is lost.
        run.restore()
        world.from_main(begin)
        world.remember(str(folder))
        return run.go()


def _begin(config: ExperimentConfig, folder: Path) -> None:
    """Writes config, tokenizer and environment of a run that is new, or whose checkpoint fits."""
    with refusing(f"write run folder {folder}", "choose another --out"):
        for part in (folder, folder / "figures", folder / CHECKPOINTS):
            sweep(part)
        text = getattr(config.data.tokenizer(), "text", None)
        if text is not None:  # so that generation does not need the data
            write_file(folder / TOKENIZER, text)
        write_file(folder / CONFIG, dump_experiment(config))
        write_file(folder / "env.json", json.dumps(environment(config), indent=1) + "\n")


def check_folder(folder: Path, resume: bool) -> None:
    """Refuses to overwrite another run, or to resume a folder that is not a run."""
    if printable(str(folder)) != str(folder):
        raise CheckpointError(f"the name of {folder} is not plain UTF-8, which checkpoints need; choose another --out")
    check_entries(folder)
    if resume:
        expect_run(folder, "`hecate train --out` starts a run there")
    exists = (folder / CONFIG).exists()
    if exists and not resume:
        raise CheckpointError(f"{folder} already holds a run; continue it with --resume or choose another --out")
    metrics = folder / METRICS
    if not exists and ((folder / CHECKPOINTS).exists() or (metrics.is_file() and metrics.stat().st_size)):
        cure = "put that back and --resume, or choose another --out"
        raise CheckpointError(f"{folder} holds checkpoints or metrics of a run that has lost its config.yaml; {cure}")


def open_run(folder: Path | str, which: str = "best") -> tuple[Trainer, int]:
    """The trainer of a run folder with the parameters of its `best` or `newest` checkpoint."""
    expect_choice(which, "checkpoint", ("best", "newest"))
    folder = Path(folder)
    expect_run(folder)  # a whole run: its config has the data to score on
    path, checkpoint = chosen_checkpoint(folder, which)
    config = load_experiment(folder / CONFIG)
    check_opening(config, checkpoint.tensors, str(path), scored=True)
    trainer = Trainer(config)
    trainer.model.load_state_dict(model_state(trainer.model, checkpoint.tensors, str(path)))
    return trainer, run_facts(checkpoint.facts, str(path)).step


def fresh_folder(name: str) -> Path:
    """The first of runs/NAME, runs/NAME-2, ... that does not exist."""
    # An existing folder is never used, whatever it contains.
    names = chain([name], (f"{name}-{number}" for number in count(2)))
    return next(folder for folder in map(Path("runs").joinpath, names) if not folder.exists())


def latest_folder(source: str | None) -> Path:
    """The newest run folder of this experiment in runs/."""
    name = load_experiment(source or "quickstart").name
    named = [path for path in Path("runs").glob(f"{name}*") if re.fullmatch(r"(-\d+)?", path.name.removeprefix(name))]
    folders = [path for path in named if (path / CONFIG).exists()]
    if not folders:
        raise CheckpointError(f"there is no run of {name!r} in runs/ to resume; give its folder: --out")
    return max(folders, key=lambda path: (path / CONFIG).stat().st_mtime_ns)


def environment(config: ExperimentConfig) -> dict[str, Any]:
    """Versions, platform, threads, commit, time and command, for reproducing a run."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit_of(Path.cwd()),
        "python": platform.python_version(), "platform": platform.platform(),
        "machine": platform.machine(), "cpus": os.cpu_count(), "threads": torch.get_num_threads(),
        "device": config.budget.device, "versions": versions(), "command": sys.argv,
    }  # fmt: skip


def versions(packages: Iterable[str] = ("torch", "numpy", "pydantic", "safetensors", "PyYAML")) -> dict[str, str]:
    """Versions of hecate and of packages: by default those that results depend on."""
    installed = {"hecate": sys.modules["hecate"].__version__} | dict.fromkeys(packages, "not installed")
    for name in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return installed | {"torch": str(torch.__version__)}  # with its build, such as +cu130, which the package leaves out


@dataclass
class _Run:
    """The loop over steps, with evaluations, samples and checkpoints in between."""

    trainer: Trainer
    folder: Path
    display: Display
    metrics: MetricsWriter | None  # only in the process that writes the records
    signals: Signals
    saver: Saver
    hooks: Sequence[Hooks] = ()
    allow: Sequence[str] = ()
    began: float = field(default_factory=time.monotonic)
    scored: tuple[int, Score] | None = None
    saved: tuple[int, dict[str, float]] | None = None
    changed: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    unseen: Path | None = None
    fault: HecateError | None = None
    ended: bool = False

    def __post_init__(self) -> None:
        self.progress = Progress(self.trainer.config, self.trainer.world, self.trainer.source.metric)

    def restore(self) -> None:
        """Continues from the newest sound checkpoint, and drops the records and samples written after it."""
        newest = self.saver.newest(self.trainer)
        if newest is not None:
            path, checkpoint, skipped = newest
            for item in skipped:
                self.display.say(f"skipped {item.path.name}: {item.reason}")
            scored = data_of(checkpoint.facts)
            checkpoint, self.changed = allowing(checkpoint, self.trainer, self.allow)
            self.trainer.restore(checkpoint, str(path))
            # A score on other data is none of this run's.
            metrics = checkpoint.facts["metrics"] if scored == data_of(checkpoint.facts) else {}
            self.saved = (self.trainer.step, metrics)
            done = self.trainer.step >= self.trainer.config.budget.steps
            more = ", the last of its budget: --steps N trains on" if done else ""
            self.display.say(f"resumed from {path} at step {self.trainer.step}{more}")
        elif (self.folder / CONFIG).exists():
            self.display.say("no checkpoint yet: starting from the beginning")
        if newest is None and self.trainer.config.init_from is not None:
            for line in begin_from(self.trainer, Path(self.trainer.config.init_from)):
                self.display.say(line)
        step = self.trainer.step if newest else -1

        def rewind() -> Record:
            last = {} if self.metrics is None else self.metrics.rewind(step)
            rewind_samples(self.folder / "samples.txt", step)
            return last

        self.progress.go_on(self.trainer.step, self.trainer.world.from_main(rewind))

    def go(self) -> RunResult:
        trainer, budget = self.trainer, self.trainer.config.budget
        self._tell("resume" if trainer.step else "start")
        if self.changed:
            self._tell("allow", settings=self.changed)
            for name, (there, here) in self.changed.items():
                self.display.say(f"allowed: {name} was {shorten(there)} and is {shorten(here)}")
            self._save(anew=True)  # with the new settings, so that the next resume needs no `allow`
        self.display.start(trainer.config.name, trainer.step, budget.steps)
        try:
            if trainer.step:
                self._follow_up()  # a signal may have cut it short at this step
            while trainer.step < budget.steps and self._status() == "finished":
                began = time.monotonic()
                result = trainer.train_step()
                took = time.monotonic() - began
                speed = self.progress.take(result.loss, result.tokens, took, result.bytes_per_label)
                facts = {"loss": result.loss, "lr": result.lr, "grad_norm": result.grad_norm}
                record = self._tell("train", **facts, **speed)
                self.display.step(trainer.step, partial(self.progress.line, result.grad_norm))
                self._call("on_step", record)
                self._follow_up()
            status: Status = self._status()
            baselines = self._finish(status)
        except Interrupted:  # the state is saved, and reported without another evaluation
            status, baselines = "interrupted", {}
            self._save()
            if not self.ended:
                self._end(status)
                self._report(status, baselines)
        self._meet()
        metric, signal = trainer.source.metric, self.signals.received
        return RunResult(status, trainer.step, self.folder, metric, self._score(), baselines, signal)

    def _tell(self, event: str, **facts: Any) -> Record:
        """Writes a record of an event at the current step, and returns it."""
        record = {"event": event, "step": self.trainer.step, **facts, **self.progress.clock()}
        with self._alone():
            if self.metrics is not None:
                self.metrics.write(record)
        return record

    def _call(self, name: str, argument: Any) -> None:
        """Calls this rank's hooks in turn; an exception in one becomes a `HookError` with its name."""
        with self._alone():
            for hook in self.hooks:
                with telling(f"hook {type(hook).__name__}.{name}"):
                    getattr(hook, name)(self.trainer, argument)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Around work that one rank does alone: with several ranks, an error is raised on all of them at their next
        `_meet`, as the others would wait for this one."""
        try:
            yield
        except HecateError as error:
            if self.trainer.world.size == 1:
                raise
            self.fault = self.fault or error

    def _meet(self) -> None:
        """Raises an error on every rank if something has failed on one. [DIST-RUN-D3]"""
        self.trainer.world.raise_first(self.fault)

    def _status(self) -> Status:
        world, minutes = self.trainer.world, self.trainer.config.budget.minutes
        late = minutes is not None and time.monotonic() - self.began > 60 * minutes
        # One collective per step for all reasons to end, so that every rank ends at the same step.
        flags = self.fault is not None, self.signals.received is not None, late
        faults, signals, lates = world.sum(torch.tensor(flags, dtype=torch.int64)).tolist()
        if faults:
            self._meet()
        if signals:
            raise Interrupted
        return "out of time" if lates else "finished"

    def _follow_up(self) -> None:
        """Evaluates, samples and saves when due. Saving comes last: the checkpoint then has the score of its step."""
        trainer, budget = self.trainer, self.trainer.config.budget
        if trainer.step >= budget.steps:
            return  # `_finish` does all of this
        # After a resume, the checkpoint of this step may have the score already.
        known = self.saved is not None and self.saved[0] == trainer.step and self.saved[1]
        if trainer.step % budget.eval_every == 0 and not known:
            self._evaluate()
        every = trainer.config.sample.every
        if every and trainer.step % every == 0:
            self._sample()
        if trainer.step % budget.checkpoint_every == 0:
            self._save()

    def _evaluate(self) -> None:
        if self._score() is not None:
            return
        self._meet()
        with self.signals.interruptible():
            score = self.trainer.evaluate()
        step, metric, seconds = self.trainer.step, self.trainer.source.metric, time.monotonic() - self.began
        self.scored = (step, score)
        record = self._tell("eval", **score.record(metric), tokens=self.progress.tokens)
        shown = f"{score.value(metric):.4f} {metric.replace('_', ' ')}"
        self.display.say(f"step {step:>6}/{self.trainer.config.budget.steps}  validation {shown}  [{seconds:.0f} s]")
        self._call("on_eval", record)

    def _score(self) -> Score | None:
        """The score at the current step, if the model was evaluated there."""
        return self.scored[1] if self.scored and self.scored[0] == self.trainer.step else None

    def _save(self, *, anew: bool = False) -> None:
        """Writes a checkpoint, unless this step has one; `anew` replaces it, for other settings."""
        score, step = self._score(), self.trainer.step
        record = score.record(self.trainer.source.metric) if score else {}
        # A manifest is strict JSON, which has neither NaN nor infinity.
        metrics = {name: value for name, value in record.items() if math.isfinite(value)}
        if self.saved is not None and self.saved[0] == step and metrics in ({}, self.saved[1]):
            if not anew:
                return
            metrics = self.saved[1]
        with self._alone():
            if self.metrics is not None:
                self.metrics.sync()
        self._await_checkpoint()
        self._meet()
        self.saver.save(step, self.trainer.checkpoint(metrics))
        self.saved = (step, metrics)
        self.unseen = self.folder / CHECKPOINTS / f"step_{step:08d}"
        if self.trainer.config.budget.save == "sync":
            self._await_checkpoint()

    def _await_checkpoint(self) -> None:
        """Waits until the latest checkpoint is written, then calls the hooks with it."""
        self.saver.wait()
        path, self.unseen = self.unseen, None
        if path is not None:
            self._call("on_checkpoint", path)

    def _sample(self) -> None:
        self._meet()
        with self.signals.interruptible():
            text = self.trainer.sample()
        if self.trainer.world.main:
            with self._alone():
                add_sample(self.folder / "samples.txt", self.trainer.step, text)

    def _finish(self, status: Status) -> dict[str, float]:
        """Finishes a run at the end of its budget: evaluates, saves, samples and reports; returns the baselines."""
        self._evaluate()
        self._save()
        self._sample()
        self._meet()
        with self.signals.interruptible():
            baselines: dict[str, float] = self.trainer.world.from_main(self.trainer.baselines)
        self._end(status)
        with self.signals.interruptible():
            self._report(status, baselines)
        return baselines

    def _end(self, status: Status) -> None:
        self._await_checkpoint()
        self.ended = True
        seconds = time.monotonic() - self.began
        self._tell("end", status=status, seconds=seconds)

    def _report(self, status: Status, baselines: dict[str, float]) -> None:
        with self._alone(), refusing(f"write the report of {self.folder}", then="continue with --resume"):
            write_report(self.trainer, self.folder, self._score(), baselines, status)
