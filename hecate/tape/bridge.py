"""Where the tape meets `torch.autograd`: one `autograd.Function` per program."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from hecate.errors import ConfigError
from hecate.tape.block import Block, Program, Tensors, differentiable, distinct, execute
from hecate.tape.tape import checkpoint

Autodiff = Literal["auto", "tape", "torch"]


def differentiate(program: Program, inputs: Tensors, autodiff: Autodiff = "auto") -> Tensors:
    """Runs `program(run, *inputs)` so that torch can differentiate it.

    `"tape"` saves the inputs only and tapes the program again in the backward pass, which is plain
    torch: second derivatives, `torch.func.grad` and `vmap` pass through. `"torch"` leaves the
    recording to autograd (more memory, forward-mode AD). `"auto"` is the tape, except while
    `torch.compile` traces: there the compiler plans its own recomputation and a Python-side tape
    would only hide the graph from it.
    """
    if autodiff not in get_args(Autodiff):
        raise ConfigError(f"autodiff must be one of {get_args(Autodiff)}, got {autodiff!r}")
    if autodiff == "torch" or (autodiff == "auto" and torch.compiler.is_compiling()):
        with _full_precision(inputs):
            return program(execute, *inputs)
    block = checkpoint("program", program)
    outputs: Tensors = _Taped.apply(block, *inputs)  # type: ignore[no-untyped-call]
    return outputs


class _Taped(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(block: Block, *inputs: Tensor | None) -> Tensors:
        with _full_precision(inputs):
            outputs = block.forward(*inputs)[0]
        # torch refuses to save an input that is an output as well.
        return distinct(outputs, {id(value) for value in inputs})

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        block, *tensors = inputs
        ctx.block = block
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(
            *(out for out in output if out is not None and not differentiable(out))
        )

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        given = [cotangent for cotangent in cotangents if cotangent is not None]
        with _full_precision(tuple(given)):
            return None, *ctx.block.pullback(ctx.saved_tensors, given)


def _full_precision(inputs: Tensors) -> AbstractContextManager[Any]:
    # Index tensors may stay on the CPU while the work is elsewhere.
    devices = sorted({value.device.type for value in inputs if value is not None}, key="cpu".__eq__)
    device = devices[0] if devices else None
    if device is None or not torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)
