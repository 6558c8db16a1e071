"""Measurements of a card, part by part: `work(order)` does the tasks of one part that have no row yet.

A process of its own does it (`studies.gpu` starts it), for a kernel may hang, or take the card's context with it. Every
row is on disk before the next task begins: what was begun and has no result is what ended the process.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
import timeit
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from itertools import islice, product
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from hecate.engine import Stepper, memory_scan, memory_step
from hecate.models import LanguageModel, LanguageModelConfig
from hecate.rule import Gates, MemoryConfig, named_rule
from hecate.train.checkpoint import named
from hecate.train.trainer import compile_chunks

LOST = 3  # how a process ends whose card answers no more
QUIET: dict[str, Any] = {"on_nonfinite": "propagate"}  # without a look for what is no number
RULES = {
    "gated delta": named_rule("gated_delta").model_copy(update=QUIET),
    "exact momentum": named_rule("titans_linear").model_copy(update=QUIET),
    "huber": MemoryConfig(bias="huber", retention="decay", **QUIET),
    "delta": MemoryConfig(**QUIET),
    "kda": named_rule("kda").model_copy(update=QUIET),
    "linear attention": MemoryConfig(bias="dot", **QUIET),
}
LP: dict[str, Any] = {"kind": "lp", "p": 3.0}
MORE = {  # whether they are right, and no more
    "lp": MemoryConfig(bias=LP, retention="decay", **QUIET),
    "kl": MemoryConfig(bias="kl", retention="decay", **QUIET),
    "huber, momentum": MemoryConfig(bias="huber", retention="decay", algorithm="momentum", **QUIET),
    "lp and lq, token by token": MemoryConfig(bias=LP, retention={"kind": "lq", "eps": 1e-3}, **QUIET),
    "elastic net, token by token": MemoryConfig(retention="elastic_net", **QUIET),
    "sphere, token by token": MemoryConfig(bias="huber", retention="sphere", **QUIET),
}
MODELS: dict[str, dict[str, Any]] = {
    "gated delta": {"memory": "gated_delta"},
    "softmax attention": {"attention": {"kind": "attention"}},
    "exact momentum": {"memory": "titans_linear"},
    "huber": {"memory": {"kind": "titans_linear", "bias": "huber"}},
    "Titans MLP, chunk 64": {"memory": {"kind": "titans", "chunk": 64}},
    "Titans MLP, chunk 64, its chunk compiled": {"memory": {"kind": "titans", "chunk": 64}},
    "gated delta, torch.compile": {"memory": "gated_delta"},
    "softmax attention, torch.compile": {"attention": {"kind": "attention"}},
}
PEERS = {  # of fla, called directly: what a rule's own call leaves to add
    "linear attention": "fla.ops.simple_gla:chunk_simple_gla",
    "delta": "fla.ops.delta_rule:chunk_delta_rule",
    "gated delta": "fla.ops.gated_delta_rule:chunk_gated_delta_rule",
    "kda": "fla.ops.kda:chunk_kda",
}
Case = dict[str, Tensor]  # q, k, v `[B, T, H, D]` and the gates that a config takes, by name
Call = Callable[[Case], Tensor]
Beside = tuple[list[float], str]  # values, and what they stand beside


class Size(NamedTuple):
    """Of a run: the side of matrices that ceilings are taken of, widths and tokens of parity, shapes `(B, T, H, D)` of
    tables, the most telling first, heads and widths of decoding, repeats, and a model's width, layers, rows and
    tokens."""

    side: int
    widths: Sequence[int]
    tokens: int
    shapes: Sequence[tuple[int, int, int, int]]
    decode: Sequence[tuple[int, int]]
    repeats: int
    model: tuple[int, int, int, int]


SHAPES = (
    (1, 8192, 16, 128), (1, 32768, 8, 128), (8, 2048, 16, 64), (1, 32768, 16, 64), (1, 8192, 32, 128),
    (8, 4096, 16, 128),
)  # fmt: skip
FULL = Size(8192, (64, 128), 150, SHAPES, ((16, 64), (16, 128), (512, 128)), 10, (768, 12, 8, 2048))
QUICK = Size(8192, (64,), 150, SHAPES[:1], ((16, 64),), 5, (768, 2, 2, 1024))
TINY = Size(64, (8,), 20, ((1, 32, 2, 8),), ((2, 8),), 1, (16, 1, 1, 32))


class Order(NamedTuple):
    """Work for one process: its share of a part's tasks, dry ones on a CPU, and where rows go."""

    part: str
    rows: str
    dry: bool = False
    quick: bool = False
    seeds: int = 1
    share: int = 0
    shares: int = 1

    @property
    def device(self) -> torch.device:
        """The card, or in its place the CPU."""
        return torch.device("cpu" if self.dry else "cuda")

    @property
    def size(self) -> Size:
        """Of its tasks."""
        return TINY if self.dry else QUICK if self.quick else FULL

    @property
    def rules(self) -> dict[str, MemoryConfig]:
        """All of them, or two."""
        return {name: RULES[name] for name in list(RULES)[: 2 if self.quick else None]}

    def case(self, config: MemoryConfig, shape: Sequence[int], seed: int = 0, dtype: torch.dtype | None = None) -> Case:
        """Keys of unit length and gates `[B, T, H]`; for kda retain of each channel."""
        dtype = dtype or (torch.float32 if self.dry else torch.bfloat16)
        g = torch.Generator(self.device).manual_seed(seed)
        draw: dict[str, Any] = {"generator": g, "device": self.device}
        q, k, v = (torch.randn(*shape, **draw) for _ in range(3))
        case = {"q": (q * shape[3] ** -0.5).to(dtype), "k": F.normalize(k, dim=-1).to(dtype), "v": v.to(dtype)}
        case["lr"] = torch.rand(*shape[:3], **draw)
        if config.retention.uses_retain:
            case["retain"] = 0.8 + 0.2 * torch.rand(*shape[: 4 if config == RULES["kda"] else 3], **draw)
        if config.algorithm.uses_momentum:
            case["momentum"] = 0.8 + 0.2 * torch.rand(*shape[:3], **draw)
        return {name: x.requires_grad_() for name, x in case.items()}

    def wait(self) -> None:
        """For what the card has been given."""
        if not self.dry:
            torch.cuda.synchronize()


class Task(NamedTuple):
    """One row: what is measured, by which way, and the call that gives a value for each seed, or a value and what it
    stands beside."""

    case: str
    way: str
    unit: str
    call: Callable[[], Any]


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Rows on disk; a line that was cut short is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def add(path: Path, **row: Any) -> None:
    """A row, on disk before anything else may happen."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())


def results(path: Path) -> dict[tuple[str, ...], dict[str, Any]]:
    """Rows that are a result, or say why there is none, by part, case and way."""
    ended = (row for row in rows_of(path) if "values" in row or "error" in row)
    return {(row["part"], row["case"], row["way"]): row for row in ended}


def work(order: Order) -> None:
    """The tasks of a share that have no row, one after the other; whatever one raises is its row. Our kernels run here
    whether they are trusted or not: how far they are off is a number, and a time is one all the same."""
    path = Path(order.rows)
    over = results(path)
    for task in islice(PARTS[order.part].tasks(order), order.share, None, order.shares):
        key = {"part": order.part, "case": task.case, "way": task.way}
        if tuple(key.values()) in over:
            continue
        add(path, **key, begun=time.time(), by=os.getpid())
        start = time.perf_counter()
        try:
            if not order.dry:
                torch.cuda.reset_peak_memory_stats()
            with mock.patch("hecate.engine.triton.engine.verdict", lambda *about: None):
                answer = task.call()
            values, against = answer if isinstance(answer, tuple) else (answer, None)
            peak = None if order.dry else torch.cuda.max_memory_allocated() / 2**20
            outcome = {"values": values, "unit": task.unit, "against": against, "peak": peak}
        except Exception as error:  # compilers raise types of their own
            traceback.print_exc()
            outcome = {"error": short(error)}
        add(path, **key, **outcome, seconds=round(time.perf_counter() - start, 2))
        if "error" in outcome and not order.dry:
            try:
                torch.cuda.empty_cache()
                torch.cuda.synchronize()
            except RuntimeError:
                sys.exit(LOST)


def short(error: BaseException) -> str:
    """An error in a line, by what caused it."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1 if len(lines) > 5 else 0][:200] if lines else ''}"


# Parts.


def device(order: Order) -> Iterator[Task]:
    """Bytes copied and products of matrices: the most that anything can do."""
    n = order.size.side

    def product(dtype: torch.dtype) -> list[float]:
        a = torch.ones(n, n, device=order.device, dtype=dtype)
        return [2e-9 * n**3 / clock(partial(torch.matmul, a, a), order)]

    yield Task(f"copy {n} x {n}", "torch", "GB/s", lambda: [copied(order)])
    for dtype in (torch.float32, torch.bfloat16):
        yield Task(f"matmul {n}", named(dtype), "TFLOP/s", partial(product, dtype))


def parity(order: Order) -> Iterator[Task]:
    """The largest error, in norm, of outputs, state and gradients beside float64's token loop: keys drawn at random,
    documents in a row, and keys nearly equal under steps of 1, which show an inverse that random ones hide."""
    kinds = ((torch.bfloat16, ""), (torch.float32, ""), (torch.bfloat16, "documents"), (torch.float32, "equal keys"))
    rules = order.rules if order.quick else {**order.rules, **MORE}
    for width, (dtype, kind), (name, config) in product(order.size.widths, kinds, rules.items()):
        loops = name.endswith("token by token")
        if (loops and width > 64) or (kind == "equal keys" and name not in ("delta", "gated delta", "kda")):
            continue
        for engine in ("triton", "parallel", "fla"):
            if engine == "triton" or not loops:
                call = partial(error_of, order, config, engine, dtype, width, kind)
                case = f"{name}, D={width}" + (f", {kind}" if kind else "")
                yield Task(case, f"{engine}, {named(dtype)}", "relative error", call)


def first_calls(order: Order) -> Iterator[Task]:
    """Seconds of a rule's first call, forward and backward: its kernels are compiled and tried there, side by side, so
    that tables find them made."""
    widths = dict.fromkeys(shape[3] for shape in order.size.shapes)
    for width, (name, config) in product(widths, order.rules.items()):
        yield Task(f"{name}, D={width}", "triton", "s", partial(first_call, order, config, width))


def tables(order: Order) -> Iterator[Task]:
    """Milliseconds of our kernels, of fla called directly, of its engine here and of torch's causal attention."""
    for shape in order.size.shapes:
        batch, length, heads, width = shape
        lead = f"B={batch} T={length} H={heads} D={width}"
        ways: list[tuple[str, str, MemoryConfig, Call]] = [(lead, "SDPA", MemoryConfig(), attention)]
        for name, config in order.rules.items():
            engines = ("triton", "fla", "parallel") if shape == order.size.shapes[0] else ("triton", "fla")
            ways += [(f"{name}, {lead}", engine, config, partial(outputs, config, engine)) for engine in engines]
            if name in PEERS:
                ways.append((f"{name}, {lead}", "fla directly", config, partial(peer, name)))
        for (case, way, config, call), back in product(ways, (False, True)):
            what = "forward and backward" if back else "forward"
            yield Task(case, f"{way}, {what}", "ms", partial(timed, order, call, config, shape, back))


def decode(order: Order) -> Iterator[Task]:
    """Milliseconds of one token, onto a new state and in place, as called and in a CUDA graph, beside those that
    reading and writing the state would take."""
    ways = [(name, in_place) for name in order.rules for in_place in (True, False)]
    for (heads, width), (name, in_place), graph in product(order.size.decode, ways, (False, True)):
        way = ("in place" if in_place else "memory_step") + (", in a CUDA graph" if graph else "")
        call = partial(one_token, order, RULES[name], heads, width, in_place, graph)
        yield Task(f"{name}, H={heads} D={width}", way, "ms", call)


def training(order: Order) -> Iterator[Task]:
    """Tokens per second of a step of a language model, forward, backward and AdamW."""
    width, layers, rows, length = order.size.model
    for name in list(MODELS)[: 2 if order.quick else None]:
        way = f"{layers} layers of {width}, {rows} x {length} tokens"
        yield Task(name, way, "tokens/s", partial(steps_of, order, name))


def kernels(order: Order) -> Iterator[Task]:
    """Milliseconds on the card of one call forward and backward, and of each of its kernels."""
    for name, config in order.rules.items():
        yield Task(name, "triton" if not order.dry else "parallel", "ms", partial(by_kernel, order, config))


def sanitizer(order: Order) -> Iterator[Task]:
    """Memory errors and races of the kernels on small cases."""
    for check in ("memcheck", "racecheck"):
        yield Task("three rules, 70 tokens", check, "exit code", partial(watched, order, check))


class Part(NamedTuple):
    """Tasks, seconds that they may take in all, and whether they go side by side."""

    tasks: Callable[[Order], Iterator[Task]]
    limit: float
    beside: bool = False


# The most telling first: whether kernels are right, how fast they are, and last what takes longest to say little.
PARTS = {
    "device": Part(device, 40),
    "parity": Part(parity, 150, beside=True),
    "first calls": Part(first_calls, 120, beside=True),
    "tables": Part(tables, 140),
    "decode": Part(decode, 40),
    "training": Part(training, 120),
    "kernels": Part(kernels, 40),
    "sanitizer": Part(sanitizer, 150),
}


# What tasks measure.


def error_of(order: Order, config: MemoryConfig, engine: str, dtype: torch.dtype, width: int, kind: str) -> Beside:
    """The largest error, and the tensor that has it."""
    length = order.size.tokens
    case = order.case(config, (1, length, 2, width), dtype=dtype)
    if kind == "equal keys":
        with torch.no_grad():
            case["k"].copy_(F.normalize(case["k"][:, :1] + 1e-2 * case["k"], dim=-1))
            case["lr"].fill_(1.0)
    borders = torch.tensor([0, length // 3, length // 3 + 1, length]) if kind == "documents" else None
    ours = answers(config, case, engine, borders)
    true = answers(config, {name: x.double() for name, x in case.items()}, "sequential", borders)
    errors = {name: float((ours[name].double() - right).norm() / right.norm()) for name, right in true.items()}
    worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
    return [errors[worst]], f"float64 loop; the worst is {worst}"


def first_call(order: Order, config: MemoryConfig, width: int) -> list[float]:
    """Seconds; both ways of calling, for a forward pass that keeps nothing is a kernel of its own."""
    case = order.case(config, (1, 256 if not order.dry else 20, 2, width))
    start = time.perf_counter()
    with torch.no_grad():
        outputs(config, "triton", case)
    both(partial(outputs, config, "triton"), case)
    order.wait()
    return [time.perf_counter() - start]


def timed(order: Order, call: Call, config: MemoryConfig, shape: Sequence[int], back: bool) -> list[float]:
    """Milliseconds for every seed, forward alone or with the way back."""
    whole: Callable[[Case], object] = partial(both, call) if back else call
    with torch.set_grad_enabled(back):
        return [clock(partial(whole, order.case(config, shape, seed)), order) for seed in range(order.seeds)]


def one_token(order: Order, config: MemoryConfig, heads: int, width: int, in_place: bool, graph: bool) -> Beside:
    """Milliseconds, and those of moving the state at the rate of a copy."""
    case = order.case(config, (1, 1, heads, width), dtype=torch.float32)
    q, k, v, gates = arguments({name: x[:, 0].detach() for name, x in case.items()})
    with torch.no_grad():
        _, state = memory_step(config, q, k, v, gates)
        call: Callable[[], object] = partial(Stepper(config, state, in_place=in_place), q, k, v, gates)
        call()
        if graph:
            if order.dry:
                raise ValueError("a CPU has no CUDA graph")
            call()
            recorded = torch.cuda.CUDAGraph()
            with torch.cuda.graph(recorded):
                call()
            call = recorded.replay
        taken = [clock(call, order) for _ in range(order.seeds)]
    size = sum(x.numel() * x.element_size() for named in state[:2] for x in named.values())
    least = 2e-6 * size / copied(order)
    return taken, f"{least:.4f} ms to read and write the state"


def steps_of(order: Order, name: str) -> list[float]:
    """Tokens per second for every seed."""
    width, layers, rows, length = order.size.model
    vocabulary = 64 if order.dry else 32768
    shape = {"vocab_size": vocabulary, "d_model": width, "layers": layers, "heads": max(1, width // 128)}
    config = LanguageModelConfig.model_validate({**shape, "mlp_ratio": 2.667, **MODELS[name]})
    rates = []
    for seed in range(order.seeds):
        g = torch.Generator().manual_seed(seed)
        model = LanguageModel(config, generator=g, device=order.device)
        if name.endswith("its chunk compiled"):
            compile_chunks(model)
        net = torch.compile(model, backend="eager" if order.dry else "inductor") if "torch.compile" in name else model
        tokens = torch.randint(vocabulary, (rows, length + 1), generator=g).to(order.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        rates.append(1e3 * rows * length / clock(partial(train_step, net, optimizer, tokens), order))
    return rates


def train_step(model: Any, optimizer: torch.optim.Optimizer, tokens: Tensor) -> None:
    """One step on rows of tokens `[rows, length + 1]`."""
    with torch.autocast(tokens.device.type, torch.bfloat16):
        logits = model(tokens[:, :-1])[0]
    F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


def by_kernel(order: Order, config: MemoryConfig) -> Beside:
    """Milliseconds of all kernels, and of the longest."""
    call = partial(both, partial(outputs, config, "parallel" if order.dry else "triton"))
    case = order.case(config, order.size.shapes[0])
    call(case)
    order.wait()
    with profile(activities=[ProfilerActivity.CPU if order.dry else ProfilerActivity.CUDA]) as trace:
        call(case)
        order.wait()
    where = "self_cpu_time_total" if order.dry else "self_device_time_total"
    taken = sorted(((1e-3 * getattr(item, where), item.key[:40]) for item in trace.key_averages()), reverse=True)
    return [sum(each for each, _ in taken)], "; ".join(f"{name} {each:.3f}" for each, name in taken[:8])


WATCHED = """
import torch
from studies.card import RULES, Order, both, outputs
for name in ("gated delta", "exact momentum", "delta"):
    case = Order("", "").case(RULES[name], (1, 70, 2, 64))
    both(lambda case: outputs(RULES[name], "triton", case), case)
torch.cuda.synchronize()
"""


def watched(order: Order, check: str) -> list[float]:
    """The exit code of compute-sanitizer around our kernels."""
    tool = shutil.which("compute-sanitizer")
    if tool is None or order.dry:
        raise FileNotFoundError("a CPU has no kernels to watch" if order.dry else "compute-sanitizer is not installed")
    command = [tool, "--tool", check, "--error-exitcode", "9", sys.executable, "-c", WATCHED]
    return [float(subprocess.run(command, timeout=75, check=False).returncode)]


# Calls.


def arguments(case: Case) -> tuple[Tensor, Tensor, Tensor, Gates]:
    """A case as a memory is given it."""
    q, k, v = (case[name] for name in ("q", "k", "v"))
    return q, k, v, Gates(**{name: x for name, x in case.items() if name not in ("q", "k", "v")})


def outputs(config: MemoryConfig, engine: str, case: Case) -> Tensor:
    """Outputs of a scan alone."""
    return memory_scan(config, *arguments(case), engine=engine)[0]


def both(call: Call, case: Case) -> None:
    """Forward and backward."""
    y = call(case)
    torch.autograd.grad(y, list(case.values()), torch.ones_like(y), allow_unused=True)


def answers(config: MemoryConfig, case: Case, engine: str, borders: Tensor | None = None) -> Case:
    """Outputs, the last weights and the gradients of all inputs."""
    leaves = {name: x.detach().requires_grad_() for name, x in case.items()}
    y, state = memory_scan(config, *arguments(leaves), engine=engine, cu_seqlens=borders)
    tensors = [y, state.memory["weight"]]
    ways = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(x.shape, generator=ways).to(x) for x in tensors]
    tensors += torch.autograd.grad(tensors, list(leaves.values()), cotangents)
    return {name: x.detach() for name, x in zip(("y", "state", *leaves), tensors, strict=True)}


def peer(name: str, case: Case) -> Tensor:
    """fla's own call of a rule, on inputs as it wants them."""
    kernel = resolve_name(PEERS[name])
    # On Hopper with Triton 3.4 to 3.7.0 it refuses a gated backward pass, whose numbers are wrong there. Its time can
    # be taken all the same, and no number of it is used.
    resolve_name("fla.ops.common.chunk_o").TRITON_ABOVE_3_7_1 = True
    q, k, v, _ = arguments(case)
    if name == "linear attention":
        return kernel(q, k, v * case["lr"].unsqueeze(-1).to(v), scale=1.0)[0]
    decay = {"g": case["retain"].log()} if "retain" in case else {}
    units = {"use_qk_l2norm_in_kernel": True} if RULES[name].key_norm == "l2" else {}
    return kernel(q=q, k=k, v=v, beta=case["lr"], scale=1.0, **decay, **units)[0]


def attention(case: Case) -> Tensor:
    """torch's causal attention over `[B, T, H, D]`."""
    q, k, v = (case[name].transpose(1, 2) for name in ("q", "k", "v"))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def clock(call: Callable[[], object], order: Order) -> float:
    """The median of milliseconds; on a card by its own events, after two calls to warm up."""
    if order.dry:
        return 1e3 * max(statistics.median(timeit.repeat(call, number=1, repeat=order.size.repeats)), 1e-9)
    call()
    call()
    taken = []
    for _ in range(order.size.repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end))
    return max(statistics.median(taken), 1e-6)


@cache
def copied(order: Order) -> float:
    """GB/s of reading and writing `order.size.side` squared float32 numbers."""
    n = order.size.side
    return 8e-6 * n * n / clock(torch.ones(n, n, device=order.device).clone, order)
