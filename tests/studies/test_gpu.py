"""The study of a GPU: every part of its code on a CPU, and what a kernel that fails, hangs or kills leaves behind."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
import torch

from hecate.errors import ConfigError
from studies import card, gpu
from studies.__main__ import main
from studies.card import Order, Part, Task, add, rows_of, work

pytestmark = pytest.mark.usefixtures("float32")


def test_every_part_runs_on_a_cpu_at_a_small_size(tmp_path, capsys, monkeypatch):
    """In this process; `.ci/run` has the processes, and the interpreter."""
    monkeypatch.setattr(gpu, "run_part", lambda order, limit: work(order))
    main(["gpu", "--dry", "--quick", "--seeds", "2", "--out", str(tmp_path)])
    facts = json.loads((tmp_path / "gpu-dry-quick.json").read_text())
    rows = facts["rows"]
    assert {row[0] for row in rows} == {"device", "parity", "tables", "decode", "training", "kernels"}
    errors = {(row[1], row[2]): row[3] for row in rows if row[0] == "parity"}
    assert (
        errors["gated delta, D=8", "parallel, float32"] < 1e-5 < errors["gated delta, D=8", "parallel, bfloat16"] < 0.05
    )
    assert errors["gated delta, D=8, equal keys", "parallel, float32"] < 1e-3
    assert {row[2] for row in rows if row[0] == "decode"} == {"memory_step"}
    assert all("to read and write the state" in row[5] for row in rows if row[0] == "decode")
    assert all(row[3]["seeds"] == 2 for row in rows if row[0] in ("tables", "training"))
    unmeasured = facts["data"]["unmeasured"]
    for what in ("triton, float32", "fla directly", "in place", "CUDA graph", "memcheck", "first calls"):
        assert any(what in line for line in unmeasured), what
    assert (tmp_path / "gpu-dry-quick.png").stat().st_size > 10_000
    assert "tells only that the code runs" in capsys.readouterr().out


def test_all_rules_and_models_are_asked_for():
    whole = Order("parity", "")
    assert {task.case.split(", D")[0] for task in card.parity(whole)} == {*card.RULES, *card.MORE}
    assert {task.way for task in card.decode(whole)} == {
        way + graph for way in ("in place", "memory_step") for graph in ("", ", in a CUDA graph")
    }
    assert [task.case for task in card.training(whole)] == [*card.MODELS]
    for part in card.PARTS.values():  # a row is found again by what it is of
        tasks = [task[:2] for task in part.tasks(whole)]
        assert len(set(tasks)) == len(tasks)
    assert list(card.PARTS)[-1] == "sanitizer" and list(card.PARTS)[1] == "parity"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_it_says_how_to_run_it(tmp_path, capsys):
    main(["gpu", "--quick", "--out", str(tmp_path)])
    assert "skipped: there is no CUDA device here" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    for asked in (["--dry"], ["--seconds", "9"]):
        with pytest.raises(SystemExit):
            main(["levels", *asked])
        assert "'levels' takes no --dry and no --seconds" in capsys.readouterr().err


def test_what_the_sanitizer_watches_runs():
    dry = card.WATCHED.replace('Order("", "")', 'Order("", "", dry=True)').replace("torch.cuda.synchronize()", "")
    exec(dry.replace("triton", "parallel"), {})


class OutOfResources(Exception):
    """As a compiler's own."""


def test_whatever_a_task_raises_costs_its_row(tmp_path, monkeypatch):
    raised = [
        subprocess.TimeoutExpired("x", 1),
        OutOfResources("shared memory"),
        AssertionError(),
        RuntimeError("a\nb"),
    ]

    def fail(error: Exception) -> None:
        raise error from ValueError("its cause") if isinstance(error, RuntimeError) else None

    def tasks(order: Order):
        for number, error in enumerate(raised):
            yield Task(str(number), "fails", "ms", lambda error=error: fail(error))
        yield Task("last", "works", "ms", lambda: ([1.0], "beside"))

    monkeypatch.setitem(card.PARTS, "tables", Part(tasks, 9))
    path = tmp_path / "rows.jsonl"
    add(path, facts={})
    work(Order("tables", str(path), dry=True))
    found = list(card.results(path).values())
    assert [row.get("error", "").split(":")[0] for row in found] == [
        "TimeoutExpired", "OutOfResources", "AssertionError", "ValueError", ""
    ]  # fmt: skip
    assert found[-1]["values"] == [1.0] and found[-1]["against"] == "beside"
    work(Order("tables", str(path), dry=True))  # all have a row
    assert list(card.results(path).values()) == found


# In the place of `studies.card`, for it starts at once: tasks "0" to "3" without a row, the second of which goes wrong.
STANDIN = """
import json, os, signal, sys, time
path, how = sys.argv[1:]
rows = [json.loads(line) for line in open(path)]
over = {row["case"] for row in rows if "values" in row or "error" in row}
def add(**row):
    with open(path, "a") as file:
        file.write(json.dumps({"part": "tables", "way": "w", **row}) + chr(10))
if how == "broken":
    sys.exit(1)
for case in "0123":
    if case not in over:
        add(case=case, begun=time.time(), by=os.getpid())
        if case == "1" and how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if case == "1" and how == "hangs" or how == "slow":
            time.sleep(60)
        if case == "1" and how == "lost":
            add(case=case, error="CUDA error: an illegal memory access was encountered")
            sys.exit(3)
        add(case=case, values=[1.0], unit="ms", against=None, peak=None)
"""


@pytest.mark.parametrize(
    ("how", "measured", "why"),
    [
        ("well", "0123", None), ("killed", "023", "exit code -9"), ("hangs", "023", "no answer in 1 s"),
        ("lost", "023", "illegal memory"), ("broken", "", "exit code 1"), ("slow", "", "no time was left"),
    ],
)  # fmt: skip
def test_a_process_that_ends_costs_the_row_it_had_begun(how, measured, why, tmp_path, monkeypatch):
    path, begun = tmp_path / "rows.jsonl", time.monotonic()
    add(path, facts={})

    def start(order: Order) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", STANDIN, str(path), how]
        return subprocess.Popen(command, start_new_session=True)

    monkeypatch.setattr(gpu, "LEAST", 1.0)
    limit = 1.0 if how == "slow" else 60
    gpu.run_part(Order("tables", str(path)), limit, start, patience=1.0 if how == "hangs" else 60)
    assert time.monotonic() - begun < 30
    rows = list(card.results(path).values())
    assert "".join(row["case"] for row in rows if "values" in row) == measured
    errors = [row["error"] for row in rows if "error" in row]
    assert (errors == []) if why is None else (len(errors) == 1 and why in errors[0])


def test_a_process_is_started_from_any_folder(tmp_path, monkeypatch):
    """As it is on a card, but for the card."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "statistics.py").write_text("raise SystemExit('not this one')")
    path = tmp_path / "gpu-rows.jsonl"
    add(path, facts={})
    gpu.run_part(Order("sanitizer", str(path), dry=True), 120)
    errors = [row["error"] for row in rows_of(path) if "error" in row]
    assert errors == ["FileNotFoundError: a CPU has no kernels to watch"] * 2, (tmp_path / "gpu-log.txt").read_text()


def test_the_same_line_again_goes_on(tmp_path):
    path, facts = tmp_path / "rows.jsonl", {"facts": {"device": "a card"}}
    gpu.begin(path, facts)
    add(path, part="tables", case="a", way="w", begun=1.0, by=1)
    add(path, part="tables", case="a", way="w", values=[1.0])
    add(path, part="tables", case="b", way="w", error="no time was left")
    with path.open("a") as file:
        file.write('{"part": "tab')  # a machine that was taken away
    gpu.begin(path, facts)
    assert rows_of(path) == [facts, {"part": "tables", "case": "a", "way": "w", "values": [1.0]}]
    with pytest.raises(ConfigError, match="of another machine, other kernels, versions or seeds; choose another --out"):
        gpu.begin(path, {"facts": {"device": "another"}})


def test_seconds_are_given_to_the_most_telling_parts_first(tmp_path, monkeypatch, capsys):
    asked = []

    def run_part(order: Order, limit: float) -> None:
        asked.append((order.part, limit))
        monkeypatch.setattr(gpu.time, "monotonic", lambda: then + 30 * len(asked))

    then = 1e3
    monkeypatch.setattr(gpu.time, "monotonic", lambda: then)
    monkeypatch.setattr(gpu, "run_part", run_part)
    main(["gpu", "--dry", "--seconds", "100", "--no-figure", "--out", str(tmp_path)])
    assert asked[:4] == [("device", 40), ("parity", 70), ("first calls", 40), ("tables", 10)]
    assert [part for part, _ in asked] == [*card.PARTS] and all(limit <= 0 for _, limit in asked[4:])
    monkeypatch.undo()
    gpu.run_part(Order("decode", str(tmp_path / "gpu-dry-rows.jsonl")), -20.0)
    assert rows_of(tmp_path / "gpu-dry-rows.jsonl")[-1]["error"] == "no time was left"
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["gpu", "--dry", "--seconds", "0"])
    assert "--seconds must be in [1, 1e+06], got 0" in capsys.readouterr().err


def test_what_a_machine_without_a_network_is_brought(tmp_path, monkeypatch, capsys):
    asked = []
    done = subprocess.CompletedProcess([], 0, "", "")
    monkeypatch.setattr(gpu.subprocess, "run", lambda command, **how: asked.append(command) or done)
    main(["gpu", "--prepare", str(tmp_path / "card"), "--python", "3.13"])
    pins = {item.split("==")[0] for item in asked[0] if "==" in item}
    assert {"pydantic", "pydantic-core", "pyyaml", "rich", "safetensors", "typer", "fla-core", "einops"} <= {
        name.lower().replace("_", "-") for name in pins
    }
    assert not pins & {"torch", "numpy", "triton", "hecate"} and "3.13" in asked[0]
    assert "on the card: PYTHONPATH=" in capsys.readouterr().out
    done.returncode, done.stderr = 1, "no such thing"
    with pytest.raises(SystemExit):
        main(["gpu", "--prepare", str(tmp_path / "card")])
    assert "for Python 3.12: no such thing" in capsys.readouterr().err
