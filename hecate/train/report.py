"""report.md: one page with the result beside its baselines, sizes, figures and how to repeat it."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hecate.train.document import dump_yaml
from hecate.train.evaluate import UNIT, Score, StateLeaf, state_leaves
from hecate.train.figures import draw_figures
from hecate.train.files import write_file
from hecate.train.levels import HEADER, health_rows, model_health
from hecate.train.metrics import read_metrics
from hecate.train.trainer import Trainer

BETTER = {"bits_per_byte": "lower is better", "accuracy": "higher is better"}


def write_report(
    trainer: Trainer, folder: Path, score: Score | None, baselines: Mapping[str, float], status: str
) -> Path:
    """Writes report.md and, with matplotlib, figures/*.png; returns the report's path."""
    metric, config = trainer.source.metric, trainer.config
    records = read_metrics(folder / "metrics.jsonl")
    figures = draw_figures(records, folder / "figures", metric, baselines)
    leaves = state_leaves(trainer.model, trainer.source, config.seq_len, trainer.device)
    parts = [
        f"# {config.name}",
        f"Run {status} at step {trainer.step} of {config.budget.steps}, seed {config.seed}.",
        f"## Result\n\n{result_table(metric, score, baselines)}",
        f"## Size\n\n{_sizes(trainer, leaves, records)}",
        "## Data\n\n" + _table(("fact", "value"), trainer.source.describe().items()),
        "## Figures\n\n" + _figures(figures),
        *_levels(trainer),
        "## Optimiser\n\n" + _optimiser(trainer),
        "## Memory\n\n" + _yaml(config.model.model_dump(mode="json")),
        "## State after one validation sequence\n\n" + _states(leaves, config.seq_len),
        "## Repeat\n\n" + _commands(folder),
    ]
    path = folder / "report.md"
    write_file(path, "\n\n".join(parts) + "\n")
    return path


def result_table(metric: str, score: Score | None, baselines: Mapping[str, float]) -> str:
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


def _figures(figures: Sequence[Path] | None) -> str:
    if figures is None:
        return "Not drawn: matplotlib is not installed (`pip install hecate[plot]`)."
    return "\n\n".join(f"![{path.stem}](figures/{path.name})" for path in figures)


def _levels(trainer: Trainer) -> list[str]:
    """A section on the levels of a model that has any."""
    length = trainer.config.seq_len
    health = model_health(trainer.model, trainer.source, length, trainer.device)
    if not health:
        return []
    text = (
        "On one validation sequence. Half-life: tokens after which the retain gates leave half of "
        "a memory. Cotangent: what a unit cotangent of the layer's output puts on the level."
    )
    return [f"## Levels\n\n{text}\n\n{_table(HEADER, health_rows(health))}"]


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
    settings = trainer.config.optim.model_dump(mode="json")
    return "\n".join(lines) + "\n\n" + _yaml(settings)


def _yaml(settings: Mapping[str, Any]) -> str:
    return f"```yaml\n{dump_yaml(settings)}```"


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
