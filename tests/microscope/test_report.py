"""`hecate report` on runs, whole, broken and repeated."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

from hecate.errors import CheckpointError, ConfigError, HealthWarning, install_line
from hecate.microscope.report import BEGIN, END, report_run, with_section
from hecate.train import ExperimentConfig, checkpoints
from tests.train.common import TASK, quiet_run, tiny

pytest.importorskip("matplotlib.figure")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of one memory with checkpoints of steps 2 and 4, without figures of its own."""
    folder, dtype = tmp_path_factory.mktemp("runs") / "tiny", torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    quiet_run(tiny(budget={"steps": 4, "checkpoint_every": 2, "eval_every": 2}), folder)
    torch.set_default_dtype(dtype)
    return folder


@pytest.fixture
def run(trained, tmp_path):
    torch.set_default_dtype(torch.float32)
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.mark.spec("SCOPE-STRENGTH-I1")
def test_a_memory_that_writes_nothing_is_warned_of(tmp_path):
    torch.set_default_dtype(torch.float32)
    budget, data = {"steps": 1, "checkpoint_every": 1}, {**TASK, "seq_len": 64}
    faint = tiny(budget=budget, data=data, model={"memory": {"algorithm": {"kind": "gd", "lr": 1e-5}}})
    quiet_run(faint, tmp_path / "run")
    with pytest.warns(HealthWarning, match="memory 'blocks.0.memory' writes nothing: .* raise algorithm.lr"):
        report_run(tmp_path / "run")
    assert "writes" in (tmp_path / "run" / "report.md").read_text(encoding="utf-8")


@pytest.mark.spec("SCOPE-REPORT-D1", "SCOPE-REPORT-I1")
def test_a_run_gets_pictures_and_a_section_once(run, hecate):
    report = run / "report.md"
    before = report.read_text(encoding="utf-8")
    code, out, err = hecate("report", run)
    assert code == 0, err
    figure = run / "figures" / "microscope-blocks.0.memory.png"
    assert out.splitlines() == [str(figure), f"step 4, 8 tokens; report: {report}"]
    text = report.read_text(encoding="utf-8")
    assert text.startswith(before) and text.count("## Memory microscope") == 1
    assert figure.read_bytes().startswith(b"\x89PNG") and f"](figures/{figure.stem}.svg)" in text
    assert "| `blocks.0.memory` |" in text and text.rstrip().endswith(END)

    mine = (text.replace("## Result", "## Result of mine") + "\r\nAnd a w\u00f6rd.\r\n").encode()
    report.write_bytes(mine)
    report_run(run)
    assert report.read_bytes() == mine


@pytest.mark.spec("SCOPE-REPORT-D1")
def test_fewer_tokens_elsewhere_and_the_newest_sound_checkpoint(run, tmp_path):
    newest = checkpoints(run / "checkpoints")[-1]
    (newest / "tensors.safetensors").write_bytes(b"cut short")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    found = report_run(str(run), tokens=5, out=f"{tmp_path}/elsewhere")
    assert (found.step, found.tokens) == (2, 5)
    assert found.report == tmp_path / "elsewhere" / "report.md"
    assert found.report.read_text(encoding="utf-8").startswith("# tiny\n\n<!-- microscope -->\n##")
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


@pytest.mark.spec("SCOPE-REPORT-D1")
def test_refusals(run, tmp_path, monkeypatch):
    for tokens in (0, 9):
        with pytest.raises(ConfigError, match="tokens: "):
            report_run(run, tokens=tokens)
    with pytest.raises(CheckpointError, match="not a run folder"):
        report_run(tmp_path)
    (tmp_path / "report.md").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match="is no UTF-8 text"):
        report_run(run, out=tmp_path)
    assert (tmp_path / "report.md").read_bytes() == b"\xff\xfe"
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="cannot write the report into .* another --out"):
        report_run(run, out=tmp_path / "file")
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(CheckpointError, match="has no checkpoint yet"):
        report_run(run)
    assert not [*(run / "figures").glob("microscope*")]
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=re.escape(install_line("plot"))):
        report_run(run)


def test_a_model_without_memories(tmp_path):
    torch.set_default_dtype(torch.float32)
    model = {"d_model": 8, "layers": 1, "heads": 2, "attention": {"kind": "attention"}}
    budget = {"steps": 1, "batch_size": 2, "eval_batches": 1}
    fields = {"name": "tiny", "model": model, "data": TASK, "budget": budget}
    config, folder = ExperimentConfig.model_validate(fields), tmp_path / "run"
    quiet_run(config, folder)
    with pytest.raises(ConfigError, match="no memories to look at"):
        report_run(folder)


@pytest.mark.spec("SCOPE-REPORT-I1")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", f"{BEGIN}\nnew\n{END}\n"),
        ("# a", f"# a\n\n{BEGIN}\nnew\n{END}\n"),
        (f"# a\n\n{BEGIN}\nold\n{END}\nb\n", f"# a\n\n{BEGIN}\nnew\n{END}\nb\n"),
        (f"{BEGIN}\nlost\n", f"{BEGIN}\nlost\n\n{BEGIN}\nnew\n{END}\n"),
        (f"{END}\nlost\n", f"{END}\nlost\n\n{BEGIN}\nnew\n{END}\n"),
        (f"{BEGIN}\nlost\n{BEGIN}\nold\n{END}", f"{BEGIN}\nlost\n{BEGIN}\nnew\n{END}"),
        (f"{BEGIN}\nold\n{END}\n{BEGIN}\nx", f"{BEGIN}\nnew\n{END}\n{BEGIN}\nx"),
    ],
    ids=["empty", "none", "one", "no end", "no begin", "two begins", "one more begin"],
)
def test_sections(text, expected):
    assert with_section(text, "new") == expected
    assert with_section(expected, "new") == expected
