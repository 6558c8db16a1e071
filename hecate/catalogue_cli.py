"""Commands that tell what there is: `hecate list`, `formula`, `schema`, `init` and `doctor`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hecate.errors import ConfigError
from hecate.terminal import echo


def _families(incomplete: str) -> list[str]:
    """Families that begin so."""
    from hecate.train.catalogue import FAMILIES

    return [name for name in FAMILIES if name.startswith(incomplete)]


def list_(
    family: Annotated[str | None, typer.Argument(
        metavar="[FAMILY]", show_default=False, autocompletion=_families,
        help="phi, bias, retention, algorithm, structure, gating, readout, position, data, optimizer, logger, engines, "
        "rules or presets.",
    )] = None,
    name: Annotated[str | None, typer.Argument(
        metavar="[NAME]", show_default=False, help="One of them: its text, its settings and an example.",
    )] = None,
) -> None:  # fmt: skip
    """List the variants of a family with formula, traits, gradient and paper; of one, all there is to know."""
    from hecate.train import catalogue, display, settings

    if family is None or name is None:
        display.print_table(*catalogue.catalogue(family))
        return
    text, table, example = settings.variant_page(family, name)
    echo(f"{text}\n")
    if table is not None:
        display.print_table(*table)
        echo("")
    echo(f"Example: {example}")


def formula(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="A kind, or a mapping as in YAML.")],
    family: Annotated[str, typer.Option(metavar="FAMILY", help="bias or retention.")] = "bias",
) -> None:
    """Print the functions that kernels are made of: traced from the variant's own methods in torch."""
    from hecate.train.catalogue import formula_text

    echo(formula_text(kind, family), end="")


def schema() -> None:
    """Print the JSON schema of an experiment, for editors that complete YAML."""
    from hecate.train.compose import experiment_schema

    echo(json.dumps(experiment_schema(), indent=1))


def init(
    path: Annotated[Path, typer.Argument(metavar="[FILE]", help="The file to write; none may be there.")] = Path(
        "my.yaml"
    ),
    source: Annotated[str, typer.Option(
        "--from", metavar="PRESET|FILE", help="Whose settings it begins with; `hecate list presets` names them.",
    )] = "quickstart",
) -> None:  # fmt: skip
    """Write a commented YAML file with every setting and its default, to change and train."""
    from hecate.files import refusing, write_file
    from hecate.train.settings import starter

    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"the file must end in .yaml or .yml, as `hecate train` reads it, got {str(path)!r}")
    text = starter(source, str(path))
    with refusing(f"write {path}", "give another name", kind=ConfigError):
        try:
            path.touch(exist_ok=False)  # in one step, so that what others put there meanwhile stays; links, too
        except FileExistsError:
            raise ConfigError(f"{path} is there already; nothing was written: give another name or remove it") from None
        try:
            write_file(path, text)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
    echo(f"{path}: change it, then hecate train {path}")


def doctor(
    rules: Annotated[list[str] | None, typer.Argument(
        metavar="[RULE]...", help="Rules to warm; all of them if left out.", show_default=False,
    )] = None,
    warm: Annotated[bool, typer.Option("--warm", help="Compile the kernels of rules and keep them on disk.")] = False,
    width: Annotated[int, typer.Option(min=1, max=1024, help="Width of a head, to warm for.")] = 64,
) -> None:  # fmt: skip
    """Say what this machine has, what is missing and the line that installs it, and which engines run here; or compile
    kernels before their first use."""
    from hecate.train import catalogue as found
    from hecate.train.display import print_table

    if not warm:
        if rules:
            raise ConfigError(f"doctor takes rules, such as {rules[0]!r}, with --warm; hecate list rules tells of them")
        for table in (found.machine(), found.missing(), found.engines(), found.kernels()):
            if table[1]:
                print_table(*table)
        return
    for what, seconds in found.warm(rules or [], width):
        echo(f"{what}, {seconds:.1f} s")
