"""`python -m tests.mutation [NAME ...]`: plants one fault after the other and counts the noticed.

Each fault of `faults.py` is planted in a copy of the project; its own tests run there, and a
failing test kills it. A fault that survives is a gap in the tests.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

from tests.mutation.faults import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("hecate", "studies", "tests", "specs", "pyproject.toml")
FAILED = 1  # pytest's exit code when tests ran and some failed
SECONDS = 900


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("names", nargs="*", help="plant faults with these words in their path only")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path, default=Path("runs/mutation.json"))
    options = parser.parse_args()
    chosen = [fault for fault in FAULTS if not options.names or any(n in fault.path for n in options.names)]
    if not chosen:
        parser.error(f"no fault has any of {', '.join(options.names)} in its path")
    with tempfile.TemporaryDirectory() as scratch:
        folders: Queue[Path] = Queue()
        for index in range(options.workers):
            folder = Path(scratch, str(index))
            for name in COPIED:
                copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
                folder.mkdir(exist_ok=True)
                copy(ROOT / name, folder / name)
            folders.put(folder)

        def judge(fault: Fault) -> dict[str, object]:
            folder = folders.get()
            try:
                return _judge(fault, folder)
            finally:
                folders.put(folder)

        with ThreadPoolExecutor(options.workers) as pool:
            results = list(pool.map(judge, chosen))
    killed = sum(result["killed"] is True for result in results)
    print(f"\n{killed} of {len(results)} faults noticed ({killed / len(results):.1%})")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(results, indent=1))
    sys.exit(killed < 0.95 * len(results))


def _judge(fault: Fault, folder: Path) -> dict[str, object]:
    path = folder / fault.path
    text = path.read_text()
    start = time.monotonic()
    try:
        path.write_text(fault.planted(text))
        code = _run(folder, fault.tests)
    finally:
        path.write_text(text)
    killed = code == FAILED
    what = "noticed" if killed else f"SURVIVES (pytest exit {code})"
    print(
        f"{what:<10} {time.monotonic() - start:5.0f} s  {fault.path}: {fault.old.strip()!r} -> {fault.new.strip()!r}",
        flush=True,
    )
    return {"path": fault.path, "old": fault.old, "new": fault.new, "killed": killed}


def _run(folder: Path, tests: str) -> int:
    # Kernels of planted faults are not for the user's own folder.
    own = {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "NUMBA_CACHE_DIR": str(folder.parent)}
    environment = {**os.environ, **own}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests.split()]
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=SECONDS,
        check=False,
    ).returncode


if __name__ == "__main__":
    main()
