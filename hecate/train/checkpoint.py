"""Checkpoints: a folder per step with safetensors and a JSON manifest, complete or absent.

A checkpoint is written to a temporary folder, forced to disk and renamed to a name that is free; only then is anything
older deleted. So a process killed at any instant leaves the newest complete one. Its manifest is a strict document with
a digest over all of it. Nothing is pickled, neither written nor read.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from hecate.errors import CheckpointError, ConfigError
from hecate.train.files import make_folder, new_folder, refusing, remove_folder, sweep, sync, write_file
from hecate.variant import Config

FORMAT = "hecate-checkpoint"
VERSION = 1
MANIFEST, TENSORS = "manifest.json", "tensors.safetensors"
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


class Summary(Config):
    """What a stored tensor must be."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class Content(Config):
    """Step, plain facts, names of tensors that share memory with a stored one, stored tensors."""

    step: int = Field(ge=0)
    facts: dict[str, Any]
    aliases: dict[str, str]
    tensors: dict[str, Summary]

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        for name, base in self.aliases.items():
            if name in self.tensors or base not in self.tensors:
                raise ConfigError(f"must name a stored tensor, got {base!r}", ("aliases", name))
        own = self.facts.get("step", self.step)
        if type(own) is not int or own != self.step:
            raise ConfigError(f"must be the step {self.step}, got {own!r}", ("facts", "step"))
        metrics = self.facts.get("metrics", {})
        if not isinstance(metrics, dict):
            raise ConfigError(f"must be a mapping, got {metrics!r}", ("facts", "metrics"))
        for name, value in metrics.items():
            if type(value) not in (int, float) or not math.isfinite(value):
                raise ConfigError(f"must be a finite number, got {value!r}", ("facts", "metrics", name))
        return self


def save_checkpoint(folder: Path, step: int, checkpoint: Checkpoint) -> Path:
    """Writes `folder/step_XXXXXXXX` atomically and durably. [CKPT-WRITE-D1]

    A step that is there already is written beside it, as `step_XXXXXXXX-2`, which takes the name once the older one is
    deleted. Tensors that share storage (tied weights) are stored once and listed as aliases.
    """
    stored, aliases = _untie(checkpoint.tensors)
    manifest = _manifest(step, checkpoint.facts, aliases, stored)
    target = folder / f"step_{step:08d}"
    remedy = "free some space or choose another --out (earlier checkpoints are intact)"
    with refusing(f"write checkpoint {target}", remedy):
        make_folder(folder)
        older = [path for path in checkpoints(folder) if _age(path)[0] == step]
        last = max((edition for _, published, edition in map(_age, older) if published), default=0)
        fresh = folder / f"{target.name}-{last + 1}" if last else target
        with new_folder(fresh) as temporary:
            try:
                save_file(stored, temporary / TENSORS)
            except SafetensorError as error:
                raise OSError(str(error)) from None
            write_file(temporary / MANIFEST, manifest)
        for path in older:
            remove_folder(path)
        if fresh != target:
            fresh.rename(target)
            sync(folder)
    return target


def load_checkpoint(path: Path) -> Checkpoint:
    """Reads a checkpoint after verifying every hash. [CKPT-READ-D1]"""
    content, file = read_manifest(path), path / TENSORS
    if _NAME.fullmatch(path.name) and _age(path)[0] != content.step:
        raise _bad(path / MANIFEST, f"is of step {content.step}")
    try:
        stored = load_file(file)
    except FileNotFoundError:
        raise _bad(file, "is missing") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise _bad(file, f"is truncated or not a safetensors file ({error})") from None
    if odd := sorted(set(stored) ^ set(content.tensors)):
        raise _bad(file, f"does not hold the tensors of its manifest (first difference {odd[0]!r})")
    for name, tensor in stored.items():
        own = content.tensors[name].model_dump(mode="json")
        for key, found in summary(tensor).items():
            if found != own[key]:
                raise _bad(file, f"is damaged: tensor {name!r} has another {key} than recorded")
    tensors = {**stored, **{name: stored[base] for name, base in content.aliases.items()}}
    return Checkpoint(tensors, content.facts)


def checkpoints(folder: Path) -> list[Path]:
    """Checkpoint folders, oldest first; unfinished ones are not among them."""
    _refuse_link(folder)
    with refusing(f"read the checkpoints in {folder}", "see what is there"):
        paths = list(folder.iterdir()) if folder.exists() else []
    return sorted((path for path in paths if _NAME.fullmatch(path.name)), key=_age)


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
    sound = [path for path in _readable(folder) if upto is None or _age(path)[0] <= upto]
    last = {_age(path)[0]: path for path in sound}
    kept = {*list(last.values())[-keep:], best_checkpoint(folder, better)}
    with refusing(f"delete checkpoints in {folder}", "make the folder writable"):
        for path in sound:
            if path not in kept:
                remove_folder(path)
        sweep(folder)


def best_checkpoint(folder: Path, better: str = "validation_loss") -> Path | None:
    """The readable checkpoint whose fact `better` is lowest, the newest of equals."""
    scored = [(content.facts.get("metrics", {}).get(better), path) for path, content in _readable(folder).items()]
    known = [(value, path) for value, path in scored if value is not None]
    return min(reversed(known), key=lambda item: item[0])[1] if known else None


def read_manifest(folder: Path) -> Content:
    """The verified content of a checkpoint's manifest, without reading the tensors."""
    for path in (folder, folder / MANIFEST, folder / TENSORS):
        _refuse_link(path)
        if path != folder and path.exists() and not path.is_file():
            raise _bad(path, "is not a regular file")  # reading a pipe would wait for ever
    file = folder / MANIFEST
    try:
        document = json.loads(file.read_bytes(), parse_constant=int)  # to which NaN and infinity are a ValueError
    except FileNotFoundError:
        raise _bad(file, "is missing") from None
    except OSError as error:
        raise _bad(file, f"cannot be read ({error.strerror or error})") from None
    except (ValueError, RecursionError):
        raise _bad(file, "is truncated or not JSON") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise _bad(file, f"is not a {FORMAT} manifest")
    version, content = document.get("version"), document.get("content")
    if type(version) is int and version > VERSION:
        raise CheckpointError(f"{file} has format version {version}, this hecate reads up to {VERSION}: upgrade hecate")
    if type(version) is not int or version != VERSION:
        raise _bad(file, f"has format version {version!r}, which there never was")
    if odd := sorted(set(document) - {"format", "version", "digest", "content"}):
        raise _bad(file, f"has an unknown field {odd[0]!r}")
    try:
        same = isinstance(content, dict) and document.get("digest") == _digest(content)
    except ValueError:  # a number beyond all floats
        same = False
    if not same:
        raise _bad(file, "is damaged: its digest does not match")
    try:
        return Content.model_validate(content)
    except ConfigError as error:
        raise _bad(file, f"is not valid: {error}") from None


def summary(tensor: Tensor) -> dict[str, Any]:
    """The facts of a `Summary`."""
    raw = tensor.reshape(-1).contiguous().view(torch.uint8).numpy()
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "sha256": hashlib.sha256(raw.data).hexdigest(),
    }


def _manifest(step: int, facts: Mapping[str, Any], aliases: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """The text of a manifest; equal states give equal texts. [CKPT-WRITE-D2]"""
    summaries = {name: summary(tensor) for name, tensor in tensors.items()}
    content = {"step": step, "facts": facts, "aliases": aliases, "tensors": summaries}
    try:
        digest = _digest(content)
        Content.model_validate(json.loads(json.dumps(content)))
    except (ValueError, TypeError) as error:  # ConfigError among them
        raise CheckpointError(
            f"cannot write a checkpoint of step {step!r}: {error}; its facts must be plain JSON with finite numbers"
        ) from None
    document = {"format": FORMAT, "version": VERSION, "digest": digest, "content": content}
    return json.dumps(document, indent=1, sort_keys=True) + "\n"


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _readable(folder: Path) -> dict[Path, Content]:
    found = {}
    for path in checkpoints(folder):
        with suppress(CheckpointError):
            found[path] = read_manifest(path)
    return found


def _age(path: Path) -> tuple[int, bool, int]:
    """Step, whether it was published, edition: a step may be written again, as `step_00000012-2`."""
    match = _NAME.fullmatch(path.name)
    retired, step, edition = match.groups() if match else (None, "0", None)
    return int(step), retired is None, int(edition or 1)


def _refuse_link(path: Path) -> None:
    """A link may lead out of the run: to a file of others, or one that changes."""
    if path.is_symlink():
        raise CheckpointError(
            f"{path} is a symbolic link, which may lead out of the run; put what it points to in its place"
        )


def _bad(file: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{file} {reason}; delete {file.parent} and resume from an earlier checkpoint")


def _untie(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    stored: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in tensors.items():
        value = tensor.detach()
        identity = (value.data_ptr(), tuple(value.shape), value.stride(), value.dtype, value.device)
        if value.numel() and (base := first.setdefault(identity, name)) != name:
            aliases[name] = base
        else:  # views of one storage that differ in shape are copied: safetensors refuses shared memory
            stored[name] = value.to("cpu", copy=True, memory_format=torch.contiguous_format)
    return stored, aliases
