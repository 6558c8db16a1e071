"""Running a comparison in a folder: every run has its own process; finished runs are kept, others are continued."""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hecate.checks import expect_number
from hecate.compare.cells import PASSES, RESULT, Budget, Cell, check_once, seeds_of
from hecate.compare.statistics import Pair, pairs
from hecate.errors import CheckpointError, ConfigError, NonFiniteError, shorten
from hecate.files import lock, make_folder, read_whole, refusing, write_file
from hecate.processes import import_modules, interpreter
from hecate.terminal import DEBUG, report
from hecate.train.compose import dump_experiment, load_experiment
from hecate.train.config import ExperimentConfig
from hecate.train.display import Display, Interrupted, Signals, duration
from hecate.train.estimate import flops_of, sizes_of
from hecate.train.evaluate import loss_by_position
from hecate.train.loggers import read_metrics
from hecate.train.report import column
from hecate.train.run import open_run, run_experiment
from hecate.train.trainer import Trainer
from hecate.variant import read_json

POLL, PATIENCE = 0.05, 60.0
"""Seconds between polls of the processes; seconds to wait for another comparison in the same folder."""
PILOTED = 1 << 20
"""Nominal steps of a run whose speed is measured in the first few: more than any period of parameters."""
RECORDS = "results.jsonl"
"""File with the results of finished runs, in the folder of the comparison."""
Row = dict[str, Any]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Comparison:
    """Result of a comparison: a row for each reported run, rows of tuning runs, verdicts on pairs, and notes."""

    cells: Sequence[Cell]
    rows: Sequence[Row]
    tuning: Sequence[Row]
    pairs: Sequence[Pair]
    notes: Sequence[str]

    def of(self, label: str) -> list[Row]:
        """The runs of a cell, by seed."""
        return [row for row in self.rows if row["cell"] == label]


class _Job(NamedTuple):
    cell: Cell
    config: ExperimentConfig
    folder: Path
    positions: int = 0
    measure: bool = False

    @property
    def name(self) -> str:
        return f"{self.cell.label}, {'speed' if self.measure else self.folder.name}"


@dataclass
class _Work:
    """The folder of a comparison, the options for its runs, and those in progress."""

    out: Path
    jobs: int
    imports: Sequence[str]
    until: float | None
    signals: Signals
    say: Say
    lock: int
    known: dict[str, Row] = field(default_factory=dict)
    data: dict[str, tuple[str, str]] = field(default_factory=dict)
    running: dict[subprocess.Popen[bytes], _Job] = field(default_factory=dict)

    def results(self, jobs: Sequence[_Job], at_once: int) -> list[Row]:
        """The results of all jobs, after running those without one; an error ends all of them."""
        self._read_records()
        for job in jobs:
            self._prepare(job)
        waiting = deque(job for job in jobs if not self._done(job))
        for job in jobs:
            self._check_data(job, self._read_result(job).get("data_sha256"))
        unseen = set(self.data)  # of runs that are done: each is looked at once, as it is now
        for job in waiting:
            if (asked := job.config.data.model_dump_json()) in unseen:
                unseen.remove(asked)
                self._check_data(job, job.config.data.load().fingerprint)
        began, missing, done = time.monotonic(), len(waiting), 0
        try:
            while waiting or self.running:
                if self.signals.received is not None or (self.until is not None and time.monotonic() > self.until):
                    raise Interrupted
                while waiting and len(self.running) < at_once:
                    self._start(waiting.popleft())
                for process in [process for process in self.running if process.poll() is not None]:
                    job = self.running.pop(process)
                    self._finish(process, job)
                    self._keep(job)
                    self._check_data(job, self._read_result(job).get("data_sha256"))
                    done += 1
                    eta = duration((time.monotonic() - began) * (missing - done) / done)
                    self.say(f"[{done + len(jobs) - missing}/{len(jobs)}] {job.name}: {self._summary(job)}; ETA {eta}")
                time.sleep(POLL)
        finally:
            self._end()
        return [self._read_result(job) for job in jobs]

    def _read_records(self) -> None:
        """Reads the results of finished runs from earlier calls, one per line."""
        path = self.out / RECORDS
        if not path.is_file():
            return
        with stored(path, "delete it, and runs without folders are run anew"):
            for line in read_whole(path).decode().splitlines():
                record = read_json(line)
                self.known[record["run"]] = {**record, "result": _check_result(record["result"])}

    def _prepare(self, job: _Job) -> None:
        """Writes the config of a run beside its folder; refuses if there is another config, of another comparison.
        [COMPARE-RESUME-D1]"""
        path, text = job.folder.with_name(f"{job.folder.name}.yaml"), dump_experiment(job.config)
        with refusing(f"write {path}", "choose another --out"):
            same = self.known.get(self._key(job), {}).get("config", _digest(text)) == _digest(text)
            make_folder(path.parent)
            if same and not path.exists():
                write_file(path, text)
            elif not same or path.read_text(encoding="utf-8") != text:
                raise ConfigError(f"{path} is of another config than cell {job.cell.label!r}; choose another --out")

    def _key(self, job: _Job) -> str:
        return str(job.folder.relative_to(self.out))

    def _done(self, job: _Job) -> bool:
        row = self._read_result(job)
        whole = job.measure or not job.positions or "positions" in row or row.get("status") == "diverged"
        return bool(row) and whole

    def _read_result(self, job: _Job) -> Row:
        """Result of a run, from its folder or the records; empty if it is not finished."""
        path = job.folder / RESULT
        if not path.is_file():
            return dict(self.known.get(self._key(job), {}).get("result", {}))
        with stored(path, "delete it and its run is finished anew"):
            return _check_result(read_json(read_whole(path)))

    def _check_data(self, job: _Job, found: str | None) -> None:
        """Refuses a run on other data, by their hash, than one before it with the same settings."""
        if found is None:  # of an older result
            return
        before, name = self.data.setdefault(job.config.data.model_dump_json(), (found, job.name))
        if found != before:
            raise ConfigError(
                f"the data changed between the runs of cells {name} and {job.name}, so that their losses are not of "
                "the same tokens; choose another --out"
            )

    def _keep(self, job: _Job) -> None:
        """Adds the result of a run to the records, which suffice to continue without the folders of finished runs."""
        text = dump_experiment(job.config)
        self.known[self._key(job)] = {"run": self._key(job), "config": _digest(text), "result": self._read_result(job)}
        lines = [json.dumps(record) for _, record in sorted(self.known.items())]
        with refusing(f"write {self.out / RECORDS}", then="call the same line again"):
            write_file(self.out / RECORDS, "\n".join(lines) + "\n")

    def _summary(self, job: _Job) -> str:
        row = self._read_result(job)
        if job.measure:
            return f"{row['steps_per_second']:.3g} steps/s"
        return "diverged" if row["status"] == "diverged" else f"loss {row['loss']:.4f} in {row['seconds']:.0f} s"

    def _start(self, job: _Job) -> None:
        orders = {
            "config": str(job.folder.with_name(f"{job.folder.name}.yaml")), "folder": str(job.folder),
            "positions": job.positions, "measure": job.measure, "imports": list(self.imports),
            "threads": max(1, (os.cpu_count() or 1) // self.jobs),
        }  # fmt: skip
        command = interpreter("from hecate.compare.run import main; main()", json.dumps(orders))
        self._errors(job).unlink(missing_ok=True)  # an existing one might be a link
        with (
            refusing(f"start the run of cell {job.name}", "give fewer --jobs", then="call the same line again"),
            self._errors(job).open("xb") as errors,
        ):  # a new session, so that signals reach this process only: a second one would lose the run's work
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=errors, stderr=errors, start_new_session=True,
                pass_fds=(self.lock,),
            )  # fmt: skip
        self.running[process] = job

    def _errors(self, job: _Job) -> Path:
        return job.folder.with_name(f"{job.folder.name}.log")

    def _finish(self, process: subprocess.Popen[bytes], job: _Job) -> None:
        if process.stdin is not None:
            process.stdin.close()
        if process.returncode or not (job.folder / RESULT).is_file():
            said = self._errors(job).read_text(encoding="utf-8", errors="replace").strip().splitlines() or [
                "it was killed, as by a system out of memory: give fewer --jobs"
                if process.returncode == -signal.SIGKILL
                else f"exit status {process.returncode}"
            ]
            raise CheckpointError(
                f"the run of cell {job.name} failed: {said[-1].removeprefix('error: ')}; its log: {self._errors(job)}"
            )

    def _end(self) -> None:
        """Tells running processes to save a checkpoint and end, by closing their input, and waits for them."""
        for process in self.running:
            if process.stdin is not None:
                process.stdin.close()
        for process in self.running:
            process.wait()
        self.running.clear()


def _check_result(record: Any) -> Row:
    """The result of a run, validated. Raises ValueError, KeyError or TypeError."""
    measured = "steps_per_second" in record
    for name in ["steps_per_second"] if measured else [] if record["status"] == "diverged" else ["loss", "seconds"]:
        if type(record[name]) not in (int, float):
            raise ValueError(f"{name} is no number: {shorten(record[name])}")
    return dict(record)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def compare(
    cells: Sequence[Cell],
    out: Path,
    *,
    budget: Budget = Budget(),  # noqa: B008 - frozen
    seeds: int = 3,
    lrs: Sequence[float] = (),
    tuning: int = 1,
    part: float = 1.0,
    keep: int | None = None,
    jobs: int = 1,
    positions: int = 0,
    minutes: float | None = None,
    imports: Sequence[str] = (),
    say: Say = print,
) -> Comparison:
    """Runs all cells that are not finished yet, and compares them. [COMPARE-RESUME-D1]

    Args:
        cells: cells from `cells_of`.
        out: folder of the runs; the same call continues there, and more seeds or cells can be added.
        budget: budget of each run.
        seeds: number of reported seeds, from 0, the same for every cell.
        lrs: learning rates; each cell takes the one with the lowest mean loss over `tuning` other seeds.
        part: share of a run's steps in the runs that rates are chosen by.
        keep: number of reported cells. All are trained on the tuning seeds with a part of the steps, the better half
            with twice as many, and so on; None reports all cells. [COMPARE-HALVE-D1]
        jobs: number of processes at once.
        positions: if not 0, also report the loss by position, in sequences of this multiple of the training length.
        minutes: time after which to stop, with everything kept.
        imports: modules that every process imports first.
        say: function that gets a line for every finished run.

    Raises:
        Interrupted: a signal arrived, or the minutes are over; unfinished runs have a checkpoint.
    """
    expect_number(positions, "--positions", 0, 1024)
    if keep is not None:
        expect_number(keep, "--keep", 1, len(cells) - 1)
        if part != 1:
            raise ConfigError("--keep says what part of the steps rates are chosen with; leave --tuning-part out")
    reported, other = seeds_of(seeds, tuning)
    _check_cells(cells, budget, lrs, part, jobs)
    until = None if minutes is None else time.monotonic() + 60 * minutes
    with locked(out) as lock, Signals() as signals:
        work = _Work(out, jobs, imports, until, signals, say, lock)
        steps = _steps(work, cells, budget)
        notes: list[str] = []
        rounds: list[Row] = []
        if keep is not None:
            cells, rounds, notes = _halve(work, cells, keep, steps, lrs, other)
        rates, tuned, caveats = _rates(work, cells, _shorter(steps, part), lrs, other)
        rows, changed = _report_rows(work, cells, reported, steps, rates, tuned if part < 1 else [], positions)
        notes += caveats + changed
    if jobs > 1:
        notes.append(f"tokens/s and seconds are those of {jobs} processes side by side")
    losses = {cell.label: [row["loss"] for row in rows if row["cell"] == cell.label] for cell in cells}
    return Comparison(cells, rows, rounds + tuned, pairs(losses), notes)


def _check_cells(cells: Sequence[Cell], budget: Budget, lrs: Sequence[float], part: float, jobs: int) -> None:
    """Refuses cells that do not fit the budget or the number of processes, and a part of the steps that is no share or
    has no effect because there are no rates to choose from, before anything is run."""
    expect_number(part, "--tuning-part", 0.001, 1)
    if part != 1 and len(lrs) < 2:
        raise ConfigError("--tuning-part is of runs that choose between rates; give several --lr, or leave it out")
    expect_number(jobs, "--jobs", 1, 1024)
    check_once(cells, budget, lrs)
    if budget == Budget() and len({cell.config.budget.steps for cell in cells}) > 1:
        raise ConfigError("the cells have different budget.steps; give one budget to all, such as --steps 1000")
    if any(cell.config.budget.device == "cuda" for cell in cells) and jobs > 1:
        raise ConfigError(f"--jobs {jobs} processes would share one GPU under budget.device=cuda; give --jobs 1")
    for cell in cells:
        # Seconds become steps only after speeds are measured; rates can be checked before.
        steps = PILOTED if budget.seconds is not None else budget.steps_of(cell)
        for lr in [*lrs] or [cell.config.optim.lr]:
            cell.at(0, steps, lr)


def speeds(work: _Work, cells: Sequence[Cell]) -> dict[str, float]:
    """Steps per second of every cell, measured one after the other, and stored."""
    jobs = [_Job(cell, cell.at(0, PILOTED), work.out / "speeds" / cell.folder, measure=True) for cell in cells]
    rows = work.results(jobs, 1)
    return {cell.label: row["steps_per_second"] for cell, row in zip(cells, rows, strict=True)}


def plan(
    cells: Sequence[Cell], out: Path, *, budget: Budget, seeds: int, lrs: Sequence[float] = (), tuning: int = 1,
    part: float = 1.0, keep: int | None = None, jobs: int = 1, imports: Sequence[str] = (), say: Say = print,
) -> list[tuple[str, int, int, float]]:  # fmt: skip
    """For each cell its name, number of runs, steps per run, and hours of training all runs one after the other.
    [COMPARE-PLAN-D1]

    A few steps of each cell are measured, and their speed is stored in the folder. Evaluation is not included.
    """
    if keep is not None:
        raise ConfigError("--plan cannot tell which cells --keep will leave; leave --keep out: the hours bound it")
    reported, other = seeds_of(seeds, tuning)
    _check_cells(cells, budget, lrs, part, jobs)
    trials = len(lrs) * len(other) if len(lrs) > 1 else 0
    with locked(out) as lock, Signals() as signals:
        paces = speeds(_Work(out, jobs, imports, None, signals, say, lock), cells)
    steps = {cell.label: budget.steps_of(cell, paces[cell.label]) for cell in cells}
    shorter = _shorter(steps, part)

    def hours(cell: str) -> float:
        return (len(reported) * steps[cell] + trials * shorter[cell]) / paces[cell] / 3600

    return [(cell.label, len(reported) + trials, steps[cell.label], hours(cell.label)) for cell in cells]


def _steps(work: _Work, cells: Sequence[Cell], budget: Budget) -> dict[str, int]:
    known = speeds(work, cells) if budget.seconds is not None else {}
    return {cell.label: budget.steps_of(cell, known.get(cell.label)) for cell in cells}


def _shorter(steps: dict[str, int], part: float) -> dict[str, int]:
    return {name: max(1, round(part * number)) for name, number in steps.items()}


def _halve(
    work: _Work, cells: Sequence[Cell], keep: int, steps: dict[str, int], lrs: Sequence[float], seeds: Sequence[int]
) -> tuple[list[Cell], list[Row], list[str]]:
    """The cells that remain after successive halving, each round with twice the steps of the one before; rows of all of
    its runs, and notes on the cells left out.

    Source: Jamieson & Talwalkar, 2016, arXiv 1502.07943. [COMPARE-HALVE-D1]
    """
    cells, tuned, notes = list(cells), list[Row](), list[str]()
    rounds = math.ceil(math.log2(len(cells) / keep))
    for number in range(rounds, 0, -1):
        shorter = _shorter(steps, 2.0**-number)
        arms = [(cell, seed, lr) for cell in cells for lr in [*lrs] or [cell.config.optim.lr] for seed in seeds]
        rows = _rows(work, arms, shorter)
        tuned += rows
        best = {cell.label: min(_means(rows, cell).values()) for cell in cells}
        ranked = sorted(cells, key=lambda cell: best[cell.label])
        chosen = {cell.label for cell in ranked[: max(keep, math.ceil(len(cells) / 2))]}
        left = [cell.label for cell in ranked if cell.label not in chosen]
        notes += [f"{name}: left out after {shorter[name]:,} steps, loss {best[name]:.4f}" for name in left]
        cells = [cell for cell in cells if cell.label in chosen]
    return cells, tuned, notes


def _means(rows: Sequence[Row], cell: Cell) -> dict[float, float]:
    """The mean loss of a cell at each of its rates, in order of the rates."""
    rows = [row for row in rows if row["cell"] == cell.label]
    rates = sorted({row["lr"] for row in rows})
    return {lr: statistics.fmean(row["loss"] for row in rows if row["lr"] == lr) for lr in rates}


def _rates(
    work: _Work, cells: Sequence[Cell], steps: dict[str, int], lrs: Sequence[float], seeds: Sequence[int]
) -> tuple[dict[str, float], list[Row], list[str]]:
    """The rate of each cell, the runs by which it was chosen, and notes on the choice. [COMPARE-LR-D1]"""
    if len(lrs) < 2:
        return {cell.label: lr for cell in cells for lr in lrs}, [], []
    rows = _rows(work, [(cell, seed, lr) for cell in cells for lr in sorted(lrs) for seed in seeds], steps)
    rates, notes = dict[str, float](), list[str]()
    for cell in cells:
        means = _means(rows, cell)
        rates[cell.label] = best = min(means, key=means.__getitem__)
        if means[best] == float("inf"):
            raise ConfigError(f"cell {cell.label!r} diverged at every --lr; give lower ones")
        if best in (min(lrs), max(lrs)):
            notes.append(f"{cell.label}: the best rate, {best:g}, is at the end of the grid; a wider one may do better")
    return rates, rows, notes


def _report_rows(
    work: _Work, cells: Sequence[Cell], seeds: Sequence[int], steps: dict[str, int], rates: dict[str, float],
    tuned: Sequence[Row], positions: int,
) -> tuple[list[Row], list[str]]:  # fmt: skip
    """The runs that are compared, and notes on cells whose rate was lowered because they diverged; rates are adjusted
    seed by seed."""
    rows, notes = list[Row](), list[str]()
    for count in range(1, len(seeds) + 1):
        lower: dict[str, float] | None = None
        while lower is None or lower:
            wanted = [(cell, seed, rates.get(cell.label)) for seed in seeds[:count] for cell in cells]
            rows = _rows(work, wanted, steps, positions)
            lower = _lower(rows, rates, tuned)
            notes += [f"{name}: diverged at {rates[name]:g}, and is taken at {lr:g}" for name, lr in lower.items()]
            rates = {**rates, **lower}
    return rows, notes


def _lower(rows: Sequence[Row], rates: dict[str, float], tuned: Sequence[Row]) -> dict[str, float]:
    """For cells that diverged, the best of the lower rates that did not diverge in the shorter runs `tuned`.
    [COMPARE-LR-D1]"""
    best = {}
    for name in {row["cell"] for row in rows if math.isinf(row["loss"])} & set(rates):
        lower = [row for row in tuned if row["cell"] == name and row["lr"] < rates[name] and math.isfinite(row["loss"])]
        if lower:
            best[name] = float(min(lower, key=lambda row: row["loss"])["lr"])
    return best


def _rows(
    work: _Work, wanted: Sequence[tuple[Cell, int, float | None]], steps: dict[str, int], positions: int = 0
) -> list[Row]:  # fmt: skip
    """A row for every run: its settings, costs and results; the loss of a run that diverged is inf."""
    jobs = []
    for cell, seed, lr in wanted:
        config = cell.at(seed, steps[cell.label], lr)
        name = f"steps-{config.budget.steps}-lr-{config.optim.lr:g}-seed-{seed}"
        jobs.append(_Job(cell, config, work.out / "runs" / cell.folder / name, positions))
    sizes = {cell.label: sizes_of(cell.config) for cell, _, _ in wanted}
    rows = []
    for job, outcome in zip(jobs, work.results(jobs, work.jobs), strict=True):
        config, size = job.config, sizes[job.cell.label]
        tokens = config.budget.steps * config.budget.batch_size * config.seq_len
        about = {
            "cell": job.cell.label, "seed": config.seed, "lr": config.optim.lr, "steps": config.budget.steps,
            "tokens": tokens, "parameters": size.parameters, "state_bytes": size.state,
            "flops": PASSES * flops_of(job.cell.config) * tokens, "folder": str(job.folder),
        }  # fmt: skip
        rows.append({**about, "loss": float("inf"), **outcome})
    return rows


@contextmanager
def stored(path: Path, remedy: str) -> Iterator[None]:
    """Turns whatever is wrong with a file of results into a `CheckpointError`."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; {remedy}") from None


@contextmanager
def locked(out: Path) -> Iterator[int]:
    """Lock for one comparison at a time in a folder; its processes inherit the lock, and hold it until they have
    ended."""
    with refusing(f"write {out}", "choose another --out"):
        make_folder(out)
        handle = os.open(out / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        until = time.monotonic() + PATIENCE
        while True:
            try:
                lock(handle, out)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise CheckpointError(f"another comparison runs in {out}; wait for it, or choose another") from None
                time.sleep(POLL)
        yield handle
    finally:
        os.close(handle)


# A single run, in its own process.

PILOT, POINTS = 4, 32
"""Number of steps in which a speed is measured, after a first one; largest number of points of a curve."""


def run(config: ExperimentConfig, folder: Path, *, positions: int) -> int:
    """Trains, continuing an unfinished run, and writes the result; returns the exit status of the process."""
    make_folder(folder)
    source, resume = config.data.load(), (folder / "config.yaml").exists()
    try:
        outcome = run_experiment(config, folder, resume=resume, source=source, display=Display(quiet=True))
        if outcome.signal is not None or outcome.score is None:
            return 128 + (outcome.signal or 0)
        if not math.isfinite(outcome.score.loss):  # the last steps broke the model, and none came to notice
            raise NonFiniteError(f"the validation loss is {outcome.score.loss}")
    except NonFiniteError as error:  # divergence is a result, too
        lost = {"status": "diverged", "reason": str(error), "data_sha256": source.fingerprint}
        write_file(folder / RESULT, json.dumps(lost) + "\n")
        return 0
    records = read_metrics(folder / "metrics.jsonl")
    speeds = column(records, "train", "tokens_per_second")
    facts: dict[str, Any] = {
        "status": "finished", "loss": outcome.score.loss, outcome.metric: outcome.score.value(outcome.metric),
        "metric": outcome.metric, "tokens_per_second": statistics.median(speeds or [math.nan]),
        "seconds": max((record.get("elapsed", 0.0) for record in records), default=0.0), "curve": curve(records),
        "data_sha256": source.fingerprint,
    }  # fmt: skip
    if positions:
        trainer, _ = open_run(folder, "newest")
        budget, length = config.budget, positions * config.seq_len
        batches = trainer.source.validation_batches(budget.batch_size, length, budget.eval_batches)
        try:
            spans = loss_by_position(trainer.model.to(trainer.device), batches, trainer.device)
            facts["positions"] = [list(span) for span in spans]
        except NonFiniteError as error:  # the result at the training length stays valid
            facts |= {"positions": None, "positions_reason": str(error)}
    write_file(folder / RESULT, json.dumps(facts, indent=1) + "\n")
    return 0


def curve(records: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """Points (tokens read, mean training loss since the previous point), evenly spaced in log tokens.
    [COMPARE-CURVE-D1]"""
    # A resumed run may have recorded some steps twice.
    whole = [record for record in records if record["event"] == "train" and {"tokens", "loss"} <= record.keys()]
    steps = {record["tokens"]: record["loss"] for record in whole if 0 < record["tokens"] < math.inf}
    if not steps:
        return []
    first, last = min(steps), max(steps)
    parts: dict[int, list[tuple[int, float]]] = {}
    for tokens, loss in sorted(steps.items()):
        place = math.ceil((POINTS - 1) * (math.log(tokens / first) / math.log(last / first))) if last > first else 0
        parts.setdefault(place, []).append((tokens, loss))
    return [(part[-1][0], statistics.fmean(loss for _, loss in part)) for part in parts.values()]


def measure(config: ExperimentConfig, folder: Path) -> int:
    """Writes the steps per second of an experiment: the median of a few, after one to warm up."""
    make_folder(folder)
    trainer, took = Trainer(config), []
    for _ in range(PILOT + 1):
        began = time.perf_counter()
        trainer.train_step()
        took.append(time.perf_counter() - began)
    write_file(folder / RESULT, json.dumps({"steps_per_second": 1 / statistics.median(took[1:])}) + "\n")
    return 0


def main() -> None:
    """Entry point of a run's process, whose only argument is a JSON object with its options.

    It ends, after a checkpoint, when standard input is closed, so that it does not outlive the process that started it.
    """
    orders = json.loads(sys.argv[1])
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        import_modules(orders["imports"])
        config, folder = load_experiment(orders["config"]), Path(orders["folder"])
        torch.set_num_threads(config.budget.threads or orders["threads"])
        if orders["measure"]:
            status = measure(config, folder)
        else:
            status = run(config, folder, positions=orders["positions"])
    except SystemExit:
        raise
    except BaseException as error:  # panics of Rust libraries are not Exceptions
        if os.environ.get(DEBUG):
            raise
        status = report(error)
    raise SystemExit(status)


def _end_with_parent() -> None:
    os.read(0, 1)  # not sys.stdin, whose lock would disturb the end of the process
    os.kill(os.getpid(), signal.SIGTERM)
