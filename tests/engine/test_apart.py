"""Kernels are tried in a process of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hecate.engine.triton import apart
from hecate.engine.triton.parity import Unrun
from hecate.rule import MemoryConfig

ASKED = MemoryConfig(bias="huber", retention="decay"), ("narrow",), torch.bfloat16, "cuda", (64, 32)
BEGIN = "import sys, os; sys.stdin.read(); print('begun', flush=True); "


def judge(config: MemoryConfig, *about: Any) -> str | None:
    """The word of a trial, where it is asked in this process."""
    return f"judged here: {config.bias.kind} {about}"


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)


def said(monkeypatch: pytest.MonkeyPatch, child: str) -> str | None:
    monkeypatch.setattr(apart, "CHILD", child)
    return apart.tried(judge, *ASKED)


@pytest.mark.spec("ENG-TRITON-I4")
@pytest.mark.parametrize(
    ("ends", "reason"),
    [
        ("os.abort()", "ends the process that tries it, by -6, on torch.bfloat16"),
        ("sys.exit('no more')", "by 1, on torch.bfloat16 with widths (64, 32): no more"),
        ("pass", "ends the process that tries it, by 0"),
        ("import time; time.sleep(60)", "no answer in 1 s"),
        ("""print('{"reason": "illegal", "unrun": true, "lost": true}')""", "takes the card with it"),
        ("""print('{"reason": "it differs", "unrun": false, "lost": false}')""", "it differs"),
    ],
)
def test_it_ends_and_the_caller_goes_on(ends: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "sleep" in ends:
        monkeypatch.setattr(apart, "PATIENCE", 1.0)
    found = said(monkeypatch, BEGIN + ends)
    assert found is not None and reason in found and not isinstance(found, Unrun)


@pytest.mark.spec("ENG-TRITON-I4")
def test_what_it_says_is_what_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert said(monkeypatch, BEGIN + """print('{"reason": null, "unrun": false, "lost": false}')""") is None
    wanting = said(monkeypatch, BEGIN + """print('{"reason": "out of memory", "unrun": true, "lost": false}')""")
    assert wanting is not None and wanting.startswith("judged here")


@pytest.mark.spec("ENG-TRITON-I4")
@pytest.mark.parametrize("child", ["raise SystemExit(3)", "import hecate_is_not_there"])
def test_one_that_cannot_begin_leaves_it_to_the_caller(child: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = said(monkeypatch, child)
    assert found is not None and found.startswith("judged here: huber")
    assert str(apart.tried(judge, *ASKED[:3], "cpu", (8, 8))).startswith("judged here")


@pytest.mark.spec("ENG-TRITON-I4")
def test_the_process_reads_what_it_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_judge.py").write_text(
        "def judge(config, flags, dtype, device, shape):\n"
        "    return f'{config.bias.kind} {flags} {dtype} {device} {shape}'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    judged: Any = __import__("some_judge").judge
    no_card = (
        "import torch; torch.cuda.set_device = torch.cuda.synchronize = lambda *a: None\n"
        "zeros = torch.zeros; torch.zeros = lambda n, device: zeros(n)\n"
    )
    monkeypatch.setattr(apart, "CHILD", no_card + apart.CHILD)
    assert apart.tried(judged, *ASKED) == "huber ('narrow',) torch.bfloat16 cuda (64, 32)"
