"""What a checkpoint says of itself: a strict JSON document with a digest over all of it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from hecate.errors import CheckpointError, ConfigError
from hecate.variant import Config

FORMAT = "hecate-checkpoint"
VERSION = 1
MANIFEST, TENSORS = "manifest.json", "tensors.safetensors"


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


def dump_manifest(
    step: int, facts: Mapping[str, Any], aliases: Mapping[str, str], tensors: Mapping[str, Tensor]
) -> str:
    """The text of a manifest; equal states give equal texts. [CKPT-WRITE-D2]"""
    content = {
        "step": step,
        "facts": facts,
        "aliases": aliases,
        "tensors": {name: summary(tensor) for name, tensor in tensors.items()},
    }
    try:
        digest = _digest(content)
        Content.model_validate(json.loads(json.dumps(content)))
    except (ValueError, TypeError) as error:  # ConfigError among them
        raise CheckpointError(
            f"cannot write a checkpoint of step {step!r}: {error}; its facts must be plain JSON with finite numbers"
        ) from None
    document = {"format": FORMAT, "version": VERSION, "digest": digest, "content": content}
    return json.dumps(document, indent=1, sort_keys=True) + "\n"


def read_manifest(folder: Path) -> Content:
    """The verified content of a checkpoint's manifest, without reading the tensors."""
    for path in (folder, folder / MANIFEST, folder / TENSORS):
        refuse_link(path)
        if path != folder and path.exists() and not path.is_file():
            raise bad(path, "is not a regular file")  # reading a pipe would wait for ever
    file = folder / MANIFEST
    try:
        document = json.loads(file.read_bytes(), parse_constant=_not_json)
    except FileNotFoundError:
        raise bad(file, "is missing") from None
    except OSError as error:
        raise bad(file, f"cannot be read ({error.strerror or error})") from None
    except (ValueError, RecursionError):
        raise bad(file, "is truncated or not JSON") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise bad(file, f"is not a {FORMAT} manifest")
    version = document.get("version")
    if type(version) is int and version > VERSION:
        raise CheckpointError(f"{file} has format version {version}, this hecate reads up to {VERSION}: upgrade hecate")
    if type(version) is not int or version != VERSION:
        raise bad(file, f"has format version {version!r}, which there never was")
    odd = sorted(set(document) - {"format", "version", "digest", "content"})
    if odd:
        raise bad(file, f"has an unknown field {odd[0]!r}")
    return _content(file, document.get("content"), document.get("digest"))


def _content(file: Path, content: Any, digest: Any) -> Content:
    try:
        same = isinstance(content, dict) and digest == _digest(content)
    except ValueError:  # a number beyond all floats
        same = False
    if not same:
        raise bad(file, "is damaged: its digest does not match")
    try:
        return Content.model_validate(content)
    except ConfigError as error:
        raise bad(file, f"is not valid: {error}") from None


def summary(tensor: Tensor) -> dict[str, Any]:
    """The facts of a `Summary`."""
    raw = tensor.reshape(-1).contiguous().view(torch.uint8).numpy()
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "sha256": hashlib.sha256(raw.data).hexdigest(),
    }


def refuse_link(path: Path) -> None:
    """A link may lead out of the run: to a file of others, or one that changes."""
    if path.is_symlink():
        raise CheckpointError(
            f"{path} is a symbolic link, which may lead out of the run; put what it points to in its place"
        )


def bad(file: Path, reason: str) -> CheckpointError:
    """What is wrong with a file of a checkpoint, and the remedy."""
    return CheckpointError(f"{file} {reason}; delete {file.parent} and resume from an earlier checkpoint")


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _not_json(text: str) -> None:
    raise ValueError(f"{text} is not JSON")
