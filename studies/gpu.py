"""gpu: what engines do on a card: whether they are right there, how fast, beside fla and torch's attention.

    python -m studies gpu --prepare .cache/card       # with a network: what a machine without one may lack
    PYTHONPATH=.cache/card python3 -m studies gpu --no-figure --seconds 385 --out OUT    # on the card
    PYTHONPATH=.cache/card python3 -m studies gpu --no-figure --seconds 265 --out OUT    # again: the rest of it

Every part is a process of its own with a limit, and every row is on disk (`gpu-rows.jsonl` in --out) before the next
begins; a kernel that fails, hangs or takes the card's context with it costs its row. The same line again goes on from
there. `--dry` runs all of it at tiny sizes on a CPU, our kernels in Triton's interpreter.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import distributions, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from hecate.engine.triton.parity import here
from hecate.errors import ConfigError
from hecate.files import make_folder, refusing, write_file
from hecate.train.run import versions
from studies.card import LOST, PARTS, Order, add, results, rows_of
from studies.study import Cell, Result, Run, Spread, Study, bars, progress

SECONDS = 600.0  # of all parts
PATIENCE = 90.0  # seconds that a row may take
LEAST = 8.0  # seconds that a process takes to begin
CODE = "import json, sys; from studies.card import Order, work; work(Order(**json.loads(sys.argv[1])))"


def gpu(run: Run) -> Result:
    """Ceilings, parity, first calls, tables, decoding, training, kernels, sanitizer, as far as the seconds reach; what
    failed is a note that says so."""
    where = "a CPU, which tells only that the code runs" if run.dry else torch.cuda.get_device_name()
    path = run.out / f"{run.stem}-rows.jsonl"
    kernels = here("cpu") if find_spec("triton") else {}  # the versions that they hold for, and their text
    facts = {"facts": {**versions(), **kernels, "device": where}, "seeds": len(run.seeds)}
    with refusing(f"write {path}", "choose another --out"):
        begin(path, facts)
    stop = time.monotonic() + (SECONDS if run.seconds is None else run.seconds)
    for name in progress(list(PARTS), "parts"):
        shares = min(14, os.cpu_count() or 1) if PARTS[name].beside and not run.dry else 1
        order = Order(name, str(path.resolve()), run.dry, run.quick, len(run.seeds), shares=shares)
        run_part(order, min(PARTS[name].limit, stop - time.monotonic()))
    return report(path, where)


ABOUT = "What do the engines do on a GPU, beside fla's kernels and torch's attention?"
GPU = Study("gpu", ABOUT, gpu, seeds=2, on_card=True)


def begin(path: Path, facts: dict[str, Any]) -> None:
    """The file of rows: a new one, or what an earlier call has measured on the same machine, less what failed then."""
    make_folder(path.parent)
    before = rows_of(path)
    if before and before[0] != facts:
        raise ConfigError(f"{path} is of another machine, other kernels, versions or seeds; choose another --out")
    measured = [row for row in before[1:] if "values" in row]
    write_file(path, "".join(json.dumps(row) + "\n" for row in (facts, *measured)))


def start(order: Order) -> subprocess.Popen[bytes]:
    """A process of an order, in a group of its own, which takes this checkout ahead of others; what it says goes to a
    log beside the rows. Without a card kernels are interpreted."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    if order.dry and find_spec("triton"):
        environment["TRITON_INTERPRET"] = "1"
    rows = Path(order.rows)
    with rows.with_name(rows.name.replace("rows.jsonl", "log.txt")).open("ab") as log:
        how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "start_new_session": True}
        return subprocess.Popen([sys.executable, "-P", "-c", CODE, json.dumps(order._asdict())], env=environment, **how)


Start = Callable[[Order], subprocess.Popen[bytes]]


def run_part(order: Order, limit: float, start: Start = start, patience: float = PATIENCE) -> None:
    """A part within its seconds, in one process or in several; one that ends before its time costs the row that it had
    begun, and goes on behind it in a new process."""
    path, stop = Path(order.rows), time.monotonic() + limit
    if limit < LEAST:
        return add(path, part=order.part, case="all", way="", error="no time was left")
    shares = [order._replace(share=share) for share in range(order.shares)]
    children = {start(share): share for share in shares}
    try:
        while children:
            time.sleep(0.1)
            for child, share in list(children.items()):
                code, late = child.poll(), time.monotonic() > stop
                begun = unfinished(path, child.pid)
                hangs = begun is not None and time.time() - begun["begun"] > patience
                if code is None and not late and not hangs:
                    continue
                end(child)
                del children[child]
                why = "no time was left" if late else f"no answer in {patience:.0f} s" if hangs else f"exit code {code}"
                if begun is not None:
                    add(path, part=order.part, case=begun["case"], way=begun["way"], error=f"its process: {why}")
                elif code not in (None, 0, LOST):
                    add(path, part=order.part, case="all", way="", error=f"its process: {why}, as the log says")
                if not late and (begun is not None or code == LOST):
                    children[start(share)] = share
    finally:
        for child in children:
            end(child)


def unfinished(path: Path, pid: int) -> dict[str, Any] | None:
    """The row that a process has begun, and no more."""
    over, begun = results(path), (row for row in rows_of(path) if row.get("by") == pid)
    return next((row for row in begun if (row["part"], row["case"], row["way"]) not in over), None)


def end(child: subprocess.Popen[bytes]) -> None:
    """Kills a process and those that it has started, which would disturb the clocks of the next."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def report(path: Path, where: str) -> Result:
    """The table, what has no value, and milliseconds of the first shape of the tables, way by way."""
    rows: list[list[Cell]] = []
    unmeasured = []
    for (part, case, way), row in results(path).items():
        if "error" in row:
            unmeasured.append(f"{part}: {case}: {way}: {row['error']}")
            continue
        value = Spread.of(row["values"]) if len(row["values"]) > 1 else row["values"][0]
        rows.append([part, case, way, value, row["unit"], row["against"], row["peak"]])
    notes = [f"Measured on {where}, torch {torch.__version__}; times are medians, spread over seeds."]
    notes += [f"Unmeasured: {what}." for what in unmeasured]

    def draw(figure: Any) -> None:
        timed = [row for row in rows if row[0] == "tables"]
        lead = str(timed[0][1]).rpartition(", ")[2] if timed else ""
        shown = [row for row in timed if str(row[1]).endswith(lead)]
        labels = [f"{row[1]}: {row[2]}".replace(f", {lead}", "") for row in shown]
        values: list[Any] = [row[3].mean if isinstance(row[3], Spread) else row[3] for row in shown]
        bars(figure, labels, {"median": values}, "What calls take", f"milliseconds, {lead}")

    columns = ("part", "case", "way", "value", "unit", "against", "peak (MiB)")
    return Result(columns, rows, notes, draw, data={"unmeasured": unmeasured})


# What a machine without a network is brought.


def prepare(folder: Path, python: str) -> None:
    """Downloads packages that hecate and its peer need on a card, beside torch, numpy and Triton, for x86-64 Linux.

    Raises:
        ConfigError: pip cannot get it.
    """
    pins = sorted(f"{name}=={version(name)}" for name in needed({"hecate-memory", "fla-core"}) - {"hecate-memory"})
    command = [sys.executable, "-m", "pip", "install", "-q", "--upgrade", "--no-deps", "--no-compile"]
    command += ["--target", str(folder), "--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    command += [f"--platform={tag}_x86_64" for tag in ("manylinux_2_28", "manylinux_2_17", "manylinux2014")]
    done = subprocess.run([*command, *pins], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"pip cannot fill --prepare {folder} for Python {python}: {done.stderr.strip()[-300:]}")
    print(f"{folder}: {', '.join(pins)}")
    print(f"on the card: PYTHONPATH={folder} python3 -m studies gpu --no-figure --seconds 385 --out OUT")


def needed(names: set[str]) -> set[str]:
    """Distributions that these ask for, and those that they ask for in turn, but for what comes with torch."""
    closure: set[str] = set()
    while names := names - closure - {"torch", "numpy", "triton"}:
        closure |= names
        asked = [line for name in names for line in requires(name) or () if "extra ==" not in line]
        names = {name for line in asked if any(distributions(name=(name := re.split(r"[^\w.-]", line)[0].lower())))}
    return closure
