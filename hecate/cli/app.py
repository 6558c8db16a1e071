"""The application that commands join, and how errors and warnings are told."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TextIO

import typer

app = typer.Typer(
    name="hecate",
    help="Memories that learn at test time: train, evaluate and inspect them.",
    epilog="Example: hecate train mqar --set feature_map=elu --steps 500",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="PATH=VALUE",
        help="Override a setting, such as optim.lr=1e-3 or feature_map=elu. May be repeated.",
    ),
]  # fmt: skip


LimitOption = Annotated[
    str | None,
    typer.Option(
        "--mem-limit", metavar="SIZE",
        help="Refuse what takes more memory than this, such as 8G; train takes the device's own "
        "when left out.",
    ),
]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line with `argv`, or the process's own arguments."""
    app(args=None if argv is None else list(argv))


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
    imports: Annotated[
        list[str] | None,
        typer.Option(
            "--import", metavar="MODULE",
            help="Import your own variants first: a module here or installed. May be repeated.",
        ),
    ] = None,
) -> None:  # fmt: skip
    pass


def complete_preset(incomplete: str) -> list[str]:
    """Presets that begin so."""
    folder = Path(__file__).parents[1] / "presets"
    return sorted(p.stem for p in folder.glob("*.yaml") if p.stem.startswith(incomplete))


def complete_family(incomplete: str) -> list[str]:
    """Families that begin so."""
    from hecate.train.catalogue import FAMILIES

    return [name for name in FAMILIES if name.startswith(incomplete)]


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    typer.echo(f"warning: {message}", err=True)


def _import(modules: Sequence[str]) -> None:
    """Imports a user's modules, whose classes register themselves; as from `python -m`, here."""
    from hecate.errors import ConfigError

    if modules and "" not in sys.path:
        sys.path.insert(0, "")
    for name in modules:
        if not name.strip(".") or name.startswith(".") or any(c in name for c in "/\\\0"):
            raise ConfigError(
                f"--import {name!r} is no name of a module; name one in this folder or an "
                "installed one, without folders and .py"
            )
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ConfigError(
                f"--import {name}: {error}; name a module in this folder or an installed one, without .py"
            ) from error
        except (Exception, SystemExit) as error:  # whatever a user's module does
            where = f"{type(error).__name__}: {error}"
            raise ConfigError(f"--import {name}: the module fails with {where}") from error


@contextmanager
def reported(context: typer.Context) -> Iterator[None]:
    """Prints a `HecateError` as one message and exits with 2, or 1 when a run itself failed."""
    from hecate.errors import HecateError, NonFiniteError

    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            _import(context.find_root().params.get("imports") or [])
            yield
    except HecateError as error:
        if context.find_root().params.get("debug"):
            raise
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1 if isinstance(error, NonFiniteError) else 2) from None
