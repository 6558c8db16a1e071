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
