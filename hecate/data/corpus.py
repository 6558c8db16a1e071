"""Documents of files: text, JSON lines and Parquet, plain or compressed, read one after the other, never all at
once."""

from __future__ import annotations

import codecs
import gzip
import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from glob import glob
from itertools import count, islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from hecate.data.tokenizer import library
from hecate.errors import DataError, shorten
from hecate.files import read_most, reading

TEXT, LINES, TABLE = (".txt", ".md", ".rst", ".py", ".text"), (".jsonl", ".ndjson"), (".parquet",)
PACKED = (".gz", ".zst")
MAX_DOCUMENT, MAX_LINE = 1 << 27, 1 << 24
"""Bytes of the longest document, and of the longest line of JSON, whose values may take 24 times as much memory."""
_ROWS, _AT_ONCE = 1024, 1 << 26
"""Rows of Parquet read at once, and bytes that they may take, unless a single row takes more."""
GLOB, _SHOWN = frozenset("*?["), 8


class Limits(NamedTuple):
    """Limits of what is held in memory at once, in uncompressed bytes.

    `cut`: a text that is one document is cut after this many bytes; None refuses one longer than `document`.
    """

    document: int = MAX_DOCUMENT
    line: int = MAX_LINE
    cut: int | None = None


def find(inputs: Sequence[str]) -> list[Path]:
    """The files that inputs name: files, folders (all readable files below) and globs; sorted, each once."""
    return sorted({path for text in inputs for path in _matches(text)})


def _matches(text: str) -> list[Path]:
    """The files that one input names."""
    known = (*TEXT, *LINES, *TABLE)
    try:
        paths = files_of(text, lambda path: _suffix(path) in known)
        if paths == [Path(text)] and _suffix(paths[0]) not in known:
            raise DataError(
                f"{text} has no suffix that tells what it is; known are {', '.join(known)}, also with .gz or .zst"
            )
    except (OSError, ValueError) as error:  # impossible names, such as a**b or too long ones
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"cannot read {shorten(text)}: {reason}; name files, folders or globs") from None
    if not paths:
        raise DataError(f"no text, JSON lines or Parquet in {text!r} (working directory {Path.cwd()})")
    return paths


def files_of(text: str, wanted: Callable[[Path], bool]) -> list[Path]:
    """The file of this name, the `wanted` files below a folder, or the files that match a pattern; else none."""
    path = Path(text)
    if path.is_dir() and text:  # "" would be the working folder
        return [p for p in path.rglob("*") if p.is_file() and wanted(p)]
    if path.is_file():
        return [path]
    paths = map(Path, glob(text, recursive=True, include_hidden=True))  # noqa: PTH207 - which takes no absolute ones
    return [p for p in paths if p.is_file()]


def _suffix(path: Path) -> str:
    return Path(path.stem).suffix if path.suffix in PACKED else path.suffix


def documents(
    path: Path,
    *,
    field: str = "text",
    separator: str | None = None,
    limits: Limits = Limits(),  # noqa: B008 - frozen
) -> Iterator[str]:
    """The documents of a file, in order; `DataError` names the place that cannot be read. [DATA-CORPUS-D1]

    A text is one document, or several between lines equal to `separator`; a line of JSON and a row of Parquet have
    theirs in the field `field`. Nothing is unpacked beyond `limits`. [DATA-CORPUS-D3]
    """
    kind = _suffix(path)
    with reading(path, ""):
        if kind in TABLE:
            yield from _rows(path, field, limits)
            return
        try:
            with _open_file(path) as file:
                yield from _lines(path, file, field, limits) if kind in LINES else _texts(path, file, separator, limits)
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is no UTF-8: {error.reason} at byte {error.start}; convert it first") from None


@contextmanager
def _open_file(path: Path) -> Iterator[BinaryIO]:
    with path.open("rb") as raw:
        if path.suffix == ".gz":
            with gzip.open(raw) as file:
                yield cast(BinaryIO, file)
        elif path.suffix == ".zst":
            arrow = library("pyarrow")
            frames = arrow.CompressedInputStream(arrow.PythonFile(raw, "r"), "zstd")
            try:
                with io.BufferedReader(frames, 1 << 17) as file:
                    yield file
            except OSError as error:
                raise OSError("it is cut off" if "Truncated" in str(error) else str(error)) from None
        else:
            yield raw


def _texts(path: Path, file: BinaryIO, separator: str | None, limits: Limits) -> Iterator[str]:
    whole = limits.document, f"{path} has a document", "part it with --separator", "--max-document"
    if separator is None and limits.cut is not None:
        yield codecs.getincrementaldecoder("utf-8")().decode(read_most(file, limits.cut))  # without half a character
        return
    if separator is None:
        text = read_most(file, limits.document + 1)
        _check_size(len(text), *whole)
        yield text.decode()
        return
    lines: list[bytes] = []
    mark, size = separator.encode(), 0
    while line := file.readline(limits.document + 1 - size):
        if line.strip() == mark:
            yield b"".join(lines).decode()
            lines, size = [], 0
            continue
        lines.append(line)
        size += len(line)
        _check_size(size, *whole)
    yield b"".join(lines).decode()


def _check_size(size: int, most: int, what: str, cure: str, option: str) -> None:
    """Refuses input beyond a limit, with the option of `hecate data` that raises it."""
    if size > most:
        limit = f"{most >> 20} MiB" if most >> 20 else f"{most} bytes"
        raise DataError(f"{what} of more than {limit}; {cure}, or raise {option}")


def _lines(path: Path, file: BinaryIO, field: str, limits: Limits) -> Iterator[str]:
    for number in count(1):
        line = file.readline(limits.line + 1)
        if not line:
            return
        _check_size(len(line), limits.line, f"{path} has in line {number} a record", "part it", "--max-line")
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            raise DataError(f"{where} is no JSON: {shorten(line)}") from None
        yield _field(record, field, where, limits)


def _field(record: Any, field: str, where: str, limits: Limits) -> str:
    """The text of a record; `DataError` says what is there instead."""
    if isinstance(record, dict) and field in record:
        return _text(record[field], f"{where} has", f"field {shorten(field)}", limits)
    has = _some_of(record) or "nothing at all" if isinstance(record, dict) else _in_words(record)
    raise DataError(f"{where} has no text in field {shorten(field)}, but {has}; name it with --field")


def _text(value: Any, where: str, place: str, limits: Limits) -> str:
    if not isinstance(value, str):
        raise DataError(
            f"{where} {_in_words(value)} in {place}, where a text must stand; leave the record out or mend it"
        )
    _check_size(len(value), limits.document, f"{where} in {place} a document", "part it", "--max-document")
    return value


def _in_words(value: Any) -> str:
    """A value of JSON or Parquet in words."""
    if value is None:
        return "null"
    name = {bool: "the truth value", int: "the number", float: "the number", list: "a list", dict: "an object"}
    return f"{name.get(type(value), f'a {type(value).__name__}')} {shorten(value)}"


def _some_of(names: Iterable[str]) -> str:
    """Names as a text, at most the first few."""
    first = [shorten(name) for name in islice(names, _SHOWN + 1)]
    return ", ".join(first[:_SHOWN]) + (" and more" if first[_SHOWN:] else "")


def _rows(path: Path, field: str, limits: Limits) -> Iterator[str]:
    parquet, arrow = library("pyarrow.parquet"), library("pyarrow")
    try:
        # Without `pre_buffer`, which would hold a whole row group in memory.
        with path.open("rb") as file, parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as table:
            _check_column(path, table.schema_arrow, field, arrow.types)
            number = 0
            for group in range(table.num_row_groups):
                size = _largest(path, file, table.metadata.row_group(group), field, limits)
                rows = max(1, min(_ROWS, _AT_ONCE // max(size, 1)))
                for batch in table.iter_batches(rows, [group], [field]):
                    for value in batch.column(0):
                        number += 1
                        yield _text(value.as_py(), f"{path} has in row {number}", f"column {shorten(field)}", limits)
    except arrow.ArrowException as error:
        raise DataError(f"cannot read {path}: {' '.join(str(error).split())}") from None


def _check_column(path: Path, schema: Any, field: str, types: Any) -> None:
    """Refuses a table without the column, with several of that name, or with other values than texts in it."""
    if field not in schema.names:
        raise DataError(f"{path} has no column {shorten(field)}, but {_some_of(schema.names)}; name it with --field")
    if schema.names.count(field) > 1:
        raise DataError(f"{path} has {schema.names.count(field)} columns {shorten(field)}; rename all but one")
    kind = schema.field(field).type
    kind = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)):
        cure = "name the column of texts with --field"
        raise DataError(f"{path} has {shorten(str(kind))} in column {shorten(field)}, where texts must stand; {cure}")


def _largest(path: Path, file: BinaryIO, group: Any, field: str, limits: Limits) -> int:
    """Bytes of the largest page of a column in a row group; refuses a page beyond the limit."""
    chunks = (group.column(index) for index in range(group.num_columns))
    chunk = next(chunk for chunk in chunks if chunk.path_in_schema == field)
    try:
        size = largest_page(file, chunk)
    except (ValueError, OverflowError) as error:
        raise DataError(f"cannot read {path}: {error}") from None
    most = limits.document + _AT_ONCE  # a document, and others before it in the page
    _check_size(size, most, f"{path} has in column {shorten(field)} a page", "write smaller ones", "--max-document")
    return size


# Sizes of the pages of a Parquet column, before a reader allocates them. The footer of a file states the uncompressed
# size of a column, but may be wrong; readers allocate by the header of each page, so these are read here. Headers are
# structs in Thrift's compact protocol.
_UNPACKED, _PACKED = 2, 3  # fields of a PageHeader
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)
_DEEPEST = 16


def largest_page(file: BinaryIO, chunk: Any) -> int:
    """Uncompressed bytes of the largest page of a column chunk, given pyarrow's metadata of it.

    No value of the chunk is longer: a page has it whole, or the part in which it differs from the value before.
    Raises ValueError for bytes that are not pages.
    """
    begin = chunk.data_page_offset
    if chunk.has_dictionary_page and 0 < chunk.dictionary_page_offset < begin:
        begin = chunk.dictionary_page_offset
    end, largest = begin + chunk.total_compressed_size, 0
    while begin < end:
        file.seek(begin)
        fields = _struct(file, 0)
        packed, unpacked = fields.get(_PACKED, -1), fields.get(_UNPACKED, -1)
        if packed < 0 or unpacked < 0:
            raise ValueError("a page has no size")
        begin, largest = file.tell() + packed, max(largest, unpacked)
    return largest


def _struct(file: BinaryIO, depth: int) -> dict[int, int]:
    """The integers of a struct by field; other fields are skipped."""
    if depth > _DEEPEST:
        raise ValueError("a page's header is nested too deeply")
    numbers: dict[int, int] = {}
    field = 0
    while head := _byte(file):
        kind, step = head & 15, head >> 4
        field = field + step if step else _zigzag(_varint(file))
        if kind in (_I16, _I32, _I64):
            numbers[field] = _zigzag(_varint(file))
        else:
            _pass(file, kind, depth)
    return numbers


def _pass(file: BinaryIO, kind: int, depth: int) -> None:
    """Skips a value; a bool in a struct has no bytes."""
    if kind == _BINARY:
        file.seek(_varint(file), 1)
    elif kind == _STRUCT:
        _struct(file, depth + 1)
    elif kind in (_BYTE, _DOUBLE):
        file.seek(1 if kind == _BYTE else 8, 1)
    elif kind not in (_TRUE, _FALSE):  # headers have neither lists, sets nor maps
        raise ValueError("a page's header has a field that none has")


def _byte(file: BinaryIO) -> int:
    byte = file.read(1)
    if not byte:
        raise ValueError("it is cut off")
    return byte[0]


def _varint(file: BinaryIO) -> int:
    value = shift = 0
    while True:
        byte = _byte(file)
        value |= (byte & 127) << shift
        if byte < 128:
            return value
        shift += 7
        if shift > 63:
            raise ValueError("a number in a page's header has too many bytes")


def _zigzag(value: int) -> int:
    return value >> 1 ^ -(value & 1)
