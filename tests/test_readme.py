"""The README's Python runs as printed, in order, in one namespace."""

from __future__ import annotations

import re
from pathlib import Path

import torch

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_python_blocks_run():
    torch.set_default_dtype(torch.float32)
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(blocks) >= 3
    namespace: dict[str, object] = {"__name__": "readme"}
    for index, source in enumerate(blocks):
        exec(compile(source, f"README.md[{index}]", "exec", dont_inherit=True), namespace)


def test_figures_exist():
    root = Path(__file__).parent.parent
    figures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", README)
    assert figures
    assert all((root / figure).is_file() for figure in figures)
