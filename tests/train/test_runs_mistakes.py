"""Loggers, allowed settings and parameters of others where something is not as it should be."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stdout
from types import ModuleType, SimpleNamespace
from typing import Literal

import pytest

from hecate.errors import CheckpointError, ConfigError, HookError
from hecate.train.checkpoint import Checkpoint
from hecate.train.loggers import read_metrics
from hecate.train.state import allowing

from .common import TiedGRU, quiet_run, tiny
from .test_runs_progress import Kept, _Kept


def run(folder, *, resume=False, **fields):
    return quiet_run(tiny(budget={"steps": 2}, **fields), folder, resume=resume, model=TiedGRU())


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
@pytest.mark.parametrize("kind", ["trackio", "wandb", "tensorboard"])
def test_libraries_are_called_as_their_versions_want(tmp_path, monkeypatch, kind):
    """Packages with the signatures of the real ones, which may not be here."""
    opened, told, metrics, out = [], [], [], io.StringIO()

    class Run:
        def log(self, record, step=None):
            assert not {"project", "run", "timestamp", "time", "metrics"} & set(record)  # which trackio reserves
            assert ("step" in record) == (kind == "wandb")
            told.append((record.get("step", step), record))

        def define_metric(self, name, step_metric=None):
            metrics.append((name, step_metric))

        def add_scalar(self, name, value, step, walltime=None):
            told.append((step, {name: value}))

        def finish(self):
            told.append("finish")

        close = finish

    def init(project, name=None, config=None, resume="never", **how):
        print("hello" if kind == "trackio" else "", end="")
        opened.append((project, name, resume, *(how.get(name) for name in ("dir", "mode", "id")), config["name"]))
        return Run()

    package = ModuleType(kind)
    package.init, package.Settings = init, dict
    package.SummaryWriter = lambda folder: opened.append(folder) or Run()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard" if kind == "tensorboard" else kind, package)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    folder = tmp_path / "run"
    with redirect_stdout(out):
        for resume in (False, True):  # asked for twice, opened once
            run(folder, loggers=[kind], resume=resume, tensorboard=kind == "tensorboard")
    assert out.getvalue() == "" and len(opened) == 2 and opened[0] == opened[1] and told[-1] == "finish"
    identity = "" if kind == "tensorboard" else (folder / "logger-id.txt").read_text()
    wanted = {
        "trackio": ("hecate", f"tiny-{identity[:8]}", "allow", None, None, None, "tiny"),
        "wandb": ("hecate", "tiny", None, str(folder), "offline", identity, "tiny"),
        "tensorboard": str(folder / "tensorboard"),
    }
    assert opened[0] == wanted[kind] and metrics == 2 * (kind == "wandb") * [("step", None), ("*", "step")]
    losses = {call[0]: call[1]["train/loss"] for call in told if call != "finish" and "train/loss" in call[1]}
    assert losses == {r["step"]: r["loss"] for r in read_metrics(folder / "metrics.jsonl") if r["event"] == "train"}


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
