"""gpu: what engines do on a card: whether they are right there, how fast, beside fla and torch's attention."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hecate.engine import Engine, memory_scan, memory_step
from hecate.errors import HecateError
from hecate.microscope.style import COLOURS, finish
from hecate.models import LanguageModel, LanguageModelConfig
from hecate.rule import Gates, MemoryConfig, named_rule
from hecate.train.trainer import compile_chunks
from studies.study import Cell, Progress, Result, Spread, Study

HOW = "there is no CUDA device here; on a machine with one run `python -m studies gpu`, some ten minutes"
RULES = {
    "linear attention": MemoryConfig(bias="dot"),
    "delta": MemoryConfig(),
    "gated delta": named_rule("gated_delta"),
    "kda": named_rule("kda"),
    "exact momentum": named_rule("titans_linear"),
    "huber": MemoryConfig(bias="huber", retention="decay"),
}
MODELS: dict[str, dict[str, Any]] = {
    "gated delta": {"memory": "gated_delta"},
    "exact momentum": {"memory": "titans_linear"},
    "huber": {"memory": {"kind": "titans_linear", "bias": "huber"}},
    "Titans MLP, chunk 64": {"memory": {"kind": "titans", "chunk": 64}},
    "Titans MLP, chunk 64, compiled": {"memory": {"kind": "titans", "chunk": 64}},
    "softmax attention": {"attention": {"kind": "attention"}},
}
PEERS = {  # of fla, called directly: what a rule's own call leaves to add
    "linear attention": ("fla.ops.simple_gla", "chunk_simple_gla"),
    "delta": ("fla.ops.delta_rule", "chunk_delta_rule"),
    "gated delta": ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
    "kda": ("fla.ops.kda", "chunk_kda"),
}
SANITIZED = (
    "import sys; sys.path.append(''); import torch; from studies.gpu import parity; "  # the checkout, behind libraries
    "print(*parity(torch.device('cuda'), 64, 16))"
)


class Size(NamedTuple):
    """Of a run: B H and T of the tables, widths, repeats, the models' width, layers, rows and tokens."""

    heads: Sequence[int]
    lengths: Sequence[int]
    widths: Sequence[int]
    repeats: int
    model: tuple[int, int, int, int]


FULL = Size((16, 128, 512), (2048, 8192, 32768), (64, 128), 10, (768, 14, 8, 2048))
SHORT = Size((16,), (2048,), (64,), 3, (768, 2, 2, 1024))
TINY = Size((2,), (64,), (8,), 2, (16, 1, 1, 32))  # on a CPU: whether the code runs
MOST = 2**31  # numbers of q, k and v in a table's case; a float32 engine keeps several times as many


class Gpu(Study):
    """Device, sanitizer, parity, tables, decoding, training."""

    name: ClassVar[str] = "gpu"
    about: ClassVar[str] = "What do the engines do on a GPU, beside fla's kernels and torch's attention?"
    count: ClassVar[int] = 2
    timed: ClassVar[bool] = True
    takes_device: ClassVar[bool] = True

    def skipped(self) -> str | None:
        """Without a card there is nothing to measure."""
        return HOW if self.device is None and not torch.cuda.is_available() else None

    def run(self, quick: bool, seeds: Sequence[int], progress: Progress) -> Result:
        """Every part, one after the other; what fails is a row that says so."""
        device = torch.device(self.device or "cuda")
        card = device.type == "cuda"
        size = TINY if not card else SHORT if quick else FULL
        rows: list[list[Cell]] = []
        unmeasured: list[str] = []
        parts: dict[str, Callable[[], Iterator[list[Cell]]]] = {
            "ceilings": lambda: ceilings(device, size),
            "sanitizer": lambda: sanitizer(card),
            "parity": lambda: parity(device, 150 if card else 20, 64 if card else 8),
            "tables": lambda: tables(device, size, seeds),
            "decode": lambda: decode(device, size, seeds),
            "training": lambda: training(device, size, seeds),
        }
        for name in progress(list(parts), "parts"):
            try:
                for row in parts[name]():
                    (unmeasured.append(f"{name}: {row[1]}: {row[2]}") if row[3] is None else rows.append(row))
            except (RuntimeError, HecateError, OSError) as error:  # of one part, which shall not lose the others
                unmeasured.append(f"{name}: {_short(error)}")
        label = torch.cuda.get_device_name(device) if card else "a CPU, which tells only that the code runs"
        notes = [f"Measured on {label}, torch {torch.__version__}; times are medians, spread over seeds."]
        notes += [f"Unmeasured: {what}." for what in unmeasured]
        columns = ("part", "case", "way", "value", "unit", "against")
        return Result(columns, rows, notes, lambda figure: draw(figure, rows), data={"unmeasured": unmeasured})


# What a part gives: (part, case, way, value or None, unit, what it stands beside).


def ceilings(device: torch.device, size: Size) -> Iterator[list[Cell]]:
    """Bytes copied and products of matrices, the most that anything here can do."""
    n = 8192 if device.type == "cuda" else 64
    x = torch.ones(n, n, device=device)
    yield ["ceilings", f"copy {n} x {n}", "torch", 8e-6 * n * n / clock(x.clone, device, size.repeats), "GB/s", None]
    for dtype in (torch.float32, torch.bfloat16):
        a = x.to(dtype)
        taken = clock(partial(torch.matmul, a, a), device, size.repeats)
        yield ["ceilings", f"matmul {n}", str(dtype).removeprefix("torch."), 2e-9 * n**3 / taken, "TFLOP/s", None]


def sanitizer(card: bool) -> Iterator[list[Cell]]:
    """Memory errors and races of the kernels on small cases."""
    tool = shutil.which("compute-sanitizer")
    if tool is None or not card:
        yield [
            "sanitizer",
            "memcheck, racecheck",
            "compute-sanitizer is not found" if card else "no card",
            None,
            "",
            "",
        ]
        return
    for check in ("memcheck", "racecheck"):
        command = [tool, "--tool", check, "--error-exitcode", "9", sys.executable, "-P", "-c", SANITIZED]
        done = subprocess.run(command, capture_output=True, timeout=300, check=False)
        yield ["sanitizer", check, "engines on small cases", float(done.returncode), "exit code", "0"]


def parity(device: torch.device, length: int, width: int) -> Iterator[list[Cell]]:
    """The largest error of outputs and gradients, in norm, of every engine and dtype beside float64's token loop; of
    one sequence, and of three documents in a row."""
    packed = torch.tensor([0, length // 3, length // 3 + 1, length])
    for (name, config), dtype, borders in product(RULES.items(), (torch.float32, torch.bfloat16), (None, packed)):
        case = draw_case(config, 1, length, 2, width, device, dtype, 0)
        true = answers(config, [x.double() for x in case], "sequential", borders)
        for engine, _ in fitting(config, case):
            found = answers(config, case, engine, borders)
            errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, true, strict=True)]
            way = f"{engine}, {str(dtype).removeprefix('torch.')}" + ("" if borders is None else ", documents")
            yield ["parity", name, way, max(errors), "relative error", "float64 loop"]


def tables(device: torch.device, size: Size, seeds: Sequence[int]) -> Iterator[list[Cell]]:
    """Milliseconds of every engine, of fla called directly and of torch's causal attention."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for heads, length, width in product(size.heads, size.lengths, size.widths):
        lead = f"BH={heads} T={length} D={width}"
        if 3 * heads * length * width > MOST // 8:
            yield ["tables", lead, "too large for one card beside its gradients", None, "", ""]
            continue
        batch, each = max(1, heads // 16), min(heads, 16)
        shape = (batch, length, each, width, device, dtype)
        yield from timed("tables", lead, "SDPA", attention, MemoryConfig(), shape, size, seeds)
        for name, config in RULES.items():
            case = draw_case(config, *shape, 0)
            for engine, why in fitting(config, case, every=True):
                if why is not None:
                    yield ["tables", f"{name}, {lead}", f"{engine}: {why}", None, "", ""]
                    continue
                call = partial(outputs, config, engine)
                yield from timed("tables", f"{name}, {lead}", engine, call, config, shape, size, seeds)
            if device.type == "cuda" and (direct := peer(name)) is not None:
                yield from timed("tables", f"{name}, {lead}", "fla directly", direct, config, shape, size, seeds)


def decode(device: torch.device, size: Size, seeds: Sequence[int]) -> Iterator[list[Cell]]:
    """Milliseconds of one token, as called and in a CUDA graph."""
    for name, config in RULES.items():
        taken: dict[str, list[float]] = {}
        for seed in seeds:
            case = [
                x[:, 0] for x in draw_case(config, 1, 1, size.heads[0], size.widths[0], device, torch.float32, seed)
            ]
            q, k, v, *gates = case
            with torch.no_grad():
                _, state = memory_step(config, q, k, v, gates_of(config, gates))
                step = partial(memory_step, config, q, k, v, gates_of(config, gates), state=state)
                taken.setdefault("as called", []).append(clock(step, device, size.repeats))
                if device.type == "cuda":
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph):
                        step()
                    taken.setdefault("in a CUDA graph", []).append(clock(graph.replay, device, size.repeats))
        for way, times in taken.items():
            yield ["decode", name, way, Spread.of(times), "ms", None]


def training(device: torch.device, size: Size, seeds: Sequence[int]) -> Iterator[list[Cell]]:
    """Tokens per second of a step of a language model, forward, backward and AdamW."""
    width, layers, rows, length = size.model
    heads, vocabulary = max(1, width // 128), 32768 if width > 100 else 64
    for name, own in MODELS.items():
        rates = []
        try:
            for seed in seeds:
                shape = {
                    "vocab_size": vocabulary,
                    "d_model": width,
                    "layers": layers,
                    "heads": heads,
                    "mlp_ratio": 2.667,
                }
                config = LanguageModelConfig.model_validate({**shape, **own})
                model = LanguageModel(config, generator=torch.Generator().manual_seed(seed), device=device)
                if name.endswith("compiled"):
                    compile_chunks(model)
                g = torch.Generator().manual_seed(seed)
                tokens = torch.randint(vocabulary, (rows, length + 1), generator=g).to(device)
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

                step = partial(train_step, model, optimizer, tokens)
                rates.append(1e3 * rows * length / clock(step, device, size.repeats))
        except (RuntimeError, HecateError) as error:
            yield ["training", name, _short(error), None, "", ""]
            continue
        yield ["training", name, f"{layers} layers of {width}", Spread.of(rates), "tokens/s", None]


def train_step(model: LanguageModel, optimizer: torch.optim.Optimizer, tokens: Tensor) -> None:
    """One step on rows of tokens `[rows, length + 1]`."""
    with torch.autocast(tokens.device.type, torch.bfloat16):
        logits = model(tokens[:, :-1])[0]
    F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


# Calls.


def draw_case(
    config: MemoryConfig, batch: int, length: int, heads: int, width: int, device: torch.device, dtype: Any, seed: int
) -> list[Tensor]:
    """q, k, v `[B, T, H, D]` and the gates that a config takes `[B, T, H]`, keys of unit length; for kda retain of each
    channel."""
    g = torch.Generator().manual_seed(seed)
    lead = (batch, length, heads)
    q, k, v = (torch.randn(*lead, width, generator=g) for _ in range(3))
    gates = [torch.rand(lead, generator=g) for _ in range(1 + sum(config_gates(config)))]
    if config == RULES["kda"]:
        gates[1] = torch.rand(*lead, width, generator=g)
    gates[1:] = [0.8 + 0.2 * gate for gate in gates[1:]]
    vectors = [x.to(dtype) for x in (q * width**-0.5, F.normalize(k, dim=-1), v)]
    return [x.to(device).requires_grad_() for x in (*vectors, *gates)]


def config_gates(config: MemoryConfig) -> tuple[bool, bool]:
    """Whether it takes retain, and momentum."""
    return config.retention.uses_retain, config.algorithm.uses_momentum


def gates_of(config: MemoryConfig, gates: Sequence[Tensor]) -> Gates:
    """lr and whichever of retain and momentum there are."""
    lr, *rest = gates
    decays, moves = config_gates(config)
    return Gates(lr, rest[0] if decays else None, rest[-1] if moves else None)


def scan(
    config: MemoryConfig, case: Sequence[Tensor], engine: str, borders: Tensor | None = None
) -> tuple[Tensor, Any]:
    """A scan by an engine."""
    own = config.model_copy(update={"on_nonfinite": "propagate"})
    q, k, v, *gates = case
    return memory_scan(own, q, k, v, gates_of(config, gates), engine=engine, cu_seqlens=borders)


def outputs(config: MemoryConfig, engine: str, case: Sequence[Tensor]) -> Tensor:
    """Those of a scan alone."""
    return scan(config, case, engine)[0]


def answers(config: MemoryConfig, case: Sequence[Tensor], engine: str, borders: Tensor | None = None) -> list[Tensor]:
    """Outputs, the last weights and the gradients of all inputs."""
    own = [x.detach().requires_grad_() for x in case]
    y, state = scan(config, own, engine, borders)
    found = [y, state.memory["weight"]]
    ways = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(x.shape, generator=ways).to(x) for x in found]
    return [x.detach() for x in (*found, *torch.autograd.grad(found, own, cotangents))]


def fitting(config: MemoryConfig, case: Sequence[Tensor], *, every: bool = False) -> Iterator[tuple[str, str | None]]:
    """The engines of blocks and of a GPU that take a case; with `every` the others too, and why not."""
    for engine in ("parallel", "triton", "fla"):
        if engine not in Engine.registry:
            continue
        try:
            with torch.no_grad():
                scan(config, [x[:, :4] for x in case], engine)
        except (HecateError, RuntimeError) as error:
            if every:
                yield engine, _short(error)
            continue
        yield engine, None


def peer(name: str) -> Callable[[Sequence[Tensor]], Tensor] | None:
    """fla's own call of a rule, on inputs as it wants them."""
    if name not in PEERS:
        return None
    try:
        module = __import__(PEERS[name][0], fromlist=[PEERS[name][1]])
    except ImportError:
        return None
    kernel = getattr(module, PEERS[name][1])

    def call(case: Sequence[Tensor]) -> Tensor:
        q, k, v, lr, *rest = case
        if name == "linear attention":
            y: Tensor = kernel(q, k, v * lr.unsqueeze(-1).to(v), scale=1.0)[0]
        else:
            given = {"g": rest[0].log()} if rest else {}
            units = {"use_qk_l2norm_in_kernel": True} if RULES[name].key_norm == "l2" else {}
            y = kernel(q=q, k=k, v=v, beta=lr, scale=1.0, **given, **units)[0]
        return y

    return call


def attention(case: Sequence[Tensor]) -> Tensor:
    """torch's causal attention over `[B, T, H, D]`."""
    q, k, v = (x.transpose(1, 2) for x in case[:3])
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


# Clocks.


def timed(
    part: str, case: str, way: str, call: Callable[[Sequence[Tensor]], Tensor], config: MemoryConfig,
    shape: tuple[Any, ...], size: Size, seeds: Sequence[int],
) -> Iterator[list[Cell]]:  # fmt: skip
    """Milliseconds forward, and forward and backward."""
    ahead: list[float] = []
    both: list[float] = []
    batch, length, heads, width, device, dtype = shape
    try:
        for seed in seeds:
            own = draw_case(config, batch, length, heads, width, device, dtype, seed)

            def back(own: list[Tensor] = own) -> None:
                y = call(own)
                used = [x for x in own if x.requires_grad]
                torch.autograd.grad(y, used, torch.ones_like(y), allow_unused=True)

            with torch.no_grad():
                ahead.append(clock(partial(call, own), device, size.repeats))
            both.append(clock(back, device, size.repeats))
    except (RuntimeError, HecateError) as error:
        yield [part, case, f"{way}: {_short(error)}", None, "", ""]
        return
    yield [part, case, f"{way}, forward", Spread.of(ahead), "ms", None]
    yield [part, case, f"{way}, forward and backward", Spread.of(both), "ms", None]


def clock(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The median of milliseconds, after two calls to warm up; on a card by its own events."""
    for _ in range(2):
        call()
    taken = []
    for _ in range(repeats):
        if device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            end.synchronize()
            taken.append(start.elapsed_time(end))
        else:
            at = time.perf_counter()
            call()
            taken.append(1e3 * (time.perf_counter() - at))
    return max(statistics.median(taken), 1e-6)


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"


def draw(figure: Any, rows: Sequence[Sequence[Cell]]) -> None:
    """Milliseconds of the largest table's case, way by way."""
    axes = figure.subplots()
    found = [row for row in rows if row[0] == "tables" and isinstance(row[3], Spread)]
    last = str(found[-1][1]).rpartition(", ")[2] if found else ""
    shown = [row for row in found if str(row[1]).endswith(last)]
    labels = [f"{row[1]}: {row[2]}".replace(f", {last}", "") for row in shown]
    values = [row[3].mean for row in shown if isinstance(row[3], Spread)]
    axes.barh(range(len(shown)), values, color=COLOURS[0], label="median")
    axes.set_yticks(range(len(shown)), labels, fontsize=6)
    finish(axes, "What calls take", f"milliseconds, {last}", "", legend=False, xscale="log" if values else "linear")
