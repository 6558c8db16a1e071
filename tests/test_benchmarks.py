"""The benchmarks run, agree with their peers, and drop no row; nothing here is about time."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import learning, lengths, peers, tables
from benchmarks.__main__ import GROUPS, main
from benchmarks.harness import Cost, Row, Size, compare, forward_backward, peak_mib
from hecate.errors import NonFiniteError
from hecate.rule import RULES


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """float32 throughout, denormals as they were, figures in a folder of their own."""
    monkeypatch.setattr(lengths, "FIGURE", tmp_path / "figure.png")
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_flush_denormal(False)


@pytest.mark.parametrize("group", list(GROUPS))
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_group_runs_and_writes_its_rows(group: str, tmp_path: Path, capsys) -> None:
    main([group, "--quick", "--json", str(tmp_path / "rows.json")])
    record = json.loads((tmp_path / "rows.json").read_text())
    printed = capsys.readouterr().out
    assert record["rows"] and record["matmul_gflops"] > 1
    for row in record["rows"]:
        measured = row["forward"] or row["both"] or row["memory"] or row["slopes"][0]
        assert measured or row["note"].startswith("absent: ")
        assert row["error"] is None or row["error"] <= 1e-3
        assert row["case"] in printed and row["peer"] in printed
    if group == "lengths":
        assert lengths.FIGURE.stat().st_size > 5000


def test_a_missing_peer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {row.peer for group in ("delta", "mlp") for row in GROUPS[group](Size(64, 1, True))}
    monkeypatch.setattr(peers, "installed", lambda package: False)
    rows = [row for group in ("delta", "mlp") for row in GROUPS[group](Size(64, 1, True))]
    assert {row.peer for row in rows} == here
    assert all(row.note.startswith("absent: pip install ") for row in rows)
    assert all(row.note in tables.speed(rows) and row.note in tables.line(row) for row in rows)


def test_results_that_differ_are_not_timed() -> None:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))

    def kinked(x: Tensor) -> Tensor:  # the same value with another gradient
        return x.exp() + (x - x.detach())

    with pytest.raises(AssertionError, match=r"case: results differ by .* from the peer"):
        compare("group", "case", kinked, "the peer", torch.exp, [x], repeats=1)


def test_peak_memory_is_that_of_the_largest_moment() -> None:
    mib = 2**18  # float32 numbers

    def run() -> None:
        first = torch.empty(3 * mib)
        del first
        _both = torch.empty(mib), torch.empty(mib)

    assert peak_mib(run) == pytest.approx(3.0, rel=1e-3)


def test_peak_memory_sees_what_autograd_keeps() -> None:
    x = torch.zeros(2**18)  # 1 MiB; exp keeps its result, and each gradient is one more
    steps = 6

    def chain(x: Tensor) -> Tensor:
        for _ in range(steps):
            x = x.exp()
        return x

    peak = peak_mib(forward_backward(chain, [x]))
    assert steps <= peak <= steps + 4


def test_slopes_and_ratios() -> None:
    assert lengths.slope([(n, 3.0 * n**2) for n in (1, 2, 8)]) == pytest.approx(2.0)
    row = Row("group", "case", "peer", forward=Cost(1.0, 4.0), goal=(0.5, None))
    assert "| case | peer | 0.25 | - | - | 0.5, - |" in tables.speed([row])


def test_rules_are_trained_row_by_row_and_never_twice(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(learning, "ProcessPoolExecutor", Here)
    path = tmp_path / "rows.jsonl"
    given = ["rules", "delta", "atlas", "--steps", "1", "--json", str(path)]
    main(given)
    written = path.read_text()
    records = [json.loads(line) for line in written.splitlines()]
    jobs = [(record["rule"], record["task"]) for record in records]
    tasks = ("mqar", "quickstart")
    assert sorted(jobs) == [(rule, task) for rule in ("atlas", "delta") for task in tasks]
    assert all(0 <= record["value"] < 9 and record["loss"] > 0 for record in records)
    narrow, matrix = (
        next(record["state_bytes"] for record in records if record["rule"] == rule)
        for rule in ("atlas", "delta")
    )
    # Closest to 4 KiB: two heads of 23 x 23 floats and a position; 9 x 21 twice, and a window of
    # 4 tokens.
    assert matrix == 2 * (4 * 23 * 23 + 8)
    assert narrow == 2 * (4 * (2 * 9 * 21 + 4 * (21 + 9 + 1)) + 8)
    path.write_text(written[:-20])  # a crash while the last line was written
    main(given)
    again = path.read_text().splitlines()
    assert len(again) == len(records) + 1 and written.startswith("\n".join(again[:3]))
    assert json.loads(again[-1])["value"] == records[-1]["value"]
    capsys.readouterr()
    monkeypatch.setattr(learning, "train", None)
    main(given)
    printed = capsys.readouterr().out
    assert re.search(r"\| delta \| \w+ \| \de-1\d \| 4248 \| \d\.\d{3} \| \d\.\d{3} \|", printed)


class Here:
    """Runs jobs in this process."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, function, job):
        future: Future[object] = Future()
        future.set_result(function(job))
        return future


def test_a_rule_that_fails_is_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: object) -> None:
        raise NonFiniteError("memory 'layer 0' holds NaN")

    monkeypatch.setattr(learning.Trainer, "train_step", refused)
    record = learning.train(learning.Job("delta", "mqar", 1))
    assert record["failed"] == "NonFiniteError: memory 'layer 0' holds NaN"
    assert "| failed |" in learning.table([record], {"delta": 0.0})


def test_every_rule_has_an_experiment_for_every_task() -> None:
    for task in learning.SETTINGS:
        for rule in RULES:
            config = learning.Job(rule, task, 7).experiment()
            assert config.budget.steps == 7 and config.model.d_model == 32
