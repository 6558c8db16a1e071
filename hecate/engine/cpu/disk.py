"""Compiled kernels on disk, in a folder that is the user's own. [ENG-NUM-D9]

numba stores pickles, and loading one may run any code. So they lie in a folder of mode 0700 that belongs to this user;
if there can be no such folder, nothing is stored or loaded. A folder's name is a digest of the kernels' sources and of
the versions of numba, LLVM and Python: a second environment finds the kernels of the first, and after an edit of a
kernel all are compiled anew.
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

DAYS = 30  # for which kernels of other sources are kept after their last use


@cache
def digest() -> str:
    """Digest of the kernels' sources and of the versions of numba, LLVM and Python; code printed from formulas has its
    own digest in its name. Files of this folder that import torch call kernels and contain none."""
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
    """Place of a function's machine code on disk, and the stamp that tells if it is out of date, for numba."""

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
        """The folder's name, the digest of all sources."""
        return self.path.name

    def get_disambiguator(self) -> str:
        """The line of the function, as several functions of a file may have the same name."""
        return str(self.line)


class _Results(CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = (_Locator,)


class _Kept(FunctionCache):  # type: ignore[misc]
    _impl_class = _Results


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    """The function as a kernel, which is compiled, or loaded from disk, when it is first called."""
    kernel = numba.njit(nogil=True, error_model="numpy", _nrt=False, **options)(function)
    with suppress(RuntimeError):  # by numba, where there is no folder
        kernel._cache = _Kept(function)
    return kernel
