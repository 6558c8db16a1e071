"""The bridge to `torch.autograd`: one `autograd.Function`, for programs of blocks and for passes written by hand.

A tape and a pass by hand are functions of numbers. Where torch has to see every operation (`torch.compile`,
`torch.func`, dispatch modes, forward mode, batched cotangents, second derivatives) both give way to plain operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from operator import is_not
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _python_dispatch
from torch.utils._pytree import tree_flatten, tree_unflatten

from hecate.checks import expect_choice
from hecate.tape.tape import (
    Block,
    Made,
    Program,
    Tape,
    Tensors,
    Values,
    differentiable,
    distinct,
    execute,
    remembering,
    replay,
    several,
)

Autodiff = Literal["auto", "tape", "torch"]
Forward = Callable[[Tensors, bool], Made]  # (inputs, keeps) -> outputs, record
Pullback = Callable[[Tensors, Any, Sequence[Tensor]], Values]  # (inputs, record, cotangents)

# Past autograd's kernels: where nothing is recorded or traced, and no foreign code is called, which may differentiate.
below_autograd = torch._C._AutoDispatchBelowAutograd
# Of tensors under `is_grads_batched`; looking a key up by its name costs more than all else here.
_BATCHED = torch._C._parse_dispatch_key("Batched")
_NOTHING: AbstractContextManager[Any] = nullcontext()
_TENSOR = {Tensor}
AT_ONCE = ("cpu",)  # types of devices whose numbers are there when a call returns


def differentiate(program: Program, inputs: Tensors, autodiff: Autodiff = "auto") -> Tensors:
    """Runs `program(run, *inputs)` so that torch can differentiate it.

    `"tape"` saves the inputs and what the program's checkpoints return; the backward pass tapes the rest again and each
    checkpoint in its turn. Where torch has to see every operation (second derivatives, `torch.func`, `torch.compile`),
    it saves the inputs alone and everything runs again, as plain torch. `"torch"` leaves the recording to autograd
    (more memory, forward-mode AD). `"auto"` is the tape, except while `torch.compile` traces: there the compiler plans
    its own recomputation and a Python-side tape would only hide the graph from it.
    """
    expect_choice(autodiff, "autodiff", get_args(Autodiff))
    compiling = torch.compiler.is_compiling()
    with full_precision(inputs):
        if autodiff == "torch" or (autodiff == "auto" and compiling):
            return program(execute, *inputs)
        transformed = torch._C._are_functorch_transforms_active()
        # Neither does torch.compile trace a Function of which nothing is to be differentiated.
        if not transformed and forward_ad._current_level < 0 and not is_recorded(inputs):
            return program(execute, *inputs)

        def forward(inputs: Tensors, keeps: bool) -> Made:
            checkpoints: list[Made] = []
            return program(remembering(checkpoints) if keeps else execute, *inputs), checkpoints

        def pullback(inputs: Tensors, record: Any, cotangents: Sequence[Tensor]) -> Values:
            # What was made is a constant to whatever differentiates this in turn.
            checkpoints = [] if record is None or torch.is_grad_enabled() else record
            with full_precision(cotangents):
                return replay(Tape(), program, inputs, cotangents, checkpoints)

        if compiling:  # which traces no Function of one tensor twice
            inputs = distinct(inputs, set())
        return _Function.apply(forward, pullback, None if compiling or transformed else [], *inputs)  # type: ignore[no-untyped-call]


class ByHand(NamedTuple):
    """A forward pass, its hand-written backward pass, and the same in plain torch.

    forward: (inputs, keeps) -> (outputs, record), the record, tensors in any nesting, being needed only if it is to be
    kept.
    vjp: (inputs, record, cotangents) -> cotangents of the inputs; it may write into tensors of its own.
    plain: (*inputs) -> outputs, in differentiable operations only, in its place wherever torch must see them all.
    """

    name: str
    forward: Forward
    vjp: Pullback
    plain: Callable[..., Tensors]

    def block(self) -> Block:
        """As a tape block."""

        def run(keeps: bool, *inputs: Tensor | None) -> Made:
            if is_traced(*inputs):
                return self.plain(*inputs), (inputs, None)
            if is_recorded(inputs):
                alive: list[Tensor | None] = []  # without the wrappers of transforms that are over
                for item in inputs:
                    alive.append(None if item is None else torch._C._functorch.unwrap_if_dead(item))
                outputs = _apply(self.forward, self.pullback, [], *alive)
                return outputs, (inputs, None)
            outputs, record = self.forward(inputs, keeps)
            return outputs, (inputs, record if keeps else None)

        def vjp(residuals: tuple[Tensors, Any], *cotangents: Tensor) -> Values:
            return self.pullback(*residuals, cotangents)

        return Block(self.name, partial(run, False), vjp, record=partial(run, True))

    def pullback(self, inputs: Tensors, record: Any, cotangents: Sequence[Tensor]) -> Values:
        """Cotangents of the inputs: by hand, or by torch where it has to see every operation."""
        recorded = torch.is_grad_enabled() and is_recorded((*inputs, *cotangents))
        if not recorded and not is_traced(*inputs, *cotangents):
            if record is None:
                record = self.forward(inputs, True)[1]
            return self.vjp(inputs, record, cotangents)
        if not is_traced(*inputs):
            return self.by_autograd(inputs, cotangents)
        blank = Block(self.name, lambda *inputs: (self.plain(*inputs), None))
        return tuple(blank.pullback(blank.apply(inputs)[1], cotangents))

    def by_autograd(self, inputs: Tensors, cotangents: Sequence[Tensor]) -> Tensors:
        """Cotangents of inputs by autograd, which records them in turn if asked to."""
        create_graph, variables = torch.is_grad_enabled(), {}
        with torch.enable_grad():
            for at, value in enumerate(inputs):
                if value is not None and differentiable(value):
                    variables[at] = value.view_as(value) if value.requires_grad else value.detach().requires_grad_()
            outputs = several(self.plain(*[variables.get(at, value) for at, value in enumerate(inputs)]))
            pairs = [pair for pair in zip(outputs, cotangents, strict=True) if pair[0].requires_grad]
            outputs, grad_outputs = zip(*pairs, strict=True)
            leaves = tuple(variables.values())
            grads = torch.autograd.grad(outputs, leaves, grad_outputs, create_graph=create_graph, allow_unused=True)
        by_input = dict(zip(variables, grads, strict=True))
        return tuple(map(by_input.get, range(len(inputs))))


def by_hand(block: Block, plain: Callable[..., Tensors] | None = None) -> Block:
    """A block with its own VJP under autograd too, where recording its operations one by one would pass over the
    tensors several times as often; `plain` where its forward is not what higher derivatives are to be taken of."""
    return ByHand(
        block.name,
        lambda inputs, _: block.forward(*inputs),
        lambda _, residuals, cotangents: block.pullback(residuals, cotangents),
        plain or (lambda *inputs: block.forward(*inputs)[0]),
    ).block()


@contextmanager
def past_hooks() -> Iterator[None]:
    """Without the hooks on what autograd saves, those of activation checkpointing among them, under which `torch.func`
    refuses to run: for what autograd does not see, of which it saves nothing."""
    hooks: list[Any] = []
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


class _Function(torch.autograd.Function):
    """(forward, pullback, record, *inputs) -> outputs. `record` is an empty list for what the backward pass needs, so
    that nothing runs twice; None where torch sees every operation, and the pullback starts from the inputs alone."""

    generate_vmap_rule = True

    @staticmethod
    def forward(forward: Forward, _: Pullback, record: list[Any] | None, *inputs: Tensor | None) -> Tensors:
        if torch.compiler.is_compiling() or torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
            outputs, residuals = forward(inputs, record is not None)
        else:
            with past_hooks():
                outputs, residuals = forward(inputs, record is not None)
        if record is None:
            # torch refuses to save an input that is an output as well.
            return distinct(outputs, set(inputs))
        record.append(residuals)
        # What is kept for the backward pass must not hold the outputs, which hold it.
        detached: list[Tensor | None] = []
        for out in outputs:  # loops here, not comprehensions: each of these is a frame in every block
            detached.append(None if out is None else out.detach())
        return tuple(detached)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        _, ctx.pullback, record, *operands = inputs
        ctx.count, ctx.flat, ctx.layout, ctx.others = len(operands), False, None, []
        saved = [*operands]
        if record:
            # Tensors alone need no walk through what may be nested.
            flat = type(record[0]) is tuple and _TENSOR.issuperset(map(type, record[0]))
            leaves, ctx.layout = (record[0], None) if flat else tree_flatten(record)
            ctx.flat = flat
            for item in leaves:
                plain = isinstance(item, Tensor)
                saved.append(item if plain else None)
                ctx.others.append(None if plain else item)
        ctx.save_for_backward(*saved)
        whole = []
        for out in output:
            if isinstance(out, Tensor) and not (out.is_floating_point() or out.is_complex()):
                whole.append(out)
        ctx.mark_non_differentiable(*whole)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: activation checkpointing hands them out a single time
        inputs, record = saved[: ctx.count], None
        if ctx.flat:
            record = saved[ctx.count :]
        elif ctx.layout is not None:
            leaves = []
            for tensor, other in zip(saved[ctx.count :], ctx.others, strict=True):
                leaves.append(other if tensor is None else tensor)
            (record,) = tree_unflatten(leaves, ctx.layout)
        grads = list(filter(partial(is_not, None), cotangents))
        return None, None, None, *ctx.pullback(inputs, record, grads)


# `_Function.apply` where no transform of torch.func is active, which binds the arguments by their names in every call.
_apply: Callable[..., Tensors] = super(torch.autograd.Function, _Function).apply


def is_traced(*tensors: Tensor | None) -> bool:
    """True if torch has to see every operation: tracing, transforms, forward mode, subclasses."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return True
    if _python_dispatch._get_current_dispatch_mode() is not None or forward_ad._current_level >= 0:
        return True
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    for tensor in tensors:  # a loop, not `any`: it runs at every block, and a generator costs a frame per tensor
        if tensor is None:
            continue
        if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            return True
        if torch._C._dispatch_keys(tensor).has(_BATCHED):  # type: ignore[arg-type]
            return True
    return False


def compiled_alone() -> bool:
    """True if torch.compile traces a program for this process: no export, and nothing that torch.func transforms."""
    compiling = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
    return compiling and not torch._C._are_functorch_transforms_active()


def is_recorded(tensors: Values) -> bool:
    """True if autograd records operations on these tensors."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def can_inspect(*tensors: Tensor, free: bool = False) -> bool:
    """True if values exist and may steer Python: not on the meta device, not while compiling, not inside `torch.func`
    transforms; `free`: nor where reading makes the host wait for a device, or torch has to see every operation."""
    if torch.compiler.is_compiling():
        return False
    for tensor in tensors:
        if tensor.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return False
        if free and tensor.device.type not in AT_ONCE:
            return False
    return not (free and is_traced(*tensors))


def waits(tensor: Tensor) -> bool:
    """True if reading values makes the host wait for a device."""
    return tensor.device.type not in AT_ONCE


def full_precision(inputs: Values) -> AbstractContextManager[Any]:
    """No autocast where the work is: index tensors may stay on the CPU while it is elsewhere."""
    for value in inputs:
        if value is not None and not value.is_cpu:
            return without_autocast(value.device.type)
    return without_autocast("cpu")


def without_autocast(device: str) -> AbstractContextManager[Any]:
    """Full precision on a device type, whatever autocast surrounds the call."""
    if not (device == "cpu" or torch.amp.is_autocast_available(device)) or not torch.is_autocast_enabled(device):
        return _NOTHING
    return torch.autocast(device, enabled=False)
