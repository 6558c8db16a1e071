"""Commands on runs: train, eval, generate, report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hecate.cli.app import LimitOption, SetOption, app, complete_preset, reported

if TYPE_CHECKING:
    from hecate.train import ExperimentConfig, RunResult

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)]


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
            show_default=False, autocompletion=complete_preset,
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
    limit: LimitOption = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the result only.")] = False,
) -> None:  # fmt: skip
    """Train a model and write a run folder with checkpoints, figures and a report."""
    with reported(context):
        import torch

        from hecate.train import load_experiment, run_experiment
        from hecate.train.display import Display
        from hecate.train.estimate import parse_bytes
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
        result = run_experiment(
            config, folder, resume=resume, display=Display(quiet=quiet),
            mem_limit=None if limit is None else parse_bytes(limit),
        )  # fmt: skip
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
    with reported(context):
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
    tokens: Annotated[int, typer.Option(min=0, max=1 << 20, help="Bytes to generate.")] = 200,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest byte.")] = 0.8,
    seed: Annotated[int, typer.Option(min=0, max=(1 << 63) - 1, help="Seed of the draws.")] = 0,
    checkpoint: Annotated[str, typer.Option(help="Which one: best or newest.")] = "best",
) -> None:
    """Continue a text, one byte at a time on a state of constant size."""
    with reported(context):
        import codecs

        import torch

        from hecate.errors import ConfigError
        from hecate.train.generate import generate as stream
        from hecate.train.run import open_run

        trainer, _ = open_run(run, checkpoint)
        if trainer.source.metric != "bits_per_byte":
            raise ConfigError(
                f"{run} was trained on task {trainer.config.data.kind!r}, which has no text to continue; see "
                "samples.txt in the run folder"
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


@app.command(epilog="Examples: hecate report runs/mqar | hecate report runs/cms --tokens 64")
def report(
    context: typer.Context,
    run: RunArgument,
    tokens: Annotated[
        int | None,
        typer.Option(min=1, max=1 << 20, help="How many to read; the run's own length, at most 256, if left out."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of figures/ and report.md; the run folder if left out.")
    ] = None,
) -> None:
    """Look at a run's memories under the microscope: implicit attention, norms, ranks, gates, and what they recall
    against age; a figure each, and a section of report.md."""
    with reported(context):
        from hecate.microscope.report import report_run

        found = report_run(run, tokens=tokens, out=out)
        for path in found.figures:
            typer.echo(str(path))
        typer.echo(f"step {found.step}, {found.tokens} tokens; report: {found.report}")


def _refuse_other_source(source: str | None, out: Path | None) -> None:
    from hecate.errors import ConfigError

    if source is not None and out is not None:
        raise ConfigError(f"--resume takes its config from {out}; leave {source!r} out and change settings with --set")


def _show_result(result: RunResult, config: ExperimentConfig) -> None:
    from hecate.train.display import print_table

    rows = [(f"{name} (baseline)", f"{value:.4f}") for name, value in result.baselines.items()]
    if result.score is not None:
        rows.append((config.name, f"{result.score.value(result.metric):.4f}"))
        print_table(("predictor", result.metric.replace("_", " ")), rows)
    report = result.folder / "report.md"  # a signal may have come before there was one
    where = f"; report: {report}" if report.exists() else ""
    typer.echo(f"{result.status} at step {result.step}{where}")
