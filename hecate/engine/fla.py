"""Triton kernels of flash-linear-attention (the extra `cuda`), for the rules that they compute.

| bias | retention | kernel |
|---|---|---|
| dot | none, decay | `fla.ops.simple_gla` |
| dot | decay per phi channel | `fla.ops.gla` |
| l2 | none | `fla.ops.delta_rule` |
| l2 | decay, before_gradient | `fla.ops.gated_delta_rule` |
| l2 | decay per phi channel, before_gradient | `fla.ops.kda` |

They compute in the dtype of v with a float32 state. Before a kernel is used for the first time with
a dtype and widths, it has to reproduce the parallel engine on random tokens, outputs, final state
and gradients, within `PARITY`; otherwise it is refused with the difference found. [ENG-FLA-D1]
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from hecate.algorithm import GD
from hecate.bias import L2, Dot
from hecate.engine.by_hand import ByHand
from hecate.engine.compiled import by_torch, run_kernel
from hecate.engine.tokens import Carry, Tokens
from hecate.retention import Decay, NoRetention
from hecate.rule import MemoryConfig
from hecate.rule.rule import several
from hecate.structure import Matrix, Memory
from hecate.tape import Run, Tensors, differentiable

# Largest relative difference from the parallel engine: rounding of the inputs' dtype.
SMALLEST = 2.0**-40  # retain gates whose logarithms add up without losing float32's digits
PARITY = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-18}


class Call(NamedTuple):
    """A kernel, and what it takes beside q, k and v."""

    module: str
    function: str
    takes_lr: bool
    takes_gate: bool


def kernel_call(config: MemoryConfig, channelwise: bool) -> Call | str:
    """The kernel that computes a config, or why there is none."""
    rule = config.rule
    if config.chunk > 1 or config.commit == "chunk":
        return (
            f"chunk={config.chunk}, commit={config.commit!r} take gradients at a remembered state"
        )
    if config.normalizer == "sum":
        return "its kernels have no sum normaliser that can be carried on"
    if config.read == "before":
        return "its kernels read after the write, not read='before'"
    for name, knob, known in (
        ("structure", rule.structure, (Matrix,)),
        ("bias", rule.bias, (Dot, L2)),
        ("retention", rule.retention, (NoRetention, Decay)),
        ("algorithm", rule.algorithm, (GD,)),
    ):
        if type(knob) not in known:
            return f"{name} {knob.kind!r} has no kernel"
    decays = rule.retention.uses_retain
    if type(rule.bias) is Dot:
        name = "gla" if channelwise else "simple_gla"
        return Call(f"fla.ops.{name}", f"chunk_{name}", False, decays)
    if not decays:
        return Call("fla.ops.delta_rule", "chunk_delta_rule", True, False)
    if config.decay_order == "with_step":
        return "its gated kernels decay before the gradient, not decay_order='with_step'"
    name = "kda" if channelwise else "gated_delta_rule"
    return Call(f"fla.ops.{name}", f"chunk_{name}", True, True)


class FlaScan(NamedTuple):
    """What decides over a kernel beside the config: the values' dtype, the retain gates `[B, T, H]`
    or `[B, T, H, P]`, masks, and the state's shape `(V, P)`."""

    values: torch.dtype = torch.float32
    retain: Tensor | None = None
    masked: bool = False
    shape: tuple[int, ...] = (64, 64)


def fla_refusal(
    config: MemoryConfig, scan: FlaScan, *, device: str = "cpu", traced: bool = False
) -> str | None:
    """Why its kernels cannot run a config on such tensors exactly; None if they can."""
    channelwise = scan.retain is not None and scan.retain.dim() == 4
    call = kernel_call(config, channelwise)
    if isinstance(call, str):
        return call
    if scan.masked:
        return "its kernels take neither write nor reset masks"
    if traced:
        return "torch has to see every operation here (torch.compile, torch.func, a dispatch mode)"
    if scan.values not in PARITY:
        return f"its kernels are for {', '.join(map(str, PARITY))}, the values are {scan.values}"
    if device != "cuda":
        return f"its kernels run on a GPU, the tensors are on {device}"
    if config.dtype == torch.float64:
        return "its kernels keep a float32 state, not state_dtype='float64'"
    if load_kernel(call) is None:
        return f'it needs {call.module}.{call.function}: pip install "hecate[cuda]"'
    if call.takes_gate and scan.retain is not None and bool((scan.retain < SMALLEST).any()):
        return f"its gates are logarithms, and a retain gate is below {SMALLEST:.0e}"
    return _difference(config, channelwise, scan.values, device, scan.shape)


@cache
def load_kernel(call: Call) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """The kernel; None if it cannot be imported."""
    try:
        found: Callable[..., tuple[Tensor, Tensor]] | None = getattr(
            importlib.import_module(call.module), call.function, None
        )
    except ImportError:
        return None
    return found


def by_fla(
    config: MemoryConfig,
    tokens: Tokens,
    carry: Carry,
    initial: Memory,
    *,
    run: Run,
    dtype: torch.dtype,
) -> tuple[Tensor, Carry]:
    """Runs a sequence in a kernel: outputs `[N, T, V]` and the final carry."""
    return run_kernel(_kernel(config, carry, dtype), tokens, carry, initial, run=run)


def _kernel(config: MemoryConfig, carry: Carry, dtype: torch.dtype) -> ByHand:
    def forward(inputs: Tensors, keeps: bool) -> tuple[Tensors, Tensors]:
        if not keeps:
            with torch.no_grad():
                return _outputs(config, dtype, inputs), ()
        with torch.enable_grad():
            own = tuple(map(_leaf, inputs))
            outputs = several(_outputs(config, dtype, own))
        return tuple(item.detach() for item in outputs), (*own, *outputs)

    return ByHand("engine.fla", forward, _pulled, by_torch(config, carry))


def _leaf(tensor: Tensor | None) -> Tensor | None:
    if tensor is None or not differentiable(tensor):
        return tensor
    return tensor.detach().requires_grad_()


def _outputs(config: MemoryConfig, dtype: torch.dtype, inputs: Tensors) -> Tensors:
    memory, _, *fields = inputs
    tokens = Tokens(*fields)  # type: ignore[arg-type]
    call = kernel_call(config, tokens.retain.dim() == 3)
    kernel = None if isinstance(call, str) else load_kernel(call)
    if kernel is None or isinstance(call, str) or memory is None:
        raise TypeError("the engine was chosen without its refusal being asked")
    phi_k, phi_q, v = (
        item.to(dtype).unsqueeze(2) for item in (tokens.phi_k, tokens.phi_q, tokens.v)
    )
    options: dict[str, Tensor] = {}
    if call.takes_lr:
        options["beta"] = tokens.lr.to(dtype).unsqueeze(2)
    else:
        v = (tokens.lr.unsqueeze(-1) * tokens.v).to(dtype).unsqueeze(2)
    if call.takes_gate:
        options["g"] = tokens.retain.log().unsqueeze(2)
    y, state = kernel(
        q=phi_q,
        k=phi_k,
        v=v,
        scale=1.0,
        initial_state=memory.mT.unsqueeze(1).float().contiguous(),
        output_final_state=True,
        **options,
    )
    return y.squeeze(2).to(memory.dtype), state.squeeze(1).mT.to(memory.dtype)


def _pulled(inputs: Tensors, record: Tensors, cotangents: Sequence[Tensor]) -> Tensors:
    """The kernels' own derivatives, by the graph that the forward kept."""
    own, outputs = record[: len(inputs)], record[len(inputs) :]
    where = [index for index, item in enumerate(own) if item is not None and item.requires_grad]
    grads = torch.autograd.grad(
        several(outputs),
        [item for item in own if item is not None and item.requires_grad],
        cotangents,
        retain_graph=True,
        allow_unused=True,
    )
    found: list[Tensor | None] = [None] * len(inputs)
    for index, grad in zip(where, grads, strict=True):
        found[index] = grad
    return tuple(found)


@cache
def _difference(
    config: MemoryConfig,
    channelwise: bool,
    dtype: torch.dtype,
    device: str,
    shape: tuple[int, ...],
) -> str | None:
    """Why a kernel is not trusted: what it computes beside the parallel engine."""
    height, width = shape
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(2, *size, generator=generator).to(device=device, dtype=dtype).float()

    length = 128
    keys = torch.nn.functional.normalize(draw(length, width), dim=-1).to(dtype).float()
    gate = draw(length, width) if channelwise else draw(length)
    retain = torch.nn.functional.logsigmoid(gate + 4.0).exp()
    lr = draw(length).sigmoid().to(dtype).float()
    inputs: Tensors = (
        draw(height, width), draw(height, width), keys, draw(length, width), draw(length, height),
        lr, retain, torch.zeros_like(lr), None, None,
    )  # fmt: skip
    cotangents = (draw(length, height), draw(height, width))

    kernel = _kernel(config, Carry((), (), (), (), (), torch.zeros(2, device=device)), dtype)
    try:
        outputs, record = kernel.forward(inputs, True)
        found = (*outputs, *kernel.vjp(inputs, record, cotangents))
    except (RuntimeError, AssertionError, ValueError, TypeError) as error:
        return f"its kernel fails on {dtype} with widths {shape}: {error}"
    with torch.no_grad():  # no second derivatives
        expected = (*kernel.plain(*inputs), *kernel.by_autograd(inputs, cotangents))
    names = ("y", "state", "memory", "initial", "phi_k", "phi_q", "v", "lr", "retain", "momentum")
    for name, own, right in zip(names, found, expected, strict=False):
        if own is None or right is None or not right.any():
            continue
        distance = float((own - right).norm() / right.norm())
        if not distance <= PARITY[dtype]:
            return (
                f"its kernel differs from the parallel engine by {distance:.1e} in {name} "
                f"on {dtype}, more than {PARITY[dtype]:.1e}"
            )
    return None
