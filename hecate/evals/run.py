"""Evaluating a model, any callable or a run of hecate, on several tasks; and the report, with tables, published scores
to compare with, files and a figure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hecate.data import DataConfig, Task, Tokenizer
from hecate.errors import CheckpointError, ConfigError, not_known, shorten
from hecate.evals.base import COLUMNS, PIECE, Evaluation, Given, Reader, Result
from hecate.evals.tasks import MOST, Niah, Synthetic, encoder_of, read_text
from hecate.figure import COLOURS, DASHES, MARKERS, finish, images, write_images
from hecate.files import make_folder, new_folder, refusing, sweep_evaluations, write_file
from hecate.models import LanguageModel
from hecate.train.report import Table, csv_text, table_by_position
from hecate.train.trained import Trained, home_of, is_pretrained, open_model

# Scores from papers, shown beside results: none was measured here, and each says what differs.
HOPE = "Nested Learning (Behrouz et al., 2025, arXiv 2512.24695), Table"
_SIZES = "a larger model after some 5e10 tokens of other text; RULER's essays, generated answers"
_WHOLE = "trained on several lengths; taken to be the share of whole strings, as 0 is below a coin: see `exact`"
_MAD = "the mean over MAD's difficulties, of models trained on each"


class Published(NamedTuple):
    """A score in per cent, of a model in a paper, and how its measurement differs from the one here."""

    task: str
    model: str
    score: float
    at: str
    differs: str
    source: str


def _needle(model: str, *scores: float) -> list[Published]:
    places = zip(("4k", "8k", "16k"), scores, strict=True)
    return [Published("niah_2", model, score, at, _SIZES, f"{HOPE} 1") for at, score in places]


def _parity(model: str, inside: float, beyond: float) -> list[Published]:
    places = {"in length": inside, "out of length": beyond}
    return [Published("parity", model, score, at, _WHOLE, f"{HOPE} 5") for at, score in places.items()]


def _mad(task: str, score: float, more: str = "") -> Published:
    return Published(f"mad_{task}", "Hope", score, "MAD", _MAD + more, f"{HOPE} 4")


PUBLISHED = [
    *_needle("Titans", 99.6, 84.6, 75.4),
    *_needle("Hope", 99.2, 88.4, 78.2),
    *_parity("Hope", 100.0, 100.0),
    *_parity("SRWM", 100.0, 100.0),
    *_parity("Transformer", 46.4, 0.0),
    _mad("compression", 51.2, "; a decoder reads one token's output, here the state"),
    _mad("recall", 100.0, "; with or without noise is not said"),
    _mad("noisy_recall", 100.0, "; with or without noise is not said"),
    _mad("fuzzy_recall", 52.1, "; trained on keys of 1 to 3 tokens"),
    _mad("selective_copy", 99.7),
    _mad("memorization", 85.2),
]


def beside(results: Sequence[Result]) -> list[Published]:
    """The published scores of the tasks that were measured."""
    names = {result.name for result in results}
    return [figure for figure in PUBLISHED if figure.task in names]


@dataclass(frozen=True)
class Report:
    """Results, in the order of the tasks."""

    results: list[Result]

    def tables(self) -> list[Table]:
        """Tables of scores, exact answers by depth, loss by position and published scores, without empty ones."""
        return [table for table in (self._scores(), self._depths(), self._positions(), self._figures()) if table[1]]

    def _scores(self) -> Table:
        header = ("task", "length", "rows", "exact", "accuracy", "loss (nats)", "chance")
        rows = []
        for part in self.results:
            shares = [f"{part.exact:.4f}", f"{part.accuracy:.4f}"]
            chosen = {"exact": 0, "accuracy": 1}.get(part.metric)
            if chosen is None:
                shares[0] = ""  # windows of text have no answers
            else:
                shares[chosen] += f" +- {part.error:.4f}"
            chance = "" if part.chance is None else f"{part.chance:.3g} ({part.metric})"
            rows.append((part.name, f"{part.length:,}", f"{part.rows:,}", *shares, f"{part.loss:.4f}", chance))
        return header, rows

    def _depths(self) -> Table:
        deep = [part for part in self.results if part.depths]
        depths = sorted(set(chain.from_iterable(part.depths for part in deep)))
        cells = [[f"{part.depths[depth]:.2f}" if depth in part.depths else "" for depth in depths] for part in deep]
        rows = [(part.name, f"{part.length:,}", *row) for part, row in zip(deep, cells, strict=True)]
        return ("exact by depth", "length", *(f"{depth:.0%}" for depth in depths)), rows

    def _positions(self) -> Table:
        wanted = [result for result in self.results if result.metric == "loss"]
        return table_by_position([(result.length, result.positions) for result in wanted]) if wanted else ((), ())

    def _figures(self) -> Table:
        rows = [(f.task, f.at, f.model, f"{f.score:.1f}", f.source, f.differs) for f in beside(self.results)]
        return ("published", "at", "model", "per cent", "source", "what differs"), rows

    def json(self, facts: Mapping[str, Any]) -> str:
        """All results as JSON, with facts about what was evaluated."""
        published = [figure._asdict() for figure in beside(self.results)]
        results = [result.record() for result in self.results]
        return json.dumps({**facts, "results": results, "published": published}, indent=1) + "\n"

    def csv(self) -> str:
        """The results as CSV, with a line for each part."""
        return csv_text((result.record() for result in self.results), COLUMNS)

    def images(self) -> dict[str, bytes]:
        """The figure as files by ending: scores by length beside chance, and loss by position; empty without
        matplotlib."""
        asked = [result for result in self.results if result.metric != "loss"]
        read = [result for result in self.results if result.metric == "loss"]
        parts = [part for part in ((_scores, asked), (_losses, read)) if part[1]]

        def draw(figure: Any) -> None:
            for axes, (part, results) in zip(figure.subplots(1, len(parts), squeeze=False)[0], parts, strict=True):
                part(axes, results)

        return images((6.4 * len(parts), 4.0), draw)

    def save(self, folder: Path, name: str, facts: Mapping[str, Any]) -> Path:
        """Writes results.json, results.csv and, with matplotlib, scores.png and scores.svg to the first of folder/NAME,
        NAME-2, ... that is free; returns that folder. [EVAL-FILES-D1]"""
        pictures = self.images()
        with refusing(f"write an evaluation into {folder}", "make room there, or choose another --out"):
            make_folder(folder)
            sweep_evaluations(folder)
            places = (folder / (name if n == 1 else f"{name}-{n}") for n in count(1))
            target = next(place for place in places if not place.exists())
            with new_folder(target) as fresh:
                write_file(fresh / "results.json", self.json(facts))
                write_file(fresh / "results.csv", self.csv())
                write_images(fresh / "scores", pictures)
        return target


def _scores(axes: Any, results: Sequence[Result]) -> None:
    names = list(dict.fromkeys(curve.name for curve in results))
    for index, name in enumerate(names):
        curve = sorted((result for result in results if result.name == name), key=lambda result: result.length)
        lengths, colour = [result.length for result in curve], COLOURS[index % len(COLOURS)]
        style = {"color": colour, "linestyle": DASHES[index % len(DASHES)], "marker": MARKERS[index % len(MARKERS)]}
        errors = [result.error for result in curve]
        label = f"{name} ({curve[0].metric})"
        axes.errorbar(lengths, [result.score for result in curve], errors, label=label, **style)
        axes.plot(lengths, [result.chance for result in curve], color=colour, linewidth=0.8, linestyle=":")
    axes.set_xscale("log", base=2)
    places = sorted({result.length for result in results})
    axes.set_xticks(places, [f"{place:,}" for place in places])
    axes.minorticks_off()
    finish(axes, "Right answers (thin dots: chance)", "length (tokens)", "share", ylim=(-0.03, 1.03))


def _losses(axes: Any, results: Sequence[Result]) -> None:
    for index, part in enumerate(results):
        spans = part.positions
        style = {"color": COLOURS[index % len(COLOURS)], "linestyle": DASHES[index % len(DASHES)]}
        axes.plot([span.first + 1 for span in spans], [span.loss for span in spans], label=f"{part.length:,}", **style)
    axes.set_xscale("log", base=2)
    finish(axes, "Loss by position", "tokens read", "nats per token")


AT_ONCE = 1 << 14
"""Default number of tokens per batch."""


def task_names() -> list[str]:
    """Names of all tasks: the evaluations in text, then the synthetic tasks."""
    text = [name for name in Evaluation.variants() if name != "synthetic"]
    synthetic = [name for name, kind in DataConfig.variants().items() if issubclass(kind, Task)]
    return [*text, "niah_1", "niah_2", "niah_3", *synthetic]


def evaluation_of(name: str | Evaluation | Task, **fields: Any) -> Evaluation:
    """The evaluation of a name, such as niah, niah_2 or parity, with those of the given fields that it has and that are
    not None; an unknown name is a `ConfigError` that suggests the nearest."""
    if isinstance(name, Evaluation):
        return name
    if isinstance(name, Task):
        return Synthetic(data=name, **_known_fields(Synthetic, fields))
    if name not in (known := task_names()):
        raise ConfigError(f"no task {shorten(name)}{not_known(name, known)}")
    if name in DataConfig.variants():
        return Synthetic(data=DataConfig.model_validate({"kind": name}), **_known_fields(Synthetic, fields))
    if name.startswith("niah_"):
        return Niah.model_validate({"forms": (int(name[-1]),), **_known_fields(Niah, fields)})
    kind = Evaluation.variants()[name]
    return kind(**_known_fields(kind, fields))


def _known_fields(kind: type[Any], fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None and name in kind.model_fields}


def evaluate_tasks(
    model: Callable[..., Any],
    tokenizer: Any,
    tasks: Sequence[str | Evaluation | Task],
    *,
    text: str | None = None,
    vocabulary: int | None = None,
    longest: int | None = None,
    device: torch.device | str | None = None,
    tokens_at_once: int = AT_ONCE,
) -> list[Result]:
    """Scores a model in tasks: names, `Evaluation`s, or tasks of `hecate.data` that it was trained on. [EVAL-TASKS-D1]

    Args:
        model: function from tokens int64 `[B, T]` to logits `[B, T, V]`, to an object with `.logits` (such as any
            causal model of transformers) or to a tuple with the logits first. A `LanguageModel` of hecate reads 1,024
            tokens at a time with its state. A module is run in evaluation mode, and its mode is restored.
        tokenizer: a tokenizer of hecate or transformers; None for tasks without text.
        text: text in which needles are hidden and the loss is measured; niah_1 and variable_tracking need none.
        vocabulary: number of ids that the model knows; None takes `model.config.vocab_size`.
        longest: largest number of tokens that it can read; None takes `model.config.max_position_embeddings`.
        device: device of the tokens; None for the model's own.
        tokens_at_once: tokens per batch, at least one row; scores do not depend on it, up to rounding.

    Raises:
        ConfigError: an unknown task, a length that does not fit, a vocabulary that is too small, a missing tokenizer.
        DataError: a task that needs a text, without one.
    """
    config = getattr(model, "config", None)
    vocabulary = getattr(config, "vocab_size", None) if vocabulary is None else vocabulary
    longest = getattr(config, "max_position_embeddings", None) if longest is None else longest
    encoder = None if tokenizer is None else encoder_of(tokenizer)
    piece = PIECE if isinstance(model, LanguageModel) else None
    reader = Reader(model, None if device is None else torch.device(device), piece, vocabulary)
    inputs = Given(encoder, text, vocabulary, longest)
    parts = [part for task in tasks for part in evaluation_of(task).parts(inputs)]  # raises before any task is run
    return [reader.scored(part, tokens_at_once) for part in parts]


def evaluate_run(
    folder: Path | str,
    tasks: Sequence[str],
    *,
    checkpoint: str = "best",
    data: Path | str | None = None,
    lengths: Sequence[int] | None = None,
    samples: int | None = None,
    out: Path | str | None = None,
) -> tuple[Report, Path]:
    """Evaluates a run's checkpoint on named tasks; returns the report, and the new folder in RUN/evals (or `out`) with
    its files. [EVAL-RUN-D1]

    A synthetic task must be the run's own, and has its fields; the text is that of `data`, or else of the run's
    validation data. For a folder in transformers' format, tasks in text can be evaluated with its own tokenizer.
    """
    folder, fields = Path(folder), {"lengths": None if lengths is None else tuple(lengths), "samples": samples}
    if is_pretrained(folder):
        if checkpoint != "best":
            raise ConfigError(f"checkpoint={checkpoint!r} is for runs, and {folder} is a model of transformers")
        return _evaluate_pretrained(folder, tasks, fields, data, out)
    trained = open_model(folder, checkpoint)
    place = Path(out) if out is not None else _evals(folder)
    config = trained.config.data
    own = {config.kind: config} if isinstance(config, Task) else {}  # its own task, with its fields
    wanted = [evaluation_of(own.get(name, name), **fields) for name in tasks]
    for name, task in zip(tasks, wanted, strict=True):
        if not isinstance(task, Synthetic) and not isinstance(trained.tokenizer, Tokenizer):
            raise ConfigError(
                f"{name} is a task in text, and the run was trained on {config.kind!r} without a tokenizer; take one "
                "that was trained on text"
            )
        if isinstance(task, Synthetic) and name != config.kind:
            raise ConfigError(
                f"task {name!r} is for a model that was trained on it, and the run was trained on {config.kind!r}; "
                f"train one with data.kind={name}"
            )
    text = None
    if not all(isinstance(task, Synthetic) for task in wanted):
        text = read_text(Path(data)) if data is not None else _own_text(trained)
    elif data is not None:
        raise ConfigError(f"--data is for tasks in text, and {', '.join(tasks)} have none; leave it out")
    how: dict[str, Any] = {"text": text, "vocabulary": config.vocabulary(), "device": trained.device}
    report = Report(evaluate_tasks(trained.model, trained.tokenizer, wanted, **how))
    facts = {"run": trained.config.name, "step": trained.step, **_facts(text, data or "the run's own", wanted)}
    return report, report.save(place, f"step-{trained.step}", facts)


def _evaluate_pretrained(
    folder: Path, tasks: Sequence[str], fields: dict[str, Any], data: Path | str | None, out: Path | str | None
) -> tuple[Report, Path]:
    """`evaluate_run` for a causal model of transformers, possibly upgraded or grafted. [EVAL-RUN-D2]"""
    from hecate.hf import load, load_tokenizer

    wanted = [evaluation_of(name, **fields) for name in tasks]
    for name, task in zip(tasks, wanted, strict=True):
        if isinstance(task, Synthetic):
            raise ConfigError(
                f"task {name!r} is for a model that was trained on it, and {folder} is a model of transformers; "
                "take tasks in text"
            )
    text = None if data is None else read_text(Path(data))
    tokenizer, model = load_tokenizer(folder), load(folder).to("cuda" if torch.cuda.is_available() else "cpu")
    report = Report(evaluate_tasks(model, tokenizer, wanted, text=text))
    facts = {"model": model.config.model_type, **_facts(text, data, wanted)}
    return report, report.save(Path(out or folder / "evals"), model.config.model_type, facts)


def _facts(text: str | None, origin: Any, wanted: Sequence[Evaluation]) -> dict[str, Any]:
    asked = [task.model_dump(mode="json") for task in wanted]
    return {"text": None if text is None else str(origin), "tasks": asked}


def _own_text(trained: Trained) -> str | None:
    """The validation text of a run; None if it has none, which still allows tasks in noise."""
    tokenizer, config = trained.tokenizer, trained.config
    if tokenizer is None or config.data.length() is not None:
        return None
    batches = config.data.load().validation_batches(1, config.seq_len, max(1, MOST // config.seq_len))
    return "\n".join(tokenizer.decode(batch.tokens[0].tolist()) for batch in batches)[:MOST]


def _evals(folder: Path) -> Path:
    """The folder of a run's evaluations, from the run folder or that of one of its checkpoints."""
    home = home_of(folder)
    if home is None:
        raise CheckpointError(f"{folder} is a checkpoint outside of a run folder; say with --out where its evals go")
    return home / "evals"
