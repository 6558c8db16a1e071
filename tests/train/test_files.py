"""Atomic replacement of files."""

from __future__ import annotations

import os

import pytest

from hecate.train.files import write_file


def test_content_is_replaced_whole(tmp_path):
    path = tmp_path / "config.yaml"
    write_file(path, "old: 1\n")
    write_file(path, "new: 2\n")
    assert path.read_text() == "new: 2\n"
    assert [item.name for item in tmp_path.iterdir()] == ["config.yaml"]


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
