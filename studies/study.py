"""What a study is: a question, a table beside what was published, and a figure."""

from __future__ import annotations

import importlib
import json
import math
import pkgutil
import statistics
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, Self, TypeVar

from hecate.compare import interval
from hecate.errors import ConfigError, not_known
from hecate.files import make_folder, write_file

T = TypeVar("T")
ALL, COST = "all", "cost"  # every study, and every `cost-NAME`; no study may bear these names


class Spread(NamedTuple):
    """A mean over seeds with its standard error."""

    mean: float
    error: float
    seeds: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        """From one value per seed; the error of a single one is unknown, NaN."""
        given = [float(value) for value in values]
        several = len(given) > 1
        error = statistics.stdev(given) / math.sqrt(len(given)) if several else math.nan
        return cls(statistics.fmean(given), error, len(given))

    def facts(self) -> dict[str, float]:
        """The same for a JSON file."""
        return {"mean": self.mean, "standard_error": self.error, "seeds": self.seeds}

    def __str__(self) -> str:
        return f"{self.mean:.3f}" + (f"+-{self.error:.3f}" if self.seeds > 1 else "")


Cell = str | int | float | Spread | None


def reach(values: Sequence[float], spec: str, most: float = math.inf) -> str | None:
    """Student's interval of 95 % around the mean of values that are between 0 and `most`; None for a single one."""
    if len(values) < 2:
        return None
    mean, half = interval(values)[:2]
    return f"{max(0.0, mean - half):{spec}} to {min(most, mean + half):{spec}}"


@dataclass(frozen=True)
class Result:
    """What a study found.

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
                raise ConfigError(
                    f"row {number} of a result has {len(row)} cells for {len(self.columns)} "
                    "columns; write None where there is nothing to say"
                )


class Progress(Protocol):
    """Goes through items and shows how far it is: `for x in progress(items, "one level")`."""

    def __call__(self, items: Sequence[T], what: str) -> Iterator[T]:
        """The items one by one."""


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


class Study(ABC):
    """One question. A subclass registers itself under its `name`.

        class Levels(Study):
            name = "levels"
            about = "Do several memory levels forget less than one of the same size?"

            def run(self, quick, seeds, progress): ...

    Class attributes:
        name: what `python -m studies` calls it.
        about: the question, in a sentence.
        count: seeds of a full run; a quick one takes two.
        timed: whether it measures time, so that equal seeds give unequal tables.
        on_card: whether it measures a GPU: `--dry` runs its code on a CPU, `--seconds` bounds it.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    count: ClassVar[int] = 8
    timed: ClassVar[bool] = False
    on_card: ClassVar[bool] = False
    dry: bool = False  # what `--dry` said
    seconds: float | None = None  # what `--seconds` said
    out: Path = Path("runs/studies")  # where `--out` has the files; what takes hours keeps its pieces there
    _known: ClassVar[dict[str, type[Study]]] = {}

    def __init_subclass__(cls, *, abstract: bool = False, **options: Any) -> None:
        super().__init_subclass__(**options)
        if abstract:
            return
        name = getattr(cls, "name", None)
        if name is None or not getattr(cls, "about", None):
            raise ConfigError(f"study {cls.__qualname__} needs a name and, in about, its question")
        if name in (ALL, COST):
            raise ConfigError(f"{name!r} stands for several studies; give {cls.__qualname__} another name")
        taken = Study._known.get(name)
        identity = (cls.__module__, cls.__qualname__)
        if taken is not None and (taken.__module__, taken.__qualname__) != identity:
            raise ConfigError(
                f"study {name!r} is taken by {taken.__module__}.{taken.__qualname__}; give "
                f"{cls.__qualname__} another name"
            )
        Study._known[name] = cls

    def stem(self, quick: bool) -> str:
        """What its files are called: a quick run or a dry one replaces those of no other."""
        return self.name + ("-dry" if self.dry else "") + ("-quick" if quick else "")

    def kept(self, quick: bool) -> Kept:
        """What a full run keeps beside its files, to go on from; a quick one keeps nothing."""
        return Kept(None if quick else self.out / f"{self.stem(quick)}-runs.jsonl")

    def skipped(self) -> str | None:
        """Why there is nothing to measure on this machine, and how to; None where there is."""
        return None

    @abstractmethod
    def run(self, quick: bool, seeds: Sequence[int], progress: Progress) -> Result:
        """Answers from these seeds alone; `quick` takes 15 seconds of one core at most."""


def studies() -> dict[str, type[Study]]:
    """Every study by name: the files of this folder, and what the user has defined."""
    package = importlib.import_module("studies")
    for module in pkgutil.iter_modules(package.__path__, "studies."):
        if module.name != "studies.__main__":
            importlib.import_module(module.name)
    return dict(sorted(Study._known.items()))


def find_study(name: str) -> type[Study]:
    """A study by name; `ConfigError` says which there are."""
    known = studies()
    if name not in known:
        raise ConfigError(f"no study {name!r}{not_known(name, [*known, 'cost', 'all'])}")
    return known[name]


def names_of(given: str) -> list[str]:
    """The names that one stands for: `all`, or `cost`, or itself."""
    if given == COST:
        return [name for name in studies() if name.startswith(f"{COST}-")]
    return list(studies()) if given == ALL else [given]
