"""The tape: a ledger of block calls that can be printed, queried and replayed in reverse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hecate.tape.block import Block, Program, Tensors, differentiable, execute


class Call(NamedTuple):
    """One recorded block call."""

    block: Block
    label: str
    inputs: Tensors
    outputs: Tensors
    residuals: Any


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

    Tensors are told apart by identity; a tape keeps what it recorded alive. Recording never copies and
    never touches `torch.autograd`, so every VJP is itself plain torch and can be differentiated again.
    """

    def __init__(self, *, observe: bool = False) -> None:
        """`observe` keeps the norm of every cotangent during `backward`, for `norms`."""
        self.calls: list[Call] = []
        self.observed: list[CotangentNorm] = []
        self.observe = observe

    def __call__(self, block: Block, *inputs: Tensor | None, label: str = "") -> Tensors:
        """Runs a block, records the call and returns its outputs."""
        outputs, residuals = block.apply(inputs)
        self.calls.append(Call(block, label, inputs, outputs, residuals))
        return outputs

    def backward(
        self,
        outputs: Sequence[Tensor | None],
        cotangents: Sequence[Tensor | None],
        inputs: Sequence[Tensor | None],
    ) -> tuple[Tensor | None, ...]:
        """Cotangents of `inputs` from cotangents of `outputs`; None where no gradient flows."""
        flowing: dict[int, Tensor] = {}
        for output, cotangent in zip(outputs, cotangents, strict=True):
            if output is not None and cotangent is not None:
                _accumulate(flowing, output, cotangent)
        for call in reversed(self.calls):
            received = [None if out is None else flowing.pop(id(out), None) for out in call.outputs]
            if all(item is None for item in received):
                continue
            filled = [
                torch.zeros_like(out) if got is None else got
                for out, got in zip(call.outputs, received, strict=True)
                if out is not None
            ]
            if self.observe:
                self.observed.append(CotangentNorm(call.label, call.block.name, _norm(filled)))
            given = self._pull(call, filled)
            for value, cotangent in zip(call.inputs, given, strict=True):
                if value is not None and cotangent is not None and differentiable(value):
                    _accumulate(flowing, value, cotangent)
        return tuple(None if value is None else flowing.get(id(value)) for value in inputs)

    def _pull(self, call: Call, cotangents: list[Tensor]) -> Sequence[Tensor | None]:
        if call.block.program is None or not self.observe:
            return call.block.pullback(call.residuals, cotangents)
        inner = Tape(observe=True)
        grads = _replay(inner, call.block.program, call.residuals, cotangents)
        self.observed += [item._replace(label=_join(call.label, item.label)) for item in inner.observed]
        return grads

    def norms(self, label: str = "") -> dict[str, Tensor]:
        """Cotangent norms of the last `backward` by `label/block`, filtered by a part of the label.

        Needs `Tape(observe=True)`; calls that share a name are combined as a root sum of squares.
        """
        squares: dict[str, Tensor] = {}
        for item in self.observed:
            if label in item.label:
                name = _join(item.label, item.block)
                squares[name] = squares.get(name, torch.zeros_like(item.norm)) + item.norm.square()
        return {name: square.sqrt() for name, square in squares.items()}

    @property
    def bytes(self) -> int:
        """Bytes of the distinct tensors that the tape keeps alive: inputs, outputs and residuals."""
        held: dict[int, int] = {}
        for call in self.calls:
            for item in torch.utils._pytree.tree_leaves((call.inputs, call.outputs, call.residuals)):
                if isinstance(item, Tensor):
                    storage = item.untyped_storage()
                    held[storage.data_ptr()] = storage.nbytes()
        return sum(held.values())

    def __str__(self) -> str:
        lines = []
        for index, call in enumerate(self.calls):
            shapes = [", ".join(_shape(item) for item in side) for side in (call.inputs, call.outputs)]
            source = "" if call.block.hand_written else "  (vjp by torch.func)"
            lines.append(
                f"{index:>4}  {call.label:<16} {call.block.name:<24} {shapes[0]} -> {shapes[1]}{source}"
            )
        return "\n".join(lines)


def checkpoint(name: str, program: Program) -> Block:
    """A block that keeps only its inputs and tapes `program` again when it is pulled back.

    Memory falls from all intermediate values to those of one program at a time, for one more forward.
    """

    def forward(*inputs: Tensor | None) -> tuple[Tensors, Tensors]:
        return program(execute, *inputs), inputs

    def vjp(inputs: Tensors, *cotangents: Tensor) -> Sequence[Tensor | None]:
        return _replay(Tape(), program, inputs, cotangents)

    return Block(name, forward, vjp, program)


def _replay(
    tape: Tape, program: Program, inputs: Tensors, cotangents: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    # Fresh views: one tensor passed as two inputs must stay two variables.
    own = tuple(value.view_as(value) if differentiable(value) else value for value in inputs)  # type: ignore[union-attr]
    outputs = [out for out in program(tape, *own) if out is not None]
    return tape.backward(outputs, cotangents, own)


def _accumulate(flowing: dict[int, Tensor], value: Tensor, cotangent: Tensor) -> None:
    present = flowing.get(id(value))
    flowing[id(value)] = cotangent if present is None else present + cotangent


def _norm(cotangents: list[Tensor]) -> Tensor:
    return torch.stack([item.detach().double().square().sum() for item in cotangents]).sum().sqrt()


def _join(*parts: str) -> str:
    return "/".join(part for part in parts if part)


def _shape(value: Tensor | None) -> str:
    return "None" if value is None else f"{list(value.shape)}"

