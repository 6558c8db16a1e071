"""Run folders: what they hold, how they are resumed, and what signals do."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from hecate.compare.run import curve
from hecate.errors import CheckpointError, ConfigError
from hecate.files import commit_of
from hecate.train import checkpoints, load_experiment, open_run, run_experiment
from hecate.train.display import Display
from hecate.train.loggers import MetricsWriter, read_metrics
from hecate.train.report import column, html_page, markdown_table

from .common import Interrupted, TiedGRU, quiet_run, tiny


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """A run whose report has figures: it is made before those of a test are turned off."""
    pytest.importorskip("matplotlib.figure")
    return run_experiment(tiny(), tmp_path_factory.mktemp("drawn") / "run", display=Display(quiet=True))


@pytest.mark.spec("TRAIN-RUN-D1")
def test_what_a_run_leaves(drawn):
    result, folder = drawn, drawn.folder
    assert (result.status, result.step, result.signal) == ("finished", 20, None)
    assert sorted(p.name for p in folder.iterdir()) == [
        "checkpoints", "config.yaml", "env.json", "figures", "metrics.jsonl",
        "report.html", "report.md", "samples.txt",
    ]  # fmt: skip
    assert load_experiment(folder / "config.yaml") == tiny()
    environment = json.loads((folder / "env.json").read_text())
    assert environment["versions"]["torch"] == torch.__version__ and environment["threads"] == 1
    assert [p.name for p in checkpoints(folder / "checkpoints")] == ["step_00000010", "step_00000020"]
    drawn = {p.name for p in (folder / "figures").iterdir()}
    assert drawn == {"accuracy.png", "accuracy.svg", "loss.png", "loss.svg"}
    records = read_metrics(folder / "metrics.jsonl")
    assert [r["event"] for r in records].count("train") == 20
    assert [r["step"] for r in records if r["event"] == "eval"] == [10, 20]
    report = (folder / "report.md").read_text()
    for text in (
        "| a value of the row (baseline) | 0.5000 |",
        f"| **this model** | **{result.score.accuracy:.4f}",
        "bytes, whatever its length", "![accuracy](figures/accuracy.svg)", "## Settings", environment["started"],
        "hecate train", "torch 2.",
    ):  # fmt: skip
        assert text in report, text
    assert "label" in (folder / "samples.txt").read_text()


@pytest.mark.spec("TRAIN-RUN-D1")
def test_the_page_of_a_report_needs_no_other_file(tmp_path, drawn):
    folder = Path(shutil.copytree(drawn.folder, tmp_path / "run"))
    page = (folder / "report.html").read_text()
    assert re.findall(r'(?:src|href)="([^"]{0,26})', page) == ["data:image/svg+xml;base64,"] * 2
    for picture in (folder / "figures").glob("*.svg"):
        assert base64.b64encode(picture.read_bytes()).decode() in page
    assert "<table>" in page and "<strong>this model</strong>" in page and "<h2>Settings</h2>" in page
    (folder / "figures/loss.png").unlink()
    (folder / "figures/loss.png").symlink_to("/etc/hostname")
    again = html_page("# <b>\n\n![x](figures/loss.png) <script>\n\n![y](../other.svg)\n", folder)
    assert "base64" not in again and "<script>" not in again and "<title>&lt;b&gt;</title>" in again


@pytest.mark.spec("TRAIN-RUN-D1")
def test_names_of_others_stay_in_the_code_of_a_report(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/x/own/__main__.py", "train", "--set", "a\n\n# A heading\x1b[31m"])
    config = tiny(budget={"steps": 1}, sample={"prompt": "<!-- kept -->"})
    folder = quiet_run(config, tmp_path / "run\n```\n\n# Another").folder
    text, page = (folder / "report.md").read_text(), (folder / "report.html").read_text()
    assert "`python -m own train --set 'a\\n\\n# A heading\\x1b[31m'`" in text
    assert re.findall(r"<h1>.*</h1>", page) == ["<h1>tiny</h1>"]
    assert page.count("<pre>") == 2 and "&lt;!-- kept --&gt;" in page


def test_a_bar_in_a_cell_does_not_end_it():
    text = markdown_table(("fact", "value"), [("`a|b`", "c|d")])
    assert text.splitlines()[2] == "| `a\\|b` | c\\|d |" and html_page(text, Path()).count("<td>") == 2


@pytest.mark.spec("TRAIN-RUN-D1")
def test_the_commit_of_a_folder_is_what_git_says(tmp_path):
    def git(*words: str, at: Path = tmp_path) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(["git", *who, *words], cwd=at, check=True, capture_output=True, text=True).stdout.strip()

    (tmp_path / "in/side").mkdir(parents=True)
    git("init", "-q")
    assert commit_of(tmp_path) is None
    git("commit", "-q", "--allow-empty", "-m", "one")
    assert commit_of(tmp_path / "in/side") == git("rev-parse", "HEAD")
    git("pack-refs", "--all")
    assert commit_of(tmp_path) == git("rev-parse", "HEAD")
    git("worktree", "add", "-q", "-b", "other", str(tmp_path / "in/tree"))
    git("commit", "-q", "--allow-empty", "-m", "two", at=tmp_path / "in/tree")
    assert commit_of(tmp_path / "in/tree") == git("rev-parse", "other") != commit_of(tmp_path)
    git("checkout", "-q", "--detach")
    assert commit_of(tmp_path) == git("rev-parse", "HEAD")


@pytest.mark.spec("TRAIN-RUN-D1")
@pytest.mark.timeout(20)
def test_what_is_no_commit_is_none(tmp_path):
    head, branch = tmp_path / ".git/HEAD", tmp_path / ".git/refs/heads/main"
    branch.parent.mkdir(parents=True)
    for content in (b"\xff", b"", b"\x1b[31m", b"a secret", b"ref: refs/heads/none", b"ref: ../secret", b"1" * 41):
        (tmp_path / "secret").write_text("a secret")
        head.write_bytes(content)
        assert commit_of(tmp_path) is None
    head.write_text("ref: refs/heads/main\n")
    branch.write_text("ref: refs/heads/other\n")
    assert commit_of(tmp_path) is None
    branch.write_text("a1" * 32 + "\n")
    assert commit_of(tmp_path) == "a1" * 32
    branch.write_text("a1" * 20 + " " * (1 << 20))  # of a size that no branch has
    assert commit_of(tmp_path) is None
    head.unlink()
    os.mkfifo(head)  # nobody writes there
    assert commit_of(tmp_path) is None
    head.unlink()
    head.symlink_to("/dev/zero")
    assert commit_of(tmp_path) is None


@pytest.mark.spec("TRAIN-RUN-D1", "TRAIN-RUN-D8")
def test_a_text_run_has_one_unit(tmp_path):
    text = io.StringIO()
    config = tiny(
        data={"kind": "bundled", "max_bytes": 1 << 16}, sample={"tokens": 5}, budget={"steps": 2, "seq_len": 8}
    )
    result = run_experiment(config, tmp_path / "run", display=Display(Console(file=text, width=200)))
    assert result.metric == "bits_per_byte" and set(result.baselines) == {"uniform", "unigram", "bigram"}
    assert result.score.value(result.metric) == pytest.approx(result.score.loss / 0.6931471805599453)
    assert (result.folder / "samples.txt").read_text().startswith("--- step 2\ndef ")
    report = (result.folder / "report.md").read_text()
    assert "| bigram (baseline) |" in report and "bits per byte (lower is better)" in report
    assert "bits per byte" in text.getvalue() and "nats" not in text.getvalue() + report


@pytest.mark.spec("TRAIN-RUN-D5")
def test_a_run_tells_what_its_levels_did(tmp_path):
    levels = [
        {"name": "fast", "memory": {"retention": "decay"}},
        {"name": "slow", "period": 4, "memory": {"algorithm": {"kind": "gd", "lr": 0.1}}},
        {"name": "never", "period": 64, "memory": {"algorithm": {"kind": "gd", "lr": 0.01}}},
    ]
    config = tiny(model={"levels": levels, "conv_kernel": 4}, budget={"steps": 2})
    report = (quiet_run(config, tmp_path / "run").folder / "report.md").read_text()
    section = report.split("## Levels")[1].split("\n## ")[0]
    rows = [line.split(" | ") for line in section.splitlines() if "`" in line]
    assert [row[0] for row in rows] == [f"| `blocks.0.memory` {name}" for name in ("fast", "slow", "never")]
    assert [(row[1], row[2]) for row in rows] == [("1", "8"), ("4", "2"), ("64", "0")]
    assert rows[0][-1] == "no |" and "never committed" in rows[2][-1]
    plain = (quiet_run(tiny(budget={"steps": 1}), tmp_path / "plain").folder / "report.md").read_text()
    assert "## Levels" not in plain


@pytest.mark.spec("TRAIN-LOOP-I2")
def test_a_run_leaves_the_global_random_state_alone(tmp_path):
    model = TiedGRU()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    threads = torch.get_num_threads()
    quiet_run(tiny(budget={"threads": 2, "steps": 2}), tmp_path / "run", model=model)
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == threads


@pytest.mark.spec("CKPT-RESUME-D1")
def test_resuming_says_what_it_skipped(tmp_path):
    quiet_run(tiny(), tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "step_00000020" / "tensors.safetensors").write_bytes(b"x")
    text = io.StringIO()
    result = run_experiment(tiny(), tmp_path / "run", resume=True, display=Display(Console(file=text, width=500)))
    assert result.status == "finished"
    assert re.search(r"skipped step_00000020: .*is truncated or not a safetensors", text.getvalue())
    assert re.search(r"resumed from .*step_00000010 at step 10", text.getvalue())


@pytest.mark.spec("TRAIN-RUN-D2")
def test_a_signal_saves_and_stops(tmp_path):
    number = signal.SIGINT  # tests of a signal elsewhere are of SIGTERM
    before = signal.getsignal(number)
    result = quiet_run(tiny(), tmp_path / "run", model=Interrupted(4, lambda: os.kill(os.getpid(), number)))
    assert signal.getsignal(number) is before
    assert (result.status, result.step, result.signal) == ("interrupted", 4, number)
    assert [p.name for p in checkpoints(result.folder / "checkpoints")] == ["step_00000004"]
    assert "Run interrupted at step 4 of 20" in (result.folder / "report.md").read_text()
    resumed = quiet_run(tiny(), result.folder, model=TiedGRU(), resume=True)
    whole = quiet_run(tiny(), tmp_path / "whole", model=TiedGRU())
    assert resumed.score == whole.score


def test_minutes_end_a_run(tmp_path):
    result = quiet_run(tiny(budget={"minutes": 1e-9}), tmp_path / "run")
    assert result.status == "out of time" and result.step == 0


@pytest.mark.spec("TRAIN-RUN-D3")
def test_folders_are_not_overwritten_or_resumed_by_mistake(tmp_path):
    with pytest.raises(CheckpointError, match="is not a run folder: there is no such folder"):
        quiet_run(tiny(), tmp_path / "run", resume=True)
    assert not (tmp_path / "run").exists()
    quiet_run(tiny(budget={"steps": 1}), tmp_path / "run")
    with pytest.raises(CheckpointError, match="already holds a run; continue it with --resume"):
        quiet_run(tiny(), tmp_path / "run")
    other = tiny(seed=4)
    with pytest.raises(CheckpointError, match="was trained with another 'seed'"):
        quiet_run(other, tmp_path / "run", resume=True)
    assert load_experiment(tmp_path / "run" / "config.yaml").seed == 0
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write run folder"):
        quiet_run(tiny(), tmp_path / "file" / "run")


@pytest.mark.spec("TRAIN-RUN-D4")
def test_opening_a_run_takes_the_best_or_the_newest(tmp_path):
    config = tiny(budget={"eval_every": 5, "checkpoint_every": 5}, optim={"lr": 0.5, "warmup": 0})
    result = quiet_run(config, tmp_path / "run")
    newest, step = open_run(result.folder, "newest")
    assert step == 20 and newest.evaluate() == result.score
    best, step = open_run(result.folder)
    losses = {
        r["step"]: r["validation_loss"]
        for r in read_metrics(result.folder / "metrics.jsonl") if r["event"] == "eval"
    }  # fmt: skip
    assert best.evaluate().loss == min(losses.values()) == losses[step]
    for empty in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(CheckpointError, match="is not a run folder"):
            open_run(empty)
    with pytest.raises(ConfigError, match=r"^checkpoint must be one of 'best', 'newest', got 'worst'$"):
        open_run(result.folder, "worst")


@pytest.mark.spec("TRAIN-METRICS-D1")
def test_metrics_survive_a_killed_writer(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as metrics:
        metrics.write({"event": "train", "step": 1, "loss": 2.0})
        metrics.write({"event": "train", "step": 2, "loss": 1.0})
    with path.open("a") as file:
        file.write('{"event": "train", "st')
    assert [r["step"] for r in read_metrics(path)] == [1, 2]
    with MetricsWriter(path) as metrics:
        metrics.write({"event": "resume", "step": 1})
        metrics.write({"event": "train", "step": 2, "loss": 1.5})
    assert [json.loads(line)["event"] for line in path.read_text().splitlines()] == [
        "train", "train", "resume", "train",
    ]  # fmt: skip
    assert [(r["event"], r["step"]) for r in read_metrics(path)] == [
        ("train", 1), ("resume", 1), ("train", 2),
    ]  # fmt: skip
    assert read_metrics(path)[-1]["loss"] == 1.5


@pytest.mark.spec("TRAIN-METRICS-D1")
def test_metrics_of_another_writer_stop_no_resume(tmp_path):
    result = quiet_run(tiny(budget={"steps": 2}), tmp_path / "run")
    path = result.folder / "metrics.jsonl"
    alien: list[dict[str, object]] = [
        {"event": "train", "step": 1},
        {"event": "train", "step": 1, "loss": "low", "tokens": None, "tokens_per_second": [3], "elapsed": True},
        {"event": "train", "step": 1, "loss": 10**400, "tokens": -(10**30), "tokens_per_second": float("inf")},
        {"event": "train", "step": 10**400, "loss": 1.0},
        {"event": "train", "step": -1, "loss": 1.0},
        {"event": "eval", "step": 1, "validation_loss": {}, "accuracy": "1"},
        {"event": "end", "step": 1, "seconds": "long", "elapsed": float("nan"), "tokens": float("inf")},
        {"event": "other", "step": 1, "tokens": "many", "elapsed": "long"},
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in alien) + "[]\n3\nnot json\n" + path.read_text())
    assert all(
        isinstance(value, float | int) for r in read_metrics(path) for name, value in r.items() if name == "loss"
    )
    again = quiet_run(tiny(budget={"steps": 3}), result.folder, resume=True)
    assert again.status == "finished" and "step 3 of 3" in (again.folder / "report.md").read_text()
    last = read_metrics(path)[-1]
    assert last["event"] == "end" and 0 <= last["elapsed"] < 1000
    assert curve(read_metrics(path))[-1][1] == column(read_metrics(path), "train", "loss")[-1]
    assert not curve(alien[:1])


@pytest.mark.spec("TRAIN-RUN-D1")
def test_without_matplotlib_the_report_says_so(tmp_path):
    result = quiet_run(tiny(budget={"steps": 1}), tmp_path / "run")
    assert "Not drawn: matplotlib is not installed" in (result.folder / "report.md").read_text()
