"""A study is a question, a table beside what was published, and a figure: NAME.csv, NAME.json, NAME.png, NAME.svg."""

from __future__ import annotations

import csv
import importlib
import io
import json
import math
import pkgutil
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import torch
from rich.console import Console
from rich.progress import track

from hecate.compare import interval
from hecate.compare.report import finite
from hecate.errors import ConfigError, not_known
from hecate.figure import COLOURS, GREY, MARKERS, figure_type, finish, images, one_legend, ticks
from hecate.files import make_folder, refusing, write_file
from hecate.train.display import print_table
from hecate.train.run import versions

NO_CARD = "there is no CUDA device here; on a machine with one run `python -m studies {}`, some ten minutes"
T = TypeVar("T")


class Spread(NamedTuple):
    """A mean over seeds with its standard error."""

    mean: float
    standard_error: float
    seeds: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        """From one value per seed; the error of a single one is unknown, NaN."""
        samples = [float(value) for value in values]
        error = statistics.stdev(samples) / math.sqrt(len(samples)) if len(samples) > 1 else math.nan
        return cls(statistics.fmean(samples), error, len(samples))

    @property
    def bar(self) -> float:
        """Length of its error bar."""
        return self.standard_error if self.seeds > 1 else 0.0

    def __str__(self) -> str:
        return f"{self.mean:.3f}" + (f"+-{self.standard_error:.3f}" if self.seeds > 1 else "")


Cell = str | int | float | Spread | None


def reach(values: Sequence[float], spec: str, most: float = math.inf) -> str | None:
    """Student's interval of 95 % around the mean of values that are between 0 and `most`; None for a single one."""
    if len(values) < 2:
        return None
    mean, half = interval(values)[:2]
    return f"{max(0.0, mean - half):{spec}} to {min(most, mean + half):{spec}}"


@dataclass(frozen=True)
class Result:
    """The findings of a study.

    Fields:
        columns: headings, with units; what was published or claimed stands in a column of its own.
        rows: a cell per column; None where there is nothing to say.
        notes: sentences below the table: how to read it, what was fixed, what fell short.
        draw: draws the figure on an empty `matplotlib.figure.Figure`.
        size: of that figure, in inches.
        data: the numbers behind the figure, for the JSON file: nested lists and mappings.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str]
    draw: Callable[[Any], None]
    size: tuple[float, float] = (8.0, 4.5)
    data: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for number, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                cells = f"{len(row)} cells for {len(self.columns)} columns"
                raise ConfigError(f"row {number} of a result has {cells}; write None where there is nothing to say")


def progress(items: Sequence[T], what: str) -> Iterator[T]:
    """The items one by one, with a bar on a terminal, a line elsewhere; both on standard error."""
    console = Console(stderr=True)
    if not console.is_terminal:
        console.print(f"{what}: {len(items)}", markup=False, highlight=False, soft_wrap=True)
    yield from track(items, description=what, console=console, transient=True, disable=not console.is_terminal)


class Kept:
    """Results of long studies, in a file as soon as they are known: whoever runs the study again goes on from them."""

    def __init__(self, path: Path | None = None) -> None:
        self.path, self.known = path, {}
        if path is not None and path.exists():
            self.known = dict(json.loads(line) for line in path.read_text().splitlines())
            print(f"{len(self.known)} results kept in {path}, which are not run again", file=sys.stderr)

    def __call__(self, what: Any, make: Callable[[], Any]) -> Any:
        """The result of what JSON describes, from the file or made."""
        key = json.dumps(what)
        if key not in self.known:
            self.known[key] = make()
            if self.path is not None:
                make_folder(self.path.parent)
                write_file(self.path, "".join(f"{json.dumps(entry)}\n" for entry in self.known.items()))
        return self.known[key]


class Run(NamedTuple):
    """Options of one run of a study.

    Fields:
        name: of the study.
        seeds: which all that is drawn comes from.
        quick: in 15 seconds of one core at most, less exact.
        out: the folder of its files; what takes hours keeps its pieces there.
        dry: of a GPU's study: on a CPU, to see that its code runs.
        seconds: of a GPU's study: how long it may take.
    """

    name: str
    seeds: Sequence[int]
    quick: bool = False
    out: Path = Path("runs/studies")
    dry: bool = False
    seconds: float | None = None

    @property
    def stem(self) -> str:
        """Stem of its file names: a quick run or a dry one replaces no other's files."""
        return self.name + ("-dry" if self.dry else "") + ("-quick" if self.quick else "")

    def kept(self) -> Kept:
        """Results that a full run keeps beside its files, to go on from; a quick one keeps nothing."""
        return Kept(None if self.quick else self.out / f"{self.stem}-runs.jsonl")


class Study(NamedTuple):
    """One question, and the function that answers it from a run's seeds alone; a name in a file of this folder.

        LEVELS = Study("levels", "Do several memory levels forget less than one of the same size?", levels, seeds=8)

    Fields:
        name: what `python -m studies` calls it.
        about: the question, in a sentence.
        answer: its function.
        seeds: of a full run; a quick one takes two.
        on_card: whether it measures a GPU: `--dry` runs its code on a CPU, `--seconds` bounds it.
    """

    name: str
    about: str
    answer: Callable[[Run], Result]
    seeds: int = 1
    on_card: bool = False


def studies() -> dict[str, Study]:
    """Every study of this folder by name."""
    known: dict[str, Study] = {}
    for module in pkgutil.iter_modules([str(Path(__file__).parent)], "studies."):
        for study in vars(importlib.import_module(module.name)).values():
            if isinstance(study, Study) and known.setdefault(study.name, study) is not study:
                raise ConfigError(f"two studies are called {study.name!r}; give that of {module.name} another name")
    return dict(sorted(known.items()))


def list_studies() -> None:
    """Prints the name and the question of every study."""
    print_table(("study", "question"), [(name, study.about) for name, study in studies().items()])


def run_studies(names: Sequence[str], **how: Any) -> None:
    """Studies by name, `cost` or `all`, one after the other, and what each took if several."""
    known = list(studies())
    groups = {"all": known, "cost": [name for name in known if name.startswith("cost-")]}
    chosen = dict.fromkeys(name for group in names for name in groups.get(group, [group]))
    took = []
    for name in chosen:
        start = time.perf_counter()
        result = run_study(name, **how)
        took.append((name, f"{time.perf_counter() - start:.0f}" if result else "skipped"))
        print()
    if len(chosen) > 1:
        print_table(("study", "seconds"), took)


def run_study(name: str, *, seeds: int | None = None, figure: bool = True, **how: Any) -> Result | None:
    """Runs, prints and writes; a quick run's files are called NAME-quick, a dry one's NAME-dry. None, and a sentence
    printed, where there is nothing to measure here.

    Args:
        how: the other fields of a `Run`.
    """
    known = studies()
    if name not in known:
        raise ConfigError(f"no study {name!r}{not_known(name, [*known, 'cost', 'all'])}")
    study, run = known[name], Run(name, (), **how)
    if (run.dry or run.seconds is not None) and not study.on_card:
        raise ConfigError(f"study {name!r} takes no --dry and no --seconds: it measures the CPU; leave them out")
    count = (min(2, study.seeds) if run.quick else study.seeds) if seeds is None else seeds
    run = run._replace(seeds=range(count))
    if figure:
        figure_type("the figure, which --no-figure leaves out,")
    print(f"{name}: {study.about}")
    if study.on_card and not run.dry and not torch.cuda.is_available():
        print(f"skipped: {NO_CARD.format(name)}")
        return None
    print(f"seeds 0 to {count - 1}" if count > 1 else "seed 0")
    result = study.answer(run)
    print_table(result.columns, [[_text(cell) for cell in row] for row in result.rows])
    for note in result.notes:
        print(f"- {note}")
    contents: dict[str, str | bytes] = {"csv": to_csv(result), "json": to_json(study, run, result)}
    if figure:
        contents |= images(result.size, result.draw)
    with refusing(f"write {run.out}", "choose another --out"):
        make_folder(run.out)
        for ending, content in contents.items():
            path = run.out / f"{run.stem}.{ending}"
            write_file(path, content)
            print(path)
    return result


def to_csv(result: Result) -> str:
    """The table; a column with spreads is followed by one of their standard errors."""
    columns: list[list[Cell]] = []
    for at, name in enumerate(result.columns):
        cells = [row[at] for row in result.rows]
        columns.append([name, *(cell.mean if isinstance(cell, Spread) else cell for cell in cells)])
        if any(isinstance(cell, Spread) for cell in cells):
            errors = (cell.standard_error if isinstance(cell, Spread) else None for cell in cells)
            columns.append([f"{name}: standard error", *errors])
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows(zip(*columns, strict=True))
    return stream.getvalue()


def to_json(study: Study, run: Run, result: Result) -> str:
    """Everything but the drawing; NaN, which JSON lacks, is null."""
    rows = [[cell._asdict() if isinstance(cell, Spread) else cell for cell in row] for row in result.rows]
    facts = {
        "study": study.name, "about": study.about, "quick": run.quick, "seeds": list(run.seeds), "versions": versions(),
        "columns": result.columns, "rows": rows, "notes": result.notes, "data": result.data,
    }  # fmt: skip
    return json.dumps(finite(facts), indent=1, allow_nan=False) + "\n"


def _text(cell: Cell) -> str:
    if cell is None:
        return "-"
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)


# Pictures that studies share: contenders as dots, as bars, and as lines over what is varied.

Panels = Mapping[str, Mapping[str, Sequence[Spread | None]]]  # a spread for every row, by the label of its mark
Lines = Mapping[str, Mapping[Any, float]]  # what a line has at every place, by its label


def dot_plot(figure: Any, rows: Sequence[str], panels: Panels, xlabel: str, chance: Sequence[float] = ()) -> None:
    """A panel a task, a row a contender, the first on top: means with standard errors; marks of a row stand one below
    the other.

    Args:
        panels: the dots of each panel by its title.
        chance: what guessing scores in each panel, drawn as a line.
    """
    all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for number, (axes, (title, dots)) in enumerate(zip(all_axes, panels.items(), strict=True)):
        for index, (label, spreads) in enumerate(dots.items()):
            shift = 0.5 * (index / max(1, len(dots) - 1) - 0.5) if len(dots) > 1 else 0.0
            known = [(spread, len(rows) - place - shift) for place, spread in enumerate(spreads) if spread is not None]
            axes.errorbar(
                [spread.mean for spread, _ in known], [place for _, place in known],
                xerr=[spread.bar for spread, _ in known], fmt=MARKERS[index], color=COLOURS[index], label=label,
                markersize=5, elinewidth=1.2,
            )  # fmt: skip
        if chance:
            axes.axvline(chance[number], color=GREY, linestyle=":", linewidth=1)
        finish(axes, title, xlabel, "", legend=False)
        axes.locator_params(axis="x", nbins=5)
        axes.set_yticks(range(len(rows), 0, -1), rows)
        axes.set_ylim(0.3, len(rows) + 0.7)
    if len(dots) > 1:
        one_legend(figure, axes, len(dots))


def spread_line(axes: Any, index: int, label: str, x: Sequence[float], spreads: Sequence[Spread]) -> None:
    """Means with standard errors over x, in look number `index`."""
    look = {"color": COLOURS[index], "marker": MARKERS[index], "label": label, "capsize": 2}
    axes.errorbar(x, [spread.mean for spread in spreads], [spread.bar for spread in spreads], **look)


def bars(
    figure: Any, rows: Sequence[str], series: Mapping[str, Sequence[float | None]], title: str, xlabel: str,
    *, line: float | None = None, xscale: str = "log",
) -> None:  # fmt: skip
    """A group of bars a row, the first on top: one of each series that knows the row; `line` is what they stand
    beside."""
    axes, height = figure.subplots(), 0.8 / len(series)
    for index, (label, values) in enumerate(series.items()):
        known = [(row + (index - (len(series) - 1) / 2) * height, x) for row, x in enumerate(values) if x is not None]
        axes.barh([at for at, _ in known], [x for _, x in known], 0.95 * height, color=COLOURS[index], label=label)
    axes.set_yticks(range(len(rows)), rows, fontsize=7)
    axes.invert_yaxis()
    if line is not None:
        axes.axvline(line, color=GREY, linewidth=1)
    finish(axes, title, xlabel, "", legend=False, xscale=xscale if any(map(any, series.values())) else "linear")
    if len(series) > 1:
        one_legend(figure, axes, len(series))


def line_plot(figure: Any, panels: Mapping[str, Lines], xlabel: str, ylabels: Sequence[str]) -> None:
    """A panel a quantity, both axes logarithmic; one without a label shares the y axis of the first. A line looks the
    same in all of them, and the last has every one."""
    labels = dict.fromkeys(label for lines in panels.values() for label in lines)
    looks = {label: (COLOURS[at], MARKERS[at]) for at, label in enumerate(labels)}
    all_axes = figure.subplots(1, len(panels), sharey=not all(ylabels))
    for axes, ylabel, (title, lines) in zip(all_axes, ylabels, panels.items(), strict=True):
        for label, points in lines.items():
            colour, marker = looks[label]
            axes.loglog(list(points), list(points.values()), color=colour, marker=marker, label=label)
        ticks(axes, sorted({x for points in lines.values() for x in points}))
        finish(axes, title, xlabel, ylabel, legend=False)
    one_legend(figure, axes, len(looks))
