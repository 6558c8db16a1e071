"""report.md: one page with the result beside its baselines, sizes, figures (with matplotlib) and how to repeat it."""

from __future__ import annotations

import io
import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hecate.cms import LevelHealth
from hecate.train.document import dump_yaml
from hecate.train.evaluate import UNIT, Score, StateLeaf, model_health, state_leaves
from hecate.train.files import write_file
from hecate.train.metrics import read_metrics
from hecate.train.trainer import Trainer
from hecate.variant import Config

LEVEL = (
    "level", "period", "commits", "fired", "memory norm", "output rms", "half-life", "cotangent", "dead",
)  # fmt: skip
BETTER = {"bits_per_byte": "lower is better", "accuracy": "higher is better"}


def write_report(
    trainer: Trainer, folder: Path, score: Score | None, baselines: Mapping[str, float], status: str
) -> Path:
    """Writes report.md and, with matplotlib, figures/*.png; returns the report's path."""
    metric, config = trainer.source.metric, trainer.config
    one_sequence = trainer.model, trainer.source, config.seq_len, trainer.device
    records = read_metrics(folder / "metrics.jsonl")
    figures = draw_figures(records, folder / "figures", metric, baselines)
    leaves = state_leaves(*one_sequence)
    sections = {
        "Result": _result(metric, score, baselines),
        "Size": _sizes(trainer, leaves, records),
        "Data": _table(("fact", "value"), trainer.source.describe().items()),
        "Figures": _shown(figures),
        "Levels": _levels(model_health(*one_sequence)),
        "Optimiser": _optimiser(trainer),
        "Memory": _yaml(config.model),
        "State after one validation sequence": _states(leaves, config.seq_len),
        "Repeat": _commands(folder),
    }
    begin = f"# {config.name}\n\nRun {status} at step {trainer.step} of {config.budget.steps}, seed {config.seed}."
    path = folder / "report.md"
    write_file(path, "\n\n".join([begin, *(f"## {name}\n\n{text}" for name, text in sections.items() if text)]) + "\n")
    return path


def _result(metric: str, score: Score | None, baselines: Mapping[str, float]) -> str:
    """The model and the baselines on the same validation labels, as a Markdown table."""
    if score is None:
        return "Not evaluated at this step: a signal ended the run. `hecate eval` does it."
    rows = [(f"{name} (baseline)", f"{value:.4f}") for name, value in baselines.items()]
    rows.append(("**this model**", f"**{score.value(metric):.4f}**"))
    header = ("predictor", f"{UNIT[metric]} ({BETTER[metric]})")
    return _table(header, rows) + f"\n\n{score.labels} validation labels, loss {score.loss:.4f} nats."


def _sizes(trainer: Trainer, leaves: Sequence[StateLeaf], records: Sequence[Mapping[str, Any]]) -> str:
    parameters = sum(p.numel() for p in trainer.model.parameters())
    trained = [r for r in records if r.get("event") == "train"]
    speeds = sorted(r["tokens_per_second"] for r in trained)
    budget = trainer.config.budget
    rows: list[tuple[str, Any]] = [
        ("parameters", f"{parameters:,}"),
        ("state per sequence", f"{sum(leaf.bytes for leaf in leaves):,} bytes, whatever its length"),
        ("training tokens", f"{trainer.step * budget.batch_size * trainer.config.seq_len:,}"),
    ]
    if speeds:
        rows.append(("training speed", f"{speeds[len(speeds) // 2]:,.0f} tokens/s (median step)"))
    seconds = [r["seconds"] for r in records if r.get("event") == "end"]
    if seconds:
        rows.append(("wall time", f"{sum(seconds):.0f} s"))
    return _table(("size", "value"), rows)


def _shown(figures: Sequence[Path] | None) -> str:
    if figures is None:
        return "Not drawn: matplotlib is not installed (`pip install hecate[plot]`)."
    return "\n\n".join(f"![{path.stem}](figures/{path.name})" for path in figures)


def _levels(health: Mapping[str, Sequence[LevelHealth]]) -> str:
    """A row per level; nothing for a model without any."""
    text = (
        "On one validation sequence. Half-life: tokens after which the retain gates leave half of a memory. Cotangent: "
        "what a unit cotangent of the layer's output puts on the level."
    )
    rows = [
        (
            f"`{layer}` {level.name}",
            level.period,
            f"{level.commits:g}",
            "all" if level.fired is None else f"{level.fired:.1%}",
            f"{level.norm_start:.3g} -> {level.norm_end:.3g}",
            *(f"{figure:.3g}" for figure in (level.output_rms, level.half_life, level.cotangent)),
            level.dead or "no",
        )
        for layer, levels in health.items()
        for level in levels
    ]
    return f"{text}\n\n{_table(LEVEL, rows)}" if rows else ""


def _optimiser(trainer: Trainer) -> str:
    """Which optimiser trained how much, what steps seldom, and the settings."""
    lines = []
    for kind, optimizer in trainer.optimizers.items():
        groups = optimizer.param_groups
        numbers = sum(p.numel() for group in groups for p in group["params"])
        lines.append(f"- `{kind}`: {numbers:,} parameters")
        slow = {group["period"] for group in groups if group.get("elapsed") is not None} - {1}
        for period in sorted(slow):
            names = [n for g in groups if g["period"] == period for n in g["param_names"]]
            listed = ", ".join(f"`{name}`" for name in names)
            lines.append(f"- once in {period} steps: {listed}")
    return "\n".join(lines) + "\n\n" + _yaml(trainer.config.optim)


def _yaml(settings: Config) -> str:
    return f"```yaml\n{dump_yaml(settings.model_dump(mode='json'))}```"


def _states(leaves: Sequence[StateLeaf], length: int) -> str:
    rows = [
        (f"`{leaf.path}`", "x".join(map(str, leaf.shape)) or "scalar", f"{leaf.bytes:,}",
         "" if math.isnan(leaf.norm) else f"{leaf.norm:.3g}")
        for leaf in leaves
    ]  # fmt: skip
    return f"{length} tokens read.\n\n" + _table(("tensor", "shape", "bytes", "norm"), rows)


def _commands(folder: Path) -> str:
    environment = json.loads((folder / "env.json").read_text(encoding="utf-8"))
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    config, again, run = (shlex.quote(str(path)) for path in (folder / "config.yaml", f"{folder}-again", folder))
    return (
        f"```\nhecate train {config} --out {again}\nhecate eval {run}\nhecate generate {run}\n```\n\nPython "
        f"{environment['python']}, {versions}; {environment['threads']} threads of {environment['cpus']} CPUs, "
        f"{environment['platform']}."
    )


def _table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def draw_figures(
    records: Sequence[Mapping[str, Any]], folder: Path, metric: str, baselines: Mapping[str, float]
) -> list[Path] | None:
    """Draws loss.png and, for tasks, accuracy.png; None if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None

    def draw(name: str, unit: str, key: str, scale: float, levels: Mapping[str, float], **limits: Any) -> Path:
        figure = Figure(figsize=(6.4, 4), layout="constrained")
        axes = figure.add_subplot()
        if key == "validation_loss":
            train = [(r["step"], scale * r["loss"]) for r in records if r.get("event") == "train"]
            axes.plot(*_columns(train), color="0.8", linewidth=0.8, label="training batch")
            axes.plot(*_columns(_smoothed(train)), color="tab:blue", label="training, smoothed")
        points = [(r["step"], scale * r[key]) for r in records if r.get("event") == "eval"]
        axes.plot(*_columns(points), "o-", color="tab:orange", label="validation")
        for index, (label, value) in enumerate(levels.items()):
            axes.axhline(value, color="0.3", linewidth=1, linestyle=("-", "--", ":")[index % 3], label=label)
        axes.set(xlabel="step", ylabel=unit, **limits)
        axes.legend()
        image = io.BytesIO()
        figure.savefig(image, dpi=120, format="png")
        write_file(folder / name, image.getvalue())
        return folder / name

    folder.mkdir(parents=True, exist_ok=True)
    if metric == "bits_per_byte":
        return [draw("loss.png", UNIT[metric], "validation_loss", 1 / math.log(2), baselines)]
    return [
        draw("loss.png", "loss (nats per label)", "validation_loss", 1.0, {}),
        draw("accuracy.png", "accuracy", "accuracy", 1.0, baselines, ylim=(-0.02, 1.02)),
    ]


def _smoothed(points: Sequence[tuple[int, float]], weight: float = 0.95) -> list[tuple[int, float]]:
    """Exponential moving average, corrected for its start."""
    total, result = 0.0, []
    for count, (step, value) in enumerate(points, start=1):
        total = weight * total + (1 - weight) * value
        result.append((step, total / (1 - weight**count)))
    return result


def _columns(points: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [step for step, _ in points], [value for _, value in points]
