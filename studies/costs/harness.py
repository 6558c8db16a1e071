"""Comparisons as studies: inputs, equal results first, then medians of interleaved runs in process CPU time, and their
ratio, ours / peer."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hecate import Gates, MemoryConfig, memory_scan
from studies.study import Cell, Result, Run, Study, bars, progress
from studies.timing import Call, Function, cpu_times, forward, forward_backward

BATCH, HEADS, WIDTH = 2, 4, 64
TOLERANCE = 1e-3


class Size(NamedTuple):
    """How much of everything: the reference case, or a quick look whether the scripts run."""

    length: int = 2048
    repeats: int = 9
    quick: bool = False

    def short(self, length: int) -> int:
        """A length of one's own, cut in a quick run."""
        return min(length, self.length) if self.quick else length

    def fewer(self, share: int) -> int:
        """Repeats of what takes long."""
        return max(1 if self.quick else 2, self.repeats // share)


Cost = dict[str, float]


def cost_of(ours: float, theirs: float) -> Cost:
    """Two sides of one quantity, ms of CPU time or MiB, and their ratio."""
    return {"ours": ours, "theirs": theirs, "ratio": ours / theirs}


class Peer(NamedTuple):
    """The other side: its function, what pip is to install where that is None, and whether it computes the same."""

    name: str
    call: Function | None
    package: str = ""
    same: bool = True


class Row(NamedTuple):
    """One comparison."""

    case: str
    peer: str
    forward: Cost | None = None
    both: Cost | None = None
    memory: Cost | None = None
    error: float | None = None
    note: str = ""


def compare(
    case: str, ours: Function, peer: Peer, inputs: Sequence[Tensor], repeats: int, directions: str = "fb"
) -> Row:
    """Both sides, forward (`f`) and forward with backward (`b`), on the same inputs.

    Refuses to time results, gradients included, of the same function that differ by more than TOLERANCE of their norm.
    Where the peer is not installed the row says so.
    """
    row = Row(case, peer.name)
    if peer.call is None:
        return row._replace(note=f"absent: pip install {peer.package}")
    errors, costs = [], {}
    for name, measure in (("f", forward), ("b", forward_backward)):
        if name in directions:
            sides = measure(ours, inputs), measure(peer.call, inputs)
            if peer.same:
                errors.append(max(distance(*pair) for pair in zip(*(side() for side in sides), strict=True)))
                if not errors[-1] <= TOLERANCE:
                    raise AssertionError(f"{case}: results differ by {errors[-1]:.2e} from {peer.name}")
            costs[name] = timed(*sides, repeats)
    return row._replace(forward=costs.get("f"), both=costs.get("b"), error=max(errors, default=None))


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Relative, in norm."""
    return float((ours - theirs).detach().norm() / theirs.detach().norm().clamp(min=1e-30))


def timed(ours: Call, theirs: Call, repeats: int) -> Cost:
    """Medians of both sides, run in turn."""
    found = cpu_times({"ours": ours, "theirs": theirs}, repeats)
    return cost_of(*(statistics.median(times.tolist()) for times in found.values()))


def drawn(
    length: int, gates: int = 0, *, largest: float = 1.0, batch: int = BATCH, seed: int = 0
) -> tuple[Tensor, ...]:
    """q and k of unit length and v of unit variance `[B, T, H, D]`; of the gates lr in (0, largest), retain in (0.9,
    0.999) and momentum in (0.4, 0.9) as many as are asked for, `[B, T, H]`: all in float32."""
    of_tokens, of_gates = (torch.Generator().manual_seed(own) for own in (seed, seed + 1))
    lead, how = (batch, length, HEADS), {"dtype": torch.float32}
    q, k, v = (torch.randn(*lead, WIDTH, generator=of_tokens, **how) for _ in range(3))
    lr, retain, momentum = (torch.rand(lead, generator=of_gates, **how) for _ in range(3))
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    return (q, k, v, *(largest * lr, 0.9 + 0.099 * retain, 0.4 + 0.5 * momentum)[:gates])


def scan(config: MemoryConfig, **options: object) -> Function:
    """The outputs of `memory_scan` as a function of q, k, v and as many gates as are given."""

    def run(q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> Tensor:
        return memory_scan(config, q, k, v, Gates(*gates) if gates else None, **options)[0]

    return run


COLUMNS = ("case", "peer", "forward", "f + b", "peak memory", "error", "note")
NOTES = (
    "ratios are ours / peer in process CPU time (peak memory: in bytes), medians of interleaved runs: forward, and "
    "forward with backward (f + b)",
    "results agree within the printed error, or the row compares two functions and prints none",
)


def cost(cases: Callable[[Size], Iterator[Row]]) -> Study:
    """A study `cost-NAME` of the rows that a function of that name yields; its question is their docstring's."""
    return Study(f"cost-{cases.__name__}", (cases.__doc__ or "").partition("\n")[0], partial(measured, cases))


def measured(cases: Callable[[Size], Iterator[Row]], run: Run) -> Result:
    """One pass in float32, on inputs of its own: the seeds given change nothing."""
    torch.set_flush_denormal(True)  # a decayed state drifts into them, on either side
    try:
        size = Size(64, 1, quick=True) if run.quick else Size()
        rows = [row for _ in progress([run.name], "cases") for row in cases(size)]
    finally:
        torch.set_flush_denormal(False)
    shown, names = [cells(row) for row in rows], [f"{row.case} / {row.peer}" for row in rows]
    series = {"forward": [row[2] for row in shown], "forward + backward": [row[3] for row in shown]}
    series = {text: ratios for text, ratios in series.items() if any(ratios)}
    notes, inches = (*NOTES, f"{torch.get_num_threads()} thread(s)"), (9.0, 1.6 + 0.28 * len(rows))

    def draw(figure: Any) -> None:
        bars(figure, names, series, "ours / peer, less is better", "ratio", line=1)

    return Result(COLUMNS, shown, notes, draw, inches, {"rows": [row._asdict() for row in rows]})


def cells(row: Row) -> tuple[Cell, ...]:
    """A row of the table."""
    ratios = [cost and cost["ratio"] for cost in (row.forward, row.both, row.memory)]
    return row.case, row.peer, *ratios, row.error and f"{row.error:.0e}", row.note or None
