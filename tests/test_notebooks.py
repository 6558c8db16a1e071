"""Every notebook runs from top to bottom, and its stored outputs hold no error."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from tests.registries import restore_registries

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

FEWER = {
    "bring_your_model": [("train(model, 80", "train(model, 20"), ("one.train(), 40", "one.train(), 12"),
                         ("range(80, 120)", "range(80, 92)")],
    "phi_momentum": [("logspace(-4, 0.5, 48", "logspace(-4, 0.5, 6"), ("lrs, 150)", "lrs, 40)")],
    "choosing_phi": [("[4, 8, 16, 32, 64, 96, 128]", "[4, 128]"), ("for seed in range(16)", "for seed in range(2)")],
}  # fmt: skip
"""Steps and points of curves that run no line that the first of them have not run."""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """As with the installed package alone: an empty folder, and nothing of the checkout to import but `hecate`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path and not (Path(path) / "studies").is_dir()])
    for name in [name for name in sys.modules if name.split(".")[0] in ("studies", "tests")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ModuleNotFoundError):
        import studies  # noqa: F401


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, whole, installed, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    restore_registries(monkeypatch)
    # A reader of the notebook has torch's own default, not that of this suite.
    torch.set_default_dtype(torch.float32)
    cells = json.loads(path.read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    for many, few in () if whole else FEWER.get(path.stem, ()):
        assert sum(source.count(many) for source in code) == 1, many
        code = [source.replace(many, few) for source in code]
    namespace: dict[str, object] = {"__name__": path.stem, "print": lambda *args, **kwargs: None}
    with matplotlib.rc_context():
        for index, source in enumerate(code):
            exec(compile(source, f"{path.name}[{index}]", "exec", dont_inherit=True), namespace)
    import matplotlib.pyplot as plt

    plt.close("all")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stored_executed(path):
    cells = [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
    assert all(cell["execution_count"] for cell in cells)
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert any("image/png" in output.get("data", {}) for output in outputs)
