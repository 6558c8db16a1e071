"""rules: every named rule trained for the same short budget.

Associative recall (MQAR) and bytes of text, through the presets `mqar-RULE` and `quickstart-RULE`
made small. States are of equal size: heads are as wide as brings a rule's state closest to 4 KiB;
multilayer memories are as wide as their keys, and keys of polynomial features are narrow. Chunks
fit the tasks: of 8 tokens where a
rule has longer ones. The layer is the rule's default one, but for a convolution where that has none:
without it a key never meets the value that follows it. Each result is appended to a file of JSON lines
as it comes; what the file already holds is not run again.
"""

from __future__ import annotations

import json
import math
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from hecate.errors import HecateError
from hecate.microscope.style import COLOURS, finish
from hecate.models import LanguageModel, LanguageModelConfig
from hecate.processes import safe_path
from hecate.rule import RULES
from hecate.train import ExperimentConfig, Trainer, load_experiment
from studies.study import Cell, Progress, Result, Study

Record = dict[str, Any]

SETTINGS = {
    "mqar": ("data.num_pairs=8", "data.seq_len=32", "data.vocab_size=48", "budget.batch_size=32"),
    "quickstart": ("model.layers=1", "budget.batch_size=8", "budget.seq_len=64"),
}
SHARED = ("model.d_model=32", "model.heads=2", "optim.lr=1e-2", "optim.warmup=20")
STEPS = {"mqar": 400, "quickstart": 200}
EVALUATION = "budget.eval_batches=16"
CHUNK = 8  # a commit per chunk can be recalled in later chunks alone
STATE_BYTES = 4096
NARROW_KEYS = 5  # C(5 + 2, 2) = 21 polynomial features of degree 2
WIDTHS = range(4, 33)
HEAD = ("rule", "engine", "error", "state bytes", "MQAR accuracy", "bits per byte", "seconds")


class Training(Protocol):
    """One training: a named tuple, by which its record is found again."""

    @property
    def steps(self) -> int:
        """Of the outer optimiser."""

    def experiment(self) -> ExperimentConfig:
        """What is trained."""

    def _asdict(self) -> Record:
        """Its fields."""


class Job(NamedTuple):
    """One rule on one task for some steps."""

    rule: str
    task: str
    steps: int

    def experiment(self) -> ExperimentConfig:
        """The preset made small."""
        return self.of_width(width(self.rule))

    def of_width(self, d_value: int) -> ExperimentConfig:
        """The preset made small, with values and, where they may be, keys of this width."""
        memory = RULES[self.rule].config
        own = [f"budget.steps={self.steps}", EVALUATION, *SHARED, *SETTINGS[self.task]]
        own += [f"model.{name}={size}" for name, size in widths(self.rule, d_value).items()]
        if hasattr(memory.structure, "expansion"):
            own.append("model.memory.structure.expansion=1")
        if memory.layer_conv_kernel == 0:
            own.append("model.conv_kernel=4")
        if memory.chunk > CHUNK:
            own.append(f"model.memory.chunk={CHUNK}")
        return load_experiment(f"{self.task}-{self.rule}", own)


def widths(rule: str, d_value: int) -> dict[str, int]:
    """Of values and, where they may be, of keys."""
    narrow = RULES[rule].config.feature_map.kind == "polynomial"
    return {"d_value": d_value, "d_key": NARROW_KEYS if narrow else d_value}


@cache
def width(rule: str) -> int:
    """The width of heads whose state is closest to `STATE_BYTES`, the smaller of two; states grow with it."""
    config = Job(rule, "mqar", 1).of_width(WIDTHS[0]).model_for_data()
    size = cache(lambda d: _bytes(config.model_copy(update=widths(rule, d))))
    above = bisect_left(WIDTHS, STATE_BYTES, key=size)
    return min(WIDTHS[max(above - 1, 0) : above + 1], key=lambda d: abs(size(d) - STATE_BYTES))


@torch.no_grad()
def _bytes(config: LanguageModelConfig) -> int:
    model = LanguageModel(config, generator=torch.Generator().manual_seed(0))
    _, state = model(torch.zeros(1, 0, dtype=torch.int64))
    return sum(layer.memory.bytes for layer in state)


def train(job: Training) -> Record:
    """Trains and evaluates; what went wrong is a record too."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    record: Record = job._asdict()
    began = time.process_time()
    try:
        config = job.experiment()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            trainer = Trainer(config)
            loss = math.nan
            for _ in range(job.steps):
                loss = trainer.train_step().loss
            record |= {"engine": config.engines()["memory"][0], "state_bytes": _bytes(config.model_for_data())}
            record |= {"loss": loss, "value": trainer.evaluate().value(trainer.source.metric)}
    except HecateError as error:
        record["failed"] = f"{type(error).__name__}: {error}"
    finally:
        torch.set_flush_denormal(False)
    return record | {"seconds": time.process_time() - began}


def reference_errors(rules: Iterable[str]) -> dict[str, float]:
    """Largest relative error of each rule against the numpy transcription of its paper."""
    from tests.rule.distance import errors

    return {rule: max(errors(rule).values()) for rule in rules}


def results(jobs: Sequence[Training], path: Path, workers: int) -> Iterator[Record]:
    """Records of all jobs: first those of the file, then new ones, appended one by one."""
    fields = list(jobs[0]._asdict())
    done = {tuple(item[name] for name in fields): item for item in read(path)}
    keys = [tuple(job._asdict().values()) for job in jobs]
    left = [job for job, key in zip(jobs, keys, strict=True) if key not in done]
    yield from (done[key] for key in keys if key in done)
    if not left:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with safe_path(), ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        futures: list[Future[Record]] = [pool.submit(train, job) for job in left]
        with path.open("a") as file:
            if path.stat().st_size and not path.read_text().endswith("\n"):
                file.write("\n")  # a crash has cut the last line short
            for future in as_completed(futures):
                record = future.result()
                file.write(json.dumps(record) + "\n")
                file.flush()
                yield record


def read(path: Path) -> list[Record]:
    """The records of a file; a last line cut short by a crash is left out."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


class Rules(Study):
    """Which rules learn, beside how exactly each follows its paper?"""

    name: ClassVar[str] = "rules"
    about: ClassVar[str] = "What does each named rule learn in a few hundred steps, at equal state?"
    count: ClassVar[int] = 1
    timed: ClassVar[bool] = True
    workers: ClassVar[int] = 2  # processes of one thread
    path: ClassVar[Path] = Path("runs/rules.jsonl")  # what it already holds is not run again

    def run(self, quick: bool, seeds: Sequence[int], progress: Progress) -> Result:
        """Every rule on both tasks; a quick run takes two rules for a step."""
        rules = ["delta", "titans_linear"] if quick else list(RULES)
        steps = dict.fromkeys(STEPS, 1) if quick else STEPS
        jobs = [Job(rule, task, steps[task]) for task in SETTINGS for rule in rules]
        if quick:
            records = [train(job) for job in progress(jobs, "rules")]
        else:
            found = results(jobs, self.path, self.workers)
            records = [next(found) for _ in progress(jobs, "rules")]
        return report(records, reference_errors(rules), steps)


def report(records: Sequence[Record], errors: dict[str, float], steps: dict[str, int]) -> Result:
    """A row per rule."""
    by = {(record["rule"], record["task"]): record for record in records}
    rows: list[tuple[Cell, ...]] = []
    for rule, error in errors.items():
        of = [by.get((rule, task), {}) for task in SETTINGS]
        some: Record = next((item for item in of if "engine" in item), {})
        seconds = sum(item.get("seconds", 0.0) for item in of)
        values = ("failed" if "failed" in item else item.get("value") for item in of)
        known = (some.get("engine"), f"{error:.0e}", some.get("state_bytes"))
        rows.append((rule, *known, *values, round(seconds)))
    notes = [
        "error: the largest relative error of outputs and states against the numpy transcription of the rule's paper",
        " ".join(SHARED),
        *(f"{task}: {steps[task]} steps; {' '.join(SETTINGS[task])}" for task in SETTINGS),
        *(f"{r['rule']}, {r['task']}: {r['failed']}" for r in records if "failed" in r),
    ]
    return Result(HEAD, rows, notes, partial(draw, rows=rows), size=(9.0, 5.0))


def draw(figure: Any, rows: Sequence[Sequence[Cell]]) -> None:
    """A bar per rule and task."""
    names = [str(row[0]) for row in rows]
    for axes, column in zip(figure.subplots(2, 1, sharex=True), (4, 5), strict=True):
        values = [row[column] if isinstance(row[column], float) else 0.0 for row in rows]
        axes.bar(range(len(rows)), values, color=COLOURS[column - 4])
        finish(axes, "", "", HEAD[column], legend=False)
    axes.set_xticks(range(len(rows)), names, rotation=90, fontsize=8)
