"""Documents of files: text, JSON lines and Parquet, plain or compressed, one after the other and never all at once."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from hecate.errors import DataError, install_line, shorten

TEXT, LINES, TABLE = (".txt", ".md", ".rst", ".py", ".text"), (".jsonl", ".ndjson"), (".parquet",)
PACKED = (".gz", ".zst")
MAX_DOCUMENT = 1 << 28
"""Bytes of the largest document, which is held as a whole."""
_GLOB = frozenset("*?[")


def find(inputs: Sequence[str]) -> list[Path]:
    """The files that inputs name: files, folders (all that can be read below) and globs; sorted, each once."""
    found: set[Path] = set()
    for text in inputs:
        try:
            matches = _matches(text)
        except (OSError, ValueError) as error:  # names that no file can have, such as a**b or too long ones
            reason = getattr(error, "strerror", None) or error
            raise DataError(f"cannot read {shorten(text)}: {reason}; name files, folders or globs") from None
        if not matches:
            raise DataError(f"no text, JSON lines or Parquet in {text!r} (working directory {Path.cwd()})")
        found.update(matches)
    return sorted(found)


def _matches(text: str) -> list[Path]:
    """The files that one input names."""
    path = Path(text)
    if not text:  # which would be the working directory
        return []
    if path.is_dir():
        return [p for p in path.rglob("*") if p.is_file() and _suffix(p) in (*TEXT, *LINES, *TABLE)]
    if path.is_file():
        if _suffix(path) not in (*TEXT, *LINES, *TABLE):
            known = ", ".join((*TEXT, *LINES, *TABLE))
            raise DataError(f"{path} has no suffix that tells what it is; known are {known}, also with .gz or .zst")
        return [path]
    if not _GLOB & set(text):
        return []
    anchor = Path(path.anchor) if path.anchor else Path()
    pattern = str(path.relative_to(path.anchor)) if path.anchor else text
    return [p for p in anchor.glob(pattern) if p.is_file()]


def _suffix(path: Path) -> str:
    return Path(path.stem).suffix if path.suffix in PACKED else path.suffix


def documents(path: Path, *, field: str = "text", separator: str | None = None) -> Iterator[str]:
    """The documents of a file, in order; `DataError` names the place that cannot be read. [DATA-CORPUS-D1]

    A text is one document, or those between lines that are `separator`; a line of JSON and a row of Parquet have theirs
    in the `field`.
    """
    kind = _suffix(path)
    try:
        if kind in TABLE:
            yield from _rows(path, field)
        else:
            with _opened(path) as file:
                yield from _lines(path, file, field) if kind in LINES else _texts(path, file, separator)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is no UTF-8: {error.reason} at byte {error.start}; convert it first") from None
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"cannot read {path}: {reason}") from None


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    with path.open("rb") as raw:
        if path.suffix == ".gz":
            with gzip.open(raw) as file:
                yield cast(BinaryIO, file)
        elif path.suffix == ".zst":
            with io.BufferedReader(_Frames(raw), 1 << 17) as file:
                yield file
        else:
            yield raw


class _Frames(io.RawIOBase):
    """Frames of zstandard, one after the other; the library's own reader takes one that is cut off for a whole one."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw, self._library = raw, _library("zstandard")
        self._frame: Any = None
        self._packed = self._plain = b""

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fills a part of the buffer; 0 at the end."""
        while not self._plain:
            self._packed = self._packed or self._raw.read(1 << 17)
            if not self._packed:
                if self._frame is not None:
                    raise EOFError("it is cut off")
                return 0
            self._frame = self._frame or self._library.ZstdDecompressor().decompressobj()
            try:
                self._plain = self._frame.decompress(self._packed)
            except self._library.ZstdError as error:
                raise OSError(str(error)) from None
            self._packed = self._frame.unused_data if self._frame.eof else b""
            self._frame = None if self._frame.eof else self._frame
        count = min(len(buffer), len(self._plain))
        buffer[:count], self._plain = self._plain[:count], self._plain[count:]
        return count


def _texts(path: Path, file: BinaryIO, separator: str | None) -> Iterator[str]:
    if separator is None:
        yield _limited(path, file.read(MAX_DOCUMENT + 1)).decode()
        return
    held: list[bytes] = []
    mark, size = separator.encode(), 0
    for line in file:
        if line.strip() == mark:
            yield b"".join(held).decode()
            held, size = [], 0
        else:
            held.append(line)
            size += len(line)
            if size > MAX_DOCUMENT:
                _limited(path, b"".join(held))
    yield b"".join(held).decode()


def _limited(path: Path, text: bytes) -> bytes:
    if len(text) > MAX_DOCUMENT:
        raise DataError(f"{path} has a document of more than {MAX_DOCUMENT >> 20} MiB; part it with --separator")
    return text


def _lines(path: Path, file: BinaryIO, field: str) -> Iterator[str]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            raise DataError(f"{path}, line {number} is no JSON: {shorten(line)}") from None
        text = record.get(field) if isinstance(record, dict) else None
        if not isinstance(text, str):
            has = ", ".join(map(repr, record)) if isinstance(record, dict) else f"a {type(record).__name__}"
            raise DataError(f"{path}, line {number} has no text in field {field!r}, but {has}; name it with --field")
        yield text


def _rows(path: Path, field: str) -> Iterator[str]:
    parquet, library = _library("pyarrow.parquet"), _library("pyarrow")
    try:
        with parquet.ParquetFile(path) as table:
            names = table.schema_arrow.names
            if field not in names:
                raise DataError(f"{path} has no column {field!r}, but {', '.join(names)}; name it with --field")
            for batch in table.iter_batches(batch_size=1024, columns=[field]):
                for text in batch.column(0).to_pylist():
                    if not isinstance(text, str):
                        raise DataError(f"{path} has {shorten(text)} in column {field!r}, which is no text")
                    yield text
    except library.ArrowException as error:
        raise DataError(f"cannot read {path}: {' '.join(str(error).split())}") from None


def _library(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.split(".")[0]
        raise DataError(f"this needs the library {package}: {install_line('data')}") from None
