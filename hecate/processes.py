"""Starting other Python interpreters and importing users' modules, so that no file in the working folder replaces a
module of the standard library or of an installed package.

Python puts the working folder first on the path of interpreters started with `-m` or `-c`; a `statistics.py` there
would be imported in place of the standard one.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from hecate.errors import ConfigError, printable, shorten

_SAFE = "PYTHONSAFEPATH"


def interpreter(code: str, *arguments: str) -> list[str]:
    """The command line of a Python that runs `code` and finds the same modules as this one, except those in the working
    folder."""
    here, package = Path.cwd(), str(Path(__file__).resolve().parents[1])
    known = [path for path in sys.path if path and Path(path).absolute() != here]
    path = f"import sys; sys.path += [path for path in {[*known, package]!a} if path not in sys.path]"
    return [sys.executable, "-P", "-c", f"{path}; {code}", *arguments]


@contextmanager
def safe_path() -> Iterator[None]:
    """Context in which processes started by `multiprocessing` do not have the working folder first on their path."""
    before = os.environ.get(_SAFE)
    os.environ[_SAFE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SAFE]
        else:
            os.environ[_SAFE] = before


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Context in which started processes inherit a mask for Ctrl-C: they leave it to this one and print no
    traceback."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def import_modules(names: Sequence[str]) -> None:
    """Imports a user's modules, whose classes register themselves: installed ones, or files in the working folder,
    which is searched last. Raises ConfigError."""
    here = str(Path.cwd())
    if names and not {"", here} & set(sys.path):
        sys.path.append(here)
    for name in names:
        if not name or name.startswith(".") or any(c in name for c in "/\\\0"):
            cure = "name one in this folder or an installed one, without folders and .py"
            raise ConfigError(f"--import {shorten(name)} is no name of a module; {cure}")
        shown = printable(name, 80)
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            cure = "name a module in this folder or an installed one, without .py"
            raise ConfigError(f"--import {shown}: {error}; {cure}") from error
        except (Exception, SystemExit) as error:  # whatever a user's module does
            raise ConfigError(f"--import {shown}: the module fails with {type(error).__name__}: {error}") from error
        _refuse_shadowed(name, module)


def _refuse_shadowed(name: str, module: ModuleType) -> None:
    """Refuses a file in the working folder that has the name of a library: the import found the library."""
    head = Path(name.partition(".")[0])
    mine = [path for path in (head.with_suffix(".py"), head / "__init__.py") if path.is_file()]
    origin = getattr(sys.modules[str(head)], "__file__", None)
    if mine and not (origin and any(Path(origin).resolve() == path.resolve() for path in mine)):
        means = f"--import {printable(name, 80)} means {module.__name__} of {origin or 'Python itself'}"
        raise ConfigError(f"{means}, and not {mine[0]} of this folder: give that another name")
