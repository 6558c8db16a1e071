"""The command line: `hecate` and `python -m hecate`. Each command imports what it needs, so that help is quick."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from hecate import commands, terminal
from hecate.commands import command, extra, importing
from hecate.errors import MESSAGE, ConfigError, install_line, printable
from hecate.terminal import afterwards, echo


class _Program(TyperGroup):
    """The group of commands; any failure is shown as one message, with --debug as a traceback."""

    def main(self, *args: Any, **how: Any) -> Any:
        asked = {"debug": bool(os.environ.get(terminal.DEBUG))}
        terminal.prepare()
        given = how.get("args") or sys.argv[1:]
        empty = {f"{name}=" for name, value in pairwise(given) if not value} | set(given)
        try:
            # A path of no characters would be the current folder.
            for name in {"--out=", "--data=", "--memories=", "--prefixes="} & empty:
                raise ConfigError(f"{name[:-1]} is empty, as where a variable of the shell is not set; name a folder")
            code = super().main(*args, **{**how, "obj": asked, "standalone_mode": False})
        except SystemExit:
            raise
        except BaseException as error:  # panics of Rust libraries are not Exceptions
            if asked["debug"]:
                raise
            code = _usage(error) if hasattr(error, "format_message") else terminal.report(error)
        terminal.finish()
        raise SystemExit(code or 0)


def _usage(error: Any) -> int:
    """Shows typer's message for an invalid command line; returns the exit code."""
    shown = type(error).__name__ == "NoArgsIsHelpError"
    error.message = error.message if shown else printable(error.message or "", MESSAGE // 4)
    with suppress(OSError):
        error.show()
    return int(error.exit_code)


app = typer.Typer(
    name="hecate", cls=_Program, help="Memories that learn at test time: train, evaluate and inspect them.",
    epilog="Example: hecate train mqar --set feature_map=elu --steps 500",
    no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False,
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line with `argv`, or the process's own arguments, and exits."""
    app(args=None if argv is None else list(argv))


@app.callback()
def _options(
    ctx: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors, as HECATE_DEBUG=1 does.")] = False,
    imports: Annotated[list[str] | None, typer.Option(
        "--import", metavar="MODULE",
        help="Import your own variants first: a module here or installed. May be repeated.",
    )] = None,
    version: Annotated[bool, typer.Option(
        "--version", help="Show the version and exit.", callback=lambda asked: _show_version(asked), is_eager=True,
    )] = False,
) -> None:  # fmt: skip
    if debug:
        ctx.obj["debug"] = True


def _show_version(asked: bool) -> None:
    if asked:
        echo(f"hecate {sys.modules['hecate'].__version__}")  # no import: it would be against the layers
        raise typer.Exit


_command = partial(command, app)
app.add_typer(commands.data, name="data")


def _presets(incomplete: str) -> list[str]:
    """Presets whose names begin with this text."""
    folder = Path(__file__).parent / "presets"
    return sorted(p.stem for p in folder.glob("*.yaml") if p.stem.startswith(incomplete))


_Source = Annotated[str, typer.Argument(
    metavar="PRESET|FILE", help="A preset or a YAML file.", show_default=False, autocompletion=_presets,
)]  # fmt: skip
_Set = Annotated[list[str] | None, typer.Option(
    "--set", metavar="PATH=VALUE",
    help="Override a setting, such as optim.lr=1e-3 or feature_map=elu. May be repeated.",
)]  # fmt: skip
_Limit = Annotated[str | None, typer.Option(
    "--mem-limit", metavar="SIZE",
    help="Refuse what takes more memory than this, such as 8G; train takes the device's own when left out.",
)]  # fmt: skip
_Allow = Annotated[list[str] | None, typer.Option(
    metavar="PATH[,PATH]", help="Settings that may differ from those of the run resumed, such as optim.lr.",
)]  # fmt: skip
_Steps = Annotated[int | None, typer.Option(help="Same as --set budget.steps=N.")]
_Quiet = Annotated[bool, typer.Option("--quiet", help="Print the result only.")]
_Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)]
_Which = Annotated[str, typer.Option("--checkpoint", help="Which one: best or newest.")]


_command("list", short="List the variants of a family, or describe one of them.")(commands.list_)
_command(short="Print the functions that kernels call for a variant.")(commands.formula)
_command(short="Write a commented YAML file with every setting.")(commands.init)


@_command(short="Print the resolved YAML of an experiment, or its engines.")
def show(source: _Source, overrides: _Set = None, engine: bool = False) -> None:
    """Print the resolved YAML of an experiment, every default written out.

    Args:
        engine: Say which engine runs the memory here, how parallel.context shares it, and why.

    Examples: hecate show mqar --set data.num_pairs=16 | hecate show quickstart --engine
    """
    from hecate.train.compose import dump_experiment, load_experiment
    from hecate.train.estimate import ways_of

    config = load_experiment(source, overrides or [])
    if engine:
        for path, (chosen, reason) in config.engines().items():
            echo(f"model.{path}: {chosen}: {reason}")
        for path, (name, reason) in ways_of(config).items():
            echo(f"{path} over {config.parallel.context} ranks: {name}: {reason}")
    else:
        echo(dump_experiment(config), end="")
        for path, (kind, width, d_key) in config.widened().items():
            echo(f"# model.{path}: {kind} makes {width:,} features of keys of width {d_key}")


_command(short="Print the JSON schema of an experiment, for editors.")(commands.schema)


@_command(short="Estimate parameters, state, memory and compute of a run.")
def estimate(
    source: _Source,
    overrides: _Set = None,
    limit: _Limit = None,
    processes: Annotated[int, typer.Option("--world", min=1, max=1 << 20)] = 1,
) -> None:
    """Estimate the parameters, state, memory and compute of an experiment before a run; allocates nothing.

    Args:
        processes: Number of processes that train it; sizes are then those of one of them.

    Examples: hecate estimate hope | hecate estimate mine.yaml --world 64 --mem-limit 80GiB
    """
    from hecate.train.compose import load_experiment
    from hecate.train.display import print_table
    from hecate.train.estimate import check_memory, estimate_rows, parse_bytes

    config = load_experiment(source, overrides or [])
    if limit is not None:
        check_memory(config, parse_bytes(limit), processes)
    print_table(("size", "value"), estimate_rows(config, processes))


@_command(short="Print the tape of each memory over a few random tokens.")
def tape(source: _Source, overrides: _Set = None, tokens: Annotated[int, typer.Option(min=1, max=4096)] = 4) -> None:
    """Scan a few random tokens with each memory of a model and print the tape: every block call, then the norm of the
    cotangents that came back through it.

    Args:
        tokens: Number of tokens to scan.

    Examples: hecate tape mqar | hecate tape cms --tokens 4
    """
    from hecate.train.compose import load_experiment
    from hecate.train.estimate import taped

    for path, (calls, norms) in taped(load_experiment(source, overrides or []), tokens).items():
        echo(f"model.{path}\n{calls}\n")
        for name, norm in norms.items():
            echo(f"  {norm:>10.3g}  {name}")
        echo("")


_Maybe = typer.Argument(metavar="[PRESET|FILE]", show_default=False, autocompletion=_presets)


@_command(short="Train a model and write a run folder with a report.")
def train(
    source: Annotated[str | None, _Maybe] = None,
    overrides: _Set = None,
    out: Path | None = None,
    resume: bool = False,
    allow: _Allow = None,
    steps: _Steps = None,
    limit: _Limit = None,
    quiet: _Quiet = False,
) -> None:
    """Train a model and write a run folder with checkpoints, figures and a report.

    Args:
        source: A preset or a YAML file; 'quickstart' when left out.
        out: Run folder; a fresh runs/NAME when left out.
        resume: Continue a run from its newest sound checkpoint.

    Examples: hecate train | hecate train mqar --set bias=dot | hecate train my.yaml --out runs/mine |
    hecate train --out runs/mine --resume --steps 2000 |
    hecate train --out runs/mine --resume --set optim.lr=1e-4 --allow optim.lr
    """
    with importing(quiet):
        import torch

        from hecate.distributed import start
        from hecate.train import load_experiment, run_experiment
        from hecate.train.display import Display
        from hecate.train.estimate import parse_bytes
        from hecate.train.run import check_folder, fresh_folder, latest_folder

    folder = out or (latest_folder(source) if resume else None)
    if resume and source is not None and out is not None:
        raise ConfigError(f"--resume takes its config from {out}; leave {source!r} out and change settings with --set")
    if resume and folder:
        check_folder(folder, resume)
    base = folder / "config.yaml" if resume and folder else source or "quickstart"
    config = load_experiment(base, [*(overrides or []), *([] if steps is None else [f"budget.steps={steps}"])])
    if config.budget.threads is not None:
        torch.set_num_threads(config.budget.threads)
    mem_limit = None if limit is None else parse_bytes(limit)
    with start(config.parallel, config.budget.device, config.budget.timeout) as world:
        where, again = world.destination(lambda: str(folder or fresh_folder(config.name)))
        folder, resume = Path(where), resume or again
        how: dict[str, Any] = {"display": Display(quiet=quiet), "mem_limit": mem_limit, "world": world}
        free = [name.strip() for names in allow or () for name in names.split(",")]
        result = run_experiment(config, folder, resume=resume, allow=free, **how)
    with afterwards():
        if world.main:
            _print_result(config.name, result)
            if result.signal is not None:
                echo(f"stopped by a signal; continue with: hecate resume {folder}")
    if result.signal is not None:
        raise typer.Exit(128 + result.signal)


@_command(short="Resume a run that was stopped, or train it longer.")
def resume(
    run: _Run, overrides: _Set = None, allow: _Allow = None, steps: _Steps = None, limit: _Limit = None,
    quiet: _Quiet = False,
) -> None:  # fmt: skip
    """Continue a run from its newest sound checkpoint: train --out RUN --resume.

    Examples: hecate resume runs/mine | hecate resume runs/mine --steps 2000 |
    hecate resume runs/mine --set optim.lr=1e-4 --allow optim.lr
    """
    train(None, overrides, run, True, allow, steps, limit, quiet)


def _print_result(name: str, result: Any) -> None:
    """Prints a run's score beside its baselines, its status and the path of its report."""
    from hecate.train.display import print_table

    rows = [(f"{name} (baseline)", f"{value:.4f}") for name, value in result.baselines.items()]
    if result.score is not None:
        rows.append((name, f"{result.score.value(result.metric):.4f}"))
        print_table(("predictor", result.metric.replace("_", " ")), rows)
    written = result.folder / "report.md"  # missing if a signal came early
    where = f"; report: {written}" if written.exists() else ""
    echo(f"{result.status} at step {result.step}{where}")


_Several = typer.Argument(metavar="PRESET|FILE...", show_default=False, autocompletion=_presets)


@_command(short="Compare experiments under one budget, with intervals and verdicts.")
def compare(
    ctx: typer.Context,
    sources: Annotated[list[str], _Several],
    out: Path | None = None,
    over: Annotated[list[str] | None, typer.Option(metavar="PATH=VALUE,VALUE")] = None,
    overrides: _Set = None,
    seeds: int = 3,
    steps: float | None = None,
    tokens: float | None = None,
    seconds: float | None = None,
    flops: float | None = None,
    lr: Annotated[str | None, typer.Option(metavar="LR[,LR]")] = None,
    tuning: Annotated[int, typer.Option("--tuning-seeds")] = 1,
    part: Annotated[float, typer.Option("--tuning-part")] = 1.0,
    keep: Annotated[int | None, typer.Option(metavar="N")] = None,
    jobs: int = 1,
    positions: Annotated[int, typer.Option(metavar="N")] = 0,
    minutes: Annotated[float | None, typer.Option(min=0)] = None,
    planned: Annotated[bool, typer.Option("--plan")] = False,
) -> None:
    """Train every cell of a grid on the same data in the same order, over seeds, under one budget; print 95 % intervals
    and, for every pair, whether one is better. Finished runs are kept in results.jsonl, and the same command goes on.

    Args:
        sources: Presets or YAML files.
        out: Folder of the runs; the same command goes on there. A fresh runs/compare-NAME when left out.
        over: Values of a setting, each a cell; several make a grid. May be repeated.
        seeds: Number of reported runs of each cell, with seeds 0, 1, ...
        steps: Budget of a run: steps; else those of the configs.
        tokens: Budget of a run: tokens.
        seconds: Budget of a run: seconds, converted to steps by each cell's measured speed.
        flops: Budget of a run: operations, including those of memories.
        lr: Learning rates; each cell takes its best, chosen on other seeds than those reported.
        tuning: Number of seeds on which rates are chosen.
        part: Share of the budget with which rates are chosen.
        keep: Successive halving: the better half of the cells gets twice the budget, until N are left.
        jobs: Number of runs at once, each in a process of its own.
        positions: Report the loss by position, too, in sequences of N times the training length.
        minutes: Stop after this time; the same command goes on.
        planned: Only measure a few steps and print how long everything will take.

    Examples: hecate compare quickstart --over memory=titans,gated_delta --over feature_map=elu,dpfp --seeds 3
    --out runs/which | hecate compare a.yaml b.yaml --flops 1e13 --lr 1e-3,3e-3,1e-2 --out runs/ab --jobs 2
    """
    from hecate.compare import Budget, cells_of
    from hecate.compare.cells import rates_of
    from hecate.train.run import fresh_folder

    folder = out or fresh_folder("compare-" + "-".join(dict.fromkeys(Path(source).stem for source in sources))[:64])
    again = "the same line again" if out else f"the same line with --out {folder}"
    cells, budget = cells_of(sources, over or [], overrides or []), Budget(steps, tokens, seconds, flops)
    how: dict[str, Any] = {"budget": budget, "seeds": seeds, "lrs": rates_of(lr), "tuning": tuning, "part": part}
    how |= {"keep": keep, "jobs": jobs, "imports": ctx.find_root().params.get("imports") or []}
    _run_cells(cells, folder, again, how, None if planned else {"positions": positions, "minutes": minutes})


def _run_cells(cells: Any, folder: Path, again: str, how: dict[str, Any], more: dict[str, Any] | None) -> None:
    """Runs cells with the options `how` and `more` and prints the results; without `more` only plans the runs."""
    from hecate.compare import report, run
    from hecate.train.display import Interrupted, print_table, print_tables

    say = partial(echo, err=True)
    try:
        if more is None:
            table, hours = report.of_plan(run.plan(cells, folder, say=say, **how))
            print_table(*table)
            echo(f"{hours:.2f} hours of training one after the other; evaluation comes on top")
            echo(f"what was measured is kept in {folder}: {again} goes on without --plan")
            return
        results = run.compare(cells, folder, say=say, **how, **more)
    except Interrupted:
        echo(f"stopped; what is done is kept in {folder}: {again} goes on", err=True)
        raise typer.Exit(3) from None
    written = report.write(results, folder)
    with afterwards():
        print_tables(report.tables(results))
        for text in (*results.notes, *map(str, written)):
            echo(text)


@_command("eval", short="Score a checkpoint: baselines, other data, longer sequences.")
def evaluate(
    run: _Run,
    checkpoint: _Which = "best",
    data: Path | None = None,
    lengths: str | None = None,
    tasks: str | None = None,
    samples: Annotated[int | None, typer.Option(min=1, max=1 << 20)] = None,
    out: Path | None = None,
) -> None:
    """Score a run's checkpoint on its validation data, beside the baselines; on other data and other lengths; or in
    tasks.

    Args:
        data: Other data: a text or a folder of texts, for a run on bytes; token shards, for a run on tokens.
        lengths: Sequence lengths, such as 1k,4k,16k, which may exceed that of training; prints the loss by position
            at each.
        tasks: Evaluate tasks instead: niah,variable_tracking,loss_by_position in text (of --data, or the run's own),
            or the synthetic task that the run was trained on. Results go into RUN/evals. RUN may then be a folder in
            the format of transformers.
        samples: Number of rows of each length, with --tasks.
        out: Folder for the results of --tasks; RUN/evals if left out.

    Examples: hecate eval runs/quickstart | hecate eval runs/mine --data book.txt --lengths 1k,4k,16k |
    hecate eval runs/mine --tasks niah,variable_tracking --lengths 1k,4k
    """
    from hecate.train.display import print_table, print_tables
    from hecate.train.run import open_run
    from hecate.train.trained import by_length, open_model, parse_lengths, source_of, tables

    if tasks is not None:
        from hecate.evals import evaluate_run

        named = [name.strip() for name in tasks.split(",")]
        wanted = parse_lengths(lengths) if lengths else None
        how: dict[str, Any] = {"data": data, "lengths": wanted, "samples": samples, "out": out}
        results, folder = evaluate_run(run, named, checkpoint=checkpoint, **how)
        picture = "" if (folder / "scores.png").exists() else f"; no figure without matplotlib: {install_line('plot')}"
        with afterwards():
            print_tables(results.tables())
            echo(f"results: {folder}{picture}")
        return
    for name, value in (("samples", samples), ("out", out)):
        if value is not None:
            raise ConfigError(f"--{name} is for --tasks, which is left out; give both or neither")
    if data is not None or lengths is not None:
        trained = open_model(run, checkpoint)
        wanted = parse_lengths(lengths) if lengths else [trained.config.seq_len]
        source = source_of(trained, data)
        print_tables(tables(trained, source, by_length(trained, source, wanted)))
        return
    trainer, step = open_run(run, checkpoint)
    metric, score = trainer.source.metric, trainer.evaluate()
    rows = [(name, f"{value:.4f}") for name, value in trainer.baselines().items()]
    rows.append((f"{trainer.config.name} (step {step})", f"{score.value(metric):.4f}"))
    print_table(("predictor", metric.replace("_", " ")), rows)


@_command(short="Continue a text, token by token.")
def generate(
    run: Annotated[Path, typer.Argument(metavar="RUN", show_default=False)],
    prompt: list[str] | None = None,
    tokens: Annotated[int, typer.Option(min=0, max=1 << 20)] = 200,
    temperature: Annotated[float, typer.Option(min=0)] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1)] = None,
    top_p: Annotated[float | None, typer.Option(min=0, max=1)] = None,
    stop: list[str] | None = None,
    batch: Annotated[int, typer.Option(min=1, max=1 << 12)] = 1,
    seed: Annotated[int, typer.Option(min=0, max=(1 << 63) - 1)] = 0,
    exact: bool = False,
    checkpoint: _Which = "best",
) -> None:
    r"""Continue texts, one token at a time on a state of constant size.

    Args:
        run: A run folder, or the folder of one checkpoint; the data are not needed.
        prompt: Text to continue. May be repeated.
        tokens: Number of tokens to generate; for a run on bytes, of bytes.
        temperature: Randomness of the draws; 0 takes the likeliest token.
        top_k: Draw from this many of the likeliest tokens.
        top_p: Draw from the fewest tokens whose probabilities add up to this.
        stop: End before this text. May be repeated.
        batch: Number of continuations of each prompt.
        seed: Seed of the draws.
        exact: Results that do not depend on the other texts of a batch, to the bit; slower.

    Examples: hecate generate runs/quickstart --prompt 'class ' --tokens 300 |
    hecate generate runs/mine --top-p 0.9 --stop '\n\n' --batch 4
    """
    from contextlib import nullcontext

    import torch

    from hecate.tape import exact as exactly
    from hecate.train.evaluate import Draws, prompts_of, written
    from hecate.train.trained import open_model, reads_text

    trained = open_model(run, checkpoint)
    tokenizer = reads_text(trained, str(run))
    texts = [text or "\n" for text in prompt or [trained.config.sample.prompt] for _ in range(batch)]
    starts = prompts_of(tokenizer, texts, trained.config.data.vocabulary(), str(run))
    seeds = [torch.Generator().manual_seed((seed + n) % (1 << 63)) for n in range(len(starts))]
    draws = Draws(
        trained.model, starts, seeds, temperature=temperature, top_k=top_k, top_p=top_p, device=trained.device
    )
    with exactly() if exact else nullcontext():
        for row, start in enumerate(starts):
            if len(starts) > 1:
                echo(f"--- {row + 1}")
            for piece in written(tokenizer, start, draws.row(row, tokens), stop or ()):
                echo(piece, end="")
            echo("")


@_command("export", short="Export a run's weights or model for other programs.")
def export_(
    run: _Run, to: str = "safetensors", out: Path | None = None, checkpoint: _Which = "best", dtype: str | None = None
) -> None:
    """Write the weights of a run, or of a checkpoint folder, and its config into a new folder. --to hf writes the model
    and its tokenizer for transformers, which loads them once hecate.hf is imported. --to onnx writes the model of a
    run, or of a folder of --to hf, as two ONNX files: one for a sequence, one for the next token from a state.

    Args:
        to: safetensors, torch, dcp, hf (transformers) or onnx.
        out: New folder; RUN-FORMAT when left out.
        dtype: Dtype of weights with --to onnx: float32 or float16.

    Examples: hecate export runs/quickstart --to safetensors --out weights | hecate export runs/mine --to hf |
    hecate export runs/mine --to onnx
    """
    if out is None:
        named = run if run.name not in ("", "..") else run.resolve()  # `.` has no name
        if not named.name:
            raise ConfigError(f"{run} has no name to make that of the new folder from; give --out")
        out = named.with_name(f"{named.name}-{to}")
    if dtype is not None and to != "onnx":
        raise ConfigError(f"--dtype {dtype} and --to {to}: weights keep their dtypes there; leave --dtype out")
    lacks = ""
    if to == "onnx":
        with extra("--to onnx: "):
            from hecate.onnx import export_folder
        kind: Any = dtype or "float32"
        model = export_folder(run, out, checkpoint, kind)
        made = f"{model.folder}: {model.step_nodes} nodes a token, within {model.error:.0e} of torch"
    elif to == "hf":
        with extra("--to hf: "):
            from hecate.hf.saved import export_run
        exported = export_run(run, out, checkpoint)
        made = str(exported.folder)
        lacks = "" if exported.has_tokenizer else "it has no tokenizer: the run was not trained on text"
    else:
        from hecate.checks import expect_choice
        from hecate.train.trained import FORMATS, export_weights

        expect_choice(to, "--to", (*FORMATS, "hf", "onnx"))
        made = str(export_weights(run, to, out, checkpoint))
    with afterwards():
        echo(made)
    if lacks:
        echo(lacks, err=True)


@_command("import", short="Make a run at step 0 from existing weights.")
def import_(
    source: Annotated[Path, typer.Argument(metavar="FILE|DIR", show_default=False)],
    out: Annotated[Path, typer.Option(show_default=False)],
    config: Annotated[str | None, typer.Option(metavar="PRESET|FILE")] = None,
    overrides: _Set = None,
) -> None:
    """Make a run folder at step 0 from given weights, to be trained with train --out RUN --resume.

    Args:
        source: A safetensors file, a folder of them, a run or a checkpoint.
        out: Run folder to make.
        config: The experiment; the config.yaml beside the weights when left out.

    Example: hecate import weights --out runs/mine-init, then hecate train --out runs/mine-init --resume
    """
    from hecate.train.compose import load_experiment
    from hecate.train.trained import import_weights

    if overrides and config is None:
        raise ConfigError("--set changes what --config names, which is left out; give both or neither")
    experiment = None if config is None else load_experiment(config, overrides or [])
    folder = import_weights(source, out, experiment)
    with afterwards():
        echo(str(folder))


@_command(short="Analyse what a run's memories hold, attend to and forget.")
def report(
    run: _Run, tokens: Annotated[int | None, typer.Option(min=1, max=1 << 20)] = None, out: Path | None = None
) -> None:
    """Analyse a run's memories: implicit attention, norms, ranks, gates, and recall against age; writes a figure of
    each, and a section of report.md.

    Args:
        tokens: Number of tokens to read; the run's sequence length, at most 256, if left out.
        out: Folder of figures/ and report.md; the run folder if left out.

    Examples: hecate report runs/mqar | hecate report runs/cms --tokens 64
    """
    from hecate.microscope.report import report_run

    summary = report_run(run, tokens=tokens, out=out)
    with afterwards():
        for path in summary.figures:
            echo(str(path))
        echo(f"step {summary.step}, {summary.tokens} tokens; report: {summary.report}")


_command(short="Test what memories remember, learn and track, against peers.")(commands.gym)
_command(short="Show what this machine has and lacks, and which engines run.")(commands.doctor)
_command(short="Serve a model through an OpenAI-compatible API.")(commands.serve)
