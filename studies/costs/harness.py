"""Comparisons as studies: inputs, equal results first, then medians of interleaved runs in process CPU time, and their
ratio, ours / peer; and the clock itself, which calls all sides in turn, a sample of each per round."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from hecate import Gates, MemoryConfig, memory_scan
from studies.study import Cell, Result, Run, Study, bars, progress

K = TypeVar("K", bound=Hashable)
Call = Callable[[], object]
Function = Callable[..., Tensor]
BATCH, HEADS, WIDTH = 2, 4, 64
TOLERANCE = 1e-3
LEAST = 0.005  # seconds that a sample lasts at least: the clock's own resolution does not show


class Size(NamedTuple):
    """Sizes of a run: the reference case, or a quick look whether the scripts run."""

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


def compare(case: str, ours: Function, peer: Peer, inputs: Sequence[Tensor], repeats: int, memory: bool = False) -> Row:
    """Both sides on the same inputs, forward and forward with backward; or the latter alone, and its memory.

    Refuses to time results, gradients included, of the same function that differ by more than TOLERANCE of their norm.
    Where the peer is not installed the row says so.
    """
    row = Row(case, peer.name)
    if peer.call is None:
        return row._replace(note=f"absent: pip install {peer.package}")
    errors, costs = [], {}
    ways = {"both": forward_backward} if memory else {"forward": forward, "both": forward_backward}
    for name, measure in ways.items():
        sides = measure(ours, inputs), measure(peer.call, inputs)
        if peer.same:
            errors.append(max(distance(*pair) for pair in zip(*(side() for side in sides), strict=True)))
            if not errors[-1] <= TOLERANCE:
                raise AssertionError(f"{case}: results differ by {errors[-1]:.2e} from {peer.name}")
        costs[name] = timed(*sides, repeats)
    if memory:
        costs["memory"] = cost_of(*map(peak_mib, sides))
    return row._replace(**costs, error=max(errors, default=None))


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Relative, in norm."""
    return float((ours - theirs).detach().norm() / theirs.detach().norm().clamp(min=1e-30))


def timed(ours: Call, theirs: Call, repeats: int) -> Cost:
    """Medians of both sides, run in turn."""
    return cost_of(**medians({"ours": ours, "theirs": theirs}, repeats))


def drawn(length: int, gates: int = 0, largest: float = 1.0, batch: int = BATCH, seed: int = 0) -> tuple[Tensor, ...]:
    """q and k of unit length and v of unit variance `[B, T, H, D]`; of the gates lr in (0, largest), retain in (0.9,
    0.999) and momentum in (0.4, 0.9) as many as are asked for, `[B, T, H]`: all in float32."""
    of_tokens, of_gates = (torch.Generator().manual_seed(number) for number in (seed, seed + 1))
    lead, dtype = (batch, length, HEADS), torch.float32
    q, k, v = (torch.randn(*lead, WIDTH, generator=of_tokens, dtype=dtype) for _ in range(3))
    lr, retain, momentum = (torch.rand(lead, generator=of_gates, dtype=dtype) for _ in range(3))
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    return (q, k, v, *(largest * lr, 0.9 + 0.099 * retain, 0.4 + 0.5 * momentum)[:gates])


def scan(config: MemoryConfig, **options: object) -> Function:
    """The outputs of `memory_scan` as a function of q, k, v and as many gates as are given."""

    def run(q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> Tensor:
        return memory_scan(config, q, k, v, Gates(*gates) if gates else None, **options)[0]

    return run


COLUMNS = ("case", "peer", "forward", "f + b", "peak memory", "error", "note")


def cost(cases: Callable[[Size], Iterator[Row]]) -> Study:
    """A study `cost-NAME` of the rows that a function of that name yields; its question is their docstring's."""
    return Study(f"cost-{cases.__name__}", (cases.__doc__ or "").partition("\n")[0], partial(measured, cases))


def measured(cases: Callable[[Size], Iterator[Row]], run: Run) -> Result:
    """One pass in float32, on inputs of its own: the seeds given change nothing."""
    size = Size(64, 1, quick=True) if run.quick else Size()
    with flushed():
        rows = [row for _ in progress([run.name], "cases") for row in cases(size)]
    shown, names = [cells(row) for row in rows], [f"{row.case} / {row.peer}" for row in rows]
    series = {"forward": [row[2] for row in shown], "forward + backward": [row[3] for row in shown]}
    series = {text: ratios for text, ratios in series.items() if any(ratios)}
    notes = [
        f"ours / peer in process CPU time of {torch.get_num_threads()} thread(s), medians of interleaved runs; f + b: "
        "forward with backward",
        "results agree within the printed error, or the row compares two functions and prints none",
    ]
    draw = partial(bars, rows=names, series=series, title="ours / peer, less is better", xlabel="ratio", line=1)
    return Result(COLUMNS, shown, notes, draw, (9.0, 1.6 + 0.28 * len(rows)), {"rows": [row._asdict() for row in rows]})


def cells(row: Row) -> tuple[Cell, ...]:
    """A row of the table."""
    ratios = [cost and cost["ratio"] for cost in (row.forward, row.both, row.memory)]
    return row.case, row.peer, *ratios, row.error and f"{row.error:.0e}", row.note or None


@contextmanager
def flushed() -> Iterator[None]:
    """Denormals, into which a decayed state drifts on either side, are 0 within."""
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def cpu_times(runs: Mapping[K, Call], rounds: int) -> dict[K, Tensor]:
    """Milliseconds of process CPU time per call, `[rounds]` for every run.

    Every run is called once to warm up, then as often per sample as makes it last; the runs take
    turns, so that whatever else the machine does falls on all of them.
    """
    calls = {}
    for name, run in runs.items():
        run()
        calls[name] = max(1, round(1e3 * LEAST / max(_sample(run, 1), 1e-3)))
    samples: dict[K, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            samples[name].append(_sample(run, calls[name]))
    return {name: torch.tensor(taken, dtype=torch.float64) for name, taken in samples.items()}


def medians(runs: Mapping[K, Call], rounds: int) -> dict[K, float]:
    """Of these times."""
    return {name: statistics.median(times.tolist()) for name, times in cpu_times(runs, rounds).items()}


def _sample(run: Call, calls: int) -> float:
    start = time.process_time()
    for _ in range(calls):
        run()
    return 1e3 * (time.process_time() - start) / calls


def forward(function: Function, inputs: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    """The output alone, without recording."""
    return torch.no_grad()(lambda: [function(*inputs)])


def forward_backward(function: Function, inputs: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    """The output and the gradients of all inputs for one fixed cotangent; 0 where unused."""
    cotangent: list[Tensor] = []

    def run() -> list[Tensor]:
        leaves = [item.detach().requires_grad_() for item in inputs]
        y = function(*leaves)
        if not cotangent:
            generator = torch.Generator().manual_seed(1)
            cotangent.append(torch.randn(y.shape, generator=generator, dtype=y.dtype))
        grads = torch.autograd.grad(y, leaves, cotangent[0], allow_unused=True)
        return [y, *(grad for grad in grads if grad is not None)]

    return run


def peak_mib(run: Call) -> float:
    """Most memory that torch's CPU allocator holds at once during a second run, beyond what it held.

    The profiler's record of every allocation, temporaries inside operators and the backward pass
    included; memory that does not come from torch is not seen.
    """
    run()
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    in_time = sorted(events, key=lambda event: event.start_ns())
    return max(0, *accumulate(event.nbytes() for event in in_time)) / 2**20
