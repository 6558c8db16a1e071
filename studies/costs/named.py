"""cost-rules: every named rule beside the transcription of its paper, its speed and its memory.

Errors are the largest of all exact engines, in float64 over 70 tokens. Speed and memory are those of one forward and
backward pass of a layer, each rule in a process of its own.
"""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from hecate.engine import Plan, choose
from hecate.nn import Memory
from hecate.processes import safe_path
from hecate.rule import RULES, MemoryConfig, named_rule
from studies.study import Result, Run, Study, bars, progress

CHUNK = 64
LINKS = "linear"  # where rules with a link take it in chunks: the memory moves from it in the primal
CHUNKED = ("titans", "yaad", "moneta", "memora", "omeganet", "atlas")


FULL, TINY = (256, 4, 2, 512, 5), (16, 2, 1, 8, 1)  # width and heads of the layer, rows and tokens it is given, repeats


def measure(rule: str, chunk: int | None, size: tuple[int, int, int, int, int]) -> dict[str, Any]:
    """One rule in this process, as it is or in chunks: a pass to warm up, one for its memory, then the timed ones. The
    peak is the resident memory that a pass added at its largest moment; None where the system does not say."""
    width, heads, batch, length, repeats = size
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    config = named_rule(rule) if chunk is None else chunked(named_rule(rule), chunk)
    source = torch.Generator().manual_seed(0)
    layer = Memory(width, heads, config, generator=source, dtype=torch.float32)
    x, cotangent = (torch.randn(batch, length, width, generator=source, dtype=torch.float32) for _ in range(2))
    leaves = [x.requires_grad_(), *layer.parameters()]

    def once() -> int:
        y, state = layer(x)
        torch.autograd.grad(y, leaves, cotangent, allow_unused=True)
        return state.memory.bytes

    held = once()
    peak = added_mib(once)
    spent: list[float] = []
    while len(spent) < repeats and (not spent or sum(spent) < 20):
        start = time.process_time()
        once()
        spent.append(time.process_time() - start)
    d_phi = config.feature_map.output_dim(layer.d_key)
    call = Plan.sketch(config, length=length, shape=(layer.d_value, d_phi), dtype=config.dtype)
    speed = batch * length / statistics.median(spent)
    return {"engine": choose(call).name, "tokens_per_second": speed, "state_mib": held / 2**20, "peak_mib": peak}


def chunked(config: MemoryConfig, chunk: int) -> MemoryConfig:
    """The same with the gradients of each chunk at its start, and the link there where it has one."""
    retention = config.retention
    if retention.dual:
        retention = retention.model_copy(update={"link_at": LINKS})
    return config.model_copy(update={"chunk": chunk, "retention": retention})


def added_mib(run: Any) -> float | None:
    """Resident memory that a run adds at its largest moment, after what is free has gone back to the system."""
    gc.collect()
    with suppress(OSError, AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
        before = _resident("VmRSS")
        run()
        return (_resident("VmHWM") - before) / 1024
    except (OSError, IndexError):
        return None


def _resident(name: str) -> int:
    return int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0])


def evidence(rule: str, quick: bool) -> tuple[str, float, float]:
    """Where the truth stands, and the largest relative errors of values and of gradients against it."""
    from tests.rule.distance import LENGTH, engines_of, errors, gradient_errors, reference

    length, chunk, engines = (8, 3, ["sequential"]) if quick else (LENGTH, None, engines_of(rule))
    values = [max(errors(rule, length, engine=engine).values()) for engine in engines]
    how = {"directions": 1 if quick else 3, "chunk": chunk}
    gradients = [max(gradient_errors(rule, length, engine=engine, **how).values()) for engine in engines]
    return reference(rule), max(values), max(gradients)


def rules(run: Run) -> Result:
    """Every rule of the registry; a quick run takes some nine of them, in tiny layers and this process."""
    names = list(RULES)[:: max(1, len(RULES) // 9) if run.quick else 1]
    before, threads = torch.get_default_dtype(), torch.get_num_threads()
    torch.set_default_dtype(torch.float64)
    try:
        found = {rule: evidence(rule, run.quick) for rule in progress(names, "rules against their papers")}
    finally:
        torch.set_default_dtype(before)
    size = TINY if run.quick else FULL
    jobs = [(rule, None) for rule in names] + [(rule, CHUNK) for rule in names if rule in CHUNKED]
    if run.quick:
        costs = {job: measure(*job, size) for job in progress(jobs, "costs of rules")}
        torch.set_num_threads(threads)
        torch.set_flush_denormal(False)
    else:
        with safe_path(), ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
            costs = {job: pool.submit(measure, *job, size).result() for job in progress(jobs, "costs of rules")}
    rows = []
    for rule in names:
        (where, values, gradients), own, other = found[rule], costs[rule, None], costs.get((rule, CHUNK))
        rows.append([
            rule, where, f"{values:.0e}", f"{gradients:.0e}", own["engine"], round(own["tokens_per_second"]),
            other and round(other["tokens_per_second"]), round(own["state_mib"], 2),
            None if own["peak_mib"] is None else round(own["peak_mib"], 1),
        ])  # fmt: skip
    columns = [
        "rule", "reference", "error", "error of gradients", "engine", "tokens/s", "tokens/s, chunk 64", "state MiB",
        "peak MiB",
    ]  # fmt: skip
    engines, place = ("the token loop", "this process") if run.quick else ("every exact engine", "a process of its own")
    notes = [
        f"error: largest of outputs and states of {engines}, relative in norm, against the function of tests.reference",
        "error of gradients: by each input and weight along random directions, against differences of that function of "
        "fourth order",
        f"tokens/s: forward + backward of nn.Memory, width {size[0]}, {size[1]} heads, {size[2]} x "
        f"{size[3]} tokens, float32, one thread, median of CPU time; the engine is the one that auto takes",
        f"chunk 64: gradients of a chunk at its start; rules with a link take it there, link_at={LINKS!r}",
        f"peak: resident memory that a pass adds at its largest moment, in {place}",
    ]
    series = {"every token": [row[5] for row in rows], f"chunks of {CHUNK}": [row[6] for row in rows]}

    def draw(figure: Any) -> None:
        bars(figure, names, series, "", "tokens/s, forward + backward")

    data = {f"{rule}, chunk {chunk}" if chunk else rule: cost for (rule, chunk), cost in costs.items()}
    return Result(columns, rows, notes, draw, size=(8.0, 9.0), data=data)


ABOUT = "How far is every named rule from its paper, how fast is it, and in how much memory?"
NAMED = Study("cost-rules", ABOUT, rules)
