"""The tape: a ledger of block calls that can be printed, queried and replayed in reverse."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hecate.errors import ConfigError, ShapeError
from hecate.tape.block import Block, Program, Run, Tensors, differentiable, distinct, execute


class Call(NamedTuple):
    """One recorded block call."""

    block: Block
    label: str
    inputs: Tensors
    outputs: Tensors
    residuals: Any


class Made(NamedTuple):
    """What a checkpoint returned, and what it recorded on the way if it did."""

    outputs: Tensors
    record: Any = None


class CotangentNorm(NamedTuple):
    """L2 norm of the cotangents that reached the outputs of one call during `backward`."""

    label: str
    block: str
    norm: Tensor


class Tape:
    """Records block calls and replays their VJPs in reverse order.

        tape = Tape()
        (y,) = tape(block, x, label="layer 0")
        (gx,) = tape.backward([y], [gy], [x])
        print(tape)                      # one line per call
        tape.norms("layer 0")            # cotangent norms by label, after backward

    Tensors are told apart by identity; a tape keeps what it recorded alive. Recording never copies and never touches
    `torch.autograd`, so every VJP is itself plain torch and can be differentiated again.
    """

    def __init__(self, *, observe: bool = False) -> None:
        """`observe` keeps the norm of every cotangent during `backward`, for `norms`."""
        self.calls: list[Call] = []
        self.observed: list[CotangentNorm] = []
        self.observe = observe
        self._known: set[int] = set()
        self._remembered: list[Made] = []  # of the checkpoints to come, the last one first

    def __call__(self, block: Block, *inputs: Tensor | None, label: str = "") -> Tensors:
        """Runs a block, records the call and returns its outputs."""
        if self._remembered and block.recomputes:
            outputs, kept = self._remembered.pop()
            residuals = inputs if kept is None else kept
        else:
            outputs, residuals = block.apply(inputs)
        self._known.update(map(id, inputs))
        outputs = distinct(outputs, self._known)
        self._known.update(map(id, outputs))
        self.calls.append(Call(block, label, inputs, outputs, residuals))
        return outputs

    def backward(
        self, outputs: Sequence[Tensor | None], cotangents: Sequence[Tensor | None], inputs: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        """Cotangents of `inputs` from cotangents of `outputs`; None where no gradient flows.

        A cotangent has the shape of its tensor, or it is a `ShapeError`, and takes its dtype.
        """
        self.observed = []
        return self._walk(reversed(self.calls), outputs, cotangents, inputs)

    def _walk(
        self,
        calls: Iterator[Call],
        outputs: Sequence[Tensor | None],
        cotangents: Sequence[Tensor | None],
        inputs: Sequence[Tensor | None],
    ) -> tuple[Tensor | None, ...]:
        flowing: dict[int, Tensor] = {}
        _accumulate(flowing, outputs, cotangents, None)
        for call in calls:
            received = [flowing.pop(id(out), None) for out in call.outputs]
            if not any(item is not None for item in received):
                continue
            filled = [
                torch.zeros_like(out) if got is None else got
                for out, got in zip(call.outputs, received, strict=True)
                if out is not None
            ]
            if self.observe:
                self.observed.append(CotangentNorm(call.label, call.block.name, _norm(filled)))
            _accumulate(flowing, call.inputs, self._pull(call, filled), call.block)
        return tuple(None if value is None else flowing.get(id(value)) for value in inputs)

    def _pull(self, call: Call, cotangents: list[Tensor]) -> Sequence[Tensor | None]:
        if call.block.program is None or not self.observe:
            return call.block.pullback(call.residuals, cotangents)
        inner = Tape(observe=True)
        grads = replay(inner, call.block.program, call.inputs, cotangents)
        self.observed += [item._replace(label=_join(call.label, item.label)) for item in inner.observed]
        return grads

    def norms(self, label: str = "") -> dict[str, Tensor]:
        """Cotangent norms of the last `backward` by `label/block`, of one label and those below it.

        Needs `Tape(observe=True)`; calls that share a name are combined as a root sum of squares."""
        if not self.observe:
            raise ConfigError("this tape kept no cotangent norms; record with Tape(observe=True)")
        squares: dict[str, Tensor] = {}
        for item in self.observed:
            if not label or f"/{label}/" in f"/{item.label}/":
                name = _join(item.label, item.block)
                squares[name] = squares.get(name, torch.zeros_like(item.norm)) + item.norm.square()
        return {name: square.sqrt() for name, square in squares.items()}

    @property
    def bytes(self) -> int:
        """Bytes of the distinct storages that the tape keeps alive: inputs, outputs, residuals."""
        held: dict[int, int] = {}
        kept: list[Any] = [call[2:] for call in self.calls]
        while kept:
            for item in torch.utils._pytree.tree_leaves(kept.pop()):
                if isinstance(item, _Taped):
                    kept += [call[2:] for call in item.calls]
                elif isinstance(item, Tensor):
                    storage = item.untyped_storage()
                    held[storage._cdata] = storage.nbytes()
        return sum(held.values())

    def __str__(self) -> str:
        lines = []
        for index, call in enumerate(self.calls):
            shapes = [", ".join(_shape(item) for item in side) for side in (call.inputs, call.outputs)]
            source = "" if call.block.hand_written else "  (vjp by torch.func)"
            head = f"{index:>4}  {call.label:<16} {call.block.name:<24}"
            lines.append(f"{head} {shapes[0]} -> {shapes[1]}{source}")
        return "\n".join(lines)


def checkpoint(name: str, program: Program, *, keep: bool = False) -> Block:
    """A block that keeps only its inputs and tapes `program` again when it is pulled back.

    Memory falls from all intermediate values to those of one program at a time, for one more forward. `keep` is for
    programs that are small enough to be taped at once: who will pull the block back then keeps everything.
    """

    def forward(*inputs: Tensor | None) -> tuple[Tensors, Tensors]:
        return program(execute, *inputs), inputs

    def vjp(inputs: Tensors | _Taped, *cotangents: Tensor) -> Sequence[Tensor | None]:
        if not isinstance(inputs, _Taped):
            return replay(Tape(), program, inputs, cotangents)
        taped, calls, inputs.calls = inputs, inputs.calls, []
        if not calls:
            return replay(Tape(), program, taped.inputs, cotangents)
        return Tape()._walk(reversed(calls), taped.outputs, cotangents, taped.inputs)

    def record(*inputs: Tensor | None) -> tuple[Tensors, _Taped]:
        tape, own = Tape(), _variables(inputs)
        outputs = program(tape, *own)
        return outputs, _Taped(tape, own, outputs)

    return Block(name, forward, vjp, program, recomputes=True, record=record if keep else None)


class _Taped:
    """A program that was taped while it ran; pulled back once, it lets go of its calls.

    No tuple: to pytrees it is one leaf, because a walk tells tensors apart by identity."""

    def __init__(self, tape: Tape, inputs: Tensors, outputs: Tensors) -> None:
        self.calls, self.inputs = tape.calls, inputs
        self.outputs = [out for out in outputs if out is not None]


def remembering(made: list[Made]) -> Run:
    """`execute` that appends to a list what checkpoints return and record."""

    def run(block: Block, *inputs: Tensor | None, label: str = "") -> Tensors:
        if not block.recomputes:
            return block.forward(*inputs)[0]
        outputs, residuals = block.apply(inputs)
        made.append(Made(outputs, None if block.record is None else residuals))
        return outputs

    return run


def replay(
    tape: Tape, program: Program, inputs: Tensors, cotangents: Sequence[Tensor], remembered: Sequence[Made] = ()
) -> tuple[Tensor | None, ...]:
    """Tapes a program and walks back, letting go of each call behind it.

    `remembered` is what the program's checkpoints have made, which then need not run.
    """
    own = _variables(inputs)
    tape._remembered = list(reversed(remembered))
    outputs = [out for out in program(tape, *own) if out is not None]
    calls = (tape.calls.pop() for _ in range(len(tape.calls)))
    return tape._walk(calls, outputs, cotangents, own)


def _variables(inputs: Tensors) -> Tensors:
    """Fresh views: one tensor passed as two inputs must stay two variables."""
    return tuple(None if value is None else value.view_as(value) for value in inputs)


def _accumulate(
    flowing: dict[int, Tensor],
    values: Sequence[Tensor | None],
    cotangents: Sequence[Tensor | None],
    block: Block | None,
) -> None:
    if len(values) != len(cotangents):
        raise ShapeError(f"{_source(block)}: expected {len(values)} cotangents, got {len(cotangents)}")
    for index, (value, cotangent) in enumerate(zip(values, cotangents, strict=True)):
        if value is None or cotangent is None or not differentiable(value):
            continue
        if cotangent.shape != value.shape:
            raise ShapeError(
                f"{_source(block)}: cotangent {index} must have the shape of its tensor, "
                f"{list(value.shape)}, got {list(cotangent.shape)}"
            )
        if cotangent.dtype != value.dtype:
            real = cotangent.is_complex() and not value.is_complex()
            cotangent = (cotangent.real if real else cotangent).to(value.dtype)
        present = flowing.get(id(value))
        flowing[id(value)] = cotangent if present is None else present + cotangent


def _source(block: Block | None) -> str:
    return "backward" if block is None else f"the VJP of {block.name!r}"


def _norm(cotangents: list[Tensor]) -> Tensor:
    squares = [item.detach().abs().double().square().sum() for item in cotangents if differentiable(item)]
    return torch.stack(squares).sum().sqrt()


def _join(*parts: str) -> str:
    return "/".join(part for part in parts if part)


def _shape(value: Tensor | None) -> str:
    return "None" if value is None else f"{list(value.shape)}"
