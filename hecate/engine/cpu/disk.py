"""Compiled kernels on disk, in a folder that is the user's own. [ENG-NUM-D9]

What numba keeps are pickles, and reading one may run anything. So they lie in a folder of mode 0700 that belongs to
this user; where there can be none, nothing is kept and nothing read. Folders are named after all that kernels are made
of, their sources and the versions of what compiles them: a second environment finds the kernels of the first, and
whoever edits a kernel finds none.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator

DAYS = 30  # that kernels of other sources are kept after their last use


@cache
def digest() -> str:
    """Of the kernels' sources, numba, LLVM and Python; what is printed from formulas has a name of its own. Sources in
    this folder that import torch call kernels, and hold none."""
    found = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__} {sys.version}".encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        text = path.read_bytes()
        if b"\nimport torch\n" not in text:
            found.update(path.name.encode() + b"\0" + text)
    return found.hexdigest()[:24]


def folder() -> Path | None:
    """`kernels/DIGEST` in `$NUMBA_CACHE_DIR`, `$XDG_CACHE_HOME/hecate` or `~/.cache/hecate`, made if it is missing.
    None where it cannot be made, or `kernels` is not this user's alone."""
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hecate"
        kernels = Path(os.environ.get("NUMBA_CACHE_DIR") or home) / "kernels"
        kernels.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = kernels.lstat()
        # Windows has neither: its folders of a user are the user's.
        if hasattr(os, "geteuid") and (status.st_uid != os.geteuid() or kernels.is_symlink() or status.st_mode & 0o077):
            return None
        path = kernels / digest()
        if not path.is_dir():
            drop_unused(kernels)
            path.mkdir(exist_ok=True)
        os.utime(path)
    except (OSError, RuntimeError):  # the latter where a user has no home
        return None
    return path


def drop_unused(kernels: Path) -> None:
    """Deletes the kernels of other sources that nobody has used for DAYS."""
    for path in kernels.iterdir():
        if time.time() - path.stat().st_mtime > DAYS * 86400:
            shutil.rmtree(path, ignore_errors=True)


class _Locator(_CacheLocator):  # type: ignore[misc]
    """Of a function: where its machine code lies, and when that is out of date."""

    def __init__(self, path: Path, line: int) -> None:
        self.path, self.line = path, line

    @classmethod
    def from_function(cls, py_func: Callable[..., Any], py_file: str) -> _Locator | None:
        """None where nothing is kept."""
        path = folder()
        return None if path is None else cls(path, py_func.__code__.co_firstlineno)

    def get_cache_path(self) -> str:
        """The folder."""
        return str(self.path)

    def get_source_stamp(self) -> str:
        """The folder's name, which is made of all sources."""
        return self.path.name

    def get_disambiguator(self) -> str:
        """The line of a function, which may share its name with another in its file."""
        return str(self.line)


class _Results(CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = (_Locator,)


class _Kept(FunctionCache):  # type: ignore[misc]
    _impl_class = _Results


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    """The function, to be compiled or taken from disk when it is first called."""
    kernel = numba.njit(nogil=True, error_model="numpy", _nrt=False, **options)(function)
    with suppress(RuntimeError):  # by numba, where there is no folder
        kernel._cache = _Kept(function)
    return kernel
