"""report.md and report.html: first a run's result beside its baselines, and figures (if matplotlib is installed); then
levels, sizes, settings, data, and the commands to repeat the run."""

from __future__ import annotations

import base64
import csv
import html
import io
import json
import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from statistics import median_high
from typing import Any

from torch import Tensor

from hecate.cms import LevelHealth
from hecate.errors import MESSAGE, install_line, printable
from hecate.figure import COLOURS, DASHES, GREY, PALE, figure_type, finish, images, write_images
from hecate.files import write_file
from hecate.train.document import dump_yaml, short
from hecate.train.evaluate import Positions, Score, model_health, state_leaves
from hecate.train.loggers import read_metrics
from hecate.train.trainer import Trainer

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""A header and rows."""

STYLE = (
    ":root{color-scheme:light dark}body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;"
    "padding:0 1rem}table{border-collapse:collapse;display:block;overflow-x:auto}td,th{border-bottom:1px solid #8886;"
    "padding:.25rem .75rem;text-align:left}pre,code{background:#8882;border-radius:4px}pre{padding:.75rem;"
    "overflow-x:auto}code{padding:.1rem .25rem}pre code{padding:0;background:none}img{max-width:100%;border-radius:4px}"
)
"""CSS of the HTML page, which follows the reader's light or dark theme."""

KINDS = {"png": "png", "svg": "svg+xml"}


def write_report(
    trainer: Trainer, folder: Path, score: Score | None, baselines: Mapping[str, float], status: str
) -> None:
    """Writes report.md, report.html and, with matplotlib, figures, on rank 0; every rank takes part in computing
    them."""
    metric, config = trainer.source.metric, trainer.config
    one_sequence = trainer.model, trainer.source, config.seq_len, trainer.device
    # Every rank takes part in the forward passes; only rank 0 writes.
    with trainer.whole_sequences():
        leaves, health = state_leaves(*one_sequence), model_health(*one_sequence)
    if not trainer.world.main:
        return
    records = read_metrics(folder / "metrics.jsonl")
    environment = json.loads((folder / "env.json").read_text(encoding="utf-8"))
    facts = [(name, _line(str(fact))) for name, fact in trainer.source.describe().items()]
    sections = {
        "Levels": _levels(health),
        "Size": _sizes(trainer, leaves, records),
        "Settings": _settings(trainer),
        "Data": markdown_table(("fact", "value"), facts),
        "State after one validation sequence": _states(leaves, config.seq_len) if leaves else "",
        "Repeat": _commands(folder, environment, foreign=trainer.own_model),
    }
    first = [
        f"# {config.name}", _outcome(trainer, environment, status), _result(metric, score, baselines),
        _figures(records, folder / "figures", metric, baselines, score),
    ]  # fmt: skip
    text = "\n\n".join([*first, *(f"## {name}\n\n{section}" for name, section in sections.items() if section)])
    write_page(folder / "report.md", text + "\n")


def write_page(path: Path, text: str) -> None:
    """Writes a page in Markdown, and beside it the same page as one HTML file with embedded figures."""
    write_file(path, text)
    write_file(path.with_suffix(".html"), html_page(text, path.parent))


def html_page(text: str, folder: Path) -> str:
    """The HTML of a page in Markdown; pictures that are regular files in the folder are embedded."""
    from markdown_it import MarkdownIt

    def inline(match: re.Match[str]) -> str:
        picture = folder / match[1]
        # Pages are passed on to others: they must not contain a file outside the folder, through a link.
        inside = picture.resolve().is_relative_to(folder.resolve()) and picture.is_file() and not picture.is_symlink()
        data = base64.b64encode(picture.read_bytes()).decode() if inside else ""
        return f'src="data:image/{KINDS[match[2]]};base64,{data}"' if inside else match[0]

    # Names and prompts are untrusted: HTML in them is escaped.
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(re.sub(r"(?m)^<!--.*-->\n?", "", text))
    title = html.escape(text.partition("\n")[0].removeprefix("# "))
    body = re.sub(r'src="([^":]+\.(png|svg))"', inline, body)
    return f'<!doctype html>\n<meta charset="utf-8">\n<title>{title}</title>\n<style>{STYLE}</style>\n{body}'


def _outcome(trainer: Trainer, environment: Mapping[str, Any], status: str) -> str:
    """Sentences on how a run ended, and on when, at which commit and by which command it was started."""
    budget, seed = trainer.config.budget, trainer.config.seed
    commit = f" at commit {environment['commit'][:12]}" if environment.get("commit") else ""
    program, *rest = environment.get("command") or [""]
    module = f"python -m {Path(program).parent.name}" if Path(program).name == "__main__.py" else ""
    words = [module or Path(program).name or "Python", *map(shlex.quote, rest)]
    command = _line(" ".join(words)).replace("`", "'")
    return (
        f"Run {status} at step {trainer.step} of {budget.steps}, seed {seed}. Started "
        f"{environment.get('started', 'at an unknown time')}{commit}, hecate {environment['versions']['hecate']}: "
        f"`{command}`."
    )


_line = partial(printable, most=MESSAGE)  # an untrusted text must not end the code block or cell that shows it


def _result(metric: str, score: Score | None, baselines: Mapping[str, float]) -> str:
    if score is None:
        return "Not evaluated at this step: a signal ended the run. `hecate eval` does it."
    rows = [(f"{name} (baseline)", f"{value:.4f}") for name, value in baselines.items()]
    rows.append(("**this model**", f"**{score.value(metric):.4f}**"))
    unit, better = metric.replace("_", " "), "higher" if metric == "accuracy" else "lower"
    table = markdown_table(("predictor", f"{unit} ({better} is better)"), rows)
    size = f"{score.bytes_per_label:.3g} byte{'s' * (score.bytes_per_label != 1)}"
    known = {"bits_per_byte": f", {size} each", "accuracy": f", loss {score.loss:.4f} nats"}
    return f"{table}\n\n{score.labels:,} validation labels{known.get(metric, '')}."


def _sizes(trainer: Trainer, leaves: Mapping[str, Tensor], records: Sequence[Mapping[str, Any]]) -> str:
    # Measured on a state that the model returned, rather than computed from its config.
    state = sum(leaf.nbytes for leaf in leaves.values())
    rows = {
        "parameters": f"{sum(p.numel() for p in trainer.model.parameters()):,}",
        **({"state per sequence": f"{state:,} bytes, whatever its length"} if leaves else {}),
        "training tokens": f"{trainer.step * trainer.config.budget.batch_size * trainer.config.seq_len:,}",
    }
    if speeds := column(records, "train", "tokens_per_second"):
        rows["training speed"] = f"{median_high(speeds):,.0f} tokens/s (median step)"
    if seconds := column(records, "end", "seconds"):
        rows["wall time"] = f"{sum(seconds):.0f} s"
    return markdown_table(("size", "value"), rows.items())


def _levels(health: Mapping[str, Sequence[LevelHealth]]) -> str:
    text = (
        "On one validation sequence. Half-life: tokens after which the retain gates leave half of a memory. Cotangent: "
        "what a unit cotangent of the layer's output puts on the level. Write: the most that a write changes an answer."
    )
    rows = []
    for layer, level in ((layer, level) for layer, levels in health.items() for level in levels):
        name, norms = f"`{layer}` {level.name}", f"{level.norm_start:.3g} -> {level.norm_end:.3g}"
        figures = [f"{figure:.3g}" for figure in (level.output_rms, level.half_life, level.cotangent)]
        fired = "all" if level.fired is None else f"{level.fired:.1%}"
        write = "-" if level.strength is None else f"{level.strength:.1%}"
        rows.append((name, level.period, f"{level.commits:g}", fired, norms, *figures, write, level.dead or "no"))
    sizes = "memory norm", "output rms", "half-life", "cotangent", "write"
    header = "level", "period", "commits", "fired", *sizes, "dead"
    return f"{text}\n\n{markdown_table(header, rows)}" if rows else ""


def _settings(trainer: Trainer) -> str:
    """The settings that are not at their defaults, and the number of parameters that each optimiser trained."""
    foreign = trainer.own_model
    settings = dump_yaml({k: v for k, v in short(trainer.config).items() if not (foreign and k == "model")})
    beside = f", but for those of `model`: it was the caller's {type(trainer.model).__name__}" if foreign else ""
    lines = [f"Other than the defaults; `config.yaml` has all of them{beside}.\n\n```yaml\n{settings}```\n"]
    for kind, optimizer in trainer.optimizers.items():
        groups = optimizer.param_groups
        numbers = sum(p.numel() for group in groups for p in group["params"])
        lines.append(f"- `{kind}` trained {numbers:,} parameters")
        for period in sorted({group["period"] for group in groups if group.get("elapsed") is not None} - {1}):
            names = [f"`{name}`" for group in groups if group["period"] == period for name in group["param_names"]]
            lines.append(f"- once in {period} steps: {', '.join(names)}")
    return "\n".join(lines)


def _states(leaves: Mapping[str, Tensor], length: int) -> str:
    rows = [
        (f"`{path}`", "x".join(map(str, leaf.shape)) or "scalar", f"{leaf.nbytes:,}",
         f"{leaf.double().norm():.3g}" if leaf.is_floating_point() else "")
        for path, leaf in leaves.items()
    ]  # fmt: skip
    return f"{length} tokens read.\n\n" + markdown_table(("tensor", "shape", "bytes", "norm"), rows)


def _commands(folder: Path, environment: Mapping[str, Any], *, foreign: bool) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    places = folder / "config.yaml", f"{folder}-again", folder
    config, again, run = (_line(shlex.quote(str(path))) for path in places)
    lines = f"hecate train {config} --out {again}\nhecate eval {run}\nhecate generate {run}"
    if foreign:
        lines = f"run_experiment(load_experiment({str(places[0])!r}), {str(places[1])!r}, model=...)  # of hecate.train"
    return (
        f"```\n{lines}\n```\n\nPython "
        f"{environment['python']}, {versions}; {environment['threads']} threads of {environment['cpus']} CPUs, "
        f"{environment['platform']}."
    )


def column(records: Iterable[Mapping[str, Any]], event: str, name: str) -> list[float]:
    """The values of a fact in those records of an event that have it."""
    return [record[name] for record in records if record["event"] == event and name in record]


def table_by_position(curves: Iterable[tuple[int, Iterable[Positions]]]) -> Table:
    """The loss by position for each length of sequences, side by side."""
    lengths, positions = zip(*curves, strict=True)
    losses = [{(span.first, span.last): span.loss for span in spans} for spans in positions]
    rows = []
    for first, last in sorted(set(chain.from_iterable(losses))):
        cells = [f"{loss[first, last]:.4f}" if (first, last) in loss else "" for loss in losses]
        rows.append((f"{first:,}" if first == last else f"{first:,} to {last:,}", *cells))
    return ("tokens read", *(f"loss at {length:,}" for length in lengths)), rows


def csv_text(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """CSV of rows: a header, and a line for each row with these columns."""
    text = io.StringIO()
    # Rows may have more facts than columns.
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table in Markdown, with bars in cells escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def _figures(
    records: Sequence[Mapping[str, Any]], folder: Path, metric: str, baselines: Mapping[str, float], score: Score | None
) -> str:
    """Draws the loss and, for tasks, the accuracy; returns the Markdown that shows them."""
    if figure_type() is None:
        return f"Not drawn: matplotlib is not installed: {install_line('plot')}."

    def curve(event: str, key: str, scale: float) -> tuple[list[float], list[float]]:
        # Not every record of an event has every fact.
        known = [record for record in records if key in record]
        return column(known, event, "step"), [scale * value for value in column(known, event, key)]

    def draw(stem: str, unit: str, key: str, scale: float, levels: Mapping[str, float], **limits: Any) -> str:
        def on(figure: Any) -> None:
            axes = figure.subplots()
            if key == "validation_loss":
                steps, losses = curve("train", "loss", scale)
                axes.plot(steps, losses, color=PALE, linewidth=0.8)
                axes.plot(steps, _smooth(losses), color=COLOURS[0], label="training, smoothed")
            axes.plot(*curve("eval", key, scale), "o-", color=COLOURS[1], label="validation")
            for index, (label, value) in enumerate(levels.items()):
                axes.axhline(value, color=GREY, linewidth=1, linestyle=DASHES[index % 7], label=label)
            finish(axes, "", "step", unit, **limits)

        write_images(folder / stem, images((6.8, 3.8), on))
        return f"![{stem}](figures/{stem}.svg)"

    folder.mkdir(parents=True, exist_ok=True)
    if metric == "bits_per_byte":
        each = 1.0 if score is None else score.bytes_per_label
        return draw("loss", "bits per byte", "validation_loss", 1 / math.log(2) / each, baselines)
    loss = draw("loss", "loss (nats per label)", "validation_loss", 1.0, {})
    if metric == "perplexity":
        return loss
    return loss + "\n\n" + draw("accuracy", "accuracy", "accuracy", 1.0, baselines, ylim=(-0.02, 1.02))


def _smooth(values: Iterable[float]) -> list[float]:
    """Exponential moving average of weight 0.95, corrected for its start."""
    averages = list(accumulate(values, lambda mean, value: 0.95 * mean + 0.05 * value, initial=0.0))[1:]
    return [mean / (1 - 0.95**count) for count, mean in enumerate(averages, start=1)]
