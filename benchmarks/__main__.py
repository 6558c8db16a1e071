"""`python -m benchmarks [GROUP ...]`: hecate against its peers, medians of interleaved runs."""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path

import torch

from benchmarks.engines import GROUPS
from benchmarks.harness import Row, markdown


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("groups", nargs="*", help=f"any of {', '.join(GROUPS)}; default: all")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="short sequences, to try the script")
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks.json"))
    options = parser.parse_args()
    unknown = set(options.groups) - set(GROUPS)
    if unknown:
        parser.error(f"unknown group {', '.join(sorted(unknown))}; known: {', '.join(GROUPS)}")
    torch.set_num_threads(options.threads)
    rows: list[Row] = []
    for name in options.groups or GROUPS:
        for row in GROUPS[name](512 if options.quick else 2048, options.repeats):
            rows.append(row)
            print(row.line, flush=True)
    print()
    print(markdown(rows))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "threads": options.threads,
        "rows": [row._asdict() for row in rows],
    }
    options.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
