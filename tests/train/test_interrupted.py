"""Runs that are killed, signalled, starved of disk, locked or deleted under way."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections import Counter

import pytest

from hecate.errors import CheckpointError, ConfigError
from hecate.train import checkpoints, load_checkpoint, newest_checkpoint
from hecate.train import run as module
from hecate.train.loggers import MetricsWriter, add_sample, read_metrics, rewind_samples

from .common import Interrupted, TiedGRU, quiet_run, same_bits, tiny
from .test_crash import KILLED, killed_at

BUDGET = {"steps": 5, "eval_every": 2, "checkpoint_every": 2, "keep": 1}


def run(folder, *, resume=False, model=None, **fields):
    config = tiny(budget=BUDGET | fields, sample={"every": 2})
    model = TiedGRU() if model is None else model
    return quiet_run(config, folder, resume=resume, model=model)


def lines(folder, *events):
    """Events of metrics.jsonl with their steps, by default those that must not be there twice."""
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    wanted = events or ("start", "train", "eval")
    return [(r["event"], r["step"]) for r in records if r["event"] in wanted]


def curve(folder):
    records = read_metrics(folder / "metrics.jsonl")
    return [[r[key] for key in ("step", "loss", "lr", "grad_norm")] for r in records if r["event"] == "train"]


def samples(folder):
    return re.findall(r"^--- step (\d+)$", (folder / "samples.txt").read_text(), re.MULTILINE)


WHOLE = [("start", 0), ("train", 1), ("train", 2), ("eval", 2), ("train", 3), ("train", 4),
         ("eval", 4), ("train", 5), ("eval", 5)]  # fmt: skip


@pytest.mark.spec("CKPT-WRITE-D3", "CKPT-RESUME-I1", "TRAIN-METRICS-D1", "TRAIN-RUN-D7")
def test_a_run_killed_anywhere_and_resumed_is_a_run_that_was_not(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)
    whole = run(tmp_path / "whole").folder
    assert lines(whole) == WHOLE and samples(whole) == ["2", "4", "5"]
    kept = set()
    for number in range(3, 1000, 19):
        folder = tmp_path / str(number)
        code = killed_at(number, lambda folder=folder: run(folder))
        assert code in (0, KILLED)
        started = (folder / "config.yaml").exists()
        found = newest_checkpoint(folder / "checkpoints")
        kept.add(found[0].name if found else "none")
        run(folder, resume=started, model=TiedGRU(seed=9 if found else 0))
        assert lines(folder) == WHOLE
        assert (folder / "samples.txt").read_bytes() == (whole / "samples.txt").read_bytes()
        (one,), (two,) = (checkpoints(f / "checkpoints") for f in (whole, folder))
        one, two = load_checkpoint(one), load_checkpoint(two)
        assert same_bits(one.tensors, two.tensors) and one.facts == two.facts and curve(folder) == curve(whole)
        assert not [p for p in folder.rglob(".tmp-*")]
        shutil.rmtree(folder)
        if code == 0:
            break
    assert kept == {"none", "step_00000002", "step_00000004", "step_00000005"}


@pytest.mark.spec("TRAIN-METRICS-D1")
def test_a_finished_run_that_is_resumed_has_no_line_twice(tmp_path):
    folder = run(tmp_path / "run").folder
    before = (folder / "checkpoints/step_00000005").stat().st_ino
    for _ in range(2):
        run(folder, resume=True)
    assert lines(folder) == WHOLE and samples(folder) == ["2", "4", "5"]
    assert (folder / "checkpoints/step_00000005").stat().st_ino == before  # not written again


def test_samples_that_look_like_headers_are_not_taken_for_them(tmp_path):
    path = tmp_path / "samples.txt"
    for step in (2, 4):
        add_sample(path, step, f"a\n--- step 9\nb{step}")
    add_sample(path, 4, "again")
    assert path.read_text() == "--- step 2\na\n --- step 9\nb2\n--- step 4\nagain\n"
    rewind_samples(path, 3)
    assert path.read_text() == "--- step 2\na\n --- step 9\nb2\n"


@pytest.mark.spec("TRAIN-RUN-D7")
@pytest.mark.parametrize("written", [0, 7])
def test_a_full_disk_is_one_error_and_the_run_goes_on_later(tmp_path, monkeypatch, written):
    real, count = os.write, 0

    def full(handle, data):
        nonlocal count
        count += 1
        if count < 6:
            return real(handle, data)
        if count == 6 and written:
            return real(handle, data[:written])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(CheckpointError, match=r"^cannot write .*metrics\.jsonl: No space .*--resume"):
            run(tmp_path / "run")
    run(tmp_path / "run", resume=True)
    assert lines(tmp_path / "run") == WHOLE


@pytest.mark.spec("TRAIN-RUN-D7")
@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.txt", "config.yaml", "report.md"])
def test_a_folder_in_the_place_of_a_file_is_one_error(tmp_path, name):
    (tmp_path / name).mkdir()
    message = "already holds a run" if name == "config.yaml" else "^cannot write .*: Is a directory"
    with pytest.raises(CheckpointError, match=message) as caught:
        run(tmp_path, steps=1)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.spec("TRAIN-RUN-D7")
def test_a_folder_that_cannot_be_written_is_one_error(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(CheckpointError, match="cannot write run folder .*run: Read-only file sys"):
        run(tmp_path / "run")
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(CheckpointError, match=r"cannot write .*metrics\.jsonl: Read-only file sys"):
        run(tmp_path)


@pytest.mark.spec("TRAIN-RUN-D6")
def test_two_processes_do_not_train_in_one_folder(tmp_path):
    folder = run(tmp_path / "run").folder
    before = (folder / "metrics.jsonl").read_bytes()
    with MetricsWriter(folder / "metrics.jsonl"):
        with pytest.raises(CheckpointError, match=f"another process is training in {folder}: wait"):
            run(folder, resume=True)
        assert (folder / "metrics.jsonl").read_bytes() == before
    assert killed_at(9, lambda: (MetricsWriter(folder / "metrics.jsonl"), os._exit(KILLED)))
    run(folder, resume=True)  # the lock of a dead process is none


@pytest.mark.spec("TRAIN-RUN-D6")
@pytest.mark.parametrize("act", [shutil.rmtree, lambda path: path.rename(path.parent / "moved")])
def test_a_run_whose_folder_goes_away_stops(tmp_path, act):
    with pytest.raises(CheckpointError, match=r"run/metrics\.jsonl was moved or deleted while"):
        run(tmp_path / "run", model=Interrupted(3, lambda: act(tmp_path / "run")))
    assert not (tmp_path / "run").exists()


@pytest.mark.spec("TRAIN-RUN-D3")
def test_a_folder_with_parts_of_a_run_is_refused(tmp_path):
    folder = run(tmp_path / "run").folder
    (folder / "config.yaml").unlink()
    with pytest.raises(CheckpointError, match="that has lost its config.yaml; put that back"):
        run(folder)
    with pytest.raises(CheckpointError, match="is not a run folder: it has no config.yaml"):
        run(folder, resume=True)
    with pytest.raises(ConfigError, match="budget.keep: must be >= 1, got 0"):
        run(tmp_path / "other", keep=0)


WHERE = {  # what is under way, the step it is at, lines of metrics and checkpoints when it stops
    "an evaluation on the way": ("trainer.Trainer.evaluate", 2, 0),
    "a sample on the way": ("trainer.Trainer.sample", 2, 0),
    "the last evaluation": ("trainer.Trainer.evaluate", 5, 2),
    "the last sample": ("trainer.Trainer.sample", 5, 2),
    "the baselines": ("trainer.Trainer.baselines", 5, 0),
    "the report": ("report.state_leaves", 5, 0),
}


@pytest.mark.spec("TRAIN-RUN-D2")
@pytest.mark.parametrize(
    ("where", "number"), [*((where, signal.SIGTERM) for where in WHERE), ("the last evaluation", signal.SIGINT)]
)
def test_a_signal_ends_what_is_under_way(tmp_path, monkeypatch, where, number):
    name, step, calls = WHERE[where]
    owner, attribute = name.rsplit(".", 1)
    path = f"hecate.train.{owner}.{attribute}"
    real = module.__dict__.get(attribute) or getattr(module.Trainer, attribute, None)
    count, saves = 0, Counter()

    def endless(*given):
        nonlocal count
        count += 1
        if count <= calls:
            return real(*given)
        os.kill(os.getpid(), number)
        time.sleep(60)
        raise AssertionError("not interrupted")

    def save(saver, at, checkpoint):
        saves[at] += 1
        return saved(saver, at, checkpoint)

    saved = module.Saver.save
    handler = signal.getsignal(number)
    with monkeypatch.context() as patch:
        patch.setattr(path, endless)
        patch.setattr(module.Saver, "save", save)
        began = time.monotonic()
        result = run(tmp_path / "run")
        assert time.monotonic() - began < 5 and signal.getsignal(number) is handler
    assert (result.status, result.step, result.signal) == ("interrupted", step, number)
    assert set(saves.values()) == {1} and max(saves) == step
    assert lines(result.folder, "end") == [("end", step)]
    resumed = run(result.folder, resume=True, model=TiedGRU(seed=9))
    assert resumed.status == "finished" and resumed.score == run(tmp_path / "whole").score
    assert lines(result.folder) == WHOLE and samples(result.folder) == ["2", "4", "5"]
