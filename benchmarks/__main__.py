"""`python -m benchmarks [GROUP ...]`: hecate against its peers, ratios of one run.

`python -m benchmarks rules` trains every named rule instead.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from benchmarks import learning, tables
from benchmarks.attention import linear
from benchmarks.decoding import decode
from benchmarks.engines import engines
from benchmarks.harness import Row, Size, matmul_gflops
from benchmarks.lengths import lengths
from benchmarks.levels import levels
from benchmarks.maps import maps
from benchmarks.optimisers import optimisers
from benchmarks.rules import biases, delta, gated_delta, mlp, titans
from benchmarks.tapes import tape

GROUPS: dict[str, Callable[[Size], Iterator[Row]]] = {
    "linear": linear,
    "delta": delta,
    "gated_delta": gated_delta,
    "titans": titans,
    "mlp": mlp,
    "biases": biases,
    "tape": tape,
    "decode": decode,
    "lengths": lengths,
    "phi": maps,
    "engines": engines,
    "levels": levels,
    "optim": optimisers,
}
NOTE = (
    "Ratios are ours / peer in process CPU time, medians of interleaved runs; results agree within "
    "the printed error, or the row compares two functions and prints none."
)


def main(arguments: Sequence[str] | None = None) -> None:
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given[:1] == ["rules"]:
        return learning.main(given[1:])
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("groups", nargs="*", help=f"any of {', '.join(GROUPS)}; default: all")
    parser.add_argument("--threads", type=int, default=1, help="beyond 1 also by the clock")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="short sequences, to try the script")
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks.json"))
    options = parser.parse_args(given)
    unknown = set(options.groups) - set(GROUPS)
    if unknown:
        parser.error(f"unknown group {', '.join(sorted(unknown))}; known: {', '.join(GROUPS)}")
    torch.set_num_threads(options.threads)
    torch.set_flush_denormal(True)  # a decayed state drifts into them, on either side
    size = Size(64, 1, quick=True) if options.quick else Size(repeats=options.repeats)
    print(
        f"{NOTE}\nOne matrix product: {matmul_gflops():.0f} GFLOP/s on {options.threads} thread(s)"
    )
    rows: list[Row] = []
    for name in options.groups or GROUPS:
        for row in GROUPS[name](size):
            rows.append(row)
            print(tables.line(row, wall=options.threads > 1), flush=True)
    print(f"\n{tables.speed(rows)}\n\n{tables.memory(rows)}")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "threads": options.threads,
        "matmul_gflops": matmul_gflops(),
        "rows": [tables.record(row) for row in rows],
    }
    options.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
