"""`python -m tests.fuzz configs|scans [--cases N] [--seed S]`: random cases, and a summary.

A case is its number: `--cases 1 --seed S` runs case S again. Exits with 1 if any is a fault.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter

import torch

from tests.fuzz import configs, scans


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("what", choices=list(CHECKS))
    parser.add_argument("--cases", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0, help="of the first case; then one by one")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: Counter[str] = Counter()
    faults: list[str] = []
    slowest = (0.0, 0)
    began = time.process_time()
    for seed in range(options.seed, options.seed + options.cases):
        start = time.process_time()
        try:
            found[CHECKS[options.what](seed)] += 1
        except Exception as error:  # whatever it is, it is the finding
            text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            frame = traceback.extract_tb(error.__traceback__)[-1]
            faults.append(
                f"seed {seed}: {text}  [{frame.filename.rpartition('/')[2]}:{frame.lineno}]"
            )
        slowest = max(slowest, (time.process_time() - start, seed))
    seconds = time.process_time() - began
    print(
        f"{options.cases} {options.what} from seed {options.seed}: {seconds:.0f} s of CPU, ", end=""
    )
    print(f"slowest {slowest[0]:.2f} s (seed {slowest[1]}), {len(faults)} faults")
    for kind, count in found.most_common():
        print(f"{count:6} {kind}")
    for fault in faults:
        print(f"fault: {fault}", file=sys.stderr)
    sys.exit(bool(faults))


CHECKS = {"configs": configs.check, "scans": scans.check}

if __name__ == "__main__":
    main()
