"""What `import hecate` loads, and that type checkers are told the same names."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import hecate

STAGES = {
    "hecate": "import hecate; dir(hecate)",
    "cli": "import hecate.cli",
    "help": "try: hecate.cli.main(['--help'])\nexcept SystemExit: pass",
    "serve": "import hecate.serve",
    "train": "import hecate.train; from hecate.distributed import ParallelConfig, start; import torch",
    "alone": "with start(ParallelConfig()) as w: w.agree({}); w.sum(torch.ones(1)); w.from_main(int)",
}


@pytest.mark.spec("DIST-IMPORT-D1", "SERVE-CLI-D1", "TRAIN-CLI-D4")
def test_what_is_heavy_is_loaded_when_it_is_needed() -> None:
    """By one process, one stage after the other."""
    told = "\nprint('STAGE', {name!r}, *sys.modules)\n"
    code = "import sys\n" + "".join(f"{line}{told.format(name=name)}" for name, line in STAGES.items())
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("STAGE ")]
    loaded = {name: set(modules) for name, *modules in lines}
    for stage in ("hecate", "cli"):
        assert "hecate" in loaded[stage] and not loaded[stage] & {"torch", "numpy", "pydantic", "yaml"}
    assert not loaded["help"] & {"hecate.train", "hecate.models", "matplotlib"} and "Example" in done.stdout
    assert not loaded["serve"] & {"starlette", "uvicorn"}
    assert loaded["alone"] == loaded["train"]
    assert not [name for name in loaded["alone"] if name.startswith("torch.distributed.tensor")]


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
