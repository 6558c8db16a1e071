"""Commands that look at things: list, show, schema, estimate, tape."""

from __future__ import annotations

from typing import Annotated

import typer

from hecate.cli.app import LimitOption, SetOption, app, complete_family, complete_preset, reported

SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="PRESET|FILE", help="A preset or a YAML file.", show_default=False,
        autocompletion=complete_preset,
    ),
]  # fmt: skip


@app.command("list", epilog="Examples: hecate list | hecate list phi | hecate list presets")
def list_(
    context: typer.Context,
    family: Annotated[
        str | None,
        typer.Argument(
            metavar="[FAMILY]",
            help="phi, bias, retention, algorithm, structure, position, data, optimizer, engines, "
            "rules or presets.",
            show_default=False, autocompletion=complete_family,
        ),
    ] = None,
) -> None:  # fmt: skip
    """List the variants of a family: formula, traits, gradient and paper."""
    with reported(context):
        from hecate.train.catalogue import catalogue
        from hecate.train.display import print_table

        header, rows = catalogue(family)
        print_table(header, rows)


@app.command(epilog="Examples: hecate show mqar --set data.num_pairs=16 | hecate show quickstart --engine")
def show(
    context: typer.Context,
    source: SourceArgument,
    overrides: SetOption = None,
    engine: Annotated[
        bool, typer.Option("--engine", help="Say which engine runs the memory here, and why.")
    ] = False,
) -> None:  # fmt: skip
    """Print the resolved YAML of an experiment, every default written out."""
    with reported(context):
        from hecate.train.compose import dump_experiment, load_experiment

        config = load_experiment(source, overrides or [])
        if engine:
            for path, (chosen, reason) in config.engines().items():
                typer.echo(f"model.{path}: {chosen}: {reason}")
        else:
            typer.echo(dump_experiment(config), nl=False)


@app.command(epilog="Example: hecate schema > experiment.schema.json")
def schema(context: typer.Context) -> None:
    """Print the JSON schema of an experiment, for editors that complete YAML."""
    with reported(context):
        import json

        from hecate.train.config import ExperimentConfig

        typer.echo(json.dumps(ExperimentConfig.model_json_schema(), indent=1))


@app.command(epilog="Examples: hecate estimate hope | hecate estimate mine.yaml --mem-limit 8G")
def estimate(
    context: typer.Context, source: SourceArgument, overrides: SetOption = None, limit: LimitOption = None
) -> None:
    """Sizes of an experiment before it is run: parameters, state, memory, work; allocates none."""
    with reported(context):
        from hecate.train.compose import load_experiment
        from hecate.train.display import print_table
        from hecate.train.estimate import check_memory, estimate_rows, parse_bytes

        config = load_experiment(source, overrides or [])
        if limit is not None:
            check_memory(config, parse_bytes(limit))
        print_table(("size", "value"), estimate_rows(config))


@app.command(epilog="Examples: hecate tape mqar | hecate tape cms --tokens 4")
def tape(
    context: typer.Context,
    source: SourceArgument,
    overrides: SetOption = None,
    tokens: Annotated[int, typer.Option(min=1, max=4096, help="How many to scan.")] = 4,
) -> None:
    """Scan a few random tokens with each memory of a model and print the tape: every block call, then the norm of the
    cotangents that came back through it."""
    with reported(context):
        from hecate.train.compose import load_experiment
        from hecate.train.estimate import taped

        for path, (calls, norms) in taped(load_experiment(source, overrides or []), tokens).items():
            typer.echo(f"model.{path}\n{calls}\n")
            for name, norm in norms.items():
                typer.echo(f"  {norm:>10.3g}  {name}")
            typer.echo("")
