"""Do many processes train what one does, whatever is killed, and at what speed? All on this machine, over gloo."""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hecate.train import load_experiment
from hecate.train.estimate import sizes_of
from hecate.train.trainer import Trainer
from studies.study import Cell, Progress, Result, Spread, Study

MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "data 2": (2, {"data": 2}),
    "replicate 2": (2, {"data": 1, "replicate": 2}),
    "context 2": (2, {"data": 1, "context": 2}),
    "data 3": (3, {"data": 3}),
    "data 4": (4, {"data": 4}),
    "replicate 2 x data 2": (4, {"data": 2, "replicate": 2}),
    "context 4": (4, {"data": 1, "context": 4}),
    "data 2 x context 2": (4, {"data": 2, "context": 2}),
    "replicate 2 x context 2": (4, {"data": 1, "replicate": 2, "context": 2}),
}
QUICK = ("data 2", "context 2")
MODELS = ("delta", "titans", "mlp", "levels")
LENGTHS = (8, 16, 64, 256)
RULES: dict[str, dict[str, str]] = {"dot": {"bias": "dot"}, "l2": {}, "momentum": {"algorithm": "momentum"}}
WORLDS = [1, 2, 4, 3, 1]
KILLS, STEPS = 10, 120  # for each way of saving
WITHIN = {"float64": 1e-12, "float32": 1e-6}
OF_LEVELS = 1e-10  # the norm behind a level that nothing is written to multiplies rounding by 1e3 per block
SPEED = 0.85
LEAST = 1e-17  # what is shown of no difference at all
Row = tuple[str, int, Cell, str]


class Scaling(Study):
    """Parity, resharding, kills, bytes, sizes and speed of many processes beside one."""

    name = "scaling"
    about = "Do many processes train what one does, whatever is killed, and at what speed?"
    count = 2
    timed = True

    def run(self, quick: bool, seeds: Sequence[int], progress: Progress) -> Result:
        """Worlds of up to four processes of this machine."""
        names = [name for name in MESHES if not quick or name in QUICK]
        far = {name: [parity(name, seed, quick) for seed in seeds] for name in progress(names, "meshes")}
        rows = [row for name, found in far.items() for row in _parity_rows(name, found)]
        sent = bytes_sent()
        rows += [
            (f"bytes that a rank sends at a border, {rule}, at {_listed(LENGTHS)} tokens", 2, _listed(found), "equal")
            for rule, found in sent.items()
        ]
        if not quick:
            rows += [resharded(), *killed(), estimated(), weak()]
        columns = ("what", "processes", "measured", "wanted")
        notes = [
            "parity: -log10 of the largest difference of any parameter from one process, after "
            f"{3 if quick else 20} steps of SGD, of {', '.join(MODELS[:1] if quick else MODELS)}; "
            "levels stand by themselves, whose norms multiply rounding",
            "kills: SIGKILL of any of two processes under torchrun at random moments; the run is to end with the "
            "losses of every step, and all tensors of its last checkpoint, equal to the bit to those of a run that "
            "nobody disturbed",
            "speed: steps of one process with 12 rows over those of two with 24, on this machine's cores; they mean "
            "something only where nothing else runs",
            "nothing of this is published elsewhere for these models",
        ]
        numbers: list[Sequence[Cell]] = list(rows)

        def draw(figure: Any) -> None:
            errors, lengths = figure.subplots(1, 2)
            for model in far[names[0]][0]:
                worst = [max(LEAST, *(each[model] for each in found)) for found in far.values()]
                errors.plot(list(far), worst, "o", label=model)
            errors.set(yscale="log", ylabel="difference from one process", title="parity")
            errors.tick_params(axis="x", rotation=60)
            errors.legend()
            for rule, found in sent.items():
                lengths.plot(LENGTHS, found, "o-", label=rule)
            lengths.set(xlabel="tokens", ylabel="bytes", xscale="log", yscale="log", title="sent at a border")
            lengths.legend()

        return Result(columns, numbers, notes, draw, size=(11, 5), data={"parity": far, "bytes": sent})


def parity(mesh: str, seed: int, quick: bool) -> dict[str, float]:
    """The largest difference of any parameter from one process, by dtype and model."""
    from tests.ranks import run_ranks
    from tests.train.worlds import PLAIN, experiment, many, one_process

    size, parallel = MESHES[mesh]
    found, before = {}, torch.get_default_dtype()
    for dtype in (torch.float64,) if quick else (torch.float64, torch.float32):
        optim = PLAIN if dtype is torch.float64 else PLAIN | {"lr": 1e-3}
        models = [m for m in (MODELS[:1] if quick else MODELS) if dtype is torch.float64 or m != "levels"]
        cases = {m: (experiment(m, parallel=parallel, optim=optim, seed=seed), 3 if quick else 20) for m in models}
        try:
            with warnings.catch_warnings():
                alone = one_process(dtype, cases)
        finally:
            torch.set_default_dtype(before)
        ranks = run_ranks(size, many, dtype, cases, patience=600)
        for model in models:
            pairs = [
                (value, rank[model]["after"][key]) for rank in ranks for key, value in alone[model]["after"].items()
            ]
            far = max(float(np.abs(one - two).max()) for one, two in pairs if one.size)
            found[f"{model}, {str(dtype).removeprefix('torch.')}"] = far
    return found


def _parity_rows(mesh: str, found: list[dict[str, float]]) -> list[Row]:
    """Digits after the point in which the worst parameter agrees, over seeds."""
    size, rows = MESHES[mesh][0], list[Row]()
    wanted = {"float64": WITHIN["float64"], "float32": WITHIN["float32"], "levels, float64": OF_LEVELS * size}
    for kind, within in wanted.items():
        levels = kind.startswith("levels")
        own = [[v for n, v in each.items() if n.endswith(kind) and n.startswith("levels") is levels] for each in found]
        if own[0]:
            digits = Spread.of(-math.log10(max(*each, LEAST)) for each in own)
            rows.append((f"parity, {kind}, {mesh}, digits", size, digits, f">= {-math.log10(within):.1f}"))
    return rows


def bytes_sent() -> dict[str, list[int]]:
    """Forward and backward, of sequences of each length, by rule."""
    from tests.ranks import run_ranks

    return {str(rule): found for rule, found in run_ranks(2, borders, group=True, dtype=torch.float64)[0].items()}


def borders() -> dict[str, list[int]]:
    """What this rank sends."""
    from torch import distributed

    from hecate.distributed.context import Context
    from tests.distributed.context_cases import border_bytes

    context = Context.of(distributed.group.WORLD)
    return {rule: [border_bytes(context, fields, length) for length in LENGTHS] for rule, fields in RULES.items()}


def resharded() -> Row:
    """A checkpoint handed on from world to world."""
    from tests.train.test_sharded import moved_through

    with tempfile.TemporaryDirectory() as name:
        try:
            moved_through(Path(name), WORLDS)
            said = "equal bits"
        except AssertionError as error:
            said = str(error).splitlines()[0][:80]
    return f"resharded {' -> '.join(map(str, WORLDS))}", max(WORLDS), said, "equal bits"


def killed() -> list[Row]:
    """Runs whose processes are killed, beside one whose are not."""
    from tests.train.killing import run_killed

    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        whole = run_killed(Path(name) / "whole", 0, steps=STEPS)
        for save in ("sync", "async"):
            found = run_killed(Path(name) / save, KILLS, steps=STEPS, save=save, seed=len(save))
            same = found.losses == whole.losses and found.tokens == whole.tokens and found.weights == whole.weights
            said = f"{len(found.killed)} kills, {'equal bits' if same else 'differs'}, {found.seconds:.0f} s"
            rows.append((f"killed at random moments, save: {save}", 2, said, f"{KILLS} kills, equal bits"))
    return rows


def estimated() -> Row:
    """Parameters of one of 256 processes, by `estimate` and by torch's own sharding."""
    from tests.train.test_estimate import FAKE, PRESETS

    done = subprocess.run([sys.executable, "-P", "-c", FAKE, *PRESETS], capture_output=True, text=True, check=True)
    wanted = [int(line) for line in done.stdout.split()]
    found = [sizes_of(load_experiment(name), 8).own for name in PRESETS]
    return f"parameters on one of 256, {', '.join(PRESETS)}", 256, _listed(found), _listed(wanted)


def weak() -> Row:
    """Steps of one process over those of two with twice the rows."""
    from tests.ranks import run_ranks

    one, two = (max(run_ranks(size, seconds, size)) for size in (1, 2))
    return "speed, twice the rows on two processes", 2, f"{one / two:.0%}", f">= {SPEED:.0%}"


def seconds(size: int) -> float:
    """The best of some spans of steps of a world of so many processes."""
    from hecate.distributed import ParallelConfig, start
    from tests.train.worlds import experiment

    config = experiment(
        "delta", budget={"batch_size": 12 * size}, data={"kind": "mqar", "num_pairs": 16, "seq_len": 128}
    )
    config = config.model_copy(update={"model": config.model.model_copy(update={"d_model": 128})})
    with start(ParallelConfig(data=size), timeout=60.0) as world:
        trainer, spans = Trainer(config, world=world), []
        for _ in range(4):
            world.barrier()
            began = time.perf_counter()
            for _ in range(5):
                trainer.train_step()
            spans.append(time.perf_counter() - began)
    return min(spans)


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(f"{number:,}" for number in numbers)
