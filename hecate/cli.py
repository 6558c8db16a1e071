"""The command line: train, evaluate, generate, list, show, schema and lab.

Heavy imports wait until a command needs them, so that help and completion are quick.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

if TYPE_CHECKING:
    from hecate.train import ExperimentConfig, RunResult

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
RunArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)
]


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line with `argv`, or the process's own arguments."""
    app(args=None if argv is None else list(argv))


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    pass


def _complete_preset(incomplete: str) -> list[str]:
    folder = Path(__file__).parent / "presets"
    return sorted(p.stem for p in folder.glob("*.yaml") if p.stem.startswith(incomplete))


def _complete_family(incomplete: str) -> list[str]:
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


@contextmanager
def _reported(context: typer.Context) -> Iterator[None]:
    """Prints a `HecateError` as one message and exits with 2, or 1 when a run itself failed."""
    from hecate.errors import HecateError, NonFiniteError

    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            yield
    except HecateError as error:
        if context.find_root().params.get("debug"):
            raise
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1 if isinstance(error, NonFiniteError) else 2) from None


@app.command(
    epilog="Examples: hecate train | hecate train mqar --set bias=dot | "
    "hecate train my.yaml --out runs/mine | hecate train --out runs/mine --resume --steps 2000"
)
def train(
    context: typer.Context,
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="[PRESET|FILE]",
            help="A preset or a YAML file; 'quickstart' when left out.",
            show_default=False, autocompletion=_complete_preset,
        ),
    ] = None,
    overrides: SetOption = None,
    out: Annotated[
        Path | None, typer.Option(help="Run folder; a fresh runs/NAME when left out.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue a run from its newest sound checkpoint.")
    ] = False,
    steps: Annotated[int | None, typer.Option(help="Same as --set budget.steps=N.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the result only.")] = False,
) -> None:  # fmt: skip
    """Train a model and write a run folder with checkpoints, figures and a report."""
    with _reported(context):
        import torch

        from hecate.train import load_experiment, run_experiment
        from hecate.train.display import Display
        from hecate.train.folders import fresh_folder, latest_folder

        texts = [*(overrides or []), *([] if steps is None else [f"budget.steps={steps}"])]
        if resume:
            folder = out or latest_folder(source)
            base: str | Path = folder / "config.yaml"
            _refuse_other_source(source, out)
        else:
            base = source or "quickstart"
        config = load_experiment(base, texts)
        folder = folder if resume else out or fresh_folder(config.name)
        if config.budget.threads is not None:
            torch.set_num_threads(config.budget.threads)
        result = run_experiment(config, folder, resume=resume, display=Display(quiet=quiet))
        _show_result(result, config)
    if result.signal is not None:
        typer.echo(f"stopped by a signal; continue with: hecate train --out {folder} --resume")
        raise typer.Exit(128 + result.signal)


@app.command("eval", epilog="Example: hecate eval runs/quickstart")
def evaluate(
    context: typer.Context,
    run: RunArgument,
    checkpoint: Annotated[str, typer.Option(help="Which one: best or newest.")] = "best",
) -> None:
    """Score a run's checkpoint on its validation data, beside the baselines."""
    with _reported(context):
        from hecate.train.display import print_table
        from hecate.train.run import open_run

        trainer, step = open_run(run, checkpoint)
        metric = trainer.source.metric
        score = trainer.evaluate()
        rows = [(name, f"{value:.4f}") for name, value in trainer.baselines().items()]
        rows.append((f"{trainer.config.name} (step {step})", f"{score.value(metric):.4f}"))
        print_table(("predictor", metric.replace("_", " ")), rows)


@app.command(epilog="Example: hecate generate runs/quickstart --prompt 'class ' --tokens 300")
def generate(
    context: typer.Context,
    run: RunArgument,
    prompt: Annotated[str | None, typer.Option(help="Text to continue.")] = None,
    tokens: Annotated[int, typer.Option(min=0, help="Bytes to generate.")] = 200,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest byte.")] = 0.8,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the draws.")] = 0,
    checkpoint: Annotated[str, typer.Option(help="Which one: best or newest.")] = "best",
) -> None:
    """Continue a text, one byte at a time on a state of constant size."""
    with _reported(context):
        import codecs

        import torch

        from hecate.errors import ConfigError
        from hecate.train.generate import generate as stream
        from hecate.train.run import open_run

        trainer, _ = open_run(run, checkpoint)
        if trainer.source.metric != "bits_per_byte":
            raise ConfigError(
                f"{run} was trained on task {trainer.config.data.kind!r}, which has no text to "
                "continue; "
                "see samples.txt in the run folder"
            )
        start = (trainer.config.sample.prompt if prompt is None else prompt).encode() or b"\n"
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        ids = stream(
            trainer.model, list(start), tokens, temperature=temperature,
            generator=torch.Generator().manual_seed(seed), device=trainer.device,
        )  # fmt: skip
        typer.echo(decoder.decode(start), nl=False)
        for token in ids:
            typer.echo(decoder.decode(bytes([token])), nl=False)
        typer.echo(decoder.decode(b"", final=True))


@app.command("list", epilog="Examples: hecate list | hecate list phi | hecate list presets")
def list_(
    context: typer.Context,
    family: Annotated[
        str | None,
        typer.Argument(
            metavar="[FAMILY]",
            help="phi, bias, retention, algorithm, structure, data, rules or presets.",
            show_default=False, autocompletion=_complete_family,
        ),
    ] = None,
) -> None:  # fmt: skip
    """List the variants of a family: formula, traits, gradient and paper."""
    with _reported(context):
        from hecate.train.catalogue import catalogue
        from hecate.train.display import print_table

        header, rows = catalogue(family)
        print_table(header, rows)


@app.command(
    epilog="Examples: hecate show mqar --set data.num_pairs=16 | hecate show quickstart --engine"
)
def show(
    context: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            metavar="PRESET|FILE", help="A preset or a YAML file.", show_default=False,
            autocompletion=_complete_preset,
        ),
    ],
    overrides: SetOption = None,
    engine: Annotated[
        bool, typer.Option("--engine", help="Say which engine runs the memory here, and why.")
    ] = False,
) -> None:  # fmt: skip
    """Print the resolved YAML of an experiment, every default written out."""
    with _reported(context):
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
    with _reported(context):
        import json

        from hecate.train.config import ExperimentConfig

        typer.echo(json.dumps(ExperimentConfig.model_json_schema(), indent=1))


@app.command(epilog="Examples: hecate lab | hecate lab levels --quick")
def lab(
    context: typer.Context,
    study: Annotated[
        str | None,
        typer.Argument(metavar="[STUDY]", help="Left out, all are listed.", show_default=False),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A minute at most, less exact.")] = False,
    seeds: Annotated[int | None, typer.Option(min=1, help="How many, from 0 on.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the CSV, JSON and PNG files.")] = Path("lab"),
    figure: Annotated[bool, typer.Option(help="Draw the figure (needs matplotlib).")] = True,
) -> None:
    """Run a study: a table, a figure and the numbers behind them."""
    with _reported(context):
        from hecate.lab.run import list_studies, run_study

        if study is None:
            return list_studies()
        run_study(study, quick=quick, seeds=seeds, out=out, figure=figure)


def _refuse_other_source(source: str | None, out: Path | None) -> None:
    from hecate.errors import ConfigError

    if source is not None and out is not None:
        raise ConfigError(
            f"--resume takes its config from {out}; leave {source!r} out and change settings "
            "with --set"
        )


def _show_result(result: RunResult, config: ExperimentConfig) -> None:
    from hecate.train.display import print_table

    rows = [(f"{name} (baseline)", f"{value:.4f}") for name, value in result.baselines.items()]
    rows.append((config.name, f"{result.score.value(result.metric):.4f}"))
    print_table(("predictor", result.metric.replace("_", " ")), rows)
    typer.echo(f"{result.status} at step {result.step}; report: {result.folder / 'report.md'}")


if __name__ == "__main__":
    main()
