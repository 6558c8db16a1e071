"""Comparisons, each a study: linear attention and memories that learn, beside peers; the library against itself and
bare arithmetic; steps of optimisers beside torch's; and every named rule beside the transcription of its paper."""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from hecate import ConfigError, Gates, MemoryConfig, bias, memory_scan, named_rule, phi, retention, structure
from hecate.engine import Plan, choose
from hecate.nn import Memory
from hecate.optim import DGD, M3, DeepMomentum, DeltaMomentum, KernelMomentum, Muon, PhiMomentum
from hecate.optim.lift import STEPS
from hecate.processes import safe_path
from hecate.rule import RULES
from studies.costs import peers
from studies.costs.harness import WIDTH, Call, Peer, Row, Size, compare, drawn, scan, timed
from studies.costs.peers import matrix_loop, mlp_loop
from studies.study import Result, Run, Study, bars, progress
from tests.oracle.peers import Titans

TAPE: dict[str, Any] = {"engine": "sequential", "autodiff": "tape"}


def linear(size: Size) -> Iterator[Row]:
    """Causal linear attention against a C++ kernel, softmax attention and performer-pytorch."""
    case, inputs = "linear attention, T={}".format, drawn(size.length)
    ours, softmax = scan(named_rule("hebbian")), peers.sdpa()
    for peer in (peers.fast_transformers(), peers.fast_transformers(native=True), softmax):
        yield compare(case(size.length), ours, peer, inputs, size.repeats)
    long = size.short(16384)
    yield compare(case(long), ours, softmax, drawn(long, batch=1), size.fewer(9))
    relu = phi.PerformerReLU(kernel_epsilon=1e-3 * WIDTH**0.25)
    params = relu.init(WIDTH)
    config = MemoryConfig(bias="dot", feature_map=relu, normalizer="sum")
    peer = peers.performer(params["frozen"]["w"][0].mT.contiguous())
    name = f"linear attention, ReLU features ({relu.output_dim(WIDTH)}), normaliser"
    yield compare(name, scan(config, phi_params=params), peer, inputs, size.fewer(3))


def delta(size: Size) -> Iterator[Row]:
    """The delta rule against fla-core's chunked reference."""

    def theirs(module, *inputs: Tensor) -> Tensor:
        return module.delta_rule_chunkwise(*(x.transpose(1, 2) for x in inputs))[0].transpose(1, 2)

    ours, peer = scan(MemoryConfig(query_scale="key_dim")), peers.fla("delta_rule", theirs)
    yield compare(f"delta, T={size.length}", ours, peer, drawn(size.length, 1), size.repeats)


def gated_delta(size: Size) -> Iterator[Row]:
    """The gated delta rule against fla-core's chunked reference."""

    def theirs(module, q: Tensor, k: Tensor, v: Tensor, lr: Tensor, retain: Tensor) -> Tensor:
        return module.naive_chunk_gated_delta_rule(q, k, v, retain.log(), lr, chunk_size=32)[0]

    ours = scan(named_rule("gated_delta").model_copy(update={"key_norm": "none", "query_scale": "key_dim"}))
    peer = peers.fla("gated_delta_rule", theirs)
    yield compare(f"gated delta, T={size.length}", ours, peer, drawn(size.length, 2), size.repeats)


def titans(size: Size) -> Iterator[Row]:
    """Titans with one linear layer: exact token by token, where the peer approximates."""
    name, weight = "titans-pytorch, chunks of 64 (an approximation)", torch.zeros(4, WIDTH, WIDTH, dtype=torch.float32)
    peer = peers.titans(name, Titans(chunk=64, batch=64), weight=weight)._replace(same=False)
    ours, inputs = scan(MemoryConfig(retention="decay", algorithm="momentum")), drawn(size.length, 3, largest=0.1)
    yield compare(f"Titans linear with momentum, exact, T={size.length}", ours, peer, inputs, size.repeats)


def mlp(size: Size) -> Iterator[Row]:
    """Titans with two layers and gradients frozen at a chunk's start, the same function."""
    deep, chunk = structure.MLP(layers=2, expansion=1, activation="gelu"), 64
    initial = deep.init(WIDTH, WIDTH, heads=4)
    for commit, length in (("chunk", size.length), ("token", size.short(512))):
        per_chunk = commit == "chunk"
        decay = retention.Decay(towards="zero")
        config = MemoryConfig(structure=deep, retention=decay, algorithm="momentum", chunk=chunk, commit=commit)
        settings = Titans(depth=2, chunk=chunk if per_chunk else 1, batch=chunk)
        q, k, v, lr, *gates = drawn(length, 3, largest=0.01)
        if per_chunk:  # one step per chunk has one gate: the peer's is the mean over the chunk
            gates = [gate[:, ::chunk].repeat_interleave(chunk, 1)[:, :length] for gate in gates]
        peer = peers.titans(f"titans-pytorch, batches of {chunk}, same function", settings, **initial)
        ours = partial(_chunks, config, initial)
        case = f"Titans MLP, one step per {commit}, T={length}"
        yield compare(case, ours, peer, (q, k, v, lr, *gates), size.fewer(2))


def _chunks(config: MemoryConfig, initial: dict[str, Tensor], *inputs: Tensor) -> Tensor:
    q, k, v, lr, retain, momentum = inputs
    if config.commit == "chunk":  # a chunk keeps the product of its retain gates, and its last momentum
        retain = retain ** (1 / config.chunk)
        momentum = momentum.unflatten(1, (-1, config.chunk)).mean(2).repeat_interleave(config.chunk, 1)
    return memory_scan(config, q, k, v, Gates(lr, retain, momentum), initial=initial)[0]


def biases(size: Size) -> Iterator[Row]:
    """Biases for which no peer has a parallel form, against the rule's token loop."""
    length, near = size.short(512), {"p": 1.01, "eps": 1e-2}
    for name, loss, slope in (
        ("huber", bias.Huber(delta=0.5), partial(torch.clamp, min=-0.5, max=0.5)),
        ("near l1 (lp 1.01)", bias.Lp(**near), partial(_power, **near)),
    ):
        peer = Peer("token loop in torch under autograd", partial(matrix_loop, slope=slope))
        ours, inputs = scan(MemoryConfig(bias=loss, retention="decay")), drawn(length, 2, largest=0.1)
        yield compare(f"{name}, T={length}", ours, peer, inputs, size.fewer(2))


def _power(error: Tensor, p: float, eps: float) -> Tensor:
    radius = (error.square() + eps**2).sqrt()
    return (error.square() / (radius + eps)) ** (p - 1) * error / radius


def tape(size: Size) -> Iterator[Row]:
    """`autodiff="tape"` keeps of the order of sqrt(T) states; autograd keeps all of them."""
    length = size.short(512)
    inputs = drawn(length, 2, largest=0.1)
    deep = structure.MLP(layers=2, expansion=1, activation="silu")
    weights = deep.init(WIDTH, WIDTH, heads=4).values()
    for name, ours, theirs, arguments in (
        ("MLP memory (64-64-64)", partial(_tape, deep), mlp_loop, (*inputs, *weights)),
        ("matrix memory, gated", scan(MemoryConfig(retention="decay"), **TAPE), matrix_loop, inputs),
    ):
        peer = Peer("plain torch loop under autograd", theirs)
        yield compare(f"{name}, token loop, T={length}", ours, peer, arguments, size.fewer(3), memory=True)


def _tape(deep: structure.MLP, *inputs: Tensor) -> Tensor:
    config = MemoryConfig(structure=deep, retention=retention.Decay(towards="zero"))
    q, k, v, lr, retain, w1, w2 = inputs
    return memory_scan(config, q, k, v, Gates(lr, retain), initial={"w1": w1, "w2": w2}, **TAPE)[0]


def engines(size: Size) -> Iterator[Row]:
    """The engines that `engine="auto"` chooses from."""
    length, ttt = size.short(512), named_rule("ttt_linear")
    rules = {name: named_rule(name) for name in ("hebbian", "delta", "gated_delta", "titans_linear")}
    rules |= {name: MemoryConfig.model_validate({"bias": name, "retention": "decay"}) for name in ("huber", "lp")}
    rules |= {"ttt_linear, chunk 16": ttt, "ttt_linear, chunk 64": ttt.model_copy(update={"chunk": 64})}
    for name, config in rules.items():
        count = 1 + config.retention.uses_retain + config.algorithm.uses_momentum
        inputs = drawn(length, count, largest=0.02 if config.chunk > 1 else 0.1)
        for engine in ("compiled", "parallel", "chunk"):
            run, peer = scan(config, engine=engine), Peer("engine sequential", scan(config, engine="sequential"))
            try:
                run(*drawn(1, count))
            except ConfigError:  # not exact for this rule
                continue
            yield compare(f"{name}, engine {engine}, T={length}", run, peer, inputs, size.fewer(4))


SAMPLES = 256
LR = 1e-3
Make = Callable[..., Optimizer]  # of parameters and a rate

OURS: dict[str, Make] = {
    "phi_momentum identity": PhiMomentum,
    "phi_momentum tanh": partial(PhiMomentum, feature_map="tanh"),
    "phi_momentum diagonal": partial(PhiMomentum, precondition="diagonal"),
    "kernel_momentum": KernelMomentum,
    "delta_momentum matrix": DeltaMomentum,
    "delta_momentum rows": partial(DeltaMomentum, reading="rows"),
    "delta_momentum scalar": partial(DeltaMomentum, reading="scalar"),
    "deep_momentum": DeepMomentum,
    "deep_momentum shared": partial(DeepMomentum, shared=True),
    f"dgd mean, {SAMPLES} samples": partial(DGD, batch="mean", unattached="sgd"),
    f"dgd sequential, {SAMPLES} samples": partial(DGD, batch="sequential", unattached="sgd"),
    "muon": Muon,
    "muon bfloat16": partial(Muon, ns_dtype="bfloat16"),
    "m3 period 8": M3,
    "phi_momentum orthogonalized": partial(PhiMomentum, orthogonalize=True),
}
ORTHOGONAL = ("muon", "muon bfloat16", "m3 period 8", "phi_momentum orthogonalized")
THEIRS: dict[str, Make] = {
    "SGD momentum, foreach": partial(SGD, momentum=0.9, foreach=True),
    "AdamW, foreach": partial(AdamW, foreach=True),
    "torch.optim.Muon": torch.optim.Muon,
}


def optim(size: Size) -> Iterator[Row]:
    """Each optimiser against foreach SGD and AdamW; those that orthogonalise against torch's Muon.

    Parameters: two blocks of a transformer of width 256 with their vectors; matrices alone for
    those that orthogonalise.
    """
    note = f"{sum(p.numel() for p in _model(size).parameters()) / 1e6:.2g}M parameters"
    for case, make in OURS.items():
        whitens = case in ORTHOGONAL
        for peer, other in list(THEIRS.items())[: 3 if whitens else 2]:
            ours, theirs = (_steps(chosen, size, bias=not whitens) for chosen in (make, other))
            taken = timed(ours, theirs, size.fewer(3 if other is torch.optim.Muon else 1))
            yield Row(case, peer, forward=taken, note=note)


def _steps(make: Make, size: Size, bias: bool) -> Call:
    """Steps on gradients of one backward pass, behind those that an optimiser watches to say whether its phi acts."""
    model = _model(size, bias)
    optimizer = make(model.parameters(), LR)
    if isinstance(optimizer, DGD):
        optimizer.attach(model)
    draws = torch.Generator().manual_seed(1)
    model(torch.randn(SAMPLES, model[0].in_features, generator=draws, dtype=torch.float32)).square().mean().backward()
    for _ in range(STEPS + 1):
        optimizer.step()
    return optimizer.step


def _model(size: Size, bias: bool = True) -> nn.Sequential:
    """Linear layers of the shapes of two transformer blocks."""
    width = WIDTH // 2 if size.quick else 4 * WIDTH
    shapes = [(width, 3 * width), (3 * width, width), (width, 4 * width), (4 * width, width)] * 2
    model = nn.Sequential(*(nn.Linear(*shape, bias=bias, dtype=torch.float32) for shape in shapes))
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=draws, dtype=torch.float32) / p.shape[-1] ** 0.5)
    return model


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

    state_mib = once() / 2**20
    peak = added_mib(once)
    spent: list[float] = []
    while len(spent) < repeats and sum(spent) < 20:
        start = time.process_time()
        once()
        spent.append(time.process_time() - start)
    d_phi = config.feature_map.output_dim(layer.d_key)
    call = Plan.sketch(config, length=length, shape=(layer.d_value, d_phi), dtype=config.dtype)
    speed = batch * length / statistics.median(spent)
    return {"engine": choose(call).name, "tokens_per_second": speed, "state_mib": state_mib, "peak_mib": peak}


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
    """The file of the reference, and the largest relative errors of values and of gradients against it."""
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
        errors = {rule: evidence(rule, run.quick) for rule in progress(names, "rules against their papers")}
    finally:
        torch.set_default_dtype(before)
    size = TINY if run.quick else FULL
    jobs = [(rule, None) for rule in names] + [(rule, CHUNK) for rule in names if rule in CHUNKED]
    pool = ThreadPoolExecutor(1) if run.quick else ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1)
    with safe_path(), pool:
        costs = {job: pool.submit(measure, *job, size).result() for job in progress(jobs, "costs of rules")}
    torch.set_num_threads(threads)
    rows = []
    for rule in names:
        (source, values, gradients), plain, chunks = errors[rule], costs[rule, None], costs.get((rule, CHUNK))
        rows.append([
            rule, source, f"{values:.0e}", f"{gradients:.0e}", plain["engine"], round(plain["tokens_per_second"]),
            chunks and round(chunks["tokens_per_second"]), round(plain["state_mib"], 2),
            None if plain["peak_mib"] is None else round(plain["peak_mib"], 1),
        ])  # fmt: skip
    columns = [
        "rule", "reference", "error", "error of gradients", "engine", "tokens/s", "tokens/s, chunk 64", "state MiB",
        "peak MiB",
    ]  # fmt: skip
    notes = [
        "error: largest of outputs and states, relative in norm, against the function of tests.reference; of "
        "gradients, along random directions, against its differences",
        f"tokens/s: forward + backward of nn.Memory, width {size[0]}, {size[1]} heads, {size[2]} x {size[3]} tokens; "
        f"the engine is the one that auto takes; chunk 64: rules with a link have link_at={LINKS!r}",
    ]
    series = {"every token": [row[5] for row in rows], f"chunks of {CHUNK}": [row[6] for row in rows]}
    draw = partial(bars, rows=names, series=series, title="", xlabel="tokens/s, forward + backward")
    data = {f"{rule}, chunk {chunk}" if chunk else rule: cost for (rule, chunk), cost in costs.items()}
    return Result(columns, rows, notes, draw, size=(8.0, 9.0), data=data)


ABOUT = "How far is every named rule from its paper, how fast is it, and in how much memory?"
NAMED = Study("cost-rules", ABOUT, rules)
