"""Verdicts of kernels on disk."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from hecate.engine import kernel_verdicts
from hecate.engine.triton import parity
from hecate.engine.triton.parity import Unrun, difference, judged
from hecate.train import catalogue

FACTS = {
    "rule": {"bias": {"kind": "l2"}},
    "beside": ("write",),
    "dtype": "torch.float32",
    "widths": (64, 16),
    "card": "a",
}


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return tmp_path / "hecate-verdicts"


def never() -> str | None:
    raise AssertionError("judged again")


@pytest.mark.spec("ENG-TRITON-I3", "TRAIN-DOCTOR-D2")
def test_a_verdict_is_found_once_and_shown(caplog: pytest.LogCaptureFixture) -> None:
    assert judged(FACTS, lambda: None) is None and judged(FACTS, never) is None
    other = {**FACTS, "card": "b"}
    with caplog.at_level(logging.WARNING, "hecate.engine"):
        assert judged(other, lambda: "its kernel differs") == judged(other, never) == "its kernel differs"
    assert "its kernel differs" in caplog.text
    found = {facts["card"]: reason for facts, reason in kernel_verdicts()}
    assert found == {"a": None, "b": "its kernel differs"}
    _, rows = catalogue.kernels()
    assert {(row[1], row[2], row[3]) for row in rows} == {
        ("torch.float32 64 x 16", "a", "passed its parity test"),
        ("torch.float32 64 x 16", "b", "its kernel differs"),
    }


@pytest.mark.spec("ENG-TRITON-I3")
def test_a_refusal_is_of_its_own_numbers_alone() -> None:
    one, two, three = ({"rule": {**FACTS["rule"], "numbers": [at]}} for at in range(3))
    assert judged(FACTS, lambda: "it differs", one) == judged(FACTS, never, one) == "it differs"
    assert judged(FACTS, lambda: None, two) is None and judged(FACTS, never, three) is None
    assert judged(FACTS, never, one) == "it differs"


@pytest.mark.spec("ENG-TRITON-I3")
def test_a_kernel_that_did_not_run_is_tried_by_the_next_process(own: Path) -> None:
    def fails() -> tuple[None, ...]:
        raise RuntimeError("out of memory")

    said = difference(fails, tuple, bound=0.0, against="", dtype=None, shape=(2, 2))  # type: ignore[arg-type]
    assert isinstance(said, Unrun) and "out of memory" in said
    assert judged(FACTS, lambda: said) == said and not own.exists()
    assert judged(FACTS, lambda: None) is None


def test_what_is_no_verdict_is_judged_again(own: Path) -> None:
    judged(FACTS, lambda: None)
    (path,) = own.iterdir()
    for broken in (b"", b"{", b"[]", b'{"facts": {}}', b'{"facts": {}, "reason": null}', b'{"facts": {}, "reason": 3}'):
        path.write_bytes(broken)
        assert judged(FACTS, lambda: "it differs") == "it differs"
    assert judged(FACTS, never) == "it differs"


def test_a_folder_that_cannot_be_written_costs_a_second_trial(own: Path) -> None:
    own.write_text("in its way")
    assert judged(FACTS, lambda: None) is None and judged(FACTS, lambda: "again") == "again"
    assert list(kernel_verdicts()) == []


def test_verdicts_are_those_of_the_kernels_as_they_stand() -> None:
    assert parity._text() == parity._text.__wrapped__() and len(parity._text()) == 16
