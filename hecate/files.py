"""Writing so that a reader, or a writer that was killed, finds the old content or the new one.

What is not finished has a name `.tmp-NAME-THREAD`, and is swept away when a run starts. Only metrics.jsonl is appended
to. File systems without locks, or that cannot force a folder to disk, serve with less, of which they warn once.
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


def read_file(path: Path, most: int) -> bytes:
    """The first bytes of a regular file, `most` of them at most, without waiting for a writer.

    Raises OSError; ValueError for a path that no file can have.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError("it is a pipe or a device, not a file")
    pieces: list[bytes] = []
    with path.open("rb") as file:
        each = max(1 << 20, path.stat().st_size + 1)  # all in one piece, unless it claims another size than it has
        while most > 0 and (piece := file.read(min(most, each))):
            pieces.append(piece)
            most -= len(piece)
    return b"".join(pieces)


def read_whole(path: Path, most: int = 1 << 30) -> bytes:
    """The bytes of a regular file, whatever size it claims. Raises OSError, also where it has more than `most`."""
    content = read_file(path, most + 1)
    if len(content) > most:
        raise OSError(f"it has more than {most >> 20} MiB")
    return content


def write_file(path: Path, content: str | bytes) -> None:
    """Replaces a file atomically and durably; text is UTF-8, and what has none is escaped. Raises OSError."""
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    temporary = temporary_name(path)
    try:
        temporary.unlink(missing_ok=True)  # of a dead process with this number, or a link that someone put there
        with temporary.open("xb") as file:
            file.write(data)
        sync(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `target`, a name that is free, complete and durable.

    If filling it fails, nothing remains. Raises OSError.
    """
    temporary = temporary_name(target)
    shutil.rmtree(temporary, ignore_errors=True)  # of a dead process with this number
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
    """Deletes a folder that others may read: it is gone as a whole before its parts are."""
    hidden = temporary_name(path)
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    sync(path.parent)
    shutil.rmtree(hidden, ignore_errors=True)


def make_folder(path: Path, mode: int = 0o777) -> None:
    """The folder, with those above it, durable; one that is there keeps its mode. Raises OSError."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(mode, exist_ok=True)
        sync(path.parent)


def sweep(folder: Path) -> None:
    """Deletes what killed writers left in a folder, and nothing that has another name."""
    for path in list(folder.iterdir()) if folder.is_dir() else ():
        if _OURS.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif _OURS.fullmatch(path.name):
            path.unlink(missing_ok=True)


def sweep_evaluations(folder: Path) -> None:
    """Deletes what killed evaluations left in a folder that others may write to now: what is older than an hour, as
    writing one takes seconds."""
    for path in folder.glob(f"{TEMPORARY}step-*"):
        plain = path.is_dir() and not path.is_symlink() and _EVALUATION.fullmatch(path.name)
        if plain and time.time() - path.stat().st_mtime > HOUR:
            shutil.rmtree(path, ignore_errors=True)


def sync(path: Path) -> None:
    """Forces a file, or the entries of a folder, to disk, where the file system can do that. Raises OSError."""
    try:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        _lost_sync(path, error, _NO_FOLDER_SYNC if path.is_dir() else _NO_SYNC)


def sync_open(handle: int, path: Path) -> None:
    """Forces the open file of a path to disk, as `sync` does."""
    try:
        os.fsync(handle)
    except OSError as error:
        _lost_sync(path, error, _NO_SYNC)


def _lost_sync(path: Path, error: OSError, served: frozenset[int]) -> None:
    if error.errno not in served:
        raise error
    _warn_once("sync", path, error, "cannot force what is written to disk", "a power cut may lose what is newest there")


def lock(handle: int, path: Path) -> None:
    """Takes the lock of the open file of a path, which ends with the processes that have it. Raises OSError,
    BlockingIOError where another process has it; where a file system has no locks, nobody is kept out."""
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
    """Tells an OSError as an error of this kind: cannot WHAT: reason; what helps against that or INSTEAD, and THEN."""
    try:
        yield
    except OSError as error:
        help_ = [text for text in (cure(error), instead) if text] or ["mend that"]
        remedy = " or ".join(help_) + (f", then {then}" if then else "")
        raise kind(f"cannot {what}: {error.strerror or error}; {remedy}") from None


def expect_free(target: Path, instead: str) -> None:
    """Refuses a folder to write that is there already; INSTEAD says what helps."""
    if target.exists():
        raise CheckpointError(f"{target} exists already; {instead}")


@contextmanager
def written_folder(target: Path, instead: str) -> Iterator[Path]:
    """`new_folder`, with the folders above it; what keeps it from being written is a `CheckpointError`."""
    with refusing(f"write {target}", instead), by_library():
        make_folder(target.absolute().parent)
        with new_folder(target.absolute()) as folder:
            yield folder


@contextmanager
def reading(what: object, instead: str = "put it back") -> Iterator[None]:
    """Tells a failure to read a file of data as `DataError`: cannot read WHAT: reason; INSTEAD."""
    try:
        yield
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        why = getattr(error, "strerror", None) or error
        raise DataError(f"cannot read {what}: {why}" + (f"; {instead}" if instead else "")) from None


def cure(error: OSError) -> str:
    """Remedy for the reason of an error; an empty text if none is known."""
    return _CURES.get(error.errno or 0, "")


@contextmanager
def by_library() -> Iterator[None]:
    """Around libraries that write files: an OSError that they tell by a type of their own is raised as what it is."""
    try:
        yield
    except (OSError, HecateError):
        raise
    except BaseException as error:  # which that of torch's DCP is
        fault = _behind(error)
        if fault is None:
            raise
        raise fault from None


def _behind(error: BaseException) -> OSError | None:
    """The OSError that was raised ahead of an error, on another rank too, or that its text tells."""
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
    """Beside a file, where its content lies until it is whole: for each thread a name of its own."""
    number = threading.get_native_id()  # that of the process in its first thread
    return path.with_name(f"{TEMPORARY}{path.name.removeprefix(TEMPORARY)}-{number}")


def commit_of(folder: Path) -> str | None:
    """The commit that is checked out in the git repository around a folder, as its files say it; None without one, or
    where they say no commit."""
    for parent in (folder, *folder.parents):
        git = parent / ".git"
        try:
            if git.is_file():  # a worktree names its own folder
                git = parent / _text(git).removeprefix("gitdir:").strip()
            elif not git.is_dir():
                continue
            commit = _resolved(git)
        except (OSError, ValueError):
            return None
        return commit if _COMMIT.fullmatch(commit) else None
    return None


def _resolved(git: Path) -> str:
    """HEAD, through a branch if it names one."""
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
    """The words of a small file, which is not waited for."""
    return read_whole(path, most).decode("utf-8").strip()
