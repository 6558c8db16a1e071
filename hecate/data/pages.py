"""Sizes of the pages of a Parquet column, read from their headers: what a reader will allocate, before it does.

The footer of a file says what a column unpacks to, and may say anything; the header ahead of each page says what the
page does, and is what the reader goes by. Headers are structs in Thrift's compact protocol.
"""

from __future__ import annotations

from typing import Any, BinaryIO

_TYPE, _UNPACKED, _PACKED = 1, 2, 3  # fields of a PageHeader
_DICTIONARY = 2  # type of a page
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)
_DEEPEST = 16


def largest_page(file: BinaryIO, chunk: Any) -> int:
    """Bytes of the largest page of a column chunk, given its metadata of pyarrow, once it is unpacked.

    No value of the chunk is longer: a page has it whole, or has the part that differs from those before.
    Raises ValueError for what are no pages.
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
    """The whole numbers of a struct by their field; all else is passed over."""
    if depth > _DEEPEST:
        raise ValueError("a page's header is nested too deeply")
    found: dict[int, int] = {}
    field = 0
    while head := _byte(file):
        kind, step = head & 15, head >> 4
        field = field + step if step else _signed(_varint(file))
        if kind in (_I16, _I32, _I64):
            found[field] = _signed(_varint(file))
        else:
            _pass(file, kind, depth)
    return found


def _pass(file: BinaryIO, kind: int, depth: int) -> None:
    """Moves behind a value; a bool in a struct has no bytes."""
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


def _signed(value: int) -> int:
    return value >> 1 ^ -(value & 1)
