"""What `import hecate` loads, and that type checkers are told the same names."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import hecate


@pytest.mark.parametrize("line", ["import hecate; dir(hecate)", "import hecate.cli"])
def test_torch_is_loaded_when_it_is_needed(line: str) -> None:
    code = f"import sys; {line}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "hecate" in loaded and not loaded & {"torch", "numpy", "pydantic", "yaml"}


def test_stubs_name_what_the_package_has() -> None:
    stubs = ast.parse(Path(hecate.__file__).with_suffix(".pyi").read_text())
    named = {a.name for n in stubs.body if isinstance(n, ast.ImportFrom) for a in n.names}
    listed = next(ast.literal_eval(n.value) for n in stubs.body if isinstance(n, ast.Assign))
    assert named | {"__version__"} == set(listed) == set(hecate.__all__) == set(dir(hecate))
    for name in hecate.__all__:
        assert getattr(hecate, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'memory_scam'"):
        hecate.memory_scam  # noqa: B018


@pytest.mark.parametrize("family", ["phi", "bias", "retention", "algorithm", "structure", "gating"])
def test_stubs_name_the_variants_of_a_family(family: str) -> None:
    """Run time needs no list of files; type checkers do: a new variant is to be added to the stub."""
    package = importlib.import_module(f"hecate.{family}")
    stubs = ast.parse(Path(package.__file__).with_suffix(".pyi").read_text())
    named = {a.name: n.module for n in stubs.body if isinstance(n, ast.ImportFrom) for a in n.names}
    listed = next(ast.literal_eval(n.value) for n in stubs.body if isinstance(n, ast.Assign))
    assert set(named) == set(listed) == set(package.__all__)
    for name, home in named.items():
        assert getattr(package, name) is getattr(importlib.import_module(home), name)
