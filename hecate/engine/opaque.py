"""Kernels that torch cannot see into, with a torch engine at their side.

A kernel computes outputs and first derivatives. Where torch has to see every operation (second
derivatives, batched cotangents), the torch engine of the same rule takes its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _python_dispatch

from hecate.engine.parallel import parallel, parallel_refusal
from hecate.engine.sequential import sequential
from hecate.engine.tokens import Carry, Tokens
from hecate.rule import MemoryConfig
from hecate.rule.rule import one, several
from hecate.structure import Memory
from hecate.tape import Block, Program, Run, Tensors, differentiable, execute


class Kernel(NamedTuple):
    """A scan outside torch's sight.

    `scan(inputs, keeps=...)` gives the outputs (y, memory, *slots) and, if it `keeps`, the tensors
    that `scan_vjp(inputs, record, cotangents)` needs for the cotangents of inputs. Inputs are
    (memory, *slots, initial, *tokens).
    """

    name: str
    scan: Callable[..., tuple[Tensors, Tensors]]
    scan_vjp: Callable[[Tensors, Tensors, Sequence[Tensor]], Tensors]


def is_traced(*tensors: Tensor) -> bool:
    """Whether torch has to see every operation: tracing, transforms, forward mode, subclasses."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return True
    if _python_dispatch._get_current_dispatch_mode() is not None or forward_ad._current_level >= 0:
        return True
    return any(
        torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        or torch._C._dispatch_keys(tensor).has("Batched")  # by `is_grads_batched`
        or type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
        for tensor in tensors
    )


def run_kernel(
    kernel: Kernel,
    config: MemoryConfig,
    tokens: Tokens,
    carry: Carry,
    initial: Memory,
    *,
    run: Run,
) -> tuple[Tensor, Carry]:
    """Runs a sequence in a kernel: outputs `[N, T, V]` and the final carry."""
    states = 1 + len(carry.slots)

    def by_torch(run: Run, *inputs: Tensor) -> Tensors:
        engine = sequential if parallel_refusal(config) else parallel
        own = carry._replace(memory=inputs[:1], slots=inputs[1:states])
        rest = Tokens(*inputs[states + 1 :])
        y, new = engine(config, rest, own, inputs[states : states + 1], run=run)
        return (y, *new.memory, *new.slots)

    def forward(*inputs: Tensor | None) -> tuple[Tensors, Any]:
        if _recorded(inputs):
            outputs: Tensors = _Opaque.apply(kernel, by_torch, *inputs)  # type: ignore[no-untyped-call]
            return outputs, (inputs, None)
        outputs, record = kernel.scan(inputs, keeps=run is not execute)
        return outputs, (inputs, record if run is not execute else None)

    def vjp(residuals: tuple[Tensors, Tensors | None], *cotangents: Tensor) -> Tensors:
        return _pullback(kernel, by_torch, *residuals, cotangents)

    block = Block(kernel.name, forward, vjp)
    y, memory, *slots = several(
        run(block, *carry.memory, *carry.slots, *initial, *tokens, label="tokens")
    )
    return y, carry._replace(memory=(memory,), slots=tuple(slots))


class _Opaque(torch.autograd.Function):
    """Keeps the kernel's record, so that under autograd nothing runs twice."""

    @staticmethod
    def forward(ctx: Any, kernel: Kernel, by_torch: Program, *inputs: Tensor | None) -> Tensors:
        outputs, record = kernel.scan(inputs, keeps=True)
        ctx.kernel, ctx.by_torch, ctx.count = kernel, by_torch, len(inputs)
        ctx.save_for_backward(*inputs, *record)
        return outputs

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        inputs, record = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        return None, None, *_pullback(ctx.kernel, ctx.by_torch, inputs, record, cotangents)


def _pullback(
    kernel: Kernel,
    by_torch: Program,
    inputs: Tensors,
    record: Tensors | None,
    cotangents: Sequence[Tensor],
) -> Tensors:
    if _recorded((*inputs, *cotangents)) or is_traced(*cotangents):
        return autograd(by_torch, inputs, cotangents)
    if record is None:
        record = kernel.scan(inputs, keeps=True)[1]
    return kernel.scan_vjp(inputs, record, cotangents)


def autograd(program: Program, inputs: Tensors, cotangents: Sequence[Tensor]) -> Tensors:
    """Cotangents of inputs by autograd, which records them in turn if asked to."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        own = leaves(inputs)
        where = [index for index, value in enumerate(own) if differentiable(value)]
        outputs = several(program(execute, *own))
        grads = torch.autograd.grad(
            outputs, [one((own[index],)) for index in where], cotangents,
            create_graph=create_graph, allow_unused=True,
        )  # fmt: skip
    found: list[Tensor | None] = [None] * len(inputs)
    for index, grad in zip(where, grads, strict=True):
        found[index] = grad
    return tuple(found)


def leaves(inputs: Tensors) -> Tensors:
    """The inputs as tensors that autograd tells apart, each requiring its gradient."""
    own: list[Tensor | None] = []
    for value in inputs:
        if value is not None and differentiable(value):
            value = value.view_as(value) if value.requires_grad else value.detach()
            value.requires_grad_()
        own.append(value)
    return tuple(own)


def _recorded(tensors: Tensors) -> bool:
    """Whether autograd records what is done with these tensors."""
    return torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in tensors
    )
