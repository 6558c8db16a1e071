"""The bridge to `torch.autograd`: one `autograd.Function`, for programs of blocks and for passes written by hand.

Torch sees neither the operations of a tape nor those of a pass by hand. Where it has to see every one (`torch.compile`,
`torch.func`, dispatch modes, forward mode, batched cotangents, second derivatives) plain torch runs in their place.
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
from hecate.errors import ConfigError
from hecate.tape.tape import Block, Made, Program, Tape, Tensors, Values, differentiable, distinct, execute, remembering

Autodiff = Literal["auto", "tape", "torch"]
Forward = Callable[[Tensors, bool], Made]  # (inputs, keeps) -> outputs, record
Pullback = Callable[[Tensors, Any, Sequence[Tensor]], Values]  # (inputs, record, cotangents)

# Skips autograd's dispatch: only where nothing is recorded or traced, and no code is called that may differentiate.
below_autograd = torch._C._AutoDispatchBelowAutograd
# The key of tensors under `is_grads_batched`; to look it up by name in each call would cost more than all else here.
_BATCHED = torch._C._parse_dispatch_key("Batched")
_NOTHING: AbstractContextManager[Any] = nullcontext()
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_present = partial(filter, partial(is_not, None))
_TENSOR = {Tensor}
AT_ONCE = ("cpu",)  # types of devices whose results are ready when a call returns


def differentiate(program: Program, inputs: Tensors, autodiff: Autodiff = "auto") -> Tensors:
    """Runs `program(run, *inputs)` so that torch can differentiate it.

    `"tape"` saves the inputs and what the program's checkpoints return; the backward pass tapes the rest again and each
    checkpoint in its turn. Where torch has to see every operation (second derivatives, `torch.func`, `torch.compile`),
    it saves the inputs alone and everything runs again, as plain torch. `"torch"` leaves the recording to autograd
    (more memory, forward-mode AD). `"auto"` is the tape, except in forward mode and while `torch.compile` traces: the
    compiler plans its own recomputation and a Python-side tape would only hide the graph from it.
    """
    expect_choice(autodiff, "autodiff", get_args(Autodiff))
    compiling = torch.compiler.is_compiling()
    with full_precision(inputs):
        forwards = forward_ad._current_level >= 0
        if autodiff == "torch" or (autodiff == "auto" and (compiling or forwards)):
            return program(execute, *inputs)
        transformed = torch._C._are_functorch_transforms_active()
        # A Function is not needed here, and torch.compile would not trace one if nothing needs a gradient.
        if not transformed and not forwards and not is_recorded(inputs):
            return program(execute, *inputs)

        def forward(inputs: Tensors, keeps: bool) -> Made:
            checkpoints: list[Made] = []
            return program(remembering(checkpoints) if keeps else execute, *inputs), checkpoints

        def pullback(inputs: Tensors, record: Any, cotangents: Sequence[Tensor]) -> Values:
            if is_traced(*cotangents) and not is_traced(*inputs):  # batched: torch has rules for its own nodes
                plain = ByHand("plain", forward, pullback, lambda *given: (*_present(program(execute, *given)),))
                return plain.by_autograd(inputs, cotangents)
            # Remembered results would be constants to a second derivative, so then everything runs again.
            checkpoints = [] if record is None or torch.is_grad_enabled() else record
            return Tape().replay(program, inputs, cotangents, checkpoints)

        if compiling:  # which cannot trace a Function that gets one tensor twice
            inputs = distinct(inputs, set())
        apply = _with_tangents if forwards else _Function.apply
        return apply(forward, pullback, None if compiling or transformed else [], *inputs)


class ByHand(NamedTuple):
    """A forward pass, its hand-written backward pass, and the same in plain torch.

    forward: (inputs, keeps) -> (outputs, record). The record, tensors in any nesting, is for `vjp`, and may be empty if
    `keeps` is False.
    vjp: (inputs, record, cotangents) -> cotangents of the inputs. It may write into tensors that it makes itself.
    plain: (*inputs) -> outputs by differentiable operations only: runs instead wherever torch must see them all.
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
                alive: list[Tensor | None] = []  # without wrappers of torch.func transforms that have ended
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
        """Cotangents of the inputs by autograd through `plain`; they can be differentiated again under grad mode."""
        create_graph, variables = torch.is_grad_enabled(), {}
        with torch.enable_grad():
            for at, value in enumerate(inputs):
                if value is not None and differentiable(value):
                    variables[at] = value.view_as(value) if value.requires_grad else value.detach().requires_grad_()
            outputs = self.plain(*[variables.get(at, value) for at, value in enumerate(inputs)])
            pairs = [(y, g) for y, g in zip(outputs, cotangents, strict=True) if y is not None and y.requires_grad]
            smooth, grad_outputs = zip(*pairs, strict=True)
            leaves = tuple(variables.values())
            grads = torch.autograd.grad(smooth, leaves, grad_outputs, create_graph=create_graph, allow_unused=True)
        by_input = dict(zip(variables, grads, strict=True))
        return tuple(map(by_input.get, range(len(inputs))))


def by_hand(block: Block, plain: Callable[..., Tensors] | None = None) -> Block:
    """The block as a single node of autograd with the block's own VJP: to record its operations one by one would take
    several times as many passes over the tensors. `plain` replaces its forward for higher derivatives."""
    return ByHand(
        block.name,
        lambda inputs, _: block.forward(*inputs),
        lambda _, residuals, cotangents: block.pullback(residuals, cotangents),
        plain or (lambda *inputs: block.forward(*inputs)[0]),
    ).block()


@contextmanager
def past_hooks() -> Iterator[None]:
    """Turns off all hooks on saved tensors, such as those of activation checkpointing, under which `torch.func` refuses
    to run: for code that autograd does not see, of which it saves nothing anyway."""
    hooks: list[Any] = []
    while (top := _top_hooks(True)) is not None:
        hooks.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


class _Function(torch.autograd.Function):
    """(forward, pullback, record, *inputs) -> outputs. `record` is an empty list, into which the forward puts what the
    backward pass needs; or None where torch sees every operation, and the pullback has the inputs alone."""

    generate_vmap_rule = True

    @staticmethod
    def forward(forward: Forward, _: Pullback, record: list[Any] | None, *inputs: Tensor | None) -> Tensors:
        if torch.compiler.is_compiling() or _top_hooks(True) is None:
            outputs, residuals = forward(inputs, record is not None)
        else:
            with past_hooks():
                outputs, residuals = forward(inputs, record is not None)
        if record is None:
            # torch refuses to save an input that is an output as well.
            return distinct(outputs, set(inputs))
        record.append(residuals)
        # Detached, as the record may contain the outputs, whose graph keeps the record: a cycle.
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
            # A flat tuple of tensors need not be flattened.
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
        grads = [*_present(cotangents)]
        graph = torch.compiler.is_compiling()  # which has no hooks; looked for here, as calls in Python cost more
        hooked, mixed = not graph and _top_hooks(True) is not None, graph or torch._C._is_any_autocast_enabled()
        with full_precision(grads) if mixed else _NOTHING, past_hooks() if hooked else _NOTHING:
            return None, None, None, *ctx.pullback(inputs, record, grads)


def _with_tangents(*given: Any) -> Tensors:
    """`_Function.apply` in forward mode: refused where tangents arrive. Not a `jvp`, which torch.compile refuses."""
    try:
        return _Function.apply(*given)  # type: ignore[no-untyped-call]
    except NotImplementedError as error:
        if "jvp" not in str(error):
            raise
        raise ConfigError(
            "forward mode (torch.func.jvp, jacfwd, forward_ad) passes neither autodiff='tape' nor engine 'parallel' "
            "under a solved step (step 'implicit', bias other than l2): take 'auto' or 'torch', and engine 'sequential'"
        ) from error


# `_Function.apply` without its Python wrapper, which binds arguments by name in each call: if no transform is active.
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
    """True if torch.compile traces, for this process: not for torch.export, and without torch.func transforms."""
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
    """True if Python may read the values and branch on them: not on the meta device, while compiling, or inside
    `torch.func` transforms. `free`: nor if the host would wait for a device, or torch has to see every operation."""
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
    """Turns autocast off on the inputs' device, which is not the CPU if any is not: index tensors may stay there."""
    for value in inputs:
        if value is not None and not value.is_cpu:
            return without_autocast(value.device.type)
    return without_autocast("cpu")


def without_autocast(device: str) -> AbstractContextManager[Any]:
    """Turns autocast off on a device type for the duration of the context."""
    if not (device == "cpu" or torch.amp.is_autocast_available(device)) or not torch.is_autocast_enabled(device):
        return _NOTHING
    return torch.autocast(device, enabled=False)
