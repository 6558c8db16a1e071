"""Checkpoints: a folder per step with safetensors and a JSON manifest, complete or absent.

A checkpoint is written to a temporary folder, forced to disk and renamed to a name that is free; only then is anything
older deleted. So a process killed at any instant leaves the newest complete one. Nothing is pickled, neither written
nor read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from hecate.errors import CheckpointError, ConfigError
from hecate.train.files import make_folder, new_folder, refusing, remove_folder, sweep, sync, write_file
from hecate.train.manifest import MANIFEST, TENSORS, Content, bad, dump_manifest, read_manifest, refuse_link, summary

# Version 0.1 renamed a checkpoint to `.tmp-old-...` while it wrote the step again.
_NAME = re.compile(r"(\.tmp-old-)?step_(\d{8,})(?:-(\d+))?")


class Checkpoint(NamedTuple):
    """Named tensors, and plain JSON facts (config, step, cursor, metrics, versions)."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]


class Skipped(NamedTuple):
    """A checkpoint that was passed over, and why."""

    path: Path
    reason: str


class _Order(NamedTuple):
    """Age of a checkpoint: a step may be written again, as `step_00000012-2`."""

    step: int
    published: bool
    edition: int


def save_checkpoint(folder: Path, step: int, checkpoint: Checkpoint) -> Path:
    """Writes `folder/step_XXXXXXXX` atomically and durably. [CKPT-WRITE-D1]

    A step that is there already is written beside it, as `step_XXXXXXXX-2`, which takes the name once the older one is
    deleted. Tensors that share storage (tied weights) are stored once and listed as aliases.
    """
    stored, aliases = _untie(checkpoint.tensors)
    manifest = dump_manifest(step, checkpoint.facts, aliases, stored)
    target = folder / f"step_{step:08d}"
    remedy = "free some space or choose another --out (earlier checkpoints are intact)"
    with refusing(f"write checkpoint {target}", remedy):
        make_folder(folder)
        older = [path for path in checkpoints(folder) if _order(path).step == step]
        last = max((_order(path).edition for path in older if _order(path).published), default=0)
        fresh = folder / f"{target.name}-{last + 1}" if last else target
        with new_folder(fresh) as temporary:
            _save_tensors(stored, temporary / TENSORS)
            write_file(temporary / MANIFEST, manifest)
        for path in older:
            remove_folder(path)
        if fresh != target:
            fresh.rename(target)
            sync(folder)
    return target


def load_checkpoint(path: Path) -> Checkpoint:
    """Reads a checkpoint after verifying every hash. [CKPT-READ-D1]"""
    content = read_manifest(path)
    known = _NAME.fullmatch(path.name)
    if known and int(known[2]) != content.step:
        raise bad(path / MANIFEST, f"is of step {content.step}")
    file = path / TENSORS
    try:
        stored = load_file(file)
    except FileNotFoundError:
        raise bad(file, "is missing") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise bad(file, f"is truncated or not a safetensors file ({error})") from None
    expected = content.tensors
    if set(stored) != set(expected):
        odd = sorted(set(stored) ^ set(expected))
        raise bad(file, f"does not hold the tensors of its manifest (first difference {odd[0]!r})")
    for name, tensor in stored.items():
        found, own = summary(tensor), expected[name].model_dump(mode="json")
        for key in ("dtype", "shape", "sha256"):
            if found[key] != own[key]:
                raise bad(file, f"is damaged: tensor {name!r} has another {key} than recorded")
    tensors = {**stored, **{name: stored[base] for name, base in content.aliases.items()}}
    return Checkpoint(tensors, content.facts)


def checkpoints(folder: Path) -> list[Path]:
    """Checkpoint folders, oldest first; unfinished ones are not among them."""
    refuse_link(folder)
    with refusing(f"read the checkpoints in {folder}", "see what is there"):
        paths = list(folder.iterdir()) if folder.exists() else []
    return sorted((path for path in paths if _NAME.fullmatch(path.name)), key=_order)


def newest_checkpoint(folder: Path) -> tuple[Path, Checkpoint, list[Skipped]] | None:
    """The newest checkpoint that verifies, and those skipped on the way; None if there is none.

    `CheckpointError` if there are checkpoints but all are damaged. [CKPT-RESUME-D1]
    """
    skipped: list[Skipped] = []
    paths = checkpoints(folder)
    for path in reversed(paths):
        try:
            return path, load_checkpoint(path), skipped
        except CheckpointError as error:
            skipped.append(Skipped(path, str(error)))
    if checkpoints(folder) != paths:  # a run that goes on has replaced them since
        return newest_checkpoint(folder)
    if skipped:
        reasons = "\n".join(f"  {item.reason}" for item in skipped)
        raise CheckpointError(f"no checkpoint in {folder} can be used; start again with another --out:\n{reasons}")
    return None


def prune_checkpoints(folder: Path, keep: int, better: str = "validation_loss", *, upto: int | None = None) -> None:
    """Deletes all but the `keep` newest and the one lowest in `better`. [CKPT-PRUNE-D1]

    Those that cannot be read, or are later than the step `upto`, neither count nor go.
    """
    if keep < 1:
        raise ConfigError(f"at least one checkpoint must be kept, got keep={keep}")
    sound = [path for path, _ in _readable(folder) if upto is None or _order(path).step <= upto]
    last = {_order(path).step: path for path in sound}
    kept = [*list(last.values())[-keep:], best_checkpoint(folder, better)]
    with refusing(f"delete checkpoints in {folder}", "make the folder writable"):
        for path in sound:
            if path not in kept:
                remove_folder(path)
        sweep(folder)


def best_checkpoint(folder: Path, better: str = "validation_loss") -> Path | None:
    """The readable checkpoint whose fact `better` is lowest, the newest of equals."""
    scored: list[tuple[float, Path]] = []
    for path, content in _readable(folder):
        value = content.facts.get("metrics", {}).get(better)
        if value is not None:
            scored.append((float(value), path))
    lowest = min((value for value, _ in scored), default=None)
    return next((path for value, path in reversed(scored) if value == lowest), None)


def _readable(folder: Path) -> list[tuple[Path, Content]]:
    found = []
    for path in checkpoints(folder):
        try:
            found.append((path, read_manifest(path)))
        except CheckpointError:
            continue
    return found


def _order(path: Path) -> _Order:
    match = _NAME.fullmatch(path.name)
    retired, step, edition = match.groups() if match else (None, "0", None)
    return _Order(int(step), retired is None, int(edition or 1))


def _save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        save_file(tensors, path)
    except SafetensorError as error:
        raise OSError(str(error)) from None


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
