"""`python -m tests.fuzz configs|scans [--cases N] [--seed S]`: random cases, and a summary.

A case is its number: `--cases 1 --seed S` runs case S again. Exits with 1 if any is a fault.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from tests.fuzz import configs, scans

CHECKS: dict[str, Callable[[int], str]] = {"configs": configs.check, "scans": scans.check}


def run(what: str, seeds: Iterable[int]) -> tuple[Counter[str], list[str], tuple[float, int]]:
    """How often each outcome came, the faults, and the slowest case: seconds of CPU and seed."""
    found: Counter[str] = Counter()
    faults: list[str] = []
    slowest = (0.0, 0)
    for seed in seeds:
        start = time.process_time()
        try:
            found[CHECKS[what](seed)] += 1
        except Exception as error:  # whatever it is, it is the finding
            text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            frame = traceback.extract_tb(error.__traceback__)[-1]
            faults.append(f"seed {seed}: {text}  [{Path(frame.filename).name}:{frame.lineno}]")
        slowest = max(slowest, (time.process_time() - start, seed))
    return found, faults, slowest


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("what", choices=list(CHECKS))
    parser.add_argument("--cases", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0, help="of the first case; then one by one")
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = time.process_time()
    seeds = range(options.seed, options.seed + options.cases)
    found, faults, (most, slowest) = run(options.what, seeds)
    print(
        f"{options.cases} {options.what} from seed {options.seed}: {len(faults)} faults, "
        f"{time.process_time() - began:.0f} s of CPU, at most {most:.2f} s (seed {slowest})"
    )
    for kind, count in found.most_common():
        print(f"{count:6} {kind}")
    if options.cases == 1 and options.what == "scans":
        print(*scans.describe(options.seed), sep="\n")
    print(*faults, sep="\n", file=sys.stderr)
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
