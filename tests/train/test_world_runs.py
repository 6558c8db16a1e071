"""Runs of several processes: what fails on one of them stops all, and what is no checkpoint of theirs is refused."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from hecate.distributed import ParallelConfig, World, start
from hecate.errors import CheckpointError, HecateError
from hecate.train import Hooks, Trainer, load_checkpoint
from hecate.train.loggers import MetricsWriter, read_metrics
from tests.ranks import run_ranks
from tests.train.common import quiet_run
from tests.train.worlds import experiment

SHORT = {"steps": 4, "eval_every": 2, "checkpoint_every": 2, "eval_batches": 1}
PLACES = {"on_step": 1, "on_eval": 1, "on_checkpoint": 0, "write": 0, "each": -1}


class Fails(Hooks):
    """A call that fails on one rank, at its second time; `each` on every rank."""

    def __init__(self, name: str, rank: int) -> None:
        self.rank, self.times = rank, 0
        if hasattr(self, name) or name == "each":
            setattr(self, "on_step" if name == "each" else name, self.act)

    def act(self, trainer: Trainer, _: Any) -> None:
        self.times += 1
        if self.times == 2 and self.rank in (-1, trainer.world.rank):
            raise ValueError(f"no room on rank {trainer.world.rank}")


def stopped(folder: str) -> dict[str, Any]:
    """What each fault of one rank raises on this one, and after how many seconds; the run that went on after it."""
    found: dict[str, Any] = {}
    config = experiment(parallel={"data": 2}, budget=SHORT)
    with start(ParallelConfig(data=2), timeout=60.0) as world:
        for name, rank in PLACES.items():
            began, hook = time.monotonic(), Fails(name, rank)
            with pytest.MonkeyPatch.context() as patch:
                if name == "write" and world.main:
                    patch.setattr(MetricsWriter, "write", full)
                try:
                    quiet_run(config, Path(folder) / name, world=world, hooks=[hook])
                except HecateError as error:
                    found[name] = type(error).__name__, str(error), time.monotonic() - began
        ended = quiet_run(config, Path(folder) / "on_step", resume=True, world=world)
        found["after"] = ended.step
        found["refused"] = refused(Path(folder), world)
    return found


def full(writer: MetricsWriter, record: dict[str, Any]) -> None:
    raise CheckpointError("cannot write metrics.jsonl (No space left on device)")


OTHERS: dict[str, dict[str, Any]] = {
    "dtype": {},
    "whole, dtype": {},
    "sizes": {"model": {"d_model": 24}},
    "layers": {"model": {"layers": 3}},
    "optimizer": {"optim": {"optimizer": "sgd"}},
    "seed": {"seed": 5},
    "steps": {"budget": {"steps": 1}},
}


def refused(folder: Path, world: World) -> dict[str, str]:
    """What resuming a run says where it is not this run, in this world."""
    said, parallel = {}, {"data": world.size}
    for name, fields in OTHERS.items():
        torch.set_default_dtype(torch.float64 if "dtype" in name else torch.float32)
        config = experiment(parallel=parallel, **{"budget": SHORT} | {k: v for k, v in fields.items() if k != "model"})
        config = config.model_copy(update={"model": config.model.model_copy(update=fields.get("model", {}))})
        try:
            if name == "whole, dtype":
                path = folder / "on_step" / "checkpoints" / "step_00000004"
                Trainer(config, world=world).restore(load_checkpoint(path), str(path))
            else:
                quiet_run(config, folder / "on_step", resume=True, world=world)
            said[name] = "nothing"
        except HecateError as error:
            said[name] = f"{type(error).__name__}: {error}"
        finally:
            torch.set_default_dtype(torch.float32)
    return said


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("runs")
    return folder, run_ranks(2, stopped, str(folder))


@pytest.mark.spec("DIST-RUN-D3")
@pytest.mark.parametrize("name", PLACES)
def test_what_fails_on_one_rank_stops_all_with_its_name(two, name):
    _, ranks = two
    lowest = max(PLACES[name], 0)
    call = "on_step" if name == "each" else name
    text = f"hook Fails.{call} failed with ValueError: no room on rank {{}}; the run can be continued with --resume"
    if name == "write":
        text = "cannot write metrics.jsonl (No space left on device)"
    for rank, found in enumerate(ranks):
        kind, said, seconds = found[name]
        assert kind == ("CheckpointError" if name == "write" else "HookError") and seconds < 20
        own = rank == lowest or name == "each"
        assert said == (text.format(rank) if own else f"on rank {lowest}, {text.format(lowest)}")


@pytest.mark.spec("DIST-RUN-D3", "CKPT-RESUME-I1")
def test_the_run_goes_on_after_it(two):
    folder, ranks = two
    assert [found["after"] for found in ranks] == [4, 4]
    steps = [r["step"] for r in read_metrics(folder / "on_step/metrics.jsonl") if r["event"] == "train"]
    assert steps == [1, 2, 3, 4]


@pytest.mark.spec("CKPT-SHARD-D3", "CKPT-RESUME-D2")
def test_several_processes_refuse_what_one_does_in_its_words(two):
    folder, ranks = two
    alone = refused(folder, World.alone())
    for name, words in {
        "dtype": "torch.float32, the model has",
        "whole, dtype": "torch.float32, the model has",
        "sizes": "another 'model' (model.d_model is 16 there and 24 here)",
        "layers": "another 'model' (model.layers is 2 there and 3 here)",
        "optimizer": "was trained with optimizer 'adamw', this run has 'sgd'",
        "seed": "seed is 0 there and 5 here",
        "steps": "is at step 4, beyond budget.steps=1",
    }.items():
        assert words in alone[name], alone[name]
        assert [found["refused"][name] for found in ranks] == [alone[name]] * 2
