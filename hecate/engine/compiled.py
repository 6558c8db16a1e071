"""The exact compiled engine for matrix memories on a CPU: token by token, the state in cache.

The recurrence of the token loop in numba kernels, forward and backward (the extra `cpu`). The
forward keeps the predictions `[N, T, V]` and the state of every max(32, sqrt(T))-th token; the
backward writes the states of one such segment again and walks it in reverse. Memories are shared
out over `torch.get_num_threads()` threads, each computed by one, so results do not depend on their
number. Subnormal numbers are kept unless `torch.set_flush_denormal` says otherwise.

Second derivatives and batched cotangents go through the torch engines instead. [ENG-NUM-D1]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _python_dispatch

from hecate.algorithm import GD, Momentum
from hecate.engine.launch import load_kernels, scan, scan_vjp
from hecate.engine.parallel import parallel, parallel_refusal
from hecate.engine.sequential import sequential
from hecate.engine.tokens import Carry, Tokens
from hecate.retention import Decay, NoRetention
from hecate.rule import MemoryConfig
from hecate.rule.rule import one, several
from hecate.structure import Matrix, Memory
from hecate.tape import Block, Program, Run, Tensors, differentiable, execute


def compiled_refusal(
    config: MemoryConfig,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    traced: bool = False,
) -> str | None:
    """Why the compiled engine cannot run a config on such tensors exactly; None if it can."""
    if traced:
        return "torch has to see every operation here (torch.compile, torch.func, a dispatch mode)"
    rule = config.rule
    if config.chunk > 1 or config.commit == "chunk":
        return (
            f"chunk={config.chunk}, commit={config.commit!r} take gradients at a remembered state"
        )
    for name, knob, known in (
        ("structure", rule.structure, (Matrix,)),
        ("retention", rule.retention, (NoRetention, Decay)),
        ("algorithm", rule.algorithm, (GD, Momentum)),
    ):
        if type(knob) not in known:
            return f"{name} {knob.kind!r} has no kernel"
    if rule.bias.kernel_form() is None:
        return f"bias {rule.bias.kind!r} as configured has no kernel"
    if device != "cpu":
        return f"its kernels run on the CPU, the tensors are on {device}"
    if dtype not in (torch.float32, torch.float64):
        return f"its kernels are for float32 and float64, the state is {dtype}"
    if load_kernels() is None:
        return 'it needs numba: pip install "hecate[cpu]"'
    return None


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


def compiled(
    config: MemoryConfig, tokens: Tokens, carry: Carry, initial: Memory, *, run: Run
) -> tuple[Tensor, Carry]:
    """Runs a sequence in the kernels: outputs `[N, T, V]` and the final carry."""
    states = 1 + len(carry.slots)

    def by_torch(run: Run, *inputs: Tensor) -> Tensors:
        engine = sequential if parallel_refusal(config) else parallel
        own = carry._replace(memory=inputs[:1], slots=inputs[1:states])
        rest = Tokens(*inputs[states + 1 :])
        y, new = engine(config, rest, own, inputs[states : states + 1], run=run)
        return (y, *new.memory, *new.slots)

    def forward(*inputs: Tensor | None) -> tuple[Tensors, Any]:
        if _recorded(inputs):
            outputs: Tensors = _Kernels.apply(config, by_torch, *inputs)  # type: ignore[no-untyped-call]
            return outputs, (inputs, None)
        outputs, record = scan(config, inputs, keeps=run is not execute)
        return outputs, (inputs, record if run is not execute else None)

    def vjp(residuals: tuple[Tensors, Tensors | None], *cotangents: Tensor) -> Tensors:
        return _pullback(config, by_torch, *residuals, cotangents)

    block = Block("engine.compiled", forward, vjp)
    y, memory, *slots = several(
        run(block, *carry.memory, *carry.slots, *initial, *tokens, label="tokens")
    )
    return y, carry._replace(memory=(memory,), slots=tuple(slots))


class _Kernels(torch.autograd.Function):
    """Keeps what the backward kernel needs, so that under autograd nothing runs twice."""

    @staticmethod
    def forward(
        ctx: Any, config: MemoryConfig, by_torch: Program, *inputs: Tensor | None
    ) -> Tensors:
        outputs, record = scan(config, inputs, keeps=True)
        ctx.config, ctx.by_torch, ctx.count = config, by_torch, len(inputs)
        ctx.save_for_backward(*inputs, *record)
        return outputs

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        inputs, record = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        return None, None, *_pullback(ctx.config, ctx.by_torch, inputs, record, cotangents)


def _pullback(
    config: MemoryConfig,
    by_torch: Program,
    inputs: Tensors,
    record: Tensors | None,
    cotangents: Sequence[Tensor],
) -> Tensors:
    if _recorded((*inputs, *cotangents)) or is_traced(*cotangents):
        return _autograd(by_torch, inputs, cotangents)
    if record is None:
        record = scan(config, inputs, keeps=True)[1]
    return scan_vjp(config, inputs, record, cotangents)


def _autograd(program: Program, inputs: Tensors, cotangents: Sequence[Tensor]) -> Tensors:
    """Cotangents of inputs by autograd, which records them in turn if asked to."""
    where = [index for index, value in enumerate(inputs) if differentiable(value)]
    own = list(inputs)
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        for index in where:
            value = one((inputs[index],))
            own[index] = value.view_as(value) if value.requires_grad else value.detach()
            one((own[index],)).requires_grad_()
        outputs = several(program(execute, *own))
        grads = torch.autograd.grad(
            outputs, [one((own[index],)) for index in where], cotangents,
            create_graph=create_graph, allow_unused=True,
        )  # fmt: skip
    found: list[Tensor | None] = [None] * len(inputs)
    for index, grad in zip(where, grads, strict=True):
        found[index] = grad
    return tuple(found)


def _recorded(tensors: Tensors) -> bool:
    """Whether autograd records what is done with these tensors."""
    return torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in tensors
    )
