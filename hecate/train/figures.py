"""The figures of a run; they need matplotlib."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hecate.train.evaluate import UNIT
from hecate.train.files import write_file


def draw_figures(
    records: Sequence[Mapping[str, Any]], folder: Path, metric: str, baselines: Mapping[str, float]
) -> list[Path] | None:
    """Draws loss.png and, for tasks, accuracy.png; None if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    bits = metric == "bits_per_byte"
    scale = 1 / math.log(2) if bits else 1.0
    unit = UNIT[metric] if bits else "loss (nats per label)"
    train = [(r["step"], scale * r["loss"]) for r in records if r.get("event") == "train"]
    evals = [r for r in records if r.get("event") == "eval"]
    paths = [folder / "loss.png"]
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(*_columns(train), color="0.8", linewidth=0.8, label="training batch")
    axes.plot(*_columns(_smoothed(train)), color="tab:blue", label="training, smoothed")
    points = [(r["step"], scale * r["validation_loss"]) for r in evals]
    axes.plot(*_columns(points), "o-", color="tab:orange", label="validation")
    if bits:
        _baselines(axes, baselines)
    axes.set(xlabel="step", ylabel=unit)
    axes.legend()
    _save(figure, paths[0])
    if not bits:
        paths.append(folder / "accuracy.png")
        figure = Figure(figsize=(6.4, 4), layout="constrained")
        axes = figure.add_subplot()
        points = [(r["step"], r["accuracy"]) for r in evals]
        axes.plot(*_columns(points), "o-", color="tab:orange", label="validation")
        _baselines(axes, baselines)
        axes.set(xlabel="step", ylabel="accuracy", ylim=(-0.02, 1.02))
        axes.legend()
        _save(figure, paths[1])
    return paths


def _save(figure: Any, path: Path) -> None:
    image = io.BytesIO()
    figure.savefig(image, dpi=120, format="png")
    write_file(path, image.getvalue())


def _baselines(axes: Any, baselines: Mapping[str, float]) -> None:
    for index, (name, value) in enumerate(baselines.items()):
        axes.axhline(value, color="0.3", linewidth=1, linestyle=("-", "--", ":")[index % 3], label=name)


def _smoothed(points: Sequence[tuple[int, float]], weight: float = 0.95) -> list[tuple[int, float]]:
    """Exponential moving average, corrected for its start."""
    total, result = 0.0, []
    for count, (step, value) in enumerate(points, start=1):
        total = weight * total + (1 - weight) * value
        result.append((step, total / (1 - weight**count)))
    return result


def _columns(points: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [step for step, _ in points], [value for _, value in points]
