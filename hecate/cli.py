"""The command line: `hecate` and `python -m hecate`. Imports wait for the command that needs them: help is quick."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from hecate import commands, terminal
from hecate.commands import Command, importing
from hecate.errors import MESSAGE, ConfigError, install_line, printable
from hecate.terminal import afterwards, echo


class _Program(TyperGroup):
    """The commands; whatever fails is one message, and its traceback is shown where that is asked for."""

    def main(self, *args: Any, **how: Any) -> Any:
        asked = {"debug": bool(os.environ.get(terminal.DEBUG))}
        terminal.prepare()
        try:
            code = super().main(*args, **{**how, "obj": asked, "standalone_mode": False})
        except SystemExit:
            raise
        except BaseException as error:  # libraries in Rust panic with what is no Exception
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
        echo(f"hecate {sys.modules['hecate'].__version__}")  # the package itself imports no floor
        raise typer.Exit


_command = partial(app.command, cls=Command)
app.add_typer(commands.data, name="data")


def _presets(incomplete: str) -> list[str]:
    """Presets that begin so."""
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


_command(
    "list",
    short_help="The variants of a family, or all about one of them.",
    epilog="Examples: hecate list | hecate list phi | hecate list phi dpfp | hecate list presets",
)(commands.list_)

_command(
    short_help="The text of a bias or retention that kernels are made of.",
    epilog="Examples: hecate formula '{kind: lp, p: 1.5}', hecate formula kl --family retention",
)(commands.formula)

_command(
    short_help="A commented file with every setting, to start from.",
    epilog="Examples: hecate init my.yaml | hecate init levels.yaml --from hope, then hecate train my.yaml",
)(commands.init)


@_command(
    short_help="The resolved YAML of an experiment, or its engines.",
    epilog="Examples: hecate show mqar --set data.num_pairs=16 | hecate show quickstart --engine",
)
def show(
    source: _Source,
    overrides: _Set = None,
    engine: Annotated[bool, typer.Option(
        "--engine", help="Say which engine runs the memory here, how parallel.context shares it, and why.",
    )] = False,
) -> None:  # fmt: skip
    """Print the resolved YAML of an experiment, every default written out."""
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


_command(
    short_help="The JSON schema of an experiment, for editors.",
    epilog="Example: hecate schema > experiment.schema.json",
)(commands.schema)


@_command(
    short_help="Parameters, state, memory and work, before a run.",
    epilog="Examples: hecate estimate hope | hecate estimate mine.yaml --world 64 --mem-limit 80GiB",
)
def estimate(
    source: _Source,
    overrides: _Set = None,
    limit: _Limit = None,
    processes: Annotated[int, typer.Option(
        "--world", min=1, max=1 << 20, help="How many processes train it: what one of them holds.",
    )] = 1,
) -> None:  # fmt: skip
    """Sizes of an experiment before it is run: parameters, state, memory, work; allocates none."""
    from hecate.train.compose import load_experiment
    from hecate.train.display import print_table
    from hecate.train.estimate import check_memory, estimate_rows, parse_bytes

    config = load_experiment(source, overrides or [])
    if limit is not None:
        check_memory(config, parse_bytes(limit), processes)
    print_table(("size", "value"), estimate_rows(config, processes))


@_command(
    short_help="The tape of each memory over a few random tokens.",
    epilog="Examples: hecate tape mqar | hecate tape cms --tokens 4",
)
def tape(
    source: _Source,
    overrides: _Set = None,
    tokens: Annotated[int, typer.Option(min=1, max=4096, help="How many to scan.")] = 4,
) -> None:
    """Scan a few random tokens with each memory of a model and print the tape: every block call, then the norm of the
    cotangents that came back through it."""
    from hecate.train.compose import load_experiment
    from hecate.train.estimate import taped

    for path, (calls, norms) in taped(load_experiment(source, overrides or []), tokens).items():
        echo(f"model.{path}\n{calls}\n")
        for name, norm in norms.items():
            echo(f"  {norm:>10.3g}  {name}")
        echo("")


@_command(
    short_help="Train a model and write a run folder with a report.",
    epilog="Examples: hecate train | hecate train mqar --set bias=dot | "
    "hecate train my.yaml --out runs/mine | hecate train --out runs/mine --resume --steps 2000 | "
    "hecate train --out runs/mine --resume --set optim.lr=1e-4 --allow optim.lr",
)
def train(
    source: Annotated[str | None, typer.Argument(
        metavar="[PRESET|FILE]", help="A preset or a YAML file; 'quickstart' when left out.",
        show_default=False, autocompletion=_presets,
    )] = None,
    overrides: _Set = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; a fresh runs/NAME when left out.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a run from its newest sound checkpoint.")] = False,
    allow: _Allow = None,
    steps: _Steps = None,
    limit: _Limit = None,
    quiet: _Quiet = False,
) -> None:  # fmt: skip
    """Train a model and write a run folder with checkpoints, figures and a report."""
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


@_command(
    short_help="Continue a run that was stopped, or train it longer.",
    epilog="Examples: hecate resume runs/mine | hecate resume runs/mine --steps 2000 | "
    "hecate resume runs/mine --set optim.lr=1e-4 --allow optim.lr",
)
def resume(
    run: _Run, overrides: _Set = None, allow: _Allow = None, steps: _Steps = None, limit: _Limit = None,
    quiet: _Quiet = False,
) -> None:  # fmt: skip
    """Continue a run from its newest sound checkpoint: train --out RUN --resume."""
    train(None, overrides, run, True, allow, steps, limit, quiet)


def _print_result(name: str, result: Any) -> None:
    """A run's score beside its baselines, and where its report is."""
    from hecate.train.display import print_table

    rows = [(f"{name} (baseline)", f"{value:.4f}") for name, value in result.baselines.items()]
    if result.score is not None:
        rows.append((name, f"{result.score.value(result.metric):.4f}"))
        print_table(("predictor", result.metric.replace("_", " ")), rows)
    written = result.folder / "report.md"  # a signal may have come before there was one
    where = f"; report: {written}" if written.exists() else ""
    echo(f"{result.status} at step {result.step}{where}")


@_command(
    short_help="Several experiments under one budget, with intervals and verdicts.",
    epilog="Examples: hecate compare quickstart --over memory=titans,gated_delta --over feature_map=elu,dpfp --seeds 3 "
    "--out runs/which | hecate compare a.yaml b.yaml --flops 1e13 --lr 1e-3,3e-3,1e-2 --out runs/ab --jobs 2",
)
def compare(
    ctx: typer.Context,
    sources: Annotated[list[str], typer.Argument(
        metavar="PRESET|FILE...", help="Presets or YAML files.", show_default=False, autocompletion=_presets,
    )],
    out: Annotated[Path | None, typer.Option(
        help="Folder of the runs, where the same line again goes on; a fresh runs/compare-NAME when left out.",
    )] = None,
    over: Annotated[list[str] | None, typer.Option(
        metavar="PATH=VALUE,VALUE", help="Values of a setting, each a cell; several make a grid. May be repeated.",
    )] = None,
    overrides: _Set = None,
    seeds: Annotated[int, typer.Option(help="Runs of each cell that are reported, with seeds 0 and on.")] = 3,
    steps: Annotated[float | None, typer.Option(help="Budget of a run: steps; else those of the configs.")] = None,
    tokens: Annotated[float | None, typer.Option(help="Budget of a run: tokens.")] = None,
    seconds: Annotated[float | None, typer.Option(help="Budget of a run: seconds, by each cell's own speed.")] = None,
    flops: Annotated[float | None, typer.Option(help="Budget of a run: operations, those of memories too.")] = None,
    lr: Annotated[str | None, typer.Option(
        metavar="LR[,LR]", help="Rates of which each cell takes its best, chosen on other seeds than are reported.",
    )] = None,
    tuning: Annotated[int, typer.Option("--tuning-seeds", help="Seeds that rates are chosen on.")] = 1,
    part: Annotated[float, typer.Option("--tuning-part", help="Of the budget, what rates are chosen with.")] = 1.0,
    keep: Annotated[int | None, typer.Option(
        metavar="N", help="Successive halving: the better half of the cells gets twice the budget, until N are left.",
    )] = None,
    jobs: Annotated[int, typer.Option(help="Processes at once.")] = 1,
    positions: Annotated[int, typer.Option(
        metavar="N", help="The loss by position, too, in sequences of N times the length that is trained on.",
    )] = 0,
    minutes: Annotated[float | None, typer.Option(min=0, help="Stop then; the same line again goes on.")] = None,
    planned: Annotated[bool, typer.Option("--plan", help="Measure a few steps and say how long it takes.")] = False,
) -> None:  # fmt: skip
    """Train every cell of a grid on the same data in the same order, over seeds, under one budget; print 95 % intervals
    and, for every pair, whether one is better. What is finished is kept: results.jsonl is enough to go on from."""
    from hecate.compare import Budget, cells_of, report, run
    from hecate.compare.cells import rates_of
    from hecate.train.display import Interrupted, print_table, print_tables
    from hecate.train.run import fresh_folder

    folder = out or fresh_folder("compare-" + "-".join(dict.fromkeys(Path(source).stem for source in sources))[:64])
    again = "the same line again" if out else f"the same line with --out {folder}"
    cells, budget = cells_of(sources, over or [], overrides or []), Budget(steps, tokens, seconds, flops)
    how: dict[str, Any] = {"budget": budget, "seeds": seeds, "lrs": rates_of(lr), "tuning": tuning, "part": part}
    how |= {"jobs": jobs, "imports": ctx.find_root().params.get("imports") or [], "say": partial(echo, err=True)}
    try:
        if planned:
            table, hours = report.of_plan(run.plan(cells, folder, keep=keep, **how))
            print_table(*table)
            echo(f"{hours:.2f} hours of training one after the other; evaluation comes on top")
            echo(f"what was measured is kept in {folder}: {again} goes on without --plan")
            return
        found = run.compare(cells, folder, positions=positions, minutes=minutes, keep=keep, **how)
    except Interrupted:
        echo(f"stopped; what is done is kept in {folder}: {again} goes on", err=True)
        raise typer.Exit(3) from None
    written = report.write(found, folder)
    with afterwards():
        print_tables(report.tables(found))
        for text in (*found.notes, *map(str, written)):
            echo(text)


@_command(
    "eval",
    short_help="Score a checkpoint: baselines, other data, longer sequences.",
    epilog="Examples: hecate eval runs/quickstart | hecate eval runs/mine --data book.txt --lengths 1k,4k,16k | "
    "hecate eval runs/mine --tasks niah,variable_tracking --lengths 1k,4k",
)
def evaluate(
    run: _Run,
    checkpoint: _Which = "best",
    data: Annotated[Path | None, typer.Option(
        help="Other data: a text or a folder of them, for a run on bytes; token shards for one on tokens.",
    )] = None,
    lengths: Annotated[str | None, typer.Option(
        help="Lengths of sequences, such as 1k,4k,16k: the loss of each, by position; may be beyond those of training.",
    )] = None,
    tasks: Annotated[str | None, typer.Option(
        help="Tasks instead, such as niah,variable_tracking,loss_by_position in text (of --data, or the run's own), or "
        "the synthetic one that the run was trained on; the results go into RUN/evals. RUN may be a folder of "
        "transformers' here.",
    )] = None,
    samples: Annotated[int | None, typer.Option(min=1, max=1 << 20, help="Rows of each length, with --tasks.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the results of --tasks; RUN/evals if left out.")] = None,
) -> None:  # fmt: skip
    """Score a run's checkpoint on its validation data, beside the baselines; on other data and other lengths; or in
    tasks."""
    from hecate.train.display import print_table, print_tables
    from hecate.train.run import open_run
    from hecate.train.trained import by_length, open_model, parse_lengths, source_of, tables

    if tasks is not None:
        from hecate.evals import evaluate_run

        named = [name.strip() for name in tasks.split(",")]
        wanted = parse_lengths(lengths) if lengths else None
        how: dict[str, Any] = {"data": data, "lengths": wanted, "samples": samples, "out": out}
        found, folder = evaluate_run(run, named, checkpoint=checkpoint, **how)
        picture = "" if (folder / "scores.png").exists() else f"; no figure without matplotlib: {install_line('plot')}"
        with afterwards():
            print_tables(found.tables())
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


@_command(
    short_help="Continue a text, token by token.",
    epilog="Examples: hecate generate runs/quickstart --prompt 'class ' --tokens 300 | "
    "hecate generate runs/mine --top-p 0.9 --stop '\\n\\n' --batch 4",
)
def generate(
    run: Annotated[Path, typer.Argument(
        metavar="RUN", help="A run folder, or that of a checkpoint; the data are not needed.", show_default=False,
    )],
    prompt: Annotated[list[str] | None, typer.Option(help="Text to continue. May be repeated.")] = None,
    tokens: Annotated[
        int, typer.Option(min=0, max=1 << 20, help="Tokens to generate; bytes, where those are the tokens.")
    ] = 200,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1, help="Draw from that many likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(
        min=0, max=1, help="Draw from the fewest tokens that hold this share.",
    )] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End ahead of this text. May be repeated.")] = None,
    batch: Annotated[int, typer.Option(min=1, max=1 << 12, help="Continuations of each prompt.")] = 1,
    seed: Annotated[int, typer.Option(min=0, max=(1 << 63) - 1, help="Seed of the draws.")] = 0,
    exact: Annotated[bool, typer.Option("--exact", help="The same bits in any company; slower.")] = False,
    checkpoint: _Which = "best",
) -> None:  # fmt: skip
    """Continue texts, one token at a time on a state of constant size."""
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


@_command(
    "export",
    short_help="A run's weights or model for other programs.",
    epilog="Examples: hecate export runs/quickstart --to safetensors --out weights | hecate export runs/mine --to hf | "
    "hecate export runs/mine --to onnx",
)
def export_(
    run: _Run,
    to: Annotated[str, typer.Option(help="safetensors, torch, dcp, hf (transformers) or onnx.")] = "safetensors",
    out: Annotated[Path | None, typer.Option(help="New folder; RUN-FORMAT when left out.")] = None,
    checkpoint: _Which = "best",
    dtype: Annotated[str | None, typer.Option(help="Of weights with --to onnx: float32 or float16.")] = None,
) -> None:
    """Write the weights of a run, or of a checkpoint folder, and its config into a new folder; with --to hf the model
    and its tokenizer as transformers loads them once hecate.hf is imported; with --to onnx the model of a run, or of a
    folder of --to hf, as files of ONNX: a sequence, and one token from a state."""
    if out is None:
        named = run if run.name not in ("", "..") else run.resolve()  # `.` has no name
        if not named.name:
            raise ConfigError(f"{run} has no name to make that of the new folder from; give --out")
        out = named.with_name(f"{named.name}-{to}")
    if to == "onnx":
        return _export_onnx(run, out, checkpoint, dtype or "float32")
    if dtype is not None:
        raise ConfigError(f"--dtype {dtype} and --to {to}: weights keep their dtypes there; leave --dtype out")
    if to == "hf":
        return _export_hf(run, out, checkpoint)
    from hecate.checks import expect_choice
    from hecate.train.export import FORMATS, export_weights

    expect_choice(to, "--to", (*FORMATS, "hf", "onnx"))
    written = export_weights(run, to, out, checkpoint)
    with afterwards():
        echo(str(written))


def _export_onnx(run: Path, out: Path, checkpoint: str, dtype: Any) -> None:
    try:
        from hecate.onnx import export_folder
    except ImportError as error:
        raise ConfigError(f"--to onnx: {error}") from None
    found = export_folder(run, out, checkpoint, dtype)
    with afterwards():
        echo(f"{found.folder}: {found.step_nodes} nodes a token, within {found.error:.0e} of torch")


def _export_hf(run: Path, out: Path, checkpoint: str) -> None:
    try:
        from hecate.hf.export import export_run
    except ImportError as error:
        raise ConfigError(f"--to hf: {error}") from None
    found = export_run(run, out, checkpoint)
    with afterwards():
        echo(str(found.folder))
    if not found.has_tokenizer:
        echo("it has no tokenizer: the run was not trained on text", err=True)


@_command(
    "import",
    short_help="A run at step 0 from weights.",
    epilog="Example: hecate import weights --out runs/mine-init, then hecate train --out runs/mine-init --resume",
)
def import_(
    source: Annotated[Path, typer.Argument(
        metavar="FILE|DIR", show_default=False, help="A safetensors file, a folder with some, a run or a checkpoint.",
    )],
    out: Annotated[Path, typer.Option(help="Run folder to make.", show_default=False)],
    config: Annotated[str | None, typer.Option(
        metavar="PRESET|FILE", help="The experiment; the config.yaml beside the weights when left out.",
    )] = None,
    overrides: _Set = None,
) -> None:  # fmt: skip
    """Make a run folder whose model has given weights, to train on with train --out RUN --resume."""
    from hecate.train.compose import load_experiment
    from hecate.train.export import import_weights

    if overrides and config is None:
        raise ConfigError("--set changes what --config names, which is left out; give both or neither")
    found = None if config is None else load_experiment(config, overrides or [])
    made = import_weights(source, out, found)
    with afterwards():
        echo(str(made))


@_command(
    short_help="What a run's memories hold, attend to and forget.",
    epilog="Examples: hecate report runs/mqar | hecate report runs/cms --tokens 64",
)
def report(
    run: _Run,
    tokens: Annotated[int | None, typer.Option(
        min=1, max=1 << 20, help="How many to read; the run's own length, at most 256, if left out.",
    )] = None,
    out: Annotated[Path | None, typer.Option(
        help="Folder of figures/ and report.md; the run folder if left out.",
    )] = None,
) -> None:  # fmt: skip
    """Look at a run's memories under the microscope: implicit attention, norms, ranks, gates, and what they recall
    against age; a figure each, and a section of report.md."""
    from hecate.microscope.report import report_run

    found = report_run(run, tokens=tokens, out=out)
    with afterwards():
        for path in found.figures:
            echo(str(path))
        echo(f"step {found.step}, {found.tokens} tokens; report: {found.report}")


_command(
    short_help="What memories remember, learn and follow, against peers.",
    epilog="Examples: hecate gym --quick | hecate gym titans 'titans + gated_delta' attention --tasks odd,two_paces | "
    "hecate gym gated_delta mine:memory --out runs/mine",
)(commands.gym)

_command(
    short_help="What this machine has and lacks, and which engines run.",
    epilog="Examples: hecate doctor | hecate doctor --warm titans delta",
)(commands.doctor)

_command(
    short_help="Answer OpenAI's clients with a model.",
    epilog="Examples: hecate serve runs/quickstart | hecate serve model --port 8080 --memories users",
)(commands.serve)
