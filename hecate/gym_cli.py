"""The command `hecate gym`: memories in streams that ask what they remember."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from hecate.errors import ConfigError, install_line, shorten
from hecate.terminal import afterwards, echo


def gym(
    named: Annotated[list[str] | None, typer.Argument(
        metavar="CONTENDER", show_default=False,
        help="Of --list, a rule, YAML of one or a file, several joined by + (levels) or | (heads), or your "
        "module:function; all of --list if left out.",
    )] = None,
    tasks: Annotated[str | None, typer.Option(metavar="TASK[,TASK]", help="Some of --list; all if left out.")] = None,
    seeds: Annotated[int, typer.Option(help="Streams that are reported, with seeds 0 and on.")] = 5,
    out: Annotated[Path, typer.Option(help="Folder of the results, where the same line again goes on.")] = Path(
        "runs/gym"
    ),
    reference: Annotated[str | None, typer.Option(
        metavar="NAME", help="The contender that others are compared with; gated_delta, or the first.",
    )] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small tasks, two seeds and settings: a look.")] = False,
    listed: Annotated[bool, typer.Option("--list", help="Show tasks and contenders, and run none.")] = False,
) -> None:  # fmt: skip
    """Ask memories what they remember, learn and follow: streams with known levels, one table, gym.json, gym.csv and a
    figure. Settings are chosen on another seed; differences to the reference are corrected by Dunnett; a contender that
    sees what it may not, or is no better than chance, is told as such."""
    from hecate.gym import contenders, report, run
    from hecate.train.display import print_table, print_tables

    if listed:
        print_tables(report.listing([make() for make in contenders().values()]))
        return
    wanted = [name.strip() for name in tasks.split(",")] if tasks is not None else ()
    say = partial(echo, err=True)
    try:
        found = run(named or (), wanted, seeds=seeds, out=out, reference=reference, quick=quick, say=say)
    except KeyboardInterrupt:
        echo(f"stopped; what is done is kept in {out}: the same line again goes on", err=True)
        raise
    except Exception as error:
        if not (place := getattr(error, "__notes__", None)):
            raise
        told = f"{type(error).__name__}: {shorten(str(error))}"
        raise ConfigError(f"{place[0]} fails with {told}; hecate --debug gym shows where") from error
    written = report.write(found, out)
    with afterwards():
        print_table(*report.table(found))
        for path in written:
            echo(str(path))
        if written[-1].suffix != ".svg":
            echo(f"no figure without matplotlib: {install_line('plot')}")
