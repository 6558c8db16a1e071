"""Small files that unpack to far more than a machine has: refused by name, in little memory."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hecate.cli import app
from hecate.data import Text
from hecate.data.corpus import Limits, documents
from hecate.data.tokenize import tokenize
from hecate.errors import DataError
from hecate.evals.tasks import MOST, read_text

GIB, MIB = 1 << 30, 1 << 20
BLOCK = 1 << 17
"""Bytes of the largest block of zstandard."""
ROOM = 400 * MIB
"""Memory that a refusal may take: a document of 128 MiB, grown in a buffer, and the window of a frame, twice, for what
the allocator keeps."""


def zst(size: int, text: bytes = b"a") -> bytes:
    """One frame of zstandard that repeats a letter: a block of 128 KiB in four bytes."""
    last = size // BLOCK - 1
    blocks = ((n == last) | 1 << 1 | BLOCK << 3 for n in range(last + 1))
    return b"\x28\xb5\x2f\xfd\x00\x50" + b"".join(head.to_bytes(3, "little") + text for head in blocks)


def gz(size: int, text: bytes = b"a") -> bytes:
    """Members of gzip, one after the other, of 8 MiB each."""
    return gzip.compress(text * (8 * MIB), 6, mtime=0) * (size // (8 * MIB))


class Peak:
    """What the process has held at most beyond what it held at the start, in bytes."""

    def __enter__(self) -> Peak:
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what is held now
        self._before = self._held()
        return self

    def __exit__(self, *_: object) -> None:
        self.bytes = self._held() - self._before

    @staticmethod
    def _held() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def refused(path: Path, message: str, room: int = ROOM, **how) -> None:
    with Peak() as peak, pytest.raises(DataError, match=message) as caught:
        list(documents(path, **how))
    assert str(path) in str(caught.value) and len(str(caught.value)) < 400 + len(str(path))
    assert peak.bytes < room


@pytest.mark.spec("DATA-CORPUS-D3")
@pytest.mark.parametrize(("name", "separator"), [
    ("a.txt.zst", None), ("a.txt.gz", None), ("a.txt", "<|sep|>"), ("a.jsonl.zst", None),
])  # fmt: skip
def test_what_a_text_unpacks_to_has_a_bound(tmp_path, name, separator):
    path = tmp_path / name
    if name == "a.txt":
        with path.open("wb") as file:
            file.truncate(4 * GIB)  # no block of it is on the disk
    else:
        pytest.importorskip("pyarrow")
        path.write_bytes(zst(4 * GIB) if name.endswith("zst") else gz(4 * GIB))
        assert path.stat().st_size < 5 * MIB
    message = "line 1 a record of more than 16 MiB; .* raise --max-line" if "jsonl" in name else (
        "a document of more than 128 MiB; part it with --separator, or raise --max-document")  # fmt: skip
    refused(path, message, separator=separator)


@pytest.mark.spec("DATA-CORPUS-D3")
def test_a_line_of_json_is_bounded_by_what_its_values_take(tmp_path):
    """Empty lists take 24 times their letters, so that a line is held to less than a document."""
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "a"}\n{"x": [' + b"[]," * (20 * MIB), 6, mtime=0))
    refused(path, "has in line 2 a record of more than 16 MiB")


def parquet(path: Path, column: object, **how) -> Path:
    arrow, library = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    library.write_table(arrow.table({"text": column}), path, compression="zstd", **how)
    return path


@pytest.mark.spec("DATA-CORPUS-D3")
@pytest.mark.parametrize("dictionary", [True, False])
def test_one_row_of_parquet_has_a_bound(tmp_path, dictionary):
    path = parquet(tmp_path / "a.parquet", ["a" * (80 * MIB)], use_dictionary=dictionary)
    assert path.stat().st_size < MIB
    message = "has in column 'text' a page of more than 72 MiB; .* raise --max-document"
    refused(path, message, 16 * MIB, limits=Limits(document=8 * MIB))  # the page itself was not unpacked


@pytest.mark.spec("DATA-CORPUS-D3")
@pytest.mark.parametrize("how", [
    {"use_dictionary": True},
    {"use_dictionary": False, "column_encoding": "DELTA_BYTE_ARRAY"},
    {"use_dictionary": False, "data_page_version": "2.0", "write_batch_size": 1},
])  # fmt: skip
def test_many_rows_of_parquet_are_not_held_at_once(tmp_path, how):
    arrow = pytest.importorskip("pyarrow")
    each, rows = MIB, 500
    column = arrow.DictionaryArray.from_arrays(arrow.array([0] * rows, arrow.int32()), arrow.array(["a" * each]))
    path = parquet(tmp_path / "a.parquet", column.cast(arrow.string()), store_schema=False, **how)
    assert path.stat().st_size < 2 * MIB
    del column
    arrow.default_memory_pool().release_unused()
    with Peak() as peak:
        assert sum(map(len, documents(path))) == each * rows
    assert peak.bytes < ROOM


@pytest.mark.spec("DATA-CORPUS-D3")
def test_limits_are_settings(tmp_path):
    (tmp_path / "a.txt").write_text("a" * 3000)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a" * 3000}) + "\n")
    parquet(tmp_path / "a.parquet", ["a" * 3000])
    for name in ("a.txt", "a.jsonl", "a.parquet"):
        assert list(documents(tmp_path / name, limits=Limits(document=3000, line=3013))) == ["a" * 3000]
        refused(tmp_path / name, "a document of more than 2999 bytes; ", limits=Limits(document=2999))
    refused(tmp_path / "a.jsonl", "a record of more than 3000 bytes; ", limits=Limits(line=3000))
    assert list(documents(tmp_path / "a.txt", limits=Limits(document=10**18))) == ["a" * 3000]


@pytest.mark.spec("DATA-CORPUS-D3")
def test_the_commands_say_which_option_raises_a_limit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("a" * (MIB + 1))
    for command in (
        ["tokenize", "a.txt", "--out", "out"],
        ["train-tokenizer", "a.txt", "--vocab", "300", "--out", "t"],
    ):
        found = CliRunner().invoke(app, ["data", *command, "--max-document", "1"])
        assert found.exit_code == 2
        assert found.output == (
            "error: a.txt has a document of more than 1 MiB; part it with --separator, or raise --max-document\n"
        )
    assert CliRunner().invoke(app, ["data", "tokenize", "a.txt", "--out", "out", "--validation", "0"]).exit_code == 0


@pytest.mark.spec("DATA-TOKENIZE-D1")
def test_large_documents_do_not_wait_side_by_side(tmp_path):
    """Any number of workers, yet never more letters in flight than their batches have, and one document."""
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"{n}" + "a" * MIB * 3}) + "\n" for n in range(6)))
    found = [
        tokenize([str(path)], tmp_path / f"out{workers}", tokenizer="bytes", workers=workers) for workers in (1, 2)
    ]
    assert found[0] == found[1]


@pytest.mark.spec("EVAL-HAYSTACK-D1")
def test_of_a_large_text_an_evaluation_reads_the_beginning(tmp_path):
    pytest.importorskip("pyarrow")
    path = tmp_path / "a.txt.zst"
    path.write_bytes(zst(4 * GIB))
    with Peak() as peak:
        assert read_text(path) == "a" * MOST
    assert peak.bytes < ROOM
    (tmp_path / "b.txt").write_text("\U0001f600" * (MOST + 1))  # the last character is cut
    assert read_text(tmp_path / "b.txt") == "\U0001f600" * MOST
    (tmp_path / "c.txt").write_bytes(b"ab\xff\xfe")
    with pytest.raises(DataError, match="no UTF-8"):
        read_text(tmp_path / "c.txt")


@pytest.mark.spec("DATA-TEXT-D1")
def test_training_text_is_bounded_by_what_is_read_and_not_by_what_a_file_claims(tmp_path):
    (tmp_path / "a.txt").symlink_to("/proc/self/pagemap")  # which claims no byte and has 256 GiB
    with Peak() as peak, pytest.raises(DataError, match=r"exceeds max_bytes=1000000 at .*a.txt; raise data.max_bytes"):
        Text(paths=(str(tmp_path / "a.txt"),), max_bytes=10**6).load()
    assert peak.bytes < ROOM
    (tmp_path / "b.txt").write_text("ab" * 50)
    assert len(Text(paths=(str(tmp_path / "b.txt"),), max_bytes=10**18).load().train) == 90


NO_TEXTS = {
    "null": ('{"text": null}', "line 1 has null in field 'text', where a text must stand"),
    "a number": ('{"text": 1.5}', "has the number 1.5 in field 'text'"),
    "a large number": ('{"text": 1%s}' % ("0" * 4000), r"has the number 1000.*\.\.\.0+ in field 'text'"),
    "not a number": ('{"text": NaN}', "has the number nan in field 'text'"),
    "true": ('{"text": true}', "has the truth value True in field 'text'"),
    "a list": ('{"text": ["a", "b"]}', r"has a list \['a', 'b'\] in field 'text'"),
    "nested": ('{"text": {"text": "a"}}', "has an object {'text': 'a'} in field 'text'"),
    "missing": ('{"body": "a"}', "has no text in field 'text', but 'body'; name it with --field"),
    "deeper": ('{"data": {"text": "a"}}', "has no text in field 'text', but 'data'; name it with --field"),
    "empty": ("{}", "has no text in field 'text', but nothing at all"),
    "no record": ("null", "has no text in field 'text', but null"),
    "a bare text": ('"a"', "has no text in field 'text', but a str 'a'"),
    "an array": ("[]", r"has no text in field 'text', but a list \[\]"),
    "a long key": ('{"%s": 1}' % ("k" * 900_000), r"has no text in field 'text', but 'kkk.*\.\.\.k+'; name it"),
    "many keys": (json.dumps({f"k{n}": n for n in range(1000)}), "but 'k0', .*'k7' and more; name it"),
}


@pytest.mark.spec("DATA-CORPUS-D2")
def test_what_stands_in_place_of_a_text_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    for line, message in NO_TEXTS.values():
        path.write_text(line + "\n")
        refused(path, message)
    path.write_text('{"text": ""}\n')
    assert list(documents(path)) == [""]


@pytest.mark.spec("DATA-CORPUS-D2")
def test_what_stands_in_place_of_a_column_of_texts_is_named(tmp_path):
    for column, message in (
    (["a", None], "has in row 2 null in column 'text', where a text must stand"),
    ([1, 2], "has 'int64' in column 'text', where texts must stand; name the column of texts with --field"),
    ([["a"]], "has 'list<element: string>' in column 'text'"),
    ([{"text": "a"}], "has 'struct<text: string>' in column 'text'"),
    ([b"a"], "has 'binary' in column 'text'"),
    ([None], "has 'null' in column 'text'"),
    ):  # fmt: skip
        refused(parquet(tmp_path / "a.parquet", column), message)


@pytest.mark.spec("DATA-CORPUS-D1")
def test_columns_of_texts_that_are_stored_otherwise(tmp_path):
    arrow, library = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    wanted = [f"{n % 7}" * 50 for n in range(5000)]
    plain = arrow.array(wanted)
    for number, column in enumerate((plain, plain.dictionary_encode(), plain.cast(arrow.large_string()))):
        for how in ({}, {"row_group_size": 700, "data_page_version": "2.0"}, {"write_statistics": False}):
            path = tmp_path / f"{number}.parquet"
            library.write_table(arrow.table({"x": [1.5] * 5000, "text": column, "y": [[1]] * 5000}), path, **how)
            assert list(documents(path)) == wanted
