"""Atomic and durable writing: readers see the old content or the new, even if the writer is killed.

Unfinished files and folders are named `.tmp-NAME-THREAD`, and are deleted when a run starts. Only metrics.jsonl is
appended to. On file systems without locks, or that cannot force a folder to disk, a warning is shown once and work goes
on without that guarantee.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import threading
import time
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from hecate.errors import CheckpointError, DataError, FileSystemWarning, HecateError, shorten

TEMPORARY = ".tmp-"
HOUR = 3600
_CHECKPOINT = r"step_\d{8,}(-\d+)?|old-step_\d{8,}-\d+"
_EVALUATION = re.compile(rf"{re.escape(TEMPORARY)}step-\d+(-\d+){{1,2}}")
_COMMIT = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
_OURS = re.compile(rf"{re.escape(TEMPORARY)}({_CHECKPOINT}|[\w.-]+\.(yaml|json|md|html|txt|png|svg))-\d+")


_ABSENT = frozenset((errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP))
_NO_LOCKS = _ABSENT | {errno.ENOLCK, errno.EINVAL}
_NO_SYNC = _ABSENT | {errno.EINVAL}
_NO_FOLDER_SYNC = _NO_SYNC | {errno.EACCES, errno.EBADF, errno.EISDIR, errno.EPERM}
_CURES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "make it writable"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise `ulimit -n`"),
}
_warned: set[str] = set()


def refuse_pipe(path: Path) -> None:
    """Raises OSError for a pipe or a device, which would wait for a writer when it is opened."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError("it is a pipe or a device, not a file")


def read_file(path: Path, most: int) -> bytes:
    """The first bytes of a regular file, at most `most`; refuses pipes, which would wait for a writer.

    Raises OSError; ValueError for an impossible path.
    """
    refuse_pipe(path)
    with path.open("rb") as file:
        # Usually one piece; some files report a wrong size, such as 0.
        return read_most(file, most, max(1 << 20, path.stat().st_size + 1))


def read_most(file: BinaryIO, most: int, each: int = 1 << 20) -> bytes:
    """The first bytes of a file, at most `most`; memory grows by `each` as they are read, while `file.read` would
    reserve `most`."""
    pieces: list[bytes] = []
    while most > 0 and (piece := file.read(min(most, each))):
        pieces.append(piece)
        most -= len(piece)
    return b"".join(pieces)


def read_whole(path: Path, most: int = 1 << 30) -> bytes:
    """The bytes of a regular file, whatever size it reports. Raises OSError, also if it has more than `most`."""
    content = read_file(path, most + 1)
    if len(content) > most:
        raise OSError(f"it has more than {most >> 20} MiB")
    return content


def write_file(path: Path, content: str | bytes) -> None:
    """Replaces a file atomically and durably; text is written in UTF-8, lone surrogates escaped. Raises OSError."""
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    temporary = temporary_name(path)
    try:
        temporary.unlink(missing_ok=True)  # left by a dead process with the same number, or a link placed there
        with temporary.open("xb") as file:
            file.write(data)
        sync(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A temporary folder to fill, renamed to `target`, a free name, once it is complete and on disk.

    If filling it fails, it is deleted. Raises OSError.
    """
    temporary = temporary_name(target)
    shutil.rmtree(temporary, ignore_errors=True)  # left by a dead process with the same number
    try:
        temporary.mkdir()
        yield temporary
        for path in temporary.iterdir():
            sync(path)
        sync(temporary)
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    sync(target.parent)


def remove_folder(path: Path) -> None:
    """Deletes a folder that others may be reading: it is renamed first, so that nobody finds it half deleted."""
    hidden = temporary_name(path)
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    sync(path.parent)
    shutil.rmtree(hidden, ignore_errors=True)


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Makes a folder and those above it, durably; an existing one keeps its mode. Raises OSError."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(mode, exist_ok=True)
        sync(path.parent)


def sweep(folder: Path) -> None:
    """Deletes unfinished files and folders that killed writers left in a folder, by their names, and nothing else."""
    for path in list(folder.iterdir()) if folder.is_dir() else ():
        if _OURS.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif _OURS.fullmatch(path.name):
            path.unlink(missing_ok=True)


def sweep_evaluations(folder: Path) -> None:
    """Deletes what killed evaluations left in a folder. Others may be writing there now, which takes seconds, so only
    what is older than an hour is deleted."""
    for path in folder.glob(f"{TEMPORARY}step-*"):
        plain = path.is_dir() and not path.is_symlink() and _EVALUATION.fullmatch(path.name)
        if plain and time.time() - path.stat().st_mtime > HOUR:
            shutil.rmtree(path, ignore_errors=True)


def sync(path: Path, handle: int | None = None) -> None:
    """Forces a file, or the entries of a folder, to disk, if the file system can; `handle` is that of an open file.
    Raises OSError."""
    try:
        opened = os.open(path, os.O_RDONLY) if handle is None else handle
        try:
            os.fsync(opened)
        finally:
            if handle is None:
                os.close(opened)
    except OSError as error:
        if error.errno not in (_NO_FOLDER_SYNC if path.is_dir() else _NO_SYNC):
            raise
        lack, so = "cannot force what is written to disk", "a power cut may lose what is newest there"
        _warn_once("sync", path, error, lack, so)


def lock(handle: int, path: Path) -> None:
    """Locks an open file; the lock ends with the processes that have the file open. On a file system without locks it
    warns, and keeps nobody out. Raises OSError; BlockingIOError if another process holds the lock."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        _warn_once("lock", path, error, "has no locks", "see to it that one process at a time writes there")


def _warn_once(what: str, path: Path, error: OSError, lack: str, so: str) -> None:
    if what not in _warned:
        _warned.add(what)
        text = f"the file system of {shorten(str(path))} {lack} ({error.strerror}): {so}"
        warnings.warn(text, FileSystemWarning, stacklevel=3)


@contextmanager
def refusing(
    what: str, instead: str = "", *, then: str = "", kind: type[HecateError] = CheckpointError
) -> Iterator[None]:
    """Turns an OSError into an error of this kind: "cannot WHAT: reason; remedy or INSTEAD, then THEN"."""
    try:
        yield
    except OSError as error:
        help_ = [text for text in (cure(error), instead) if text] or ["mend that"]
        remedy = " or ".join(help_) + (f", then {then}" if then else "")
        raise kind(f"cannot {what}: {error.strerror or error}; {remedy}") from None


def expect_free(target: Path, instead: str) -> None:
    """Refuses a target folder that exists already; `instead` is the remedy in the message."""
    if target.exists():
        raise CheckpointError(f"{target} exists already; {instead}")


@contextmanager
def written_folder(target: Path, instead: str) -> Iterator[Path]:
    """`new_folder`, with the folders above it; failures to write it are `CheckpointError`s."""
    with refusing(f"write {target}", instead), by_library():
        make_folder(target.absolute().parent)
        with new_folder(target.absolute()) as folder:
            yield folder


@contextmanager
def reading(what: object, instead: str = "put it back") -> Iterator[None]:
    """Turns a failure to read a data file into a `DataError`: "cannot read WHAT: reason; INSTEAD"."""
    try:
        yield
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        why = getattr(error, "strerror", None) or error
        raise DataError(f"cannot read {what}: {why}" + (f"; {instead}" if instead else "")) from None


def cure(error: OSError) -> str:
    """Remedy for an error, by its errno; an empty text if none is known."""
    return _CURES.get(error.errno or 0, "")


@contextmanager
def by_library() -> Iterator[None]:
    """Around calls of libraries that write files: raises the OSError behind an exception of a library's own type."""
    try:
        yield
    except (OSError, HecateError):
        raise
    except BaseException as error:  # the exception of torch's DCP is no Exception
        fault = _behind(error)
        if fault is None:
            raise
        raise fault from None


def _behind(error: BaseException) -> OSError | None:
    """The OSError that caused an error, possibly on another rank, or whose number its text names."""
    faults = [pair[0] for pair in getattr(error, "failures", {}).values()] or [error]
    for fault in faults:
        place: BaseException | None = fault
        while place is not None:
            if isinstance(place, OSError):
                return place
            if number := re.search(r"os error (\d+)", str(place)):
                return OSError(int(number[1]), os.strerror(int(number[1])))
            place = place.__cause__ or place.__context__
    return None


def temporary_name(path: Path) -> Path:
    """Path beside a file for its unfinished content; each thread has its own."""
    number = threading.get_native_id()  # in the main thread this is the process id
    return path.with_name(f"{TEMPORARY}{path.name.removeprefix(TEMPORARY)}-{number}")


def commit_of(folder: Path) -> str | None:
    """The commit that is checked out in the git repository around a folder, read from git's files; None without a
    repository or a commit."""
    for parent in (folder, *folder.parents):
        git = parent / ".git"
        try:
            if git.is_file():  # in a worktree `.git` is a file that names the folder
                git = parent / _text(git).removeprefix("gitdir:").strip()
            elif not git.is_dir():
                continue
            commit = _resolved(git)
        except (OSError, ValueError):
            return None
        return commit if _COMMIT.fullmatch(commit) else None
    return None


def _resolved(git: Path) -> str:
    """The commit of HEAD, looked up if HEAD names a branch; an empty text if the branch has none."""
    head = _text(git / "HEAD")
    if not head.startswith("ref: "):
        return head
    name = head.removeprefix("ref: ")
    common = git / "commondir"
    for place in (git, git / _text(common)) if common.is_file() else (git,):
        if (place / name).is_file():
            return _text(place / name)
        packed = place / "packed-refs"
        for line in _text(packed, 1 << 26).splitlines() if packed.is_file() else ():
            if line.endswith(f" {name}"):
                return line.split()[0]
    return ""


def _text(path: Path, most: int = 1 << 12) -> str:
    """The stripped text of a small file, read without blocking."""
    return read_whole(path, most).decode("utf-8").strip()
