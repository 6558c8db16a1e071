"""`python -m studies NAME ... [--quick]`: runs studies; `--list` says which there are."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from hecate.terminal import quiet_interrupts

if __name__ == "__main__":
    quiet_interrupts()

import torch

from hecate.checks import expect_number
from hecate.errors import HecateError
from hecate.train.display import Interrupted
from studies.gpu import prepare
from studies.study import list_studies, run_studies


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line with `argv`, or the process's own arguments."""
    parser = argparse.ArgumentParser(prog="python -m studies", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a study, or cost, or all")
    parser.add_argument("--list", action="store_true", help="the studies and their questions")
    parser.add_argument("--quick", action="store_true", help="in seconds, less exact")
    parser.add_argument("--seeds", type=int, help="how many, from 0 on")
    parser.add_argument("--out", type=Path, default=Path("runs/studies"), help="folder of files")
    parser.add_argument("--no-figure", action="store_true", help="do without matplotlib")
    parser.add_argument("--threads", type=int, default=1, help="of torch; times are quoted for 1")
    parser.add_argument("--dry", action="store_true", help="of gpu: tiny, on a CPU, to see that its code runs")
    parser.add_argument("--seconds", type=float, help="of gpu: how long it may take")
    parser.add_argument("--prepare", type=Path, metavar="FOLDER", help="of gpu: what a card without a network may lack")
    parser.add_argument("--python", default="3.12", help="of that machine (3.12)")
    options = parser.parse_args(argv)
    try:
        for name, most in (("threads", 1024), ("seeds", 10_000), ("seconds", 1e6)):
            if (value := getattr(options, name)) is not None:
                expect_number(value, f"--{name}", 1, most)
        torch.set_num_threads(options.threads)
        if options.prepare is not None:
            return prepare(options.prepare, options.python)
        if options.list or not options.names:
            return list_studies()
        how = {name: getattr(options, name) for name in ("quick", "seeds", "out", "dry", "seconds")}
        run_studies(options.names, figure=not options.no_figure, **how)
    except Interrupted:
        print("stopped; what is done is kept: the same line again goes on", file=sys.stderr)
        raise SystemExit(3) from None
    except HecateError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
