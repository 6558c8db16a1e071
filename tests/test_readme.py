"""The README's Python runs as printed, in order, in one namespace, and its YAML becomes models;
neither warns, since tests take warnings for errors."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from hecate.models import LanguageModel
from hecate.rule import RULES
from hecate.train import load_experiment
from hecate.train.catalogue import _VARIANTS
from tests.product.examples import shipped

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_python_blocks_run():
    torch.set_default_dtype(torch.float32)
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(blocks) >= 3
    namespace: dict[str, object] = {"__name__": "readme"}
    for index, source in enumerate(blocks):
        exec(compile(source, f"README.md[{index}]", "exec", dont_inherit=True), namespace)


def test_yaml_blocks_become_models(tmp_path):
    """What `hecate train my.yaml` builds of each."""
    torch.set_default_dtype(torch.float32)
    blocks = re.findall(r"```yaml\n(.*?)```", README, re.S)
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
    assert {name: {*kinds} for name, kinds in named.items()} == {name: {*shipped(_VARIANTS[name])} for name in named}
    flat = " ".join(README.split())
    for words in (f"each of the {len(shipped(_VARIANTS['phi']))} maps goes", f"Each of the {len(RULES)} named rules"):
        assert words in flat, f"README should say: {words}"


def test_figures_exist():
    root = Path(__file__).parent.parent
    figures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", README)
    assert figures
    assert all((root / figure).is_file() for figure in figures)
