"""Where runs are when no folder is named: runs/NAME, runs/NAME-2, ..."""

from __future__ import annotations

import re
from pathlib import Path

from hecate.errors import CheckpointError
from hecate.train.compose import load_experiment


def fresh_folder(name: str) -> Path:
    """The first of runs/NAME, runs/NAME-2, ... that does not exist."""
    root, number = Path("runs"), 2
    folder = root / name
    while folder.exists():
        folder = root / f"{name}-{number}"
        number += 1
    return folder


def latest_folder(source: str | None) -> Path:
    """The run of this experiment that was written last."""
    name = load_experiment(source or "quickstart").name
    found = [
        path
        for path in Path("runs").glob(f"{name}*")
        if re.fullmatch(r"(-\d+)?", path.name.removeprefix(name)) and (path / "config.yaml").exists()
    ]
    if not found:
        raise CheckpointError(f"there is no run of {name!r} in runs/ to resume; give its folder: --out")
    return max(found, key=lambda path: (path / "config.yaml").stat().st_mtime_ns)
