"""Checkpoints: a folder per step with safetensors and a JSON manifest, complete or absent.

A checkpoint is written to a temporary folder, forced to disk and renamed, so that a process killed
at any instant leaves the earlier ones. Nothing is pickled, neither written nor read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from hecate.errors import CheckpointError
from hecate.train.files import sync

FORMAT = "hecate-checkpoint"
VERSION = 1
MANIFEST, TENSORS = "manifest.json", "tensors.safetensors"
_NAME = re.compile(r"step_(\d{8,})")
_TEMPORARY = ".tmp-"


class Checkpoint(NamedTuple):
    """Named tensors, and plain JSON facts (config, step, cursor, metrics, versions)."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]


class Skipped(NamedTuple):
    """A checkpoint that was passed over, and why."""

    path: Path
    reason: str


def save_checkpoint(folder: Path, step: int, checkpoint: Checkpoint) -> Path:
    """Writes `folder/step_XXXXXXXX` atomically and durably. [CKPT-WRITE-D1]

    Tensors that share storage (tied weights) are stored once and listed as aliases.
    """
    target = folder / f"step_{step:08d}"
    temporary = folder / f"{_TEMPORARY}{target.name}-{os.getpid()}"
    stored, aliases = _untie(checkpoint.tensors)
    content = {
        "step": step,
        "facts": checkpoint.facts,
        "aliases": aliases,
        "tensors": {name: _summary(tensor) for name, tensor in stored.items()},
    }
    document = {
        "format": FORMAT,
        "version": VERSION,
        "digest": _digest(content),
        "content": content,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if temporary.exists():
            shutil.rmtree(temporary)
        temporary.mkdir()
        save_file(stored, temporary / TENSORS)
        (temporary / MANIFEST).write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
        for path in (temporary / TENSORS, temporary / MANIFEST, temporary):
            sync(path)
        if target.exists():  # an older run's or a damaged one; never left half replaced
            target.rename(retired := folder / f"{_TEMPORARY}old-{target.name}-{os.getpid()}")
            temporary.rename(target)
            shutil.rmtree(retired)
        else:
            temporary.rename(target)
        sync(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"cannot write checkpoint {target}: {error}; free some space or choose another --out "
            "(earlier checkpoints are intact)"
        ) from None
    return target


def load_checkpoint(path: Path) -> Checkpoint:
    """Reads a checkpoint after verifying every hash. [CKPT-READ-D1]"""
    content = read_manifest(path)
    file = path / TENSORS
    try:
        stored = load_file(file)
    except FileNotFoundError:
        raise _bad(file, "is missing") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise _bad(file, f"is truncated or not a safetensors file ({error})") from None
    expected = content["tensors"]
    if set(stored) != set(expected):
        odd = sorted(set(stored) ^ set(expected))
        raise _bad(file, f"does not hold the tensors of its manifest (first difference {odd[0]!r})")
    for name, tensor in stored.items():
        found = _summary(tensor)
        for key in ("dtype", "shape", "sha256"):
            if found[key] != expected[name][key]:
                raise _bad(file, f"is damaged: tensor {name!r} has another {key} than recorded")
    tensors = {**stored, **{name: stored[base] for name, base in content["aliases"].items()}}
    return Checkpoint(tensors, content["facts"])


def read_manifest(path: Path) -> dict[str, Any]:
    """The verified content of a manifest, without reading the tensors."""
    file = path / MANIFEST
    try:
        document = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise _bad(file, "is missing") from None
    except OSError as error:
        raise _bad(file, f"cannot be read ({error.strerror or error})") from None
    except (ValueError, RecursionError):
        raise _bad(file, "is truncated or not JSON") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise _bad(file, f"is not a {FORMAT} manifest")
    version = document.get("version")
    if not isinstance(version, int) or version > VERSION:
        raise CheckpointError(
            f"{file} has format version {version!r}, this hecate reads up to {VERSION}: upgrade "
            "hecate"
        )
    content = document.get("content")
    if not isinstance(content, dict) or document.get("digest") != _digest(content):
        raise _bad(file, "is damaged: its digest does not match")
    return content


def checkpoints(folder: Path) -> list[Path]:
    """Checkpoint folders, oldest first; unfinished ones are not among them."""
    found = [(int(m[1]), p) for p in folder.glob("step_*") if (m := _NAME.fullmatch(p.name))]
    return [path for _, path in sorted(found)]


def newest_checkpoint(folder: Path) -> tuple[Path, Checkpoint, list[Skipped]] | None:
    """The newest checkpoint that verifies, and those skipped on the way; None if there is none.

    `CheckpointError` if there are checkpoints but all are damaged. [CKPT-RESUME-D1]
    """
    skipped: list[Skipped] = []
    for path in reversed(checkpoints(folder)):
        try:
            return path, load_checkpoint(path), skipped
        except CheckpointError as error:
            skipped.append(Skipped(path, str(error)))
    if skipped:
        reasons = "\n".join(f"  {item.reason}" for item in skipped)
        raise CheckpointError(
            f"no checkpoint in {folder} can be used; start again with another --out:\n{reasons}"
        )
    return None


def prune_checkpoints(folder: Path, keep: int, better: str = "validation_loss") -> None:
    """Deletes all but the `keep` newest and the one lowest in `better`. [CKPT-PRUNE-D1]"""
    for stale in folder.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(stale, ignore_errors=True)
    paths = checkpoints(folder)
    best = best_checkpoint(folder, better)
    for path in paths[:-keep]:
        if path != best:
            shutil.rmtree(path, ignore_errors=True)


def best_checkpoint(folder: Path, better: str = "validation_loss") -> Path | None:
    """The readable checkpoint whose fact `better` is lowest, the newest of equals."""
    scored: list[tuple[float, Path]] = []
    for path in checkpoints(folder):
        try:
            value = read_manifest(path)["facts"].get("metrics", {}).get(better)
        except CheckpointError:
            continue
        if value is not None:
            scored.append((float(value), path))
    lowest = min((value for value, _ in scored), default=None)
    return next((path for value, path in reversed(scored) if value == lowest), None)


def _untie(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    stored: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in tensors.items():
        value = tensor.detach()
        identity = (value.data_ptr(), tuple(value.shape), value.stride(), value.dtype, value.device)
        if value.numel() and identity in first:
            aliases[name] = first[identity]
            continue
        first[identity] = name
        copy = value.cpu().contiguous()
        # Views of one storage that differ in shape are copied: safetensors refuses shared memory.
        stored[name] = copy.clone() if copy.data_ptr() == value.data_ptr() else copy
    return stored, aliases


def _summary(tensor: Tensor) -> dict[str, Any]:
    raw = tensor.reshape(-1).contiguous().view(torch.uint8).numpy()
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "sha256": hashlib.sha256(raw.data).hexdigest(),
    }


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _bad(file: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{file} {reason}; delete {file.parent} and resume from an earlier checkpoint"
    )
