"""Writing files so that a reader finds the old content or the new one, never a part of it."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def read_file(path: Path, most: int) -> bytes:
    """The first bytes of a regular file, `most` of them at most, without waiting for a writer.

    Raises OSError; ValueError for a path that no file can have.
    """
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        kind = os.fstat(handle).st_mode
        if stat.S_ISDIR(kind):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(kind):
            raise OSError("it is a pipe or a device, not a file")
        return os.read(handle, most)
    finally:
        os.close(handle)


def write_file(path: Path, content: str | bytes) -> None:
    """Replaces a file atomically and durably; text is UTF-8. Raises OSError."""
    data = content.encode("utf-8") if isinstance(content, str) else content
    temporary = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    try:
        temporary.write_bytes(data)
        sync(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def sync(path: Path) -> None:
    """Forces a file, or the entries of a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
