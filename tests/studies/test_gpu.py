"""The study of a GPU: every part of its code on a CPU, and what it says without a card."""

from __future__ import annotations

import json

import pytest
import torch

from studies import gpu
from studies.__main__ import main


def test_every_part_runs_on_a_cpu_at_a_small_size(tmp_path, capsys):
    torch.set_default_dtype(torch.float32)
    main(["gpu", "--quick", "--device", "cpu", "--seeds", "1", "--out", str(tmp_path)])
    facts = json.loads((tmp_path / "gpu-quick.json").read_text())
    parts = {row[0] for row in facts["rows"]}
    assert parts == {"ceilings", "parity", "tables", "decode", "training"}
    errors = {row[2]: row[3] for row in facts["rows"] if row[0] == "parity"}
    assert errors["parallel, float32"] < 1e-5 and 1e-5 < errors["parallel, bfloat16"] < 0.05
    compiled = {name for name in gpu.MODELS if name.endswith("compiled")}  # which a CPU is no place for
    assert {row[1] for row in facts["rows"] if row[0] == "training"} == {*gpu.MODELS} - compiled
    assert any("compute-sanitizer" in what or "no card" in what for what in facts["data"]["unmeasured"])
    assert any("fla" in what for what in facts["data"]["unmeasured"])  # which needs a card
    assert (tmp_path / "gpu-quick.png").stat().st_size > 10_000
    assert "tells only that the code runs" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_it_says_how_to_run_it(tmp_path, capsys):
    main(["gpu", "--quick", "--out", str(tmp_path)])
    assert "skipped: there is no CUDA device here" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    with pytest.raises(SystemExit):
        main(["levels", "--device", "cpu"])
    assert "takes no --device 'cpu'" in capsys.readouterr().err


def test_what_the_sanitizer_watches_runs(monkeypatch, capsys):
    monkeypatch.setattr(gpu, "RULES", {"delta": gpu.RULES["delta"], "kda": gpu.RULES["kda"]})
    exec(gpu.SANITIZED.replace("cuda", "cpu"), {})
    said = capsys.readouterr().out
    assert said.count("float64 loop") == 8 and "generator" not in said
