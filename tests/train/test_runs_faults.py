"""Loggers, allowed settings and parameters of others where something is not as it should be."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stdout
from types import ModuleType, SimpleNamespace
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file, save_file

from hecate.distributed import ParallelConfig, start
from hecate.errors import CheckpointError, ConfigError, HecateError, HookError
from hecate.train import Trainer, run_experiment
from hecate.train.checkpoint import Checkpoint
from hecate.train.display import Display
from hecate.train.loggers import read_metrics
from hecate.train.state import allowing
from hecate.train.trained import begin_from
from tests.ranks import run_ranks

from .common import TiedGRU, tiny
from .test_runs_progress import Kept, _Kept
from .worlds import experiment


def run(folder, *, resume=False, steps=2, **fields):
    config = tiny(budget={"steps": steps}, **fields)
    return run_experiment(config, folder, resume=resume, display=Display(quiet=True), model=TiedGRU())


class Endless(Kept):
    """endless: cannot be closed."""

    kind: Literal["test-endless"] = "test-endless"

    def open(self, folder, config):
        return SimpleNamespace(log=lambda record: None, close=lambda: {}["no end"])


@pytest.mark.spec("TRAIN-LOG-D1")
def test_loggers_are_opened_for_runs_that_begin_and_closed_each(tmp_path):
    _Kept.opened.clear()
    with pytest.raises(ConfigError, match=r"^loggers\[1\]: 'kept' is given twice; keep one$"):
        run(tmp_path / "run", loggers=["kept", "kept"])
    assert not (tmp_path / "run").exists()
    run(tmp_path / "run")
    with pytest.raises(CheckpointError, match="another 'seed'"):
        run(tmp_path / "run", resume=True, seed=7, loggers=["kept"])
    assert _Kept.opened == []
    with pytest.raises(HookError, match=r"^logger test-endless failed with KeyError: 'no end'; the run can be"):
        run(tmp_path / "other", loggers=["kept", "test-endless"])
    assert [logger.closed for logger in _Kept.opened] == [True]


@pytest.mark.spec("TRAIN-LOG-D1")
def test_trackio_is_called_as_its_versions_want(tmp_path, monkeypatch):
    """A package with the signatures of the real one, which may not be here."""
    calls = []

    class Run:
        def log(self, metrics, step=None):
            assert not {"project", "run", "timestamp", "step", "time", "metrics"} & set(metrics)  # which it reserves
            calls.append((step, metrics))

        def finish(self):
            calls.append("finish")

    def init(project, name=None, group=None, space_id=None, config=None, resume="never"):
        print("hello")
        calls.append((project, name, resume))
        return Run()

    package = ModuleType("trackio")
    package.init = init
    monkeypatch.setitem(sys.modules, "trackio", package)
    out = io.StringIO()
    with redirect_stdout(out):
        for resume in (False, True):
            run(tmp_path / "run", loggers=["trackio"], resume=resume)
    assert out.getvalue() == ""
    opened = [call for call in calls if call[0] == "hecate"]
    assert len(opened) == 2 and opened[0] == opened[1] and opened[0][1].startswith("tiny-") and opened[0][2] == "allow"
    assert [call[0] for call in calls if call != "finish" and "train/loss" in call[1]] == [1, 2]
    assert calls[-1] == "finish"


def cursor_after(step, before, **fields):
    """The step at which data with such a cursor are gone on with."""
    trainer = SimpleNamespace(
        config=tiny(),
        optimizers={},
        loader=SimpleNamespace(state_dict=lambda: {"step": 0, "seed": 0, "fingerprint": "x"} | fields["own"]),
        source=SimpleNamespace(ordered=fields["ordered"], carries=fields.get("carries", False)),
    )
    cursor = {"step": step, "seed": 0, "fingerprint": "x"} | before
    facts = {"config": tiny().model_dump(mode="json"), "cursor": cursor}
    return allowing(Checkpoint({}, facts), trainer, ["budget.batch_size", "budget.seq_len"])[0].facts["cursor"]["step"]


@pytest.mark.spec("CKPT-ALLOW-D1")
def test_other_batches_read_nothing_twice():
    old = {"batch_size": 6, "seq_len": 4}
    for own, wanted in (((4, 4), 5), ((6, 4), 3), ((12, 4), 2), ((6, 9), 2), ((3, 8), 3)):
        now = dict(zip(("batch_size", "seq_len"), own, strict=True))
        found = cursor_after(3, old, own=now, ordered=True)
        assert found == wanted and found * own[0] * own[1] >= 3 * 24 > (found - 1) * own[0] * own[1]
        assert cursor_after(3, old, own=now, ordered=False) == 3
    assert cursor_after(3, old, own=old, ordered=True, carries=True) == 3
    for own in ({"batch_size": 4, "seq_len": 4}, {"batch_size": 6, "seq_len": 2}):  # fewer rows would fit their states
        with pytest.raises(CheckpointError, match=r"^--allow: rows go on from batch to batch with their states"):
            cursor_after(3, old, own=own, ordered=True, carries=True)


@pytest.mark.spec("TRAIN-INIT-D1", "TRAIN-RUN-D8")
def test_two_processes_begin_with_the_same_numbers_or_not_at_all(tmp_path):
    torch.set_default_dtype(torch.float32)
    first = run_experiment(experiment(budget={"steps": 2}), tmp_path / "first", display=Display(quiet=True)).folder
    own = Trainer(experiment()).model.state_dict()
    for name, shift in ("a", 0.0), ("b", 1.0):
        save_file({key: x + shift for key, x in own.items()}, tmp_path / f"{name}.safetensors")
    for whole, fault, tokens in run_ranks(2, of_two, str(tmp_path)):
        assert all(
            torch.equal(torch.tensor(whole[name]), x) for name, x in load_file(tmp_path / "a.safetensors").items()
        )
        assert fault.startswith("ParallelError: init_from.") and "on rank 1" in fault
        assert tokens == [2 * 192 + n * 384 for n in (1, 2)]
    assert [r["step"] for r in read_metrics(first / "metrics.jsonl") if r["event"] == "train"] == [1, 2, 3, 4]


def of_two(folder):
    """Parameters taken from a file; what is said where files differ; tokens after a resume with other batches."""
    from pathlib import Path

    from hecate.distributed import gathered
    from hecate.train import Hooks

    sys.modules["matplotlib.figure"] = None
    here, tokens = Path(folder), []

    class Counts(Hooks):
        def on_step(self, trainer, record):
            tokens.append(record["tokens"])

    with start(ParallelConfig(data=2), timeout=60.0) as world:
        trainer = Trainer(experiment(parallel={"data": 2}), world=world)
        begin_from(trainer, here / "a.safetensors")
        whole = {name: gathered(x).detach().tolist() for name, x in trainer.model.state_dict().items()}
        try:
            begin_from(trainer, here / f"{'ab'[world.rank]}.safetensors")
            fault = ""
        except HecateError as error:
            fault = f"{type(error).__name__}: {error}"
        config = experiment(parallel={"data": 2}, budget={"steps": 4, "batch_size": 24})
        run_experiment(
            config, here / "first", resume=True, allow=["budget.batch_size"], hooks=[Counts()], world=world,
            display=Display(quiet=True),
        )  # fmt: skip
    return whole, fault, tokens
