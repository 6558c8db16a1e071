"""Kernels of flash-linear-attention: the one that computes a config, as a block with a backward pass, and whether it is
trusted: each has to reproduce float64 before it is used. [ENG-FLA-I2]"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hecate.algorithm import AlgorithmForm
from hecate.engine.engine import chunk_refusal, with_graph
from hecate.engine.loop import sequential
from hecate.engine.parallel import by_torch
from hecate.engine.tokens import Carry, Tokens
from hecate.engine.triton.kernel import NO_CARD, distrust_norm
from hecate.engine.triton.parity import both_by_torch, both_ways, difference, trial
from hecate.errors import install_line
from hecate.rule import MemoryConfig
from hecate.tape import ByHand, Tensors, one

SMALLEST = 2.0**-40  # smaller retain gates count as this, so that sums of logarithms keep float32's digits
# Relative difference from float64 that is always allowed: rounding of the inputs' dtype.
PARITY = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-18}


class Kernel(NamedTuple):
    """A kernel, and what it takes beside q, k and v."""

    module: str
    function: str
    takes_lr: bool
    takes_gate: bool


def kernel_of(config: MemoryConfig, *, channelwise: bool) -> Kernel | str:
    """The kernel that computes a config, or why there is none, whichever way its gates are."""
    rule, forms = config.rule, config.forms
    if (reason := chunk_refusal(config)) is not None:
        return reason
    if config.normalizer != "none":
        return "its kernels have no sum normaliser that can be carried on"
    if config.read == "before":
        return "its kernels read after the write, not read='before'"
    for name, knob, known in (
        ("structure", rule.structure, rule.structure.linear and not rule.structure.diagonal),
        ("bias", rule.bias, forms.target or forms.error),
        ("retention", rule.retention, forms.plain),
        ("algorithm", rule.algorithm, forms.algorithm == AlgorithmForm()),
    ):
        if not known:
            return f"{name} {knob.kind!r} has no kernel"
    decays = rule.retention.uses_retain
    if forms.target:
        name = "gla" if channelwise else "simple_gla"
        return Kernel(f"fla.ops.{name}", f"chunk_{name}", False, decays)
    if not decays:
        return Kernel("fla.ops.delta_rule", "chunk_delta_rule", True, False)
    if config.decay_order == "with_step":
        return "its gated kernels decay before the gradient, not decay_order='with_step'"
    name = "kda" if channelwise else "gated_delta_rule"
    return Kernel(f"fla.ops.{name}", f"chunk_{name}", True, True)


@cache
def load_kernel(kernel: Kernel) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """The kernel; None if it cannot be imported."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the engine that asks reports a missing GPU itself
            module: Any = importlib.import_module(kernel.module)
    except ImportError:
        return None
    return getattr(module, kernel.function, None)


def by_kernel(config: MemoryConfig, carry: Carry, dtype: torch.dtype, borders: tuple[int, ...] | None = None) -> ByHand:
    """A kernel's function of (memory, initial, *tokens), with its own derivatives."""
    plain = by_torch(config, carry)

    def wide(*inputs: Tensor | None) -> Tensors:
        precision = one(inputs[:1]).dtype
        tensors = (i if i is None or not i.is_floating_point() else i.to(precision) for i in inputs)
        return plain(*tensors)

    return with_graph("engine.fla", partial(_outputs, config, dtype, borders), wide)


def _outputs(
    config: MemoryConfig, dtype: torch.dtype, borders: tuple[int, ...] | None, memory: Tensor, initial: Tensor | None,
    *fields: Tensor | None,
) -> Tensors:  # fmt: skip
    tokens = Tokens(*fields)  # type: ignore[arg-type]
    kernel: Any = kernel_of(config, channelwise=tokens.retain.dim() == 4)
    function: Any = load_kernel(kernel)  # the engine is unfit without either
    # Gates stay in float32: what a kernel multiplies by them it rounds afterwards.
    options: dict[str, Tensor] = {"beta": tokens.lr} if kernel.takes_lr else {}
    if kernel.takes_gate:
        options["g"] = tokens.retain.clamp_min(SMALLEST).log()
    v = tokens.v if kernel.takes_lr else tokens.lr.unsqueeze(-1) * tokens.v
    if borders is None:
        start = memory.mT.unflatten(0, (-1, v.shape[2]))
    else:  # every document from the weights at which memories restart
        start = one((initial,)).mT.unsqueeze(0).expand(len(borders) - 1, -1, -1, -1)
        at = torch.tensor(borders)
        options |= {"cu_seqlens": at.to(v.device, non_blocking=True), "cu_seqlens_cpu": at}
    q, k, start = tokens.phi_q.to(dtype), tokens.phi_k.to(dtype), start.float().contiguous()
    y, state = function(q=q, k=k, v=v.to(dtype), scale=1.0, initial_state=start, output_final_state=True, **options)
    last = state if borders is None else state[-1:]
    return y.to(memory.dtype), last.flatten(0, 1).mT.to(memory.dtype)


def verdict(
    config: MemoryConfig, channelwise: bool, dtype: torch.dtype, device: str, shape: tuple[int, ...]
) -> str | None:
    """Reason why a config's kernel cannot be used, or that of its key_norm: it is not at hand, or not trusted."""
    kernel: Any = kernel_of(config, channelwise=channelwise)
    if load_kernel(kernel) is None:
        return f"it needs {kernel.module}.{kernel.function}: {install_line('gpu')}"
    reason = distrust_norm(dtype, device, shape) if config.key_norm == "l2" else None
    return reason or distrust(config.model_copy(update={"key_norm": "none"}), channelwise, dtype, device, shape)


@cache
@torch.inference_mode(False)
def distrust(
    config: MemoryConfig, channelwise: bool, dtype: torch.dtype, device: str, shape: tuple[int, ...]
) -> str | None:
    """Reason why a kernel is not trusted: what it computes beside the parallel engine."""
    if device == "cuda" and not torch.cuda.is_available():
        return NO_CARD
    inputs, cotangents = trial(dtype, device, shape, flags=("channels",) * channelwise)
    carry = Carry((), (), (), (), (), (), torch.zeros(2, device=device))
    kernel = by_kernel(config, carry, dtype)

    def of(kind: torch.dtype, plain: ByHand) -> Tensors:
        tensors = [x if x is None or not x.is_floating_point() else x.to(kind) for x in inputs]
        return both_by_torch(plain, tuple(tensors), [item.to(kind) for item in cotangents])

    loop = kernel._replace(plain=by_torch(config, carry, sequential))
    return difference(
        partial(both_ways, kernel, inputs, cotangents), partial(of, torch.float64, kernel),
        plain=partial(of, dtype, loop), bound=PARITY[dtype], against="float64", dtype=dtype, shape=shape,
    )  # fmt: skip
