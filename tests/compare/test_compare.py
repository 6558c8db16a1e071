"""Comparisons: statistics against other formulas, fair cells, and a folder that goes on where it was killed."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import hecate.compare.run as runs
from hecate.compare import Budget, cells_of, holm, interval, pairs
from hecate.compare.cells import Cell, check_once, seeds_of
from hecate.compare.report import _images
from hecate.compare.run import Comparison
from hecate.compare.statistics import critical, paired, tail
from hecate.data import Loader
from hecate.errors import ConfigError, NonFiniteError
from hecate.train import Trainer, load_experiment
from hecate.train.evaluate import Score

TINY = """
name: tiny
data: {kind: mqar, vocab_size: 16, num_pairs: 2, seq_len: 8}
model: {d_model: 8, layers: 1, heads: 2, mlp_ratio: 1.0, conv_kernel: 2}
optim: {warmup: 3}
budget: {steps: 40, batch_size: 4, eval_every: 20, eval_batches: 2, checkpoint_every: 5, threads: 1}
"""


@pytest.fixture
def base(tmp_path: Path) -> str:
    path = tmp_path / "base.yaml"
    path.write_text(TINY)
    return str(path)


def density(x: float, freedom: int) -> float:
    scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)
    return math.exp(scale) / math.sqrt(freedom * math.pi) * (1 + x * x / freedom) ** (-(freedom + 1) / 2)


@pytest.mark.spec("COMPARE-STAT-D1")
@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 10])
def test_tails_are_integrals_of_the_density(freedom: int):
    t, parts = 1.7, 2000  # Simpson's rule: its error is below 1e-10 at this step
    width = t / parts
    inner = sum((4 if n % 2 else 2) * density(n * width, freedom) for n in range(1, parts))
    inside = 2 * width / 3 * (density(0, freedom) + inner + density(t, freedom))
    assert tail(t, freedom) == tail(-t, freedom) == pytest.approx(1 - inside, abs=1e-9)


@pytest.mark.spec("COMPARE-STAT-D1")
def test_intervals_are_those_of_printed_tables():
    for freedom, value in ((1, 12.706), (2, 4.303), (4, 2.776), (9, 2.262), (30, 2.042)):  # of any textbook
        assert critical(freedom) == pytest.approx(value, abs=5e-4)
    found = interval([1.0, 2.0, 3.0])
    assert found.mean == 2 and found.half == pytest.approx(4.303 / math.sqrt(3), abs=1e-3)
    assert math.isnan(interval([1.0]).half) and math.isnan(interval([1.0, math.inf]).half)


@pytest.mark.spec("COMPARE-STAT-D2")
def test_verdicts_are_paired_and_corrected():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])  # Holm (1979), by hand
    assert holm([]) == [] and holm([0.9, 0.8]) == [1.0, 1.0]
    noise = [0.0, 3.0, -2.0, 5.0]  # of seeds, far above the difference: only pairing finds it
    found = pairs({"a": noise, "b": [x + 0.1 + 0.001 * n for n, x in enumerate(noise)], "c": [-x for x in noise]})
    assert [pair.verdict for pair in found] == ["better", "cannot tell", "cannot tell"]
    assert pairs({"b": [1.0, 1.1, 1.2], "a": [0.0, 0.1, 0.2]})[0].verdict == "worse"
    assert pairs({"a": [0.0], "b": [9.0]})[0].verdict == "cannot tell"
    assert paired([1.0, math.inf]) == paired([0.0, 0.0]) == 1.0
    with pytest.raises(ConfigError, match="same seeds"):
        pairs({"a": [0.0], "b": [1.0, 2.0]})


@pytest.mark.spec("COMPARE-GRID-D1")
@pytest.mark.parametrize(("over", "told"), [
    (["memory=delta,nonsense"], "^cell 'memory=nonsense': "),
    (["nosuch=1,2"], "nosuch: no such setting"),
    (["memory"], "--over needs path=value,value"),
    (["memory=delta,delta"], "a value twice"),
    (["memory=delta", "memory=titans"], "names 'memory' twice"),
    (["memory=delta"], "needs two configs or more"),
    (["budget.batch_size=2,4"], "differ in budget.batch_size"),
    (["data.num_pairs=1,2"], "differ in data"),
    (["name=a,b"], "the same experiment"),
    (["budget.minutes=1,2"], "budget.minutes"),
    (["init_from=here,nowhere"], "cell 'init_from=nowhere': init_from: nothing is at nowhere"),
])  # fmt: skip
def test_bad_cells_are_told_before_anything_runs(base: str, over: list[str], told: str):
    with pytest.raises(ConfigError, match=told):
        cells_of([base], over)


@pytest.mark.spec("COMPARE-GRID-D1")
def test_cells_are_the_product_of_all_values(base: str):
    cells = cells_of([base], ["memory=delta,titans", "memory.feature_map=elu,{kind: dpfp, nu: 2}"])
    assert len(cells) == 4 and len({cell.folder for cell in cells}) == 4
    assert cells[1].label == "memory=delta, memory.feature_map={kind: dpfp, nu: 2}"
    assert cells[1].config.model.memory.feature_map.kind == "dpfp"
    assert [cell.config.data.examples for cell in cells_of([base], ["data.examples=4,8"])] == [4, 8]  # judged alike


@pytest.mark.spec("COMPARE-BUDGET-D1", "COMPARE-LR-D1")
def test_budgets_in_steps_and_seeds_apart(base: str):
    from hecate.train.estimate import flops_of

    one, two = cells_of([base], ["model.d_model=8,16"])
    assert Budget().steps_of(one) == 40 and Budget(steps=7).steps_of(one) == 7
    assert Budget(tokens=330).steps_of(one) == 10 and Budget(seconds=3).steps_of(one, 5.5) == 16
    flops = 3 * flops_of(one.config) * 4 * 8 * 12
    assert Budget(flops=flops).steps_of(one) == 12 > Budget(flops=flops).steps_of(two) >= 1
    with pytest.raises(ConfigError, match="0.03125 steps"):
        Budget(tokens=1).steps_of(one)
    with pytest.raises(ConfigError, match="one budget at a time, got --steps and --tokens"):
        Budget(steps=1, tokens=1)
    with pytest.raises(ConfigError, match="--flops must be a number above 0"):
        Budget(flops=-1)
    with pytest.raises(ConfigError, match="--steps must be a whole number, got 10.7$"):
        Budget(steps=10.7)
    reported, tuning = seeds_of(10_000, 10_000)
    assert not set(reported) & set(tuning)


@pytest.mark.spec("COMPARE-GRID-D1")
@pytest.mark.parametrize(("given", "how", "told"), [
    ("budget.steps=20", {"budget": Budget(steps=10)}, "budget.steps=20 is set by --steps, too"),
    ("optim.lr=0.1", {"lrs": [0.1, 0.2]}, "optim.lr=0.1 is set by --lr, too"),
    ("seed=3", {}, "seed=3 is set by --seeds, too"),
])  # fmt: skip
def test_what_an_option_sets_no_override_may(base: str, given: str, how: dict[str, Any], told: str):
    cells = cells_of([base], ["memory=delta,titans"], [given])
    with pytest.raises(ConfigError, match=told):
        check_once(cells, how.get("budget", Budget()), how.get("lrs", ()))
    check_once(cells_of([base], ["memory=delta,titans"], ["budget.steps=20"]), Budget(), [0.1])


@pytest.mark.spec("COMPARE-PAIR-D1")
def test_a_seed_has_the_same_batches_in_every_cell(base: str):
    cells = cells_of([base], ["memory=delta,titans", "optim.lr=1e-3,1e-2"])

    def batches(seed: int) -> list[list[list[list[int]]]]:
        loaders: list[Loader] = [Trainer(cell.at(seed, 9)).loader for cell in cells]
        return [[loader.next().tokens.tolist() for _ in range(3)] for loader in loaders]

    first, other = batches(0), batches(1)
    assert all(found == first[0] for found in first) and other[0] != first[0]


def command(base: str, out: Path, *more: str) -> list[str]:
    given = ["--over", "memory=delta,gated_delta", "--seeds", "2", "--out", str(out), "--steps", "200", *more]
    return [sys.executable, "-m", "hecate", "compare", base, *given]


def results(out: Path) -> dict[str, float]:
    found = out.glob("runs/*/*/result.json")
    return {str(path.relative_to(out)): json.loads(path.read_text())["loss"] for path in found}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.spec("COMPARE-RESUME-D1", "COMPARE-REPORT-D1", "COMPARE-LR-D1")
def test_a_killed_comparison_goes_on(base: str, tmp_path: Path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    done = subprocess.run(command(base, whole, "--jobs", "2"), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "cannot tell" in done.stdout or "better" in done.stdout or "worse" in done.stdout
    assert {"cells.csv", "pairs.csv", "runs.csv", "comparison.json"} <= {path.name for path in whole.iterdir()}

    process = subprocess.Popen(command(base, killed), stderr=subprocess.DEVNULL)
    until = time.monotonic() + 120
    while not list(killed.glob("runs/*/*/checkpoints/step_*")):  # it is in the middle of its first run
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    again = subprocess.run(command(base, killed), capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stderr
    assert len(results(whole)) == 4 and results(killed) == results(whole)  # to the bit

    kept = {path: path.stat().st_mtime_ns for path in killed.glob("runs/*/*/result.json")}
    third = subprocess.run(command(base, killed, "--seeds", "3"), capture_output=True, text=True, timeout=300)
    assert third.returncode == 0 and len(results(killed)) == 6
    assert {path: path.stat().st_mtime_ns for path in kept} == kept

    moved = tmp_path / "moved"  # the records alone
    moved.mkdir()
    (moved / "results.jsonl").write_bytes((killed / "results.jsonl").read_bytes())
    fourth = subprocess.run(command(base, moved, "--seeds", "3"), capture_output=True, text=True, timeout=60)
    assert fourth.returncode == 0 and not results(moved)
    assert (moved / "pairs.csv").read_text() == (killed / "pairs.csv").read_text()
    other = subprocess.run(command(base, moved, "--set", "optim.warmup=2"), capture_output=True, text=True, timeout=60)
    assert other.returncode == 2 and "of another config than cell" in other.stderr


class Counted(runs._Work):
    """Runs that come to a loss by their rate, cell and steps, without training."""

    def results(self, jobs: Sequence[runs._Job], at_once: int) -> list[runs.Row]:
        worth = {"memory=delta": 3.0, "memory=gla": 1.0, "memory=titans": 2.0, "memory=hebbian": 4.0, "memory=kda": 5.0}
        losses = [worth[job.cell.label] + abs(math.log(job.config.optim.lr / 0.01)) for job in jobs]
        return [{"status": "finished", "loss": loss} for loss in losses]


@pytest.mark.spec("COMPARE-HALVE-D1", "COMPARE-LR-D1")
def test_halving_leaves_the_better_half_of_every_round(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runs, "_Work", Counted)
    cells = cells_of([base], ["memory=delta,gla,titans,hebbian,kda"])
    how: dict[str, Any] = {"budget": Budget(steps=80), "seeds": 2, "lrs": [0.001, 0.01]}
    found = runs.compare(cells, tmp_path, keep=2, **how)
    assert [cell.label for cell in found.cells] == ["memory=gla", "memory=titans"]
    assert {row["steps"] for row in found.rows} == {80} and {row["lr"] for row in found.rows} == {0.01}
    short = [row["cell"] for row in found.tuning if row["steps"] == 20]
    assert len(short) == 10 and len([row for row in found.tuning if row["steps"] == 40]) == 6
    out = [note.split(":")[0] for note in found.notes if "left out after" in note]
    assert out == ["memory=hebbian", "memory=kda", "memory=delta"]
    part = runs.compare(cells[:2], tmp_path, part=0.25, **how)
    assert {row["steps"] for row in part.tuning} == {20}
    for more, told in (({"keep": 5}, "--keep must be in"), ({"keep": 1, "part": 0.5}, "leave --tuning-part out")):
        with pytest.raises(ConfigError, match=told):
            runs.compare(cells, tmp_path, **how, **more)
    how["lrs"] = [1e-3]
    for call in (runs.compare, runs.plan):
        with pytest.raises(ConfigError, match="--tuning-part is of runs that choose between rates"):
            call(cells, tmp_path, **how, part=0.5)


@pytest.mark.spec("COMPARE-LR-D1")
def test_who_diverges_in_a_whole_run_goes_down_a_rate(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Diverging(Counted):
        def results(self, jobs: Sequence[Any], at_once: int) -> list[dict[str, Any]]:
            rows = super().results(jobs, at_once)
            for job, row in zip(jobs, rows, strict=True):
                config, late = job.config, job.config.budget.steps == 80 and job.config.seed == 1
                if job.cell.label == "memory=titans" and late and config.optim.lr > 0.003:
                    row["loss"] = math.inf
            return rows

    monkeypatch.setattr(runs, "_Work", Diverging)
    cells = cells_of([base], ["memory=delta,titans"])
    how: dict[str, Any] = {"budget": Budget(steps=80), "seeds": 3, "lrs": [0.001, 0.003, 0.01]}
    found = runs.compare(cells, tmp_path, part=0.25, **how)
    assert {(row["cell"], row["lr"]) for row in found.rows} == {("memory=delta", 0.01), ("memory=titans", 0.003)}
    assert all(math.isfinite(row["loss"]) for row in found.rows) and len(found.rows) == 6
    assert "memory=titans: diverged at 0.01, and is taken at 0.003" in found.notes
    whole = runs.compare(cells, tmp_path, **how)  # whose rates were chosen on whole runs
    assert [row["loss"] for row in whole.rows if row["lr"] == 0.01].count(math.inf) == 1


@pytest.mark.spec("COMPARE-REPORT-D1")
def test_what_diverges_beyond_its_length_keeps_its_loss(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def diverging(*_: Any) -> None:
        raise NonFiniteError("memory 'layer 0' became non-finite")

    monkeypatch.setattr(runs, "loss_by_position", diverging)
    cell, _ = cells_of([base], ["memory=delta,gated_delta"], ["budget.steps=2"])
    assert runs.run(cell.config, tmp_path / "run", positions=1) == 0
    found = json.loads((tmp_path / "run" / "result.json").read_text())
    assert found["status"] == "finished" and found["loss"] > 0
    assert found["positions"] is None and "non-finite" in found["positions_reason"]


@pytest.mark.spec("COMPARE-LR-D1")
def test_a_run_that_ends_without_a_finite_loss_has_diverged(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Trainer, "evaluate", lambda _: Score(math.nan, 0.0, 1))  # as after a last step that is too long
    cell, _ = cells_of([base], ["memory=delta,gated_delta"], ["budget.steps=1"])
    assert runs.run(cell.config, tmp_path / "run", positions=0) == 0
    found = json.loads((tmp_path / "run" / "result.json").read_text())
    assert found["status"] == "diverged" and found["reason"] == "the validation loss is nan"


@pytest.mark.spec("COMPARE-RESUME-D1", "COMPARE-PAIR-D1")
def test_runs_on_data_that_changed_are_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    text = tmp_path / "text.txt"
    (tmp_path / "base.yaml").write_text(TINY.replace(
        "{kind: mqar, vocab_size: 16, num_pairs: 2, seq_len: 8}", f"{{kind: text, paths: [{text}]}}"
    ).replace("eval_every", "seq_len: 8, eval_every"))  # fmt: skip
    cells = cells_of([str(tmp_path / "base.yaml")], ["memory=delta,gated_delta"], ["sample.tokens=0"])
    out, seed = tmp_path / "out", "steps-1-lr-0.003-seed-0"
    for number, cell in enumerate(cells):
        text.write_text(f"text {number} and another " * 40)
        runs.run(cell.at(0, 1), out / "runs" / cell.folder / seed, positions=0)
    told = f"^the data changed between the runs of cells memory=delta, {seed} and memory=gated_delta, {seed}, so"
    with pytest.raises(ConfigError, match=told):
        runs.compare(cells, out, budget=Budget(steps=1), seeds=1)
    shutil.rmtree(out / "runs" / cells[1].folder)  # before it is trained anew, for hours
    monkeypatch.setattr(runs._Work, "_start", lambda *_: pytest.fail("a run began"))
    text.write_text("text 2 and another " * 40)
    with pytest.raises(ConfigError, match=told):
        runs.compare(cells, out, budget=Budget(steps=1), seeds=1)


@pytest.mark.spec("COMPARE-CURVE-D1")
def test_a_curve_is_made_of_means_over_equal_ratios_of_tokens():
    records = [{"event": "train", "tokens": 10 * step, "loss": float(step % 2)} for step in range(1, 1025)]
    records += [{"event": "eval", "tokens": 10, "loss": 9.0}, {"event": "train", "tokens": 10, "loss": 3.0}]  # resumed
    found = runs.curve(records)
    assert found[0] == (10, 3.0) and found[-1][0] == 10240 and len(found) <= runs.POINTS
    assert all(abs(loss - 0.5) < 0.02 for tokens, loss in found if tokens > 1000)
    late = [tokens for tokens, _ in found if tokens > 1000]
    assert max(b / a for a, b in pairwise(late)) / min(b / a for a, b in pairwise(late)) < 1.1
    ends = [runs.curve(records[:steps])[-2:] for steps in range(2, 1025)]
    assert all(end[0][0] * 1.05 < end[1][0] for end in ends[100:])  # no place for the last step alone
    assert runs.curve(records[:1]) == [(10, 1.0)] and runs.curve([]) == []


@pytest.mark.spec("COMPARE-PLAN-D1", "COMPARE-BUDGET-D1")
@pytest.mark.parametrize("start", [runs.plan, runs.compare])
@pytest.mark.parametrize(("over", "how", "told"), [
    ("memory=delta,titans", {"budget": Budget(seconds=5), "lrs": [-1.0, 1e-3]}, "cell 'memory=delta': optim.lr"),
    ("budget.steps=20,40", {"budget": Budget()}, "different budget.steps"),
    ("memory=delta,titans", {"budget": Budget(steps=5), "jobs": 0}, "--jobs must be in"),
])  # fmt: skip
def test_what_cannot_run_is_told_before_a_speed_is_measured(
    base: str, tmp_path: Path, start: Any, over: str, how: dict[str, Any], told: str
):
    with pytest.raises(ConfigError, match=told):
        start(cells_of([base], [over]), tmp_path / "out", seeds=1, **how)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.spec("COMPARE-PLAN-D1", "COMPARE-BUDGET-D1")
def test_a_plan_states_runs_steps_and_hours(base: str, tmp_path: Path):
    given = command(base, tmp_path / "out", "--lr", "1e-3,1e-2", "--plan")
    done = subprocess.run(given, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    row = next(line.split() for line in done.stdout.splitlines() if line.startswith("memory=delta"))
    assert row[1:3] == ["4", "200"] and "hours of training" in done.stdout  # two seeds and two rates on one other
    assert not (tmp_path / "out" / "runs").exists()


def test_names_as_long_as_settings_leave_the_figure_its_room():
    """Else matplotlib warns that axes have collapsed, and warnings are errors here."""
    pytest.importorskip("matplotlib")
    config = load_experiment("quickstart")
    cells = [Cell(f"memory.kind=gated_delta, optim.optimizer.kind=adamw, {'x' * 28} {n}", (), config) for n in (0, 1)]
    names = "lr", "steps", "tokens", "parameters", "state_bytes", "flops", "tokens_per_second", "seconds"
    known: dict[str, Any] = dict.fromkeys(names, 1)
    curve = [[10, 3.0], [100, 2.0]]
    row = {**known, "loss": 1.0, "status": "finished", "metric": "bits_per_byte", "bits_per_byte": 1.4, "curve": curve}
    found = Comparison(cells, [{**row, "cell": cell.label} for cell in cells], [], [], [])
    assert set(_images(found)) == {"png", "svg"}
