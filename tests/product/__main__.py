"""`python -m tests.product [--cover pairs|rules|fields] [--write FILE]`: checks the product of all knobs.

`pairs` runs cells of a rule's knobs among which any two kinds of different families meet; `rules` every combination
of structure, bias, retention, algorithm, chunk and commit, with the feature maps in turn. Both
validate every cell with every feature map. `fields` runs cells of all axes, gatings, readouts, writes and gates
among them, in which any two kinds that go together meet, and validates 20,000 random ones. Exits with 1 if any cell
is a fault.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from tests.product.cells import (
    Cell,
    Verdict,
    all_axes,
    axes,
    every_cell,
    every_rule,
    fieldwise,
    pairwise,
    some_cells,
    validate,
)
from tests.product.check import check_cell

COVERS: dict[str, tuple[Callable[[], Iterable[Cell]], Callable[[], Iterable[Cell]]]] = {
    "pairs": (pairwise, every_cell),
    "rules": (every_rule, every_cell),
    "fields": (fieldwise, lambda: some_cells(20_000)),
}
"""Cells to run, and cells to validate."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.product", description=__doc__)
    parser.add_argument("--cover", choices=COVERS, default="pairs")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--write", type=Path, help="a file for the table, in markdown")
    options = parser.parse_args()
    to_run, to_validate = COVERS[options.cover]
    cells = list(to_run())
    start = time.monotonic()
    with ProcessPoolExecutor(options.workers, initializer=_one_thread) as pool:
        verdicts = list(pool.map(check_cell, cells, chunksize=16))
    seconds = time.monotonic() - start
    refusals = Counter(map(_refused, to_validate()))
    text = table(verdicts, refusals, seconds, axes() if options.cover != "fields" else all_axes())
    print(text)
    if options.write:
        options.write.write_text(text)
    faults = [verdict for verdict in verdicts if verdict.status == "fault"]
    for verdict in faults:
        print(f"fault: {verdict.cell}: {verdict.reason}", file=sys.stderr)
    sys.exit(bool(faults) or refusals["fault"] > 0)


def table(verdicts: list[Verdict], refusals: Counter[str], seconds: float, found: dict[str, list[str]]) -> str:
    """Counts, by kind and as a whole."""
    ran = Counter(verdict.status for verdict in verdicts)
    sizes = " x ".join(f"{len(kinds)} {name}" for name, kinds in found.items())
    lines = [
        f"{sizes} = {math.prod(map(len, found.values())):,} cells, {refusals.total():,} validated: "
        f"{refusals['allowed']:,} allowed, "
        f"{refusals['refused']:,} refused with a reason, {refusals['fault']:,} refused without. "
        f"{len(verdicts):,} cells run in {seconds:.0f} s: {ran['passed']:,} passed, "
        f"{ran['refused']:,} refused, {ran['fault']:,} faults.",
        "",
        "| setting | kind | passed | refused | faults |",
        "|---|---|---|---|---|",
    ]
    for name, kinds in found.items():
        seen = Counter((getattr(v.cell, name), v.status) for v in verdicts)
        for kind in kinds:
            counts = [seen[kind, status] for status in ("passed", "refused", "fault")]
            lines.append(f"| {name} | {kind} | {' | '.join(map(str, counts))} |")
    lines += ["", "| refused | cells run |", "|---|---|"]
    lines += [f"| {reason} | {count} |" for reason, count in reasons(verdicts).most_common()]
    return "\n".join(lines) + "\n"


def reasons(verdicts: Iterable[Verdict]) -> Counter[str]:
    """How often each reason was given."""
    return Counter(verdict.reason for verdict in verdicts if verdict.status == "refused")


def _refused(cell: Cell) -> str:
    found = validate(cell)
    return found.status if isinstance(found, Verdict) else "allowed"


def _one_thread() -> None:
    torch.set_num_threads(1)


if __name__ == "__main__":
    main()
