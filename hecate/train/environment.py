"""Where a run ran."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from typing import Any

import torch

from hecate.train.config import ExperimentConfig


def environment(config: ExperimentConfig) -> dict[str, Any]:
    """Versions, platform and threads: what a reader needs to repeat the numbers."""
    return {
        "python": platform.python_version(), "platform": platform.platform(),
        "machine": platform.machine(), "cpus": os.cpu_count(), "threads": torch.get_num_threads(),
        "device": config.budget.device, "versions": versions(), "command": sys.argv,
    }  # fmt: skip


def versions() -> dict[str, str]:
    """Of the packages that numbers depend on."""
    found = {}
    for name in ("hecate", "torch", "numpy", "pydantic", "safetensors", "PyYAML"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed as a package"
    return found
