"""Reports of an evaluation: tables, files and a figure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple

from hecate.errors import CheckpointError
from hecate.evals.base import COLUMNS, Result
from hecate.files import make_folder, new_folder, refusing, sweep_evaluations, write_file
from hecate.microscope.style import COLOURS, DASHES, MARKERS, finish
from hecate.train.report import Table, csv_text, figure_type, png, table_by_position

HOPE = "Nested Learning (Behrouz et al., 2025, arXiv 2512.24695), Table"
_SIZES = "a larger model after some 5e10 tokens of other text; RULER's essays, generated answers"
_WHOLE = "trained on several lengths; taken to be the share of whole strings, as 0 is below a coin: see `exact`"
_MAD = "the mean over MAD's difficulties, of models trained on each"


class Published(NamedTuple):
    """A figure in per cent, of a model in a paper, and what differs from what is measured here."""

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
    """The figures of the tasks that were measured."""
    names = {result.name for result in results}
    return [figure for figure in PUBLISHED if figure.task in names]


@dataclass(frozen=True)
class Report:
    """Results, in the order of the tasks."""

    results: list[Result]

    def tables(self) -> list[Table]:
        """The scores; exact answers by depth, loss by position and published figures, where there are any."""
        return [table for table in (self._scores(), self._depths(), self._positions(), self._published()) if table[1]]

    def _scores(self) -> Table:
        header = ("task", "length", "rows", "exact", "accuracy", "loss (nats)", "chance")
        rows = []
        for own in self.results:
            shares = [f"{own.exact:.4f}", f"{own.accuracy:.4f}"]
            chosen = {"exact": 0, "accuracy": 1}.get(own.metric)
            if chosen is None:
                shares[0] = ""  # windows of text are no answers
            else:
                shares[chosen] += f" +- {own.error:.4f}"
            chance = "" if own.chance is None else f"{own.chance:.3g} ({own.metric})"
            rows.append((own.name, f"{own.length:,}", f"{own.rows:,}", *shares, f"{own.loss:.4f}", chance))
        return header, rows

    def _depths(self) -> Table:
        deep = [own for own in self.results if own.depths]
        depths = sorted(set(chain.from_iterable(own.depths for own in deep)))
        cells = [[f"{own.depths[depth]:.2f}" if depth in own.depths else "" for depth in depths] for own in deep]
        rows = [(own.name, f"{own.length:,}", *row) for own, row in zip(deep, cells, strict=True)]
        return ("exact by depth", "length", *(f"{depth:.0%}" for depth in depths)), rows

    def _positions(self) -> Table:
        wanted = [own for own in self.results if own.metric == "loss"]
        return table_by_position([(own.length, own.positions) for own in wanted]) if wanted else ((), ())

    def _published(self) -> Table:
        rows = [(f.task, f.at, f.model, f"{f.score:.1f}", f.source, f.differs) for f in beside(self.results)]
        return ("published", "at", "model", "per cent", "source", "what differs"), rows

    def json(self, facts: Mapping[str, Any]) -> str:
        """Everything, with facts about what was evaluated."""
        published = [figure._asdict() for figure in beside(self.results)]
        results = [own.record() for own in self.results]
        return json.dumps({**facts, "results": results, "published": published}, indent=1) + "\n"

    def csv(self) -> str:
        """A line for each part."""
        return csv_text((own.record() for own in self.results), COLUMNS)

    def png(self) -> bytes | None:
        """Scores by length beside chance, and the loss by position; None without matplotlib."""
        drawn_on = figure_type()
        if drawn_on is None:
            return None
        asked = [own for own in self.results if own.metric != "loss"]
        read = [own for own in self.results if own.metric == "loss"]
        figure = drawn_on(figsize=(6.4 * (bool(asked) + bool(read)), 4.8), layout="constrained")
        axes = list(figure.subplots(1, bool(asked) + bool(read), squeeze=False)[0])
        if asked:
            _scores(axes.pop(0), asked)
        if read:
            _losses(axes.pop(0), read)
        return png(figure)

    def save(self, folder: Path, name: str, facts: Mapping[str, Any]) -> Path:
        """results.json, results.csv and scores.png in the first of folder/NAME, NAME-2, ... that is free.
        [EVAL-FILES-D1]"""
        picture = self.png()
        with refusing(f"write an evaluation into {folder}", "make room there, or choose another --out"):
            make_folder(folder)
            sweep_evaluations(folder)
            for target in (folder / (name if n == 1 else f"{name}-{n}") for n in count(1)):
                if target.exists():
                    continue
                with new_folder(target) as fresh:
                    write_file(fresh / "results.json", self.json(facts))
                    write_file(fresh / "results.csv", self.csv())
                    if picture is not None:
                        write_file(fresh / "scores.png", picture)
                return target
        raise CheckpointError(f"{folder} has no free name for an evaluation")


def _scores(axes: Any, results: Sequence[Result]) -> None:
    names = list(dict.fromkeys(own.name for own in results))
    for index, name in enumerate(names):
        own = sorted((result for result in results if result.name == name), key=lambda result: result.length)
        lengths, colour = [result.length for result in own], COLOURS[index % len(COLOURS)]
        style = {"color": colour, "linestyle": DASHES[index % len(DASHES)], "marker": MARKERS[index % len(MARKERS)]}
        errors = [result.error for result in own]
        label = f"{name} ({own[0].metric})"
        axes.errorbar(lengths, [result.score for result in own], errors, capsize=3, label=label, **style)
        axes.plot(lengths, [result.chance for result in own], color=colour, linewidth=0.8, linestyle=":")
    axes.set_xscale("log", base=2)
    places = sorted({result.length for result in results})
    axes.set_xticks(places, [f"{place:,}" for place in places])
    axes.minorticks_off()
    finish(axes, "Right answers (thin dots: chance)", "length (tokens)", "share", ylim=(-0.03, 1.03))


def _losses(axes: Any, results: Sequence[Result]) -> None:
    for index, own in enumerate(results):
        spans = own.positions
        style = {"color": COLOURS[index % len(COLOURS)], "linestyle": DASHES[index % len(DASHES)]}
        axes.plot([span.first + 1 for span in spans], [span.loss for span in spans], label=f"{own.length:,}", **style)
    axes.set_xscale("log", base=2)
    finish(axes, "Loss by position", "tokens read", "nats per token")
