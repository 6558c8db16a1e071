"""A writer that is killed before any of its calls to the system loses nothing that was complete."""

from __future__ import annotations

import os
import shutil
import sys
import traceback
from pathlib import Path

import pytest
import torch

from hecate.errors import CheckpointError
from hecate.files import remove_folder, sweep, write_file
from hecate.train import Checkpoint, checkpoints, newest_checkpoint, prune_checkpoints, save_checkpoint
from hecate.train import checkpoint as module
from hecate.train.loggers import add_sample

CALLS = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate")
KILLED = 77


def state(value: float) -> Checkpoint:
    return Checkpoint({"w": torch.full((3,), value)}, {"metrics": {"validation_loss": value}})


def killed_at(number: int, act) -> int:
    """Runs `act` in a process that ends, as by SIGKILL, before its call `number`."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    count = 0

    def step(*_) -> None:
        nonlocal count
        count += 1
        if count > number:
            os._exit(KILLED)

    def watch(event: str, given: tuple) -> None:
        if event in CALLS or (event == "open" and given[2] & (os.O_WRONLY | os.O_RDWR)):
            step()
        if event == "open" and given[2] & os.O_TRUNC and os.path.exists(given[0]):  # noqa: PTH110 - or a number
            os.truncate(given[0], 0)  # before anything is written there
            step()

    try:
        os.fsync = step  # what it forces to disk, a killed process cannot lose
        write = os.write
        os.write = lambda handle, data: (step(), write(handle, data[:40]))[1]  # lines in parts
        saved = module.save_file
        module.save_file = lambda *given: (step(), saved(*given), step())
        sys.addaudithook(watch)
        act()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def every_kill(folder, prepare, act):
    """Yields a folder, and whether `act` was killed, for every number of calls to let pass."""
    for number in range(500):
        here = folder / str(number)
        here.mkdir()
        prepare(here)
        code = killed_at(number, lambda here=here: act(here))
        assert code in (0, KILLED)
        yield here, code == KILLED
        shutil.rmtree(here)
        if code == 0:
            assert number > 5
            return
    raise AssertionError("never finished")


@pytest.fixture
def quick(monkeypatch):
    """A process that is killed loses nothing that it wrote, forced to disk or not."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.mark.spec("CKPT-WRITE-D3", "CKPT-PRUNE-D1")
@pytest.mark.parametrize("step", [1, 2], ids=["the same step", "the next step"])
def test_a_kill_at_any_call_of_a_save_keeps_the_newest(tmp_path, quick, step):
    def act(folder):
        save_checkpoint(folder, step, state(2.0))
        prune_checkpoints(folder, 1)

    seen = set()
    for folder, killed in every_kill(tmp_path, lambda f: save_checkpoint(f, 1, state(3.0)), act):
        _, found, skipped = newest_checkpoint(folder)
        value = float(found.tensors["w"][0])
        assert skipped == [] and (killed or value == 2)
        seen.add(value)
        # What is left behind neither counts nor hinders, and the next save clears it away.
        act(folder)
        assert [p.name for p in folder.iterdir()] == [f"step_0000000{step}"]
        assert float(newest_checkpoint(folder)[1].tensors["w"][0]) == 2
    assert seen == {2.0, 3.0}


@pytest.mark.spec("CKPT-WRITE-D3")
def test_what_is_older_goes_when_the_newer_is_on_disk(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, 1, state(3.0))
    log, handles, real = [], {}, {name: getattr(os, name) for name in ("open", "fsync", "rename")}

    def opened(path, *rest, **more):
        handle = real["open"](path, *rest, **more)
        handles[handle] = os.fspath(path)
        return handle

    def forced(handle):
        log.append(("sync", Path(handles[handle]).name))
        real["fsync"](handle)

    def renamed(old, new):
        log.append(("rename", Path(old).name))
        real["rename"](old, new)

    for name, act in ("open", opened), ("fsync", forced), ("rename", renamed):
        monkeypatch.setattr(os, name, act)
    save_checkpoint(tmp_path, 1, state(2.0))
    fresh = f".tmp-step_00000001-2-{os.getpid()}"
    published, retired = log.index(("rename", fresh)), log.index(("rename", "step_00000001"))
    for name in ("tensors.safetensors", "manifest.json", fresh):
        assert ("sync", name) in log[:published]
    assert ("sync", tmp_path.name) in log[published:retired]


@pytest.mark.spec("CKPT-RESUME-D1")
def test_a_reader_beside_a_run_finds_the_next_checkpoint(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, 1, state(3.0))
    load = module.load_checkpoint

    def late(path):
        if path.name == "step_00000001":
            save_checkpoint(tmp_path, 2, state(2.0))
            prune_checkpoints(tmp_path, 1)
        return load(path)

    monkeypatch.setattr(module, "load_checkpoint", late)
    assert newest_checkpoint(tmp_path)[0].name == "step_00000002"


@pytest.mark.spec("CKPT-RESUME-D1")
def test_what_version_0_1_had_renamed_away_is_still_found(tmp_path):
    save_checkpoint(tmp_path, 7, state(1.0)).rename(tmp_path / ".tmp-old-step_00000007-123")
    (tmp_path / ".tmp-step_00000007-123").mkdir()
    sweep(tmp_path)
    path, found, _ = newest_checkpoint(tmp_path)
    assert path.name == ".tmp-old-step_00000007-123" and found.tensors["w"].tolist() == [1.0] * 3
    save_checkpoint(tmp_path, 7, state(2.0))
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000007"]


def test_a_kill_at_any_call_of_a_file_leaves_the_old_content_or_the_new(tmp_path, quick):
    def act(folder):
        write_file(folder / "config.yaml", "new: 2\n")
        add_sample(folder / "samples.txt", 2, "two")

    def prepare(folder):
        write_file(folder / "config.yaml", "old: 1\n")
        add_sample(folder / "samples.txt", 1, "one")

    for folder, killed in every_kill(tmp_path, prepare, act):
        config, samples = (folder / "config.yaml").read_text(), (folder / "samples.txt").read_text()
        assert config == "new: 2\n" or (killed and config == "old: 1\n")
        assert samples in ("--- step 1\none\n", "--- step 1\none\n--- step 2\ntwo\n")
        sweep(folder)
        assert len(list(folder.iterdir())) == 2


def test_only_what_killed_writers_leave_is_swept(tmp_path):
    ours = [".tmp-step_00000001-2-33", ".tmp-config.yaml-33", ".tmp-microscope-a.0.png-1", ".tmp-a.svg-1"]
    theirs = [".tmp-notes", ".tmp-data-2024", "step_00000001", ".tmp-old-step_00000001-5"]
    for name in (*ours[:1], *theirs):
        (tmp_path / name).mkdir()
    for name in ours[1:]:
        (tmp_path / name).touch()
    sweep(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(theirs)


def test_pruning_counts_what_can_be_read_and_is_not_of_a_later_time(tmp_path):
    for step in (1, 2, 3, 9):
        save_checkpoint(tmp_path, step, state(1.0 / step))
    (tmp_path / "step_00000003" / "manifest.json").write_text("{}")
    prune_checkpoints(tmp_path, 1, better="other", upto=3)
    assert [int(p.name[5:]) for p in checkpoints(tmp_path)] == [2, 3, 9]
    with pytest.raises(ValueError, match="at least one checkpoint must be kept, got keep=0"):
        prune_checkpoints(tmp_path, 0)
    remove_folder(tmp_path / "step_00000002")
    assert [int(p.name[5:]) for p in checkpoints(tmp_path)] == [3, 9]


def test_what_could_not_be_read_is_not_written(tmp_path):
    for step, facts, reason in (
        (-1, {}, "step: must be >= 0"), (1, {"a": float("nan")}, "plain JSON with finite numbers"),
        (True, {}, "step: must be an integer"), (1, {"a": {1, 2}}, "not JSON serializable"),
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match=f"cannot write a checkpoint of step .*{reason}"):
            save_checkpoint(tmp_path, step, Checkpoint({"w": torch.zeros(1)}, facts))
        assert not list(tmp_path.iterdir())
