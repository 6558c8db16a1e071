"""Costs against peers: they run, agree, and drop no row; nothing here is about time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hecate.rule import RULES
from studies.costs import cases
from studies.costs.harness import Peer, Row, Size, cells, compare, cost_of, forward_backward, peak_mib
from studies.study import run_study, studies
from tests import forked
from tests.oracle import peers


@pytest.fixture(autouse=True)
def as_on_the_command_line() -> Iterator[None]:
    """float32 throughout."""
    torch.set_default_dtype(torch.float32)
    yield


@pytest.mark.slow  # `.ci/run` runs `python -m studies all --quick`
@pytest.mark.parametrize("name", [name for name in studies() if name.startswith("cost-") and name != "cost-rules"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_group_runs_and_writes_its_rows(name: str, tmp_path: Path, capsys) -> None:
    result = run_study(name, quick=True, out=tmp_path)
    facts = json.loads((tmp_path / f"{name}-quick.json").read_text())["data"]
    printed = capsys.readouterr().out
    assert facts["rows"]
    for row, shown in zip(facts["rows"], result.rows, strict=True):
        measured = row["forward"] or row["both"] or row["memory"]
        assert measured or row["note"].startswith("absent: ")
        assert row["error"] is None or row["error"] <= 1e-3
        assert shown[:2] == (row["case"], row["peer"]) and row["case"] in printed
    assert (tmp_path / f"{name}-quick.png").stat().st_size > 5000


def test_every_rule_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    """The registry decides which: here two of it."""
    monkeypatch.setattr(cases, "RULES", {name: RULES[name] for name in ("rwkv7", "omeganet")})
    result = run_study("cost-rules", quick=True, out=tmp_path)
    facts = json.loads((tmp_path / "cost-rules-quick.json").read_text())["data"]
    rows = {row[0]: dict(zip(result.columns, row, strict=True)) for row in result.rows}
    assert list(rows) == ["rwkv7", "omeganet"] and "papers_steps.omeganet" in capsys.readouterr().out
    assert rows["rwkv7"]["reference"] == "papers_2025.rwkv7"
    assert rows["omeganet"]["engine"] == "window" and rows["omeganet"]["tokens/s, chunk 64"] > 0
    for row in rows.values():
        assert float(row["error"]) < 1e-12 and float(row["error of gradients"]) < 1e-7
        assert row["tokens/s"] > 0 and row["state MiB"] >= 0
    assert set(facts) == {*rows, "omeganet, chunk 64"}
    assert (tmp_path / "cost-rules-quick.png").stat().st_size > 5000
    assert set(cases.CHUNKED) <= set(RULES)


def test_chunks_of_a_rule_with_a_link_take_it_at_their_start() -> None:
    config = cases.chunked(RULES["moneta"].config, 8)
    assert (config.chunk, config.retention.link_at) == (8, "linear")
    assert cases.chunked(RULES["titans"].config, 8) == RULES["titans"].config.model_copy(update={"chunk": 8})


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux counts the peak of resident memory")
def test_added_memory_is_that_of_the_largest_moment() -> None:
    """In a process of its own, as every rule has: here an allocator may keep what other tests have freed."""
    done = forked.run(
        "from studies.costs.cases import added_mib\n"
        "from tests.studies.test_costs import one_after_the_other\nprint(added_mib(one_after_the_other))"
    )
    assert 60 < float(done.stdout) < 70, done.stderr


def one_after_the_other() -> None:
    first = torch.ones(16 * 2**20)
    del first
    _second = torch.ones(8 * 2**20)


def test_a_missing_peer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "installed", lambda package: False)
    rows = [row for group in (cases.delta, cases.mlp) for row in group(Size(64, 1, True))]
    monkeypatch.undo()
    monkeypatch.setattr(cases, "compare", lambda case, _, peer, *__, **___: Row(case, peer.name))  # measures nothing
    assert {row.peer for row in rows} == {
        row.peer for group in (cases.delta, cases.mlp) for row in group(Size(64, 1, True))
    }
    assert all(row.note.startswith("absent: pip install ") for row in rows)
    assert all(row.note in cells(row) for row in rows)


def test_results_that_differ_are_not_timed() -> None:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))

    def kinked(x: Tensor) -> Tensor:  # the same value with another gradient
        return x.exp() + (x - x.detach())

    with pytest.raises(AssertionError, match=r"case: results differ by .* from the peer"):
        compare("case", kinked, Peer("the peer", torch.exp), [x], 1)


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


def test_ratios() -> None:
    row = Row("case", "peer", forward=cost_of(1.0, 4.0))
    assert cells(row) == ("case", "peer", 0.25, None, None, None, None)
