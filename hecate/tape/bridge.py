"""Where the tape meets `torch.autograd`: one `autograd.Function` per program."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd import forward_ad

from hecate.errors import ConfigError
from hecate.tape.block import Program, Tensors, differentiable, distinct, execute
from hecate.tape.tape import Made, Tape, remembering, replay

Autodiff = Literal["auto", "tape", "torch"]


def differentiate(program: Program, inputs: Tensors, autodiff: Autodiff = "auto") -> Tensors:
    """Runs `program(run, *inputs)` so that torch can differentiate it.

    `"tape"` saves the inputs and what the program's checkpoints return; the backward pass tapes the rest again and each
    checkpoint in its turn. Where torch has to see every operation (second derivatives, `torch.func`, `torch.compile`),
    it saves the inputs alone and everything runs again, as plain torch. `"torch"` leaves the recording to autograd
    (more memory, forward-mode AD). `"auto"` is the tape, except while `torch.compile` traces: there the compiler plans
    its own recomputation and a Python-side tape would only hide the graph from it.
    """
    if autodiff not in get_args(Autodiff):
        raise ConfigError(f"autodiff must be one of {get_args(Autodiff)}, got {autodiff!r}")
    compiling = torch.compiler.is_compiling()
    if autodiff == "torch" or (autodiff == "auto" and compiling):
        with _full_precision(inputs):
            return program(execute, *inputs)
    seen = compiling or torch._C._are_functorch_transforms_active()
    if not seen and forward_ad._current_level < 0 and not _recorded(inputs):
        with _full_precision(inputs):
            return program(execute, *inputs)
    outputs: Tensors = _Taped.apply(program, None if seen else [], *inputs)  # type: ignore[no-untyped-call]
    return outputs


class _Taped(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(program: Program, made: list[Made] | None, *inputs: Tensor | None) -> Tensors:
        run = execute if made is None else remembering(made)
        with _full_precision(inputs):
            outputs = program(run, *inputs)
        if made:  # what is kept for the backward pass must not hold the outputs, which hold it
            return tuple(None if out is None else out.detach() for out in outputs)
        # torch refuses to save an input that is an output as well.
        return distinct(outputs, {id(value) for value in inputs})

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        ctx.program, made, *tensors = inputs
        ctx.sizes = [len(tensors), *(len(each.outputs) for each in made or ())]
        ctx.records = [each.record for each in made or ()]
        ctx.save_for_backward(*tensors, *(item for each in made or () for item in each.outputs))
        ctx.mark_non_differentiable(*(out for out in output if out is not None and not differentiable(out)))

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        given = [cotangent for cotangent in cotangents if cotangent is not None]
        saved = iter(ctx.saved_tensors)
        inputs, *kept = (tuple(islice(saved, size)) for size in ctx.sizes)
        made = [Made(*each) for each in zip(kept, ctx.records, strict=False)]
        if torch.is_grad_enabled():
            made = []  # they are constants to what differentiates this in turn
        ctx.records = [None] * len(kept)  # let go of: a second backward pass tapes again
        with _full_precision(tuple(given)):
            return None, None, *replay(Tape(), ctx.program, inputs, given, made)


def _recorded(inputs: Tensors) -> bool:
    """Whether autograd records what is done with these tensors."""
    return torch.is_grad_enabled() and any(value is not None and value.requires_grad for value in inputs)


def _full_precision(inputs: Tensors) -> AbstractContextManager[Any]:
    # Index tensors may stay on the CPU while the work is elsewhere.
    away = (value for value in inputs if value is not None and not value.is_cpu)
    worker = next(away, None)
    return without_autocast("cpu" if worker is None else worker.device.type)


def without_autocast(device: str) -> AbstractContextManager[Any]:
    """Full precision on a device type, whatever autocast surrounds the call."""
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)


def can_inspect(*tensors: Tensor) -> bool:
    """Whether values exist and may steer Python: not on the meta device, not while compiling, not inside `torch.func`
    transforms."""
    if torch.compiler.is_compiling() or any(tensor.is_meta for tensor in tensors):
        return False
    return not any(torch._C._functorch.is_functorch_wrapped_tensor(tensor) for tensor in tensors)
