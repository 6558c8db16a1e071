"""The README's Python runs as printed, each block by itself, and its YAML becomes models;
neither warns, since tests take warnings for errors."""

from __future__ import annotations

import os
import re
import sys
import warnings
from pathlib import Path

import pytest
import torch

from hecate.hf.saved import export_run
from hecate.models import LanguageModel
from hecate.rule import RULES
from hecate.train import load_experiment, run_experiment
from hecate.train.catalogue import VARIANTS
from hecate.train.display import Display
from tests.hf.families import built
from tests.ranks import run_ranks
from tests.registries import shipped_kinds

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


PYTHON = re.findall(r"```python\n(.*?)```", README, re.S)
LOOP = next(index for index, source in enumerate(PYTHON) if "torchrun" in source)


def run_block(index: int) -> dict[str, object]:
    """The names that a block leaves, copied alone."""
    namespace: dict[str, object] = {"__name__": "readme"}
    exec(compile(PYTHON[index], f"README.md[{index}]", "exec", dont_inherit=True), namespace)
    return namespace


def test_python_blocks_run(tmp_path, monkeypatch):
    torch.set_default_dtype(torch.float32)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # drawing takes a second
    tiny = ["budget.steps=1", "budget.batch_size=2", "budget.eval_batches=1"]
    run_experiment(load_experiment("quickstart", tiny), f"{tmp_path}/runs/mine", display=Display(quiet=True))
    export_run(f"{tmp_path}/runs/mine", f"{tmp_path}/hf-folder")
    built("qwen3_next").save_pretrained(tmp_path / "my-qwen")
    monkeypatch.chdir(tmp_path)
    assert len(PYTHON) >= 4 and all([run_block(index) for index in range(len(PYTHON))])


def trained_by_the_loop(sharded: bool) -> tuple[float, int]:
    """The last loss of the README's training loop and the size of what a rank holds."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    os.environ |= {"SHARD": "1"} if sharded else {}
    names = run_block(LOOP)
    return names["loss"].item(), sum(getattr(p, "_local_tensor", p).numel() for p in names["model"].parameters())


@pytest.mark.slow
def test_the_training_loop_runs_under_torchrun():
    torch.set_default_dtype(torch.float32)
    alone = run_block(LOOP)["loss"].item()
    found = [run_ranks(2, trained_by_the_loop, sharded) for sharded in (False, True)]
    for (copied, whole), (sharded, part) in zip(*found, strict=True):
        # The ranks draw the same tokens, so their mean gradient is that of one process; sums of two halves round.
        assert abs(copied - alone) < 1e-3 and abs(sharded - alone) < 1e-3
        assert part < 0.6 * whole


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 220
    code = [line for block in re.findall(r"```(?:python|yaml)\n(.*?)```", README, re.S) for line in block.splitlines()]
    assert max(map(len, code)) <= 100, "a line of code scrolls sideways on the front page"


def test_yaml_blocks_become_models(tmp_path):
    """What `hecate train my.yaml` builds of each, on the front page and where levels are explained."""
    torch.set_default_dtype(torch.float32)
    pages = README + (ROOT / "docs/pages/memories.md").read_text()
    blocks = re.findall(r"```yaml\n(.*?)```", pages, re.S)
    assert len(blocks) >= 2
    for index, text in enumerate(blocks):
        path = tmp_path / f"{index}.yaml"
        path.write_text(text)
        config = load_experiment(path)
        source = torch.Generator().manual_seed(config.seed)
        assert LanguageModel(config.model_for_data(), generator=source).blocks


def test_counts_and_kinds_are_those_of_the_library():
    rows = re.findall(r"^\| ([a-z ]+) \| [^|]+\? \| ([^|]+) \|$", README, re.M)
    named = {name.split()[-1]: re.sub(r"\([^)]*\)", "", kinds).replace(" ", "").split(",") for name, kinds in rows}
    assert {*named} == {"structure", "bias", "retention", "algorithm", "gating", "readout"}
    assert {name: {*kinds} for name, kinds in named.items()} == {
        name: {*shipped_kinds(VARIANTS[name])} for name in named
    }
    flat = " ".join(README.split())
    for words in (
        f"each of the {len(shipped_kinds(VARIANTS['phi']))} maps goes",
        f"Each of the {len(RULES)} named rules",
    ):
        assert words in flat, f"README should say: {words}"


def test_figures_exist():
    figures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", README)
    assert figures
    assert all((ROOT / figure).is_file() for figure in figures)
