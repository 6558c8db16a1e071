"""What a run tells while it goes on: progress, clocks that go on over a resume, loggers and hooks."""

from __future__ import annotations

import io
import json
import math
import re
import sys
import time
from collections import Counter
from typing import Any, ClassVar, Literal

import pytest
import torch
from rich.console import Console

from hecate.distributed import World
from hecate.errors import ConfigError, HookError, install_line
from hecate.train import Hooks, checkpoints, run_experiment
from hecate.train import display as display_module
from hecate.train.display import Display, Progress, counted, duration, peak_flops
from hecate.train.estimate import sizes_of
from hecate.train.loggers import Logger, LoggerKind, numbers, read_metrics

from .common import Interrupted, TiedGRU, quiet_run, tiny

TRAIN = {"loss", "lr", "grad_norm", "tokens_per_second", "tokens", "peak_memory", "time", "elapsed"}


def run(folder, *, resume=False, model=None, hooks=(), **fields):
    model = TiedGRU() if model is None else model
    return quiet_run(tiny(**fields), folder, model=model, hooks=hooks, resume=resume)


@pytest.mark.spec("TRAIN-RUN-D8", "TRAIN-METRICS-D1")
def test_tokens_and_time_go_on_over_a_kill_and_a_resume(tmp_path):
    began = time.time()
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", model=Interrupted(14))
    killed = read_metrics(tmp_path / "run" / "metrics.jsonl")
    run(tmp_path / "run", resume=True, model=TiedGRU(seed=9))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    train = [r for r in records if r["event"] == "train"]
    assert [r["step"] for r in train] == list(range(1, 21))
    assert [r["tokens"] for r in train] == [32 * step for step in range(1, 21)]  # 4 rows of 8
    assert all(set(r) == TRAIN | {"event", "step"} for r in train)
    assert all(began <= r["time"] <= time.time() + 1 for r in records)
    assert [r["time"] for r in records] == sorted(r["time"] for r in records)
    elapsed = [r["elapsed"] for r in records]
    assert elapsed == sorted(elapsed) and elapsed[-1] < time.time() - began + 0.1
    kept = max(r["elapsed"] for r in killed if r["step"] <= 10)
    resumed = next(r for r in records if r["event"] == "resume")
    assert kept <= resumed["elapsed"] and resumed["step"] == 10
    assert all(r["peak_memory"] > 1 << 20 for r in train)
    twice = Counter((r["event"], r["step"]) for r in records)
    assert max(twice.values()) == 1


@pytest.mark.spec("TRAIN-RUN-D8")
def test_a_run_of_an_older_version_goes_on_with_its_tokens(tmp_path):
    run(tmp_path / "run", budget={"steps": 10})
    path = tmp_path / "run" / "metrics.jsonl"
    kept = ("event", "step", "loss", "lr", "grad_norm", "tokens_per_second", "status", "seconds")
    old = [{k: r[k] for k in kept if k in r} for r in read_metrics(path)]
    path.write_text("".join(json.dumps(r) + "\n" for r in old))
    run(tmp_path / "run", resume=True)
    tokens = [r["tokens"] for r in read_metrics(path) if r["event"] == "train" and r["step"] > 10]
    assert tokens == [step * 32 for step in range(11, 21)]


@pytest.mark.spec("TRAIN-RUN-D8")
def test_lines_come_now_and_then_where_there_is_no_terminal(tmp_path, monkeypatch):
    monkeypatch.setattr(display_module, "PLAIN", 0.0)
    text = io.StringIO()
    run_experiment(tiny(), tmp_path / "a", display=Display(Console(file=text, width=200)))
    shown = [line for line in text.getvalue().splitlines() if " loss " in line]
    assert "\x1b" not in text.getvalue()
    assert re.search(r"^step +10/20  validation 0\.\d{4} accuracy", text.getvalue(), re.MULTILINE)
    pattern = (
        r"^step +\d+/20  loss \d\.\d{3} nats  [\d.]+k? tokens  ([\d,]+ tokens/s \([\d,]+ of the run\)  )?"
        r"norm [\d.]+  [\d.]+ [KMG]iB  ETA (-|0:\d\d:\d\d)$"
    )
    assert len(shown) == 20 and all(re.match(pattern, line) for line in shown), shown[0]
    assert shown[0].endswith("ETA -") and "tokens/s" not in shown[0] and "tokens/s" in shown[-1]
    fancy = io.StringIO()
    display = Display(Console(file=fancy, force_terminal=True, width=100))
    run_experiment(tiny(), tmp_path / "b", display=display)
    assert all(word in fancy.getvalue() for word in ("20/20", "ETA", "\x1b"))


@pytest.mark.spec("TRAIN-RUN-D8")
def test_the_loss_is_smoothed_and_the_time_left_is_that_of_the_whole_run(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress = Progress(tiny(budget={"steps": 10}), World.alone())
    assert progress.line(1.0).endswith("ETA -")
    for loss in (4.0, 2.0):
        now[0] += 3.0  # a second of it in the step, the rest elsewhere
        progress.take(loss, 32, 1.0)
    mean = (0.95 * 0.05 * 4.0 + 0.05 * 2.0) / (1 - 0.95**2)
    line = progress.line(0.5)
    assert f"loss {mean:.3f}" in line and "64 tokens" in line and "32 tokens/s (11 of the run)" in line
    assert progress.seconds_left() == 8 * 3.0 and line.endswith("ETA 0:00:24")
    limited = Progress(tiny(budget={"steps": 10, "minutes": 0.1}), World.alone())
    now[0] += 2.0
    limited.take(1.0, 32, 1.0)
    assert limited.seconds_left() == pytest.approx(4.0)


@pytest.mark.spec("TRAIN-RUN-D8")
@pytest.mark.parametrize("slow", [[20.0], [20.0, 5.0, 2.0], [0.1], [0.1, 20.0], [20.0] * 25])
def test_steps_in_which_kernels_compile_count_neither_as_speed_nor_towards_the_end(monkeypatch, slow):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress = Progress(tiny(budget={"steps": 100}), World.alone())
    for seconds in [*slow, *[0.5] * 10]:
        now[0] += seconds + 0.5  # as long again between two steps
        progress.take(1.0, 32, seconds)
        if progress.step == 1:
            assert progress.line(1.0).endswith("ETA -") and "tokens/s" not in progress.line(1.0)
    late = slow[20:]  # so late that they are none of the first
    seconds, steps = sum(late) + 5.0, len(late) + 10
    assert progress.seconds_left() == pytest.approx((100 - progress.step) * (seconds + 0.5 * steps) / steps)
    speed, whole = 32 * steps / seconds, 32 * steps / (seconds + 0.5 * steps)
    assert f"{speed:,.0f} tokens/s ({whole:,.0f} of the run)" in progress.line(1.0)


@pytest.mark.spec("TRAIN-RUN-D8")
def test_the_loss_of_training_has_the_unit_of_validation():
    for metric, each, shown in (
        ("accuracy", 1.0, "loss 1.386 nats  "),
        ("bits_per_byte", 1.0, "loss 2.000 bits per byte  "),
        ("bits_per_byte", 4.0, "loss 0.500 bits per byte  "),
        ("perplexity", 1.0, "perplexity 4.000  "),
    ):
        progress = Progress(tiny(), World.alone(), metric)
        for _ in range(3):
            progress.take(math.log(4), 32, 1.0, each)
        assert progress.line(1.0).startswith(shown)


def test_what_takes_long_before_the_first_step_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(display_module, "PATIENCE", 0.05)
    config, source = tiny(), tiny().data.load()

    def load(_):
        time.sleep(0.5)
        return source

    monkeypatch.setattr(type(config.data), "load", load)
    text, fancy = io.StringIO(), io.StringIO()
    run_experiment(config, tmp_path / "a", display=Display(Console(file=text, width=200)))
    assert text.getvalue().startswith("loading data (mqar) and building the model\n")
    assert text.getvalue().count("loading") == 1
    run_experiment(config, tmp_path / "b", display=Display(Console(file=fancy, force_terminal=True, width=100)))
    assert "loading data (mqar)" in fancy.getvalue() and "the first step compiles kernels" in fancy.getvalue()
    quiet = io.StringIO()
    run_experiment(config, tmp_path / "c", display=Display(Console(file=quiet), quiet=True))
    assert not quiet.getvalue()


PEAKS = [
    ("NVIDIA H100 80GB HBM3", 989e12, 67e12), ("NVIDIA H100 PCIe", 756e12, 51e12), ("NVIDIA L4", 121e12, 30.3e12),
    ("NVIDIA A100-SXM4-80GB", 312e12, 19.5e12), ("NVIDIA H100 NVL", 835e12, 60e12), ("NVIDIA A10G", None, None),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None, None), ("NVIDIA GeForce RTX 4090 Laptop GPU", None, None),
]  # fmt: skip


@pytest.mark.spec("TRAIN-RUN-D8")
def test_the_share_of_a_peak_is_told_where_the_peak_is_known(monkeypatch):
    for name, bfloat16, float32 in PEAKS:
        assert (peak_flops(name, "bfloat16"), peak_flops(name, "float32")) == (bfloat16, float32)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: 3 << 30)
    config = tiny(budget={"precision": "bfloat16"})
    world = World(device=torch.device("cuda"), size=4)
    progress = Progress(config, world)
    progress.take(1.0, 1000, 9.0)
    assert "MFU" not in progress.line(1.0)  # of a step that compiles
    facts = progress.take(1.0, 1000, 0.5)
    assert facts["mfu"] == pytest.approx(2000 * 6 * sizes_of(config).work / (4 * 312e12))
    assert facts["peak_memory"] == 3 << 30 and "3 GiB  MFU" in progress.line(1.0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Some other device")
    assert "mfu" not in Progress(config, world).take(1.0, 1000, 0.5)


def test_numbers_in_words():
    assert [counted(n) for n in (0, 999, 1000, 12_345, 999_999, 12_345_678, 3e9, 2.5e12)] == [
        "0", "999", "1k", "12.3k", "1000k", "12.3M", "3G", "2.5T"
    ]  # fmt: skip
    assert [duration(s) for s in (0, 59.9, 3661, 90061, 1e30, float("inf"), float("nan"))] == [
        "0:00:00", "0:00:59", "1:01:01", "1 day, 1:01:01", "-", "-", "-"
    ]  # fmt: skip


class Heard(Hooks):
    """Notes what it is told."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.evals: list[dict[str, Any]] = []
        self.paths: list[str] = []

    def on_step(self, trainer, record):
        assert trainer.step == record["step"]
        self.steps.append(record)

    def on_eval(self, trainer, record):
        self.evals.append(record)

    def on_checkpoint(self, trainer, path):
        assert (path / "manifest.json").is_file()
        self.paths.append(path.name)


@pytest.mark.spec("TRAIN-HOOK-D1")
def test_hooks_hear_of_steps_evaluations_and_checkpoints(tmp_path):
    heard = Heard()
    folder = run(tmp_path / "run", hooks=[heard]).folder
    records = read_metrics(folder / "metrics.jsonl")
    assert heard.steps == [r for r in records if r["event"] == "train"] and len(heard.steps) == 20
    assert heard.evals == [r for r in records if r["event"] == "eval"] and len(heard.evals) == 2
    assert heard.paths == [p.name for p in checkpoints(folder / "checkpoints")]
    plain = run(tmp_path / "plain")
    assert plain.score == run(tmp_path / "again", hooks=[Heard()]).score


@pytest.mark.spec("TRAIN-HOOK-D1")
@pytest.mark.parametrize("name", ["on_step", "on_eval", "on_checkpoint"])
def test_a_hook_that_fails_is_named_and_the_run_can_go_on(tmp_path, name):
    class Broken(Hooks):
        pass

    setattr(Broken, name, lambda *_: {}["gone"])
    with pytest.raises(HookError, match=rf"^hook Broken\.{name} failed with KeyError: 'gone'; .*--resume"):
        run(tmp_path / "run", hooks=[Hooks(), Broken()])
    assert run(tmp_path / "run", resume=True).step == 20


class Kept(LoggerKind):
    """kept: a list, for tests."""

    kind: Literal["kept"] = "kept"
    fails_at: int = -1
    package, name = "builtins", "a list"

    def open(self, folder, config):
        if self.fails_at == 0:
            raise OSError("no room")
        return _Kept(self.fails_at, config)


class _Kept(Logger):
    opened: ClassVar[list[_Kept]] = []

    def __init__(self, fails_at, config):
        self.fails_at, self.config, self.records, self.closed = fails_at, config, [], False
        self.opened.append(self)

    def log(self, record):
        if record["step"] == self.fails_at:
            raise ValueError("cannot")
        self.records.append(record)

    def close(self):
        self.closed = True


@pytest.mark.spec("TRAIN-LOG-D1")
def test_a_logger_of_ones_own_is_told_every_line_once(tmp_path):
    _Kept.opened.clear()
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", model=Interrupted(14), loggers=["kept"])
    run(tmp_path / "run", resume=True, model=TiedGRU(seed=9), loggers=["kept"])
    first, second = _Kept.opened
    assert first.closed and second.closed and first.config["name"] == "tiny"
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [r for r in first.records if r["step"] <= 10] + second.records == records


@pytest.mark.spec("TRAIN-LOG-D1")
@pytest.mark.parametrize(("step", "said"), [(0, "OSError: no room"), (3, "ValueError: cannot")])
def test_a_logger_that_fails_is_named(tmp_path, step, said):
    kinds = [{"kind": "kept", "fails_at": step}]
    with pytest.raises(HookError, match=rf"^logger kept failed with {said}"):
        run(tmp_path / "run", loggers=kinds)


@pytest.mark.spec("TRAIN-LOG-D1")
def test_a_logger_that_is_missing_is_named(tmp_path, monkeypatch):
    line = re.escape(install_line("track"))
    for kind in ("wandb", "trackio"):
        monkeypatch.setitem(sys.modules, kind, None)
        with pytest.raises(ConfigError, match=rf"^loggers\[1\]: needs {kind}: {line}, or leave it out"):
            run(tmp_path / "run", loggers=["kept", kind])
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=f"tensorboard: needs TensorBoard: {line}"):
        run(tmp_path / "run", tensorboard=True)
    assert not (tmp_path / "run").exists()


def test_numbers_of_a_record():
    record = {"event": "train", "step": 3, "time": 1.5, "loss": 2.0, "tokens": 7, "status": "x", "sound": True}
    assert numbers(record) == {"train/loss": 2.0, "train/tokens": 7}
