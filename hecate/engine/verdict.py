"""Verdicts on kernels on this machine, kept on disk: whether each computes what it is to compute.

A verdict lies in a file of its own beside what Triton has compiled, and goes with it. It holds for one rule, dtype,
widths, card, versions and text of the kernels; any other is judged anew. [ENG-TRITON-I3]
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from hecate.files import make_folder, read_file, write_file

_LOG = logging.getLogger("hecate.engine")
LONGEST = 1 << 16  # bytes of a file
Facts = dict[str, Any]


class Unrun(str):
    """Why a kernel did not run: want of memory it may be, so that it is told of this process alone."""

    __slots__ = ()


def folder() -> Path:
    """Where verdicts lie: within Triton's cache."""
    home = Path(os.environ.get("TRITON_HOME") or Path.home())
    return Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache") / "hecate-verdicts"


def here(device: str) -> Facts:
    """The card and the versions that a verdict holds for."""
    card = torch.cuda.get_device_name() if device == "cuda" else device
    return {"card": card, "torch": torch.__version__, "triton": version("triton"), "kernels": _text()}


def judged(facts: Facts, judge: Callable[[], str | None]) -> str | None:
    """Why a kernel is not trusted, None if it is: as kept on disk, else as found by `judge`, and kept. A kernel that is
    not trusted is told of in a warning of the log."""
    facts = json.loads(json.dumps(facts))  # as they are read again
    path = folder() / f"{sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]}.json"
    found = _read(path)
    if found is not None and found["facts"] == facts:
        reason: str | None = found["reason"]
    else:
        reason = judge()
        if not isinstance(reason, Unrun):
            _keep(path, {"facts": facts, "reason": reason})
    if reason is not None:
        _LOG.warning("a kernel is not used: %s", reason)
    return reason


def kept() -> Iterator[tuple[Facts, str | None]]:
    """Every verdict on disk: what it holds for, and why that kernel is not trusted, None if it is."""
    for path in sorted(folder().glob("*.json")):
        if (found := _read(path)) is not None:
            yield found["facts"], found["reason"]


def _read(path: Path) -> dict[str, Any] | None:
    """A verdict; None where there is none, or what is no verdict."""
    try:
        found = json.loads(read_file(path, LONGEST))
    except (OSError, ValueError):
        return None
    whole = isinstance(found, dict) and isinstance(found.get("facts"), dict) and "reason" in found
    return found if whole and isinstance(found["reason"], str | None) else None


def _keep(path: Path, found: dict[str, Any]) -> None:
    try:
        make_folder(path.parent)
        write_file(path, json.dumps(found, indent=1))
    except OSError as error:  # the next process judges again
        _LOG.info("verdicts of kernels cannot be kept in %s: %s", path.parent, error)


@cache
def _text() -> str:
    """A digest of the kernels and of the trial that they are held to."""
    home = Path(__file__).parent
    digest = sha256()
    for path in [*sorted((home / "triton").glob("*.py")), home / "parity.py"]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
