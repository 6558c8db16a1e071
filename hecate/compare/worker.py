"""One run of a comparison in a process of its own.

It ends when standard input does: where the process that started it is gone, so is this one, behind a checkpoint.
"""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hecate.compare.cells import RESULT
from hecate.errors import NonFiniteError
from hecate.files import make_folder, write_file
from hecate.processes import import_modules
from hecate.terminal import DEBUG, report
from hecate.train.compose import load_experiment
from hecate.train.config import ExperimentConfig
from hecate.train.display import Display
from hecate.train.evaluate import loss_by_position
from hecate.train.loggers import read_metrics
from hecate.train.report import column
from hecate.train.run import open_run, run_experiment
from hecate.train.trainer import Trainer

PILOT, POINTS = 4, 32
"""Steps that a speed is measured in, after a first one; places of a curve, at most."""


def run(config: ExperimentConfig, folder: Path, *, positions: int) -> int:
    """Trains from where it stands, and writes what it came to; the exit status of the process."""
    make_folder(folder)
    try:
        found = run_experiment(config, folder, resume=(folder / "config.yaml").exists(), display=Display(quiet=True))
    except NonFiniteError as error:  # a result, too: this rate is no good here
        write_file(folder / RESULT, json.dumps({"status": "diverged", "reason": str(error)}) + "\n")
        return 0
    if found.signal is not None or found.score is None:
        return 128 + (found.signal or 0)
    records = read_metrics(folder / "metrics.jsonl")
    speeds = column(records, "train", "tokens_per_second")
    facts: dict[str, Any] = {
        "status": "finished", "loss": found.score.loss, found.metric: found.score.value(found.metric),
        "metric": found.metric, "tokens_per_second": statistics.median(speeds or [math.nan]),
        "seconds": max((record.get("elapsed", 0.0) for record in records), default=0.0), "curve": curve(records),
    }  # fmt: skip
    if positions:
        trainer, _ = open_run(folder, "newest")
        budget, length = config.budget, positions * config.seq_len
        batches = trainer.source.validation_batches(budget.batch_size, length, budget.eval_batches)
        try:
            spans = loss_by_position(trainer.model.to(trainer.device), batches, trainer.device)
            facts["positions"] = [list(span) for span in spans]
        except NonFiniteError as error:  # what it came to within the length of training stands
            facts |= {"positions": None, "positions_reason": str(error)}
    write_file(folder / RESULT, json.dumps(facts, indent=1) + "\n")
    return 0


def curve(records: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """Tokens read and the mean training loss since the place before, at places that are evenly spread in log tokens.
    [COMPARE-CURVE-D1]"""
    # Steps that a resumed run took again stand there twice.
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
    """Writes how many steps a second this experiment takes: the median of a few, after one to warm up."""
    make_folder(folder)
    trainer, took = Trainer(config), []
    for _ in range(PILOT + 1):
        began = time.perf_counter()
        trainer.train_step()
        took.append(time.perf_counter() - began)
    write_file(folder / RESULT, json.dumps({"steps_per_second": 1 / statistics.median(took[1:])}) + "\n")
    return 0


def main() -> None:
    """The process: a JSON object of its orders is its only argument."""
    given = json.loads(sys.argv[1])
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        import_modules(given["imports"])
        config, folder = load_experiment(given["config"]), Path(given["folder"])
        torch.set_num_threads(config.budget.threads or given["threads"])
        if given["measure"]:
            status = measure(config, folder)
        else:
            status = run(config, folder, positions=given["positions"])
    except SystemExit:
        raise
    except BaseException as error:  # libraries in Rust panic with what is no Exception
        if os.environ.get(DEBUG):
            raise
        status = report(error)
    raise SystemExit(status)


def _end_with_parent() -> None:
    os.read(0, 1)  # without Python's own lock, which would be missed as the process ends
    os.kill(os.getpid(), signal.SIGTERM)
