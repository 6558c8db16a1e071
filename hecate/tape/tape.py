"""Blocks, the unit of differentiation, and the tape, which records their calls and can print, query and replay them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hecate.checks import described
from hecate.errors import ConfigError, ShapeError

Tensors = tuple[Tensor | None, ...]
Values = Sequence[Tensor | None]
Made = tuple[Tensors, Any]  # outputs, and what a VJP needs besides them
Program = Callable[..., Tensors]  # program(run, *inputs) -> outputs, built from calls of `run`


class Block(NamedTuple):
    """A differentiable operation on whole batches, given by two plain functions.

    `forward(*inputs) -> (outputs, residuals)` returns a tuple of tensors and whatever its VJP needs; `vjp(residuals,
    *cotangents) -> input cotangents` returns one tensor or None per input, None meaning "no gradient flows here". A
    cotangent of an output that nobody used, or of integers, arrives as zeros. Without a `vjp` the block is
    differentiated by `torch.func.vjp`, from the one evaluation that is recorded, and `hand_written` is False.

    `program` is set on blocks that are programs themselves, so that a tape can look inside. A block that `recomputes`
    has its inputs as residuals and runs its program again in the VJP. `record` is a forward that keeps what the VJP
    would compute again: a tape calls it in place of `forward`.

    Neither function may change its arguments in place: tapes and `torch.func` both rely on that. A tensor that reaches
    a block by closure rather than as an input is a constant: no gradient flows to it.
    """

    name: str
    forward: Callable[..., Made]
    vjp: Callable[..., Values] | None = None
    program: Program | None = None
    recomputes: bool = False
    record: Callable[..., Made] | None = None

    @property
    def hand_written(self) -> bool:
        """True if the derivative is written by hand rather than left to `torch.func.vjp`."""
        return self.vjp is not None

    def apply(self, inputs: Tensors) -> Made:
        """Runs the forward; the residual of a block without a VJP is torch's own pullback."""
        if self.vjp is None:
            return _autograd_vjp(self, inputs)
        return self.checked((self.forward if self.record is None else self.record)(*inputs))

    def checked(self, returned: Made) -> Made:
        """The result of a forward; `ShapeError` unless it is a tuple of outputs with residuals."""
        if not isinstance(returned[0], tuple):
            got = f"got a {type(returned[0]).__name__}; write `(y,), residuals` for a single output"
            raise ShapeError(f"block {self.name!r} must return (outputs, residuals) with a tuple of outputs, {got}")
        return returned

    def pullback(self, residuals: Any, cotangents: Sequence[Tensor]) -> Values:
        """Input cotangents from output cotangents."""
        return (residuals if self.vjp is None else partial(self.vjp, residuals))(*cotangents)


def formula_block(
    name: str, formula: Callable[..., Any], vjp: Callable[..., Any] | None = None, *, alike: object = None
) -> Block:
    """A block of `formula(*inputs)`, one tensor or a tuple, whose VJP `vjp(*inputs, *cotangents)` needs its inputs
    alone. `alike`: the variant, perhaps a user's own, whose formula must return the shape of its first input."""

    def forward(*inputs: Tensor) -> tuple[Tensors, Tensors]:
        outputs = formula(*inputs)
        if alike is not None and getattr(outputs, "shape", None) != inputs[0].shape:
            shape = list(inputs[0].shape)
            raise ShapeError(f"{name} of {alike!r} must be {shape}, as its first input is, got {described(outputs)}")
        return outputs if isinstance(outputs, tuple) else (outputs,), inputs

    def pulled(inputs: Tensors, *cotangents: Tensor) -> Tensors:
        grads = vjp(*inputs, *cotangents)  # type: ignore[misc]
        return grads if isinstance(grads, tuple) else (grads,)

    return Block(name, forward, None if vjp is None else pulled)


class Run(Protocol):
    """Anything that executes blocks: `execute` forgets them, a `Tape` records them."""

    def __call__(self, block: Block, *inputs: Tensor | None, label: str = "") -> Tensors:
        """Runs the block and returns its outputs."""
        ...


def execute(block: Block, *inputs: Tensor | None, label: str = "") -> Tensors:
    """Runs a block and keeps nothing for a backward pass."""
    return block.forward(*inputs)[0]


def one(outputs: Tensors) -> Tensor:
    """The only output of a block."""
    (output,) = outputs
    if output is None:
        raise TypeError("a block returned None where a tensor was expected")
    return output


def several(outputs: Tensors) -> tuple[Tensor, ...]:
    """All outputs of a block, none of them None."""
    for output in outputs:
        if output is None:
            raise TypeError("a block returned None where a tensor was expected")
    return outputs  # type: ignore[return-value]


def differentiable(tensor: Tensor | None) -> bool:
    """True if gradients can flow to a tensor: floating point or complex, not None."""
    return tensor is not None and (tensor.is_floating_point() or tensor.is_complex())


def distinct(outputs: Tensors, known: set[Tensor | None]) -> Tensors:
    """Outputs that are objects of their own: a repeated one, or one already known, becomes a view.

    A block may return an input as it is; as tensors are identified by object, the two would share one cotangent."""
    views: list[Tensor | None] = []
    met: set[Tensor | None] = set()
    for out in outputs:
        views.append(out.view_as(out) if out is not None and (out in known or out in met) else out)
        met.add(out)
    return tuple(views)


def _autograd_vjp(block: Block, inputs: Tensors) -> tuple[Tensors, Callable[..., Any]]:
    """Outputs of a block and `pull(*cotangents)`, both from one evaluation of its forward."""
    where = [at for at, value in enumerate(inputs) if differentiable(value)]
    if not where:
        return block.checked(block.forward(*inputs))[0], lambda *_: [None] * len(inputs)
    layout: list[bool | None] = []  # per output: None, or whether gradients flow to it

    def outputs_of(*varied: Tensor) -> tuple[Tensors, Tensors]:  # tuples: dicts cost torch.func a sort for each walk
        filled = list(inputs)
        for at, value in zip(where, varied, strict=True):
            filled[at] = value
        outputs = block.checked(block.forward(*filled))[0]
        layout[:] = [None if out is None else differentiable(out) for out in outputs]
        smooth, others = ([o for o, k in zip(outputs, layout, strict=True) if k is kind] for kind in (True, False))
        return tuple(smooth), tuple(others)

    smooth, pull, others = torch.func.vjp(outputs_of, *[inputs[at] for at in where], has_aux=True)  # type: ignore[misc]
    streams = {True: iter(smooth), False: iter(others)}

    def pulled(*cotangents: Tensor) -> list[Tensor | None]:
        grads = dict(zip(where, pull(tuple([g for g in cotangents if differentiable(g)])), strict=True))
        return [grads.get(at) for at in range(len(inputs))]

    return tuple([None if kind is None else next(streams[kind]) for kind in layout]), pulled


# The tape.


class Call(NamedTuple):
    """One recorded block call."""

    block: Block
    label: str
    inputs: Tensors
    outputs: Tensors
    residuals: Any


class Tape:
    """Records block calls and replays their VJPs in reverse order.

        tape = Tape()
        (y,) = tape(block, x, label="layer 0")
        (gx,) = tape.backward([y], [gy], [x])
        print(tape)                      # one line per call
        tape.norms("layer 0")            # cotangent norms by label, after backward

    Tensors are distinguished by identity, as by their hash; a tape keeps what it recorded alive. Recording never copies
    and never touches `torch.autograd`, so every VJP is itself plain torch and can be differentiated again.
    """

    def __init__(self, *, observe: bool = False) -> None:
        """`observe` keeps the norm of every cotangent during `backward`, for `norms`."""
        self.calls: list[Call] = []
        self.observe = observe
        self._observed: list[tuple[str, str, Tensor]] = []  # label, block, norm of its outputs' cotangents
        self._known: set[Tensor | None] = set()
        self._remembered: list[Made] = []  # results of the checkpoints to come, the last one first

    def __call__(self, block: Block, *inputs: Tensor | None, label: str = "") -> Tensors:
        """Runs a block, records the call and returns its outputs."""
        if self._remembered and block.recomputes:
            outputs, record = self._remembered.pop()
            residuals = inputs if record is None else record
        else:
            outputs, residuals = block.apply(inputs)
        self._known.update(inputs)
        outputs = distinct(outputs, self._known)
        self._known.update(outputs)
        self.calls.append(Call(block, label, inputs, outputs, residuals))
        return outputs

    def backward(self, outputs: Values, cotangents: Values, inputs: Values) -> Tensors:
        """Cotangents of `inputs` from cotangents of `outputs`; None where no gradient flows.

        A cotangent must have the shape of its tensor, or `ShapeError` is raised; it is cast to its dtype.
        """
        self._observed = []
        return self._walk(reversed(self.calls), outputs, cotangents, inputs)

    def replay(
        self, program: Program, inputs: Tensors, cotangents: Sequence[Tensor], remembered: Sequence[Made] = ()
    ) -> Tensors:
        """Tapes a program and walks back, releasing each call after it.

        `remembered` has the results of the program's checkpoints, which then need not run.
        """
        views = _variables(inputs)
        self._remembered = list(reversed(remembered))
        outputs = [out for out in program(self, *views) if out is not None]
        self._known.clear()  # otherwise it would keep alive what the calls release
        calls = (self.calls.pop() for _ in range(len(self.calls)))
        return self._walk(calls, outputs, cotangents, views)

    def _walk(self, calls: Iterable[Call], outputs: Values, cotangents: Values, inputs: Values) -> Tensors:
        flowing: dict[Tensor | None, Tensor] = {}
        _accumulate(flowing, outputs, cotangents, None)
        for call in calls:
            received = [(out, flowing.pop(out, None)) for out in call.outputs if out is not None]
            if all(got is None for _, got in received):
                continue
            filled = [torch.zeros_like(out) if got is None else got for out, got in received]
            if self.observe:
                squares = [g.detach().abs().double().square().sum() for g in filled if differentiable(g)]
                self._observed.append((call.label, call.block.name, torch.stack(squares).sum().sqrt()))
            _accumulate(flowing, call.inputs, self._pull(call, filled), call.block)
        return tuple(None if value is None else flowing.get(value) for value in inputs)

    def _pull(self, call: Call, cotangents: list[Tensor]) -> Values:
        if call.block.program is None or not self.observe:
            return call.block.pullback(call.residuals, cotangents)
        inner = Tape(observe=True)
        grads = inner.replay(call.block.program, call.inputs, cotangents)
        self._observed += [(_join(call.label, label), block, norm) for label, block, norm in inner._observed]
        return grads

    def norms(self, label: str = "") -> dict[str, Tensor]:
        """Cotangent norms of the last `backward` by `label/block`, of one label and those below it.

        Needs `Tape(observe=True)`; calls that share a name are combined as a root sum of squares."""
        if not self.observe:
            raise ConfigError("this tape kept no cotangent norms; record with Tape(observe=True)")
        squares: dict[str, Tensor] = {}
        for call_label, block, norm in self._observed:
            if not label or f"/{label}/" in f"/{call_label}/":
                name = _join(call_label, block)
                squares[name] = squares.get(name, torch.zeros_like(norm)) + norm.square()
        return {name: square.sqrt() for name, square in squares.items()}

    @property
    def bytes(self) -> int:
        """Bytes of the distinct storages that the tape keeps alive: inputs, outputs, residuals."""
        sizes: dict[int, int] = {}
        pending: list[Any] = [call[2:] for call in self.calls]
        while pending:
            for item in torch.utils._pytree.tree_leaves(pending.pop()):
                if isinstance(item, _Taped):
                    pending += [call[2:] for call in item.calls]
                elif isinstance(item, Tensor):
                    storage = item.untyped_storage()
                    sizes[storage._cdata] = storage.nbytes()
        return sum(sizes.values())

    def __str__(self) -> str:
        lines = []
        for index, call in enumerate(self.calls):
            shapes = f"{_shapes(call.inputs)} -> {_shapes(call.outputs)}"
            source = "" if call.block.hand_written else "  (vjp by torch.func)"
            lines.append(f"{index:>4}  {call.label:<16} {call.block.name:<24} {shapes}{source}")
        return "\n".join(lines)


def _shapes(tensors: Tensors) -> str:
    return ", ".join("None" if item is None else f"{list(item.shape)}" for item in tensors)


def checkpoint(name: str, program: Program, *, keep: bool = False) -> Block:
    """A block that keeps only its inputs and tapes `program` again when it is pulled back.

    Memory falls from all intermediate values to those of one program at a time, for one more forward. `keep` is for
    programs that are small enough to be taped at once: a caller that will pull the block back then keeps everything.
    """

    def forward(*inputs: Tensor | None) -> tuple[Tensors, Tensors]:
        return program(execute, *inputs), inputs

    def vjp(inputs: Tensors | _Taped, *cotangents: Tensor) -> Values:
        if not isinstance(inputs, _Taped):
            return Tape().replay(program, inputs, cotangents)
        calls, inputs.calls = inputs.calls, []
        if not calls:
            return Tape().replay(program, inputs.inputs, cotangents)
        return Tape()._walk(reversed(calls), inputs.outputs, cotangents, inputs.inputs)

    def record(*inputs: Tensor | None) -> tuple[Tensors, _Taped]:
        tape, views = Tape(), _variables(inputs)
        outputs = program(tape, *views)
        return outputs, _Taped(tape, views, outputs)

    return Block(name, forward, vjp, program, recomputes=True, record=record if keep else None)


class _Taped:
    """A program that was taped while it ran; once pulled back, it releases its calls.

    Not a tuple, so that it is one leaf to pytrees, because a walk distinguishes tensors by identity."""

    def __init__(self, tape: Tape, inputs: Tensors, outputs: Tensors) -> None:
        self.calls, self.inputs = tape.calls, inputs
        self.outputs = [out for out in outputs if out is not None]


def remembering(record: list[Made]) -> Run:
    """`execute` that appends to a list what checkpoints return and record."""

    def run(block: Block, *inputs: Tensor | None, label: str = "") -> Tensors:
        if not block.recomputes:
            return block.forward(*inputs)[0]
        outputs, residuals = block.apply(inputs)
        record.append((outputs, None if block.record is None else residuals))
        return outputs

    return run


def _variables(inputs: Tensors) -> Tensors:
    """Fresh views: one tensor passed as two inputs must stay two variables."""
    return tuple(None if value is None else value.view_as(value) for value in inputs)


def _accumulate(flowing: dict[Tensor | None, Tensor], values: Values, cotangents: Values, block: Block | None) -> None:
    source = "backward" if block is None else f"the VJP of {block.name!r}"
    if len(values) != len(cotangents):
        raise ShapeError(f"{source}: expected {len(values)} cotangents, got {len(cotangents)}")
    for index, (value, cotangent) in enumerate(zip(values, cotangents, strict=True)):
        if value is None or cotangent is None or not differentiable(value):
            continue
        if cotangent.shape != value.shape:
            wanted = f"cotangent {index} must have the shape of its tensor, {list(value.shape)}"
            raise ShapeError(f"{source}: {wanted}, got {list(cotangent.shape)}")
        if cotangent.dtype != value.dtype:
            real = cotangent.is_complex() and not value.is_complex()
            cotangent = (cotangent.real if real else cotangent).to(value.dtype)
        present = flowing.get(value)
        flowing[value] = cotangent if present is None else present + cotangent


def _join(*parts: str) -> str:
    return "/".join(part for part in parts if part)
