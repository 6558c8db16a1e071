"""Runs a study and writes its table and figure: NAME.csv, NAME.json, NAME.png and NAME.svg."""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hecate.compare.report import finite
from hecate.errors import ConfigError
from hecate.figure import figure_type, images
from hecate.files import make_folder, refusing, write_file
from hecate.train.display import print_table
from hecate.train.run import versions
from studies.study import Cell, Result, Run, Spread, Study, find_study, studies

NO_CARD = "there is no CUDA device here; on a machine with one run `python -m studies {}`, some ten minutes"


def list_studies() -> None:
    """Prints the name and the question of every study."""
    print_table(("study", "question"), [(name, study.about) for name, study in studies().items()])


def run_studies(names: Sequence[str], **how: Any) -> None:
    """Studies by name, `cost` or `all`, one after the other, and what each took if several."""
    known = list(studies())
    groups = {"all": known, "cost": [name for name in known if name.startswith("cost-")]}
    chosen = dict.fromkeys(name for given in names for name in groups.get(given, [given]))
    took = []
    for name in chosen:
        start = time.perf_counter()
        found = run_study(name, **how)
        took.append((name, "skipped" if found is None else f"{time.perf_counter() - start:.0f}"))
        print()
    if len(chosen) > 1:
        print_table(("study", "seconds"), took)


def run_study(
    name: str, *, quick: bool = False, seeds: int | None = None, out: Path, figure: bool = True, dry: bool = False,
    seconds: float | None = None,
) -> Result | None:  # fmt: skip
    """Runs, prints and writes; a quick run's files are called NAME-quick, a dry one's NAME-dry. None, and a sentence
    printed, where there is nothing to measure here."""
    study = find_study(name)
    if (dry or seconds is not None) and not study.on_card:
        raise ConfigError(f"study {name!r} takes no --dry and no --seconds: it measures the CPU; leave them out")
    count = (min(2, study.seeds) if quick else study.seeds) if seeds is None else seeds
    if type(count) is not int or count < 1:
        raise ConfigError(f"a study needs at least one seed, got {count}")
    if figure:
        figure_type("the figure, which --no-figure leaves out,")
    print(f"{name}: {study.about}")
    if study.on_card and not dry and not torch.cuda.is_available():
        print(f"skipped: {NO_CARD.format(name)}")
        return None
    print(f"seeds 0 to {count - 1}" if count > 1 else "seed 0")
    run = Run(name, range(count), quick, out, dry, seconds)
    result = study.answer(run)
    print_table(result.columns, [[_text(cell) for cell in row] for row in result.rows])
    for note in result.notes:
        print(f"- {note}")
    contents: dict[str, str | bytes] = {"csv": to_csv(result), "json": to_json(study, run, result)}
    if figure:
        contents |= images(result.size, result.draw)
    with refusing(f"write {out}", "choose another --out"):
        make_folder(out)
        for ending, content in contents.items():
            path = out / f"{run.stem}.{ending}"
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
            errors = (cell.error if isinstance(cell, Spread) else None for cell in cells)
            columns.append([f"{name}: standard error", *errors])
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows(zip(*columns, strict=True))
    return stream.getvalue()


def to_json(study: Study, run: Run, result: Result) -> str:
    """Everything but the drawing; NaN, which JSON lacks, is null."""
    facts = {
        "study": study.name,
        "about": study.about,
        "quick": run.quick,
        "seeds": list(run.seeds),
        "versions": versions(),
        "columns": list(result.columns),
        "rows": [[cell.facts() if isinstance(cell, Spread) else cell for cell in row] for row in result.rows],
        "notes": list(result.notes),
        "data": result.data,
    }
    return json.dumps(finite(facts), indent=1, allow_nan=False) + "\n"


def _text(cell: Cell) -> str:
    if cell is None:
        return "-"
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)
