"""Training with sequences shared by several processes, against one."""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hecate.distributed import ParallelConfig, World, start
from hecate.errors import ConfigError
from hecate.train import Trainer, load_checkpoint, run_experiment
from hecate.train.display import Display
from hecate.train.estimate import ways_of
from hecate.train.trainer import context_of
from tests.ranks import run_ranks
from tests.train.worlds import PLAIN, agree, experiment, many, one_process, whole

AGAIN = {"accumulate": 2, "recompute": "full"}


def told(cases: dict[str, Any]) -> dict[str, set[str]]:
    """`many` in float64, and the ways that scans have told of themselves as they ran."""
    log, said = logging.getLogger("hecate.distributed"), set[str]()
    handler = logging.Handler()
    handler.emit = lambda record: said.add(record.args[3])  # type: ignore[index,method-assign]
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    try:
        return {"found": many(torch.float64, cases), "ways": said}
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)


@pytest.mark.spec("CTX-TRAIN-I1", "CTX-WAY-D2")
def test_two_processes_share_sequences():
    shape = {"parallel": {"data": 1, "context": 2}}
    cases = {
        "delta": (experiment("delta", **shape), 5),
        "levels, in parts": (experiment("levels", **shape, budget=AGAIN), 5),
    }
    ranks = run_ranks(2, told, cases)
    agree(one_process(torch.float64, cases), [rank["found"] for rank in ranks], 1e-11)
    ways = {way.name for config, _ in cases.values() for way in ways_of(config).values()}
    assert [rank["ways"] for rank in ranks] == [ways, ways]


SHAPES = {
    "2": {"context": 2},
    "3": {"context": 3},
    "4": {"context": 4},
    "data 2 x 2": {"data": 2, "context": 2},
    "replicate 2 x 2": {"data": 1, "replicate": 2, "context": 2},
}


@pytest.mark.slow
@pytest.mark.spec("CTX-TRAIN-I1", "CTX-GRAD-D1")
@pytest.mark.parametrize("shape", SHAPES)
def test_every_model_on_every_mesh(shape):
    parallel = {"data": 1} | SHAPES[shape]
    size = ParallelConfig(**parallel)
    ranks = size.context * size.data * size.replicate
    how: dict[str, Any] = {"parallel": parallel, "optim": PLAIN}
    cases = {
        "delta": (experiment("delta", **how), 20),
        "titans": (experiment("titans", **how), 20),
        # Norms between levels multiply rounding: a last bit of the start moves their weights by 3e-10 in eight steps.
        "levels, in parts": (experiment("levels", **how, budget=AGAIN), 5),
        "mlp": (experiment("mlp", **how), 20),
    }
    agree(one_process(torch.float64, cases), run_ranks(ranks, many, torch.float64, cases, patience=280), 1e-12)
    how["optim"] = PLAIN | {"lr": 1e-3}
    cases = {name: (experiment(name, **how), 20) for name in ("delta", "titans", "mlp")}
    agree(one_process(torch.float32, cases), run_ranks(ranks, many, torch.float32, cases, patience=280), 1e-6)


def gone_on(folder: str, parallel: dict[str, Any], steps: int) -> dict[str, Any]:
    """A run that goes on with what another world has left, saving behind itself."""
    warnings.simplefilter("ignore")
    sys.modules["matplotlib.figure"] = None  # type: ignore[assignment]
    config = chained(steps, parallel)
    with start(config.parallel, timeout=60.0) as world:
        resume = (Path(folder) / "config.yaml").exists()
        world.any(False)  # rank 0 writes it
        run_experiment(config, Path(folder), resume=resume, world=world, display=Display(quiet=True))
        run = Trainer(config, world=world)
        path = Path(folder) / "checkpoints" / f"step_{steps:08d}"
        run.restore(load_checkpoint(path), str(path))
        return whole(run)


def chained(steps: int, parallel: dict[str, Any]) -> Any:
    budget = {"steps": steps, "save": "async", "checkpoint_every": 2, "eval_every": 100}
    return experiment("titans", parallel=parallel, budget=budget, optim=PLAIN | {"schedule": "constant"})


@pytest.mark.slow
@pytest.mark.spec("CKPT-SHARD-D2", "CKPT-ASYNC-D1", "DIST-SAVE-D1")
def test_a_run_goes_on_in_one_world_after_another(tmp_path):
    """HSDP, then shards of three, then pieces of sequences, then shards and pieces, then one process, each after
    another; numbers are those of one process that never stopped, but for the rounding of its loss in float32."""
    both, pieces = {"replicate": 2, "data": 2}, {"data": 1, "context": 2}
    worlds = [(4, both), (3, {"data": 3}), (2, pieces), (4, {"data": 2, "context": 2}), (1, {"data": 1})]
    for number, (size, parallel) in enumerate(worlds, 1):
        given = str(tmp_path / "run"), parallel, 4 * number
        ranks = run_ranks(size, gone_on, *given, dtype=torch.float64)
    torch.set_default_dtype(torch.float64)
    alone = Trainer(chained(20, {"data": 1}), world=World.alone())
    for _ in range(20):
        alone.train_step()
    for name, value in whole(alone).items():
        assert np.allclose(ranks[0][name], value, rtol=0, atol=1e-6), name


@pytest.mark.spec("CTX-TRAIN-I1")
@pytest.mark.parametrize(
    ("ranks", "budget", "words"),
    [(2, {"compile": "block"}, "budget.compile='block' compiles blocks"), (32, {}, "sequences of 16 tokens cannot be")],
)
def test_what_ranks_cannot_share_is_refused(ranks, budget, words):
    world: Any = SimpleNamespace(extent=lambda axis: ranks, mesh=object())
    with pytest.raises(ConfigError, match=f"parallel.context: is {ranks}, and {words}"):
        context_of(experiment("delta", budget=budget), world)
