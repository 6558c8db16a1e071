"""Checkpoints: a folder per step with safetensors files and a JSON manifest, complete or absent.

A checkpoint is written to a temporary folder, forced to disk and renamed to a free name; only then are older ones
deleted. So whenever a process is killed, the newest complete checkpoint remains. The manifest is validated strictly and
has a digest of its whole content. Nothing is pickled or unpickled.

One process writes version 1, with all tensors in one file; several processes write version 2 (`hecate.train.sharded`),
whose files hold parts of tensors. A single process can read both.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hecate import files
from hecate.checks import MAX_COUNT, Count, check_room
from hecate.errors import CheckpointError, ConfigError
from hecate.optim.tensors import local
from hecate.variant import Config, Conflicts, read_json

FORMAT = "hecate-checkpoint"
VERSION, SHARDED = 1, 2
"""Format versions of checkpoints written by one process and by several."""

MANIFEST, TENSORS = "manifest.json", "tensors.safetensors"
# Version 0.1 renamed a checkpoint to `.tmp-old-...` while it wrote the step again.
_SHA256 = r"^[0-9a-f]{64}$"
_FILE = r"^[A-Za-z0-9][A-Za-z0-9_-]*\.safetensors$"
_NAME = re.compile(r"(\.tmp-old-)?step_(\d{8,})(?:-(\d+))?")


MAX_AXES, MAX_BYTES = 64, 1 << 28
"""Largest number of axes of a tensor, which is torch's, and of bytes of a manifest."""
Extents = Annotated[tuple[Annotated[Count, Field(ge=0)], ...], Field(max_length=MAX_AXES)]


class LeftAloneError(CheckpointError):
    """Another process of the run has ended, or does not answer."""


class Checkpoint(NamedTuple):
    """Named tensors, and plain JSON facts (config, step, cursor, metrics, versions)."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]


class Staged(NamedTuple):
    """A checkpoint ready to be written: tensors on the CPU that share no storage, and aliases, further names of
    these."""

    step: int
    tensors: Mapping[str, Tensor]
    aliases: Mapping[str, str]
    facts: Mapping[str, Any]


class Skipped(NamedTuple):
    """A checkpoint that was skipped, and why."""

    path: Path
    reason: str


class Summary(Config):
    """Expected dtype, shape and digest of a stored tensor."""

    dtype: str
    shape: Annotated[tuple[int, ...], Field(max_length=MAX_AXES)]
    sha256: str = Field(pattern=_SHA256)


class StoredFile(Config):
    """Expected size and digest of a file of a sharded checkpoint."""

    bytes: int = Field(ge=0)
    sha256: str = Field(pattern=_SHA256)


class Piece(Config):
    """A block of a tensor, and the file that holds it under the tensor's name."""

    file: str
    offset: Extents
    shape: Extents


class Spread(Config):
    """Expected dtype, shape and blocks of a tensor stored in blocks; each element is in exactly one of them."""

    dtype: str
    shape: Extents
    pieces: tuple[Piece, ...]

    def conflicts(self) -> Conflicts:
        """An unknown dtype, and blocks that leave out an element, or have one twice."""
        if not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            yield ("dtype",), f"there is no dtype {self.dtype!r}"
        boxes = [list(zip(p.offset, p.shape, strict=False)) for p in self.pieces]
        if math.prod(max(n, 1) for n in self.shape) > MAX_COUNT:  # torch cannot make such a tensor, even on meta
            yield ("shape",), f"must be of at most {MAX_COUNT:,} numbers"
        ranks = {len(self.shape), *(len(x) for p in self.pieces for x in (p.offset, p.shape))}
        if len(ranks) > 1 or not tiles([box for box in boxes if all(length for _, length in box)], self.shape):
            yield ("pieces",), f"must cover each number of {list(self.shape)} once"


class Manifest(Config):
    """Step, plain facts, aliases (names of tensors that share memory with a stored one), stored tensors."""

    step: int = Field(ge=0)
    facts: dict[str, Any]
    aliases: dict[str, str]
    tensors: dict[str, Any]

    def conflicts(self) -> Conflicts:
        """Aliases of tensors that are not stored, facts of another step, and metrics that are not finite numbers."""
        for name, base in self.aliases.items():
            if name in self.tensors or base not in self.tensors:
                yield ("aliases", name), f"must name a stored tensor, got {base!r}"
        step = self.facts.get("step", self.step)
        if type(step) is not int or step != self.step:
            yield ("facts", "step"), f"must be the step {self.step}, got {step!r}"
        metrics = self.facts.get("metrics", {})
        if not isinstance(metrics, dict):
            yield ("facts", "metrics"), f"must be a mapping, got {metrics!r}"
        for name, value in metrics.items():
            if type(value) not in (int, float) or not math.isfinite(value):
                yield ("facts", "metrics", name), f"must be a finite number, got {value!r}"


class Content(Manifest):
    """Manifest of a checkpoint that one process wrote, in one file."""

    tensors: dict[str, Summary]


class ShardedContent(Manifest):
    """Manifest of a checkpoint that several processes wrote, with its files."""

    files: dict[Annotated[str, Field(pattern=_FILE)], StoredFile]
    tensors: dict[str, Spread]

    def conflicts(self) -> Conflicts:
        """Conflicts of any manifest, and blocks in files that are not listed or too small."""
        yield from super().conflicts()
        claimed = Counter[str]()
        for name, spread in self.tensors.items():
            for piece in spread.pieces:
                claimed[piece.file] += getattr(torch, spread.dtype).itemsize * math.prod(piece.shape)
            unknown = [piece.file for piece in spread.pieces if piece.file not in self.files]
            twice = [file for file, times in Counter(piece.file for piece in spread.pieces).items() if times > 1]
            if unknown or twice:
                yield ("tensors", name), f"must be in files that are listed, once in each, got {(unknown + twice)[0]!r}"
        for file, size in claimed.items():
            if size > self.files[file].bytes:
                yield ("files", file), f"must hold blocks of {size:,} bytes, got {self.files[file].bytes:,}"


def tiles(boxes: list[list[tuple[int, int]]], shape: tuple[int, ...]) -> bool:
    """True if boxes, given as (offset, length) along each dimension, cover a shape without gap or overlap, and result
    from cutting it along the first dimension, each slab along the second, and so on."""
    if 0 in shape:
        return not boxes
    if not shape:
        return len(boxes) == 1
    end = 0
    # Slabs along the first axis; each of them has to be tiled along the others.
    for (offset, length), group in groupby(sorted(boxes), key=lambda box: box[0]):
        if offset != end or not tiles([box[1:] for box in group], shape[1:]):
            return False
        end += length
    return end == shape[0]


def save_checkpoint(folder: Path, step: int, checkpoint: Checkpoint) -> Path:
    """Writes `folder/step_XXXXXXXX` atomically and durably. [CKPT-WRITE-D1]

    If a checkpoint of that step exists, the new one is written beside it as `step_XXXXXXXX-2`, and renamed once the
    older one is deleted. Tensors that share storage (tied weights) are stored once and listed as aliases.
    """
    return write_checkpoint(folder, staged(step, checkpoint))


def staged(step: int, checkpoint: Checkpoint, aliases: Mapping[str, str] | None = None) -> Staged:
    """A checkpoint with copies on the CPU of the tensors' present values, but for aliases (None looks for them); a
    `DTensor` stays one, with this process's part."""
    aliases = aliases_of(checkpoint.tensors) if aliases is None else aliases
    stored = {name: tensor.detach() for name, tensor in checkpoint.tensors.items() if name not in aliases}
    # Different views of one storage become separate copies: safetensors refuses shared memory.
    copies = {k: v.to("cpu", copy=True, memory_format=torch.contiguous_format) for k, v in stored.items()}
    return Staged(step, copies, aliases, checkpoint.facts)


def write_checkpoint(folder: Path, checkpoint: Staged) -> Path:
    """Writes a staged checkpoint as `save_checkpoint` does."""
    summaries = {name: summary(tensor) for name, tensor in checkpoint.tensors.items()}
    manifest = manifest_text(VERSION, **checkpoint._asdict() | {"tensors": summaries})
    with publishing(folder, checkpoint.step) as (temporary, target):
        write_tensors(checkpoint.tensors, temporary / TENSORS)
        files.write_file(temporary / MANIFEST, manifest)
    return target


@contextmanager
def publishing(folder: Path, step: int) -> Iterator[tuple[Path, Path]]:
    """Context with a temporary folder to fill with a step's checkpoint, and the path under which it is published."""
    target = folder / f"step_{step:08d}"
    with files.refusing(f"write checkpoint {target}", "choose another --out (earlier checkpoints are intact)"):
        files.make_folder(folder)
        # If the step exists already, as after a resume, the new checkpoint is first published under another name.
        older = [path for path in checkpoints(folder) if _age(path)[0] == step]
        last = max((edition for _, published, edition in map(_age, older) if published), default=0)
        fresh = folder / f"{target.name}-{last + 1}" if last else target
        # `new_folder` forces it to disk and renames it; from then on it is the newest checkpoint.
        with files.new_folder(fresh) as temporary:
            yield temporary, target
        for path in older:
            files.remove_folder(path)
        if fresh != target:
            fresh.rename(target)
            files.sync(folder)


def write_tensors(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Writes a new safetensors file with the usual mode; safetensors itself makes its files private. Raises OSError."""
    file.touch()
    mode = file.stat().st_mode
    with files.by_library():
        save_file(dict(tensors), file)
    file.chmod(mode)


def load_checkpoint(path: Path) -> Checkpoint:
    """Reads a checkpoint of one or several processes, and verifies every hash. [CKPT-READ-D1]"""
    content = read_manifest(path)
    check_name(path, content.step)
    if isinstance(content, ShardedContent):
        check_listed(path, content)
        check_files(path, content, content.files)
        stored = _join_blocks(path, content)
    else:
        stored = dict(whole(path, content))
    tensors = {**stored, **{name: stored[base] for name, base in content.aliases.items()}}
    return Checkpoint(tensors, content.facts)


def check_name(path: Path, step: int) -> None:
    """Refuses a checkpoint whose folder is named after another step."""
    if _NAME.fullmatch(path.name) and _age(path)[0] != step:
        raise CheckpointError(f"{path / MANIFEST} is of step {step}; rename its folder to step_{step:08d}")


def whole(path: Path, content: Content, share: slice = slice(None)) -> Iterator[tuple[str, Tensor]]:
    """The tensors of version 1, or a share of them, each verified as it is yielded."""
    file = path / TENSORS
    with open_tensors(file) as opened:
        # Sorted by name, so that all ranks cut the same shares.
        names = sorted(opened.keys())
        if odd := sorted(set(names) ^ set(content.tensors)):
            raise bad(file, f"does not hold the tensors of its manifest (first difference {odd[0]!r})")
        for name in names[share]:
            tensor, expected = opened.get_tensor(name), content.tensors[name].model_dump(mode="json")
            for key, fact in summary(tensor).items():
                if fact != expected[key]:
                    raise bad(file, f"is damaged: tensor {name!r} has another {key} than recorded")
            yield name, tensor


def check_listed(path: Path, content: Content | ShardedContent) -> None:
    """Refuses a checkpoint whose safetensors files are not those of its manifest: DCP would read any it finds."""
    listed = set(content.files) if isinstance(content, ShardedContent) else {TENSORS}
    for name in sorted(listed ^ {file.name for file in path.glob("*.safetensors")}):
        raise bad(path / name, "is missing" if name in listed else "is not of this checkpoint: no manifest lists it")


def check_files(path: Path, content: ShardedContent, names: Iterable[str]) -> None:
    """Refuses files of a sharded checkpoint that are not as they were written."""
    for name in names:
        refuse_link(path / name)
        try:
            file = describe_file(path / name)
        except FileNotFoundError:
            raise bad(path / name, "is missing") from None
        except OSError as error:
            raise bad(path / name, f"cannot be read ({error.strerror or error})") from None
        if file.bytes < content.files[name].bytes:
            raise bad(path / name, f"is cut off: {file.bytes} of {content.files[name].bytes} bytes")
        if file != content.files[name]:
            raise bad(path / name, "is damaged: it has another sha256 than recorded")


def describe_file(file: Path) -> StoredFile:
    """Size and hash of a regular file. Raises OSError."""
    if not file.is_file():
        raise FileNotFoundError(str(file)) if not file.exists() else OSError("it is not a regular file")
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return StoredFile(bytes=file.stat().st_size, sha256=digest)


def _join_blocks(path: Path, content: ShardedContent) -> dict[str, Tensor]:
    """The tensors of version 2, assembled from verified files."""
    blocks: dict[str, dict[str, Piece]] = {file: {} for file in content.files}
    for name, spread in content.tensors.items():
        for piece in spread.pieces:
            blocks[piece.file][name] = piece
    for file, listed in blocks.items():  # before anything of the sizes in the manifest is allocated
        with open_tensors(path / file) as opened:
            shapes = {(name, tuple(opened.get_slice(name).get_shape())) for name in opened.keys()}
        for name, _ in sorted(shapes ^ {(name, piece.shape) for name, piece in listed.items()}):
            raise bad(path / file, f"does not hold the block of tensor {name!r} that its manifest lists")
    # The files agree with the manifest; next, whether the tensors fit into memory.
    sizes = [getattr(torch, item.dtype).itemsize * math.prod(item.shape) for item in content.tensors.values()]
    check_room(sum(sizes), f"{path} has tensors", "open it with more processes", error=CheckpointError)
    stored = {name: torch.empty(x.shape, dtype=getattr(torch, x.dtype)) for name, x in content.tensors.items()}
    for file, listed in blocks.items():
        with open_tensors(path / file) as opened:
            for name, piece in listed.items():
                block = opened.get_tensor(name)
                if block.dtype != stored[name].dtype:
                    raise bad(path / file, f"holds tensor {name!r} in {block.dtype}, its manifest says otherwise")
                place = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape, strict=True))
                stored[name][place] = block
    return stored


@contextmanager
def open_tensors(file: Path, cure: str = "") -> Iterator[Any]:
    """Context with an open safetensors file; refuses one that is missing or damaged, with this remedy, as `bad`."""
    try:
        files.refuse_pipe(file)
        with safe_open(file, framework="pt") as opened:
            yield opened
    except FileNotFoundError:
        raise bad(file, "is missing", cure) from None
    except (SafetensorError, OSError, ValueError) as error:
        raise bad(file, f"is truncated or not a safetensors file ({error})", cure) from None


def named(dtype: torch.dtype) -> str:
    """The name of a dtype in a manifest."""
    return str(dtype).removeprefix("torch.")


def checkpoints(folder: Path) -> list[Path]:
    """Checkpoint folders, oldest first, without unfinished ones."""
    refuse_link(folder)
    with files.refusing(f"read the checkpoints in {folder}", "see what is there"):
        paths = list(folder.iterdir()) if folder.exists() else []
    return sorted((path for path in paths if _NAME.fullmatch(path.name)), key=_age)


def newest_checkpoint(folder: Path) -> tuple[Path, Checkpoint, list[Skipped]] | None:
    """The newest checkpoint that verifies, and those skipped on the way; None if there is none.

    `CheckpointError` if there are checkpoints but all are damaged. [CKPT-RESUME-D1]
    """
    return newest_of(folder, lambda: checkpoints(folder), load_checkpoint)


def newest_of(
    folder: Path, listed: Callable[[], list[Path]], load: Callable[[Path], Checkpoint]
) -> tuple[Path, Checkpoint, list[Skipped]] | None:
    """As `newest_checkpoint`, with functions that list and load checkpoints."""
    skipped, paths = list[Skipped](), listed()
    for path in reversed(paths):
        try:
            return path, load(path), skipped
        except LeftAloneError:
            raise
        except CheckpointError as error:
            skipped.append(Skipped(path, str(error)))
    if listed() != paths:  # a running process has replaced them meanwhile
        return newest_of(folder, listed, load)
    if skipped:
        reasons = "; ".join(item.reason for item in skipped)
        raise CheckpointError(f"no checkpoint in {folder} can be used; start again with another --out: {reasons}")
    return None


def prune_checkpoints(folder: Path, keep: int, better: str = "validation_loss", *, upto: int | None = None) -> None:
    """Deletes all but the `keep` newest and the one lowest in `better`. [CKPT-PRUNE-D1]

    Those that cannot be read, or are later than the step `upto`, are neither counted nor deleted.
    """
    if keep < 1:
        raise ConfigError(f"at least one checkpoint must be kept, got keep={keep}")
    sound = [path for path in _readable(folder) if upto is None or _age(path)[0] <= upto]
    last = {_age(path)[0]: path for path in sound}
    survivors = {*list(last.values())[-keep:], best_checkpoint(folder, better)}
    with files.refusing(f"delete checkpoints in {folder}", "make the folder writable"):
        for path in sound:
            if path not in survivors:
                files.remove_folder(path)
        files.sweep(folder)


def best_checkpoint(folder: Path, better: str = "validation_loss") -> Path | None:
    """The readable checkpoint with the lowest metric `better`, the newest of equals, among those on the data and the
    sequence length of the newest one: losses on others are of other tokens. [CKPT-PRUNE-D1]"""
    every = {path: content.facts for path, content in _readable(folder).items()}
    last = [*map(data_of, every.values())][-1:]
    alike = {path: facts.get("metrics", {}) for path, facts in every.items() if data_of(facts) in last}
    scored = {path: metrics[better] for path, metrics in alike.items() if better in metrics}
    return min(reversed(scored), key=scored.__getitem__, default=None)


def data_of(facts: Mapping[str, Any]) -> tuple[Any, ...]:
    """The fingerprint of the data that a checkpoint was scored on, and its sequence length; empty if unknown."""
    cursor = facts.get("cursor")
    return tuple(cursor.get(name) for name in ("fingerprint", "seq_len")) if isinstance(cursor, dict) else ()


def read_manifest(folder: Path) -> Content | ShardedContent:
    """The verified content of a checkpoint's manifest; tensors are not read."""
    for path in (folder, folder / MANIFEST, folder / TENSORS):
        refuse_link(path)
        if path != folder and path.exists() and not path.is_file():
            raise bad(path, "is not a regular file")  # reading a pipe would wait for ever
    file = folder / MANIFEST
    try:
        text = files.read_whole(file, MAX_BYTES)
    except FileNotFoundError:
        raise bad(file, "is missing") from None
    except OSError as error:
        raise bad(file, f"cannot be read ({error.strerror or error})") from None
    try:
        document = read_json(text, strict=True)
    except ConfigError as error:
        raise bad(file, f"is truncated or not JSON ({error})") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise bad(file, f"is not a {FORMAT} manifest")
    version, content = document.get("version"), document.get("content")
    if type(version) is int and version > SHARDED:
        raise CheckpointError(f"{file} has format version {version}, this hecate reads up to {SHARDED}: upgrade hecate")
    if type(version) is not int or version not in (VERSION, SHARDED):
        raise bad(file, f"has format version {version!r}, which there never was")
    if odd := sorted(set(document) - {"format", "version", "digest", "content"}):
        raise bad(file, f"has an unknown field {odd[0]!r}")
    try:
        same = isinstance(content, dict) and document.get("digest") == _digest(content)
    except ValueError:  # a number that is not finite
        same = False
    if not same:
        raise bad(file, "is damaged: its digest does not match")
    try:
        return (Content if version == VERSION else ShardedContent).model_validate(content)
    except ConfigError as error:
        raise bad(file, f"is not valid: {error.line}") from None


def summary(tensor: Tensor) -> dict[str, Any]:
    """The fields of a tensor's `Summary`."""
    raw = tensor.reshape(-1).contiguous().view(torch.uint8).numpy()
    return {"dtype": named(tensor.dtype), "shape": list(tensor.shape), "sha256": hashlib.sha256(raw.data).hexdigest()}


def manifest_text(version: int, **content: Any) -> str:
    """The text of a manifest; equal states give equal texts. [CKPT-WRITE-D2]"""
    try:
        digest = _digest(content)
        (Content if version == VERSION else ShardedContent).model_validate(json.loads(json.dumps(content)))
    except (ValueError, TypeError) as error:  # ConfigError among them
        cure = "its facts must be plain JSON with finite numbers"
        raise CheckpointError(f"cannot write a checkpoint of step {content['step']!r}: {error}; {cure}") from None
    document = {"format": FORMAT, "version": version, "digest": digest, "content": content}
    return json.dumps(document, indent=1, sort_keys=True) + "\n"


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _readable(folder: Path) -> dict[Path, Content | ShardedContent]:
    contents = {}
    for path in checkpoints(folder):
        with suppress(CheckpointError):
            contents[path] = read_manifest(path)
    return contents


def _age(path: Path) -> tuple[int, bool, int]:
    """Sort key: step, whether it was published, and edition, such as 2 for `step_00000012-2`."""
    match = _NAME.fullmatch(path.name)
    retired, step, edition = match.groups() if match else (None, "0", None)
    return int(step), retired is None, int(edition or 1)


def refuse_link(path: Path) -> None:
    """Refuses a link, which may lead out of the run: to somebody else's file, or one that changes."""
    if path.is_symlink():
        raise CheckpointError(
            f"{path} is a symbolic link, which may lead out of the run; put what it points to in its place"
        )


def bad(file: Path, reason: str, cure: str = "") -> CheckpointError:
    """The error for a damaged file, by default one of a run's checkpoint."""
    return CheckpointError(f"{file} {reason}; {cure or f'delete {file.parent} and resume from an earlier checkpoint'}")


def aliases_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Aliases among tensors: names of tensors that are the same in memory as an earlier one, and its name."""
    aliases: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in tensors.items():
        value = local(tensor.detach())
        # Only tensors that are the same in every respect, such as tied weights, are aliases; other views are copied.
        identity = (value.data_ptr(), tuple(tensor.shape), value.stride(), value.dtype, value.device)
        if value.numel() and (base := first.setdefault(identity, name)) != name:
            aliases[name] = base
    return aliases
