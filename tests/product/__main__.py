"""`python -m tests.product [--cover pairs|rules] [--write FILE]`: checks the product of all knobs.

`pairs` runs cells among which any two kinds of different families meet; `rules` every combination
of structure, bias, retention, algorithm, chunk and commit, with the feature maps in turn. Both
validate every cell with every feature map. Exits with 1 if any cell is a fault.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from tests.product.cells import Cell, Verdict, axes, check_cell, every_cell, every_rule, pairwise, validate


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.product", description=__doc__)
    parser.add_argument("--cover", choices=("pairs", "rules"), default="pairs")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--write", type=Path, help="a file for the table, in markdown")
    options = parser.parse_args()
    cells = pairwise() if options.cover == "pairs" else list(every_rule())
    start = time.monotonic()
    with ProcessPoolExecutor(options.workers, initializer=_one_thread) as pool:
        verdicts = list(pool.map(check_cell, cells, chunksize=16))
    seconds = time.monotonic() - start
    refusals = Counter(map(_refused, every_cell()))
    text = table(verdicts, refusals, seconds)
    print(text)
    if options.write:
        options.write.write_text(text)
    faults = [verdict for verdict in verdicts if verdict.status == "fault"]
    for verdict in faults:
        print(f"fault: {verdict.cell}: {verdict.reason}", file=sys.stderr)
    sys.exit(bool(faults) or refusals["fault"] > 0)


def table(verdicts: list[Verdict], refusals: Counter[str], seconds: float) -> str:
    """Counts, by kind and as a whole."""
    ran = Counter(verdict.status for verdict in verdicts)
    sizes = " x ".join(f"{len(kinds)} {name}" for name, kinds in axes().items())
    lines = [
        f"{sizes} = {refusals.total():,} cells: {refusals['allowed']:,} allowed, "
        f"{refusals['refused']:,} refused with a reason, {refusals['fault']:,} refused without. "
        f"{len(verdicts):,} cells run in {seconds:.0f} s: {ran['passed']:,} passed, "
        f"{ran['refused']:,} refused, {ran['fault']:,} faults.",
        "",
        "| setting | kind | passed | refused | faults |",
        "|---|---|---|---|---|",
    ]
    for name in Cell._fields:
        found = Counter((getattr(v.cell, name), v.status) for v in verdicts)
        for kind in axes()[name]:
            counts = [found[kind, status] for status in ("passed", "refused", "fault")]
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
