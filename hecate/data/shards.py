"""Tokens on disk: a folder of shards with its sidecar `tokens.json`, and the `.bin` files of nanoGPT, as one stream.

A shard is a file of token ids, uint16 or uint32, little endian, and a file of the positions at which documents start,
uint64. Files are read with `pread`: pages of a mapped file would count as memory of the process.
"""

from __future__ import annotations

import hashlib
import json
import os
import weakref
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hecate.checks import Count
from hecate.data.base import Split
from hecate.data.tokenizer import MOST, MOST_BYTES, Bytes, FileTokenizer, Tokenizer
from hecate.errors import ConfigError, DataError, retelling
from hecate.files import read_file, read_whole, reading, refuse_pipe
from hecate.variant import Config, read_json

FORMAT, VERSION = "hecate-tokens", 1
SIDECAR, TOKENIZER, LENGTHS = "tokens.json", "tokenizer.json", "lengths.bin"
Dtype = Literal["uint16", "uint32"]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
Number = Annotated[Count, Field(ge=0)]
NANOGPT, NANOGPT_HEADER = 20240520, 1024
"""First of the 256 int32 in the header of a nanoGPT shard, and the header's size in bytes."""
OTHER_MAGIC = 20240801
_MOST_OPEN, _MOST_BYTES, _MOST_STARTS = 64, 1 << 26, 1 << 24
"""Limits: files open at once; bytes of a sidecar; starts of documents read beyond one per token."""


class Shard(Config):
    """Files of a shard: tokens, and the starts of documents; `text` is the number of bytes of text in it."""

    file: FileName
    tokens: Number
    sha256: Digest
    starts: FileName
    documents: Number
    starts_sha256: Digest
    text: Number

    def digests(self) -> dict[str, str]:
        """Expected SHA-256 of its files, by name."""
        return {self.file: self.sha256, self.starts: self.starts_sha256}


class Sidecar(Config):
    """Contents of a folder's `tokens.json`. [DATA-SHARD-D1]

    Fields:
        dtype, vocabulary: dtype of the stored tokens, number of token ids.
        tokenizer: SHA-256 of `tokenizer.json` in the folder; None for bytes.
        end: token that ends every document; None without one.
        lengths: SHA-256 of `lengths.bin`, uint32, the bytes of text of every token; None if they are not known.
        train, validation: shards in the order of their documents.
    """

    dtype: Dtype
    vocabulary: Annotated[Number, Field(le=MOST)]
    tokenizer: Digest | None
    end: Number | None
    lengths: Digest | None
    train: tuple[Shard, ...]
    validation: tuple[Shard, ...]

    def text(self) -> str:
        """The text of the file, with a digest of its content."""
        content = self.model_dump(mode="json")
        document = {"format": FORMAT, "version": VERSION, "digest": digest_of(content), "content": content}
        return json.dumps(document, indent=1, sort_keys=True) + "\n"


def digest_of(content: Any) -> str:
    """SHA-256 of plain values, as canonical JSON."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_sidecar(folder: Path) -> Sidecar:
    """The sidecar of a folder; `DataError` says why it is missing or cannot be used."""
    path = folder / SIDECAR
    with reading(path, "make the folder with `hecate data tokenize`"):
        text = read_whole(path, _MOST_BYTES)
    try:
        document = read_json(text, strict=True)
    except ConfigError:
        raise DataError(f"{path} is cut off or no JSON; make the folder again with `hecate data tokenize`") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise DataError(f"{path} is no sidecar of {FORMAT}; make the folder with `hecate data tokenize`")
    version, content = document.get("version"), document.get("content")
    if type(version) is not int or version > VERSION:
        raise DataError(f"{path} has version {version!r}, this hecate reads up to {VERSION}: upgrade hecate")
    if not isinstance(content, dict) or document.get("digest") != digest_of(content):
        raise DataError(f"{path} is damaged: its digest does not match; put the folder back as it was written")
    with retelling(DataError, f"{path} is not valid"):
        return Sidecar.model_validate(content)


def tokenizer_of(folder: Path, sidecar: Sidecar | None = None) -> Tokenizer:
    """The tokenizer that a folder's tokens were made with."""
    sidecar, path = sidecar or read_sidecar(folder), folder / TOKENIZER
    if sidecar.tokenizer is None:
        return Bytes()
    with reading(path):
        text = read_whole(path, MOST_BYTES).decode()
    if hashlib.sha256(text.encode()).hexdigest() != sidecar.tokenizer:
        raise DataError(f"{path} is not the tokenizer that the shards beside it were made with; put that back")
    return FileTokenizer(text, str(path))


class TokenFile(NamedTuple):
    """Tokens in a file: `tokens` of them from byte `begin` on; `starts` is the file of the starts of documents, None
    if unknown."""

    path: Path
    dtype: str
    tokens: int
    begin: int = 0
    starts: Path | None = None
    documents: int = 0
    starts_sha256: str | None = None

    def check(self) -> None:
        """Refuses files that are missing, or not of the size that they must have. [DATA-SHARD-D2]"""
        _check_size(self.path, self.begin + np.dtype(self.dtype).itemsize * self.tokens)
        if self.starts is not None:
            _check_size(self.starts, 8 * self.documents)


def _check_size(path: Path, needed: int) -> None:
    with reading(path):
        refuse_pipe(path)
        size = path.stat().st_size
    if size != needed:
        what = "is cut off" if size < needed else "has grown"
        raise DataError(f"{path} {what}: it has {size} bytes, its folder says {needed}; put it back as it was written")


def files_of(folder: Path, sidecar: Sidecar, split: Split) -> list[TokenFile]:
    """The files of a split."""
    shards = sidecar.train if split == "train" else sidecar.validation
    return [
        TokenFile(folder / s.file, sidecar.dtype, s.tokens, 0, folder / s.starts, s.documents, s.starts_sha256)
        for s in shards
    ]  # fmt: skip


def nanogpt_file(path: Path) -> TokenFile:
    """A `.bin` file of uint16 tokens, with nanoGPT's header or without one. [DATA-SHARD-D4]"""
    with reading(path, "put a regular file there"):
        size, head = path.stat().st_size, read_file(path, 12)
    whole = np.frombuffer(head[: len(head) // 4 * 4], dtype="<i4").tolist()
    magic, version, count = (*whole, 0, 0, 0)[:3]
    if magic == OTHER_MAGIC:
        raise DataError(f"{path} has the header {OTHER_MAGIC}, of uint32 shards; only uint16 shards are read as .bin")
    if magic == NANOGPT:
        if version != 1:
            raise DataError(f"{path} has a header of version {version}; version 1 is read")
        shard = TokenFile(path, "uint16", count, NANOGPT_HEADER)
        shard.check()
        return shard
    if size % 2:
        raise DataError(f"{path} has {size} bytes, which are no uint16 tokens; is it cut off?")
    return TokenFile(path, "uint16", size // 2)


class TokenStream:
    """Files of tokens as one stream, or the part `begin .. end` of it; tokens are read on demand, and not kept.
    [DATA-SHARD-D3]"""

    def __init__(self, files: Sequence[TokenFile], begin: int = 0, end: int | None = None) -> None:
        for file in files:
            file.check()
        self.files = list(files)
        self._ends = list(accumulate(file.tokens for file in files))
        whole = self._ends[-1] if files else 0
        self.begin, self.end = begin, whole if end is None else end
        self._open: dict[Path, int] = {}
        self._checked: set[Path] = set()
        weakref.finalize(self, _close, self._open)

    def __getstate__(self) -> dict[str, Any]:
        # File descriptors belong to this stream only: in a copy the same numbers could be other files.
        return {**vars(self), "_open": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        weakref.finalize(self, _close, self._open)

    def __len__(self) -> int:
        return self.end - self.begin

    @property
    def has_starts(self) -> bool:
        """True if all files have the starts of their documents."""
        return all(file.starts is not None for file in self.files)

    def read(self, at: int, count: int) -> NDArray[np.int64]:
        """Tokens `at .. at + count`."""
        pieces = []
        for file, first, last, _ in self._parts(at, at + count):
            dtype = np.dtype(file.dtype).newbyteorder("<")
            raw = self._read_bytes(file.path, file.begin + first * dtype.itemsize, (last - first) * dtype.itemsize)
            pieces.append(np.frombuffer(raw, dtype))
        return np.concatenate(pieces).astype(np.int64) if pieces else np.zeros(0, dtype=np.int64)

    def starts(self, at: int, end: int) -> NDArray[np.int64]:
        """Starts of documents among the tokens `at .. end`."""
        places = [np.zeros(0, dtype=np.int64)]
        for file, first, last, before in self._parts(at, end):
            low, high = self._first_at(file, first), self._first_at(file, last)
            if high - low > last - first + _MOST_STARTS:
                raise DataError(
                    f"{file.starts} has {high - low:,} documents in {last - first:,} tokens; is it damaged?"
                )
            places.append(self._places(file, low, high) + (before - self.begin))
        return np.concatenate(places)

    def next_start(self, at: int) -> int | None:
        """The first start of a document at or after a token; None if there is none."""
        for file, first, _, before in self._parts(at, len(self)):
            index = self._first_at(file, first)
            if index < file.documents:
                return int(self._places(file, index, index + 1)[0]) + before - self.begin
        return None

    def part(self, begin: int, end: int) -> TokenStream:
        """A part of the stream, as a stream."""
        return TokenStream(self.files, self.begin + begin, self.begin + end)

    def _parts(self, at: int, end: int) -> Iterator[tuple[TokenFile, int, int, int]]:
        """Files that hold tokens `at .. end`, the first and last token in each, and the number of tokens before it."""
        at, end = at + self.begin, end + self.begin
        index = bisect_left(self._ends, at + 1)
        while at < end:
            file, before = self.files[index], self._ends[index] - self.files[index].tokens
            last = min(end, self._ends[index])
            if last > at:
                yield file, at - before, last - before, before
            at, index = last, index + 1

    def _first_at(self, file: TokenFile, place: int) -> int:
        """The index of the first document that starts at or after a place; reads only the starts that it compares."""
        return bisect_left(range(file.documents), place, key=lambda n: int(self._places(file, n, n + 1)[0]))

    def _places(self, file: TokenFile, first: int, last: int) -> NDArray[np.int64]:
        """Starts of the documents `first .. last` of a file, within that file."""
        path = file.starts
        if path is None:
            raise DataError(f"nothing says where documents start in {file.path}")
        # Verified before the first use, as starts decide where memories are reset; the file is small.
        if file.starts_sha256 is not None and path not in self._checked:
            check_hash(path, file.starts_sha256)
            self._checked.add(path)
        return np.frombuffer(self._read_bytes(path, 8 * first, 8 * max(last - first, 0)), dtype="<u8").astype(np.int64)

    def _read_bytes(self, path: Path, at: int, count: int) -> bytes:
        with reading(path):
            if path not in self._open:
                if len(self._open) >= _MOST_OPEN:
                    os.close(self._open.pop(next(iter(self._open))))
                self._open[path] = os.open(path, os.O_RDONLY)
            content = os.pread(self._open[path], count, at)
        if len(content) != count:
            raise DataError(f"{path} was cut off while it was read; put it back as it was written")
        return content


def _close(handles: dict[Path, int]) -> None:
    while handles:
        os.close(handles.popitem()[1])


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file."""
    with reading(path):
        refuse_pipe(path)
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


def check_hash(path: Path, recorded: str) -> None:
    """Refuses a file with another SHA-256 than recorded."""
    if file_sha256(path) != recorded:
        raise DataError(f"{path} is damaged: it has another SHA-256 than recorded; put it back as it was written")


def hashes_of(folder: Path, sidecar: Sidecar) -> dict[Path, str]:
    """Expected SHA-256 of every file of a folder, by path."""
    shards = (*sidecar.train, *sidecar.validation)
    hashes = {folder / name: digest for shard in shards for name, digest in shard.digests().items()}
    if sidecar.tokenizer is not None:
        hashes[folder / TOKENIZER] = sidecar.tokenizer
    if sidecar.lengths is not None:
        hashes[folder / LENGTHS] = sidecar.lengths
    return hashes


def lengths_of(folder: Path, sidecar: Sidecar) -> NDArray[np.int64] | None:
    """Bytes of text of every token, int64 `[vocabulary]`; None if not known."""
    if sidecar.lengths is None:
        return None
    path = folder / LENGTHS
    _check_size(path, 4 * sidecar.vocabulary)
    check_hash(path, sidecar.lengths)
    return np.fromfile(path, dtype="<u4").astype(np.int64)


def first_documents(folder: Path, count: int, most: int = 200) -> list[tuple[int, str]]:
    """Number of tokens and first characters of each of the first training documents of a folder."""
    sidecar = read_sidecar(folder)
    stream, tokenizer = TokenStream(files_of(folder, sidecar, "train")), tokenizer_of(folder, sidecar)
    documents: list[tuple[int, str]] = []
    at = 0
    while len(documents) < count and at < len(stream):
        end = stream.next_start(at + 1) or len(stream)
        text = tokenizer.decode(stream.read(at, min(end - at, 2 * most)).tolist())
        documents.append((end - at, text if len(text) <= most else text[:most] + "..."))
        at = end
    return documents
