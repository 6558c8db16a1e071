"""Atomic replacement of files."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

import hecate
from hecate.files import write_file


def test_a_failed_write_leaves_the_old_content(tmp_path, monkeypatch):
    path = tmp_path / "config.yaml"
    write_file(path, "old: 1\n")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_file(path, "new: 2\n")
    assert path.read_text() == "old: 1\n"
    assert [item.name for item in tmp_path.iterdir()] == ["config.yaml"]


WRITES = re.compile(
    r"\.write_text\(|\.write_bytes\(|\bopen\([^)\n]*[\"'][rbt]*[wax+]|os\.open\(|torch\.save\(|"
    r"\bsave_file\(|savefig\((?!png|svg)|\bimport pickle|torch\.load\(|\bshelve\b|np\.save"
)
ALLOWED = {
    "files.py": {'open("x', "os.open("},
    "train/loggers.py": {"os.open("},  # the one file that is appended to
    "train/checkpoint.py": {"save_file("},  # into a folder that is published as a whole
    "train/trained.py": {'open("w', "torch.save(", "torch.load("},  # the same; what reads it, in words
    "data/shards.py": {"os.open("},  # to read
    "terminal.py": {"os.open(", 'open("w'},  # /dev/null
    "serve/kept.py": {"os.open("},  # a lock, which holds nothing
    "compare/run.py": {"os.open(", 'open("x'},  # a lock, which holds nothing; what a process complains of
    "data/tokenize.py": {'open("r+', 'open("x'},  # what is locked; under other names until they are whole
}


def test_every_file_is_written_atomically_and_nothing_is_pickled():
    package = Path(hecate.__file__).parent
    found = {
        path.relative_to(package).as_posix(): set(WRITES.findall(path.read_text())) for path in package.rglob("*.py")
    }
    assert {name: calls for name, calls in found.items() if calls} == ALLOWED
    for fault in ('path.open("a")', 'open(p, "wb")', "p.write_text(x)", "figure.savefig(path)"):
        assert WRITES.search(fault)
