"""The unit of differentiation: a forward with its vector-Jacobian product beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hecate.errors import ShapeError

Tensors = tuple[Tensor | None, ...]
Program = Callable[..., Tensors]  # program(run, *inputs) -> outputs, built from calls of `run`


class Block(NamedTuple):
    """A differentiable operation on whole batches, given by two plain functions.

    `forward(*inputs) -> (outputs, residuals)` returns a tuple of tensors and whatever its VJP needs; `vjp(residuals,
    *cotangents) -> input cotangents` returns one tensor or None per input, None meaning "no gradient flows here". A
    cotangent of an output that nobody used, or of integers, arrives as zeros. Without a `vjp` the block is
    differentiated by `torch.func.vjp`, from the one evaluation that is recorded; `hand_written` tells which.

    `program` is set on blocks that are programs themselves, so that a tape can look inside. A block that `recomputes`
    has its inputs as residuals and runs its program again in the VJP, unless it has a `record`: a forward that keeps
    what the VJP would compute again, for whoever pulls back.

    Neither function may change its arguments in place: tapes and `torch.func` both rely on that. A tensor that reaches
    a block by closure rather than as an input is a constant: no gradient flows to it.
    """

    name: str
    forward: Callable[..., tuple[Tensors, Any]]
    vjp: Callable[..., Sequence[Tensor | None]] | None = None
    program: Program | None = None
    recomputes: bool = False
    record: Callable[..., tuple[Tensors, Any]] | None = None

    @property
    def hand_written(self) -> bool:
        """Whether the derivative is written by hand rather than left to `torch.func.vjp`."""
        return self.vjp is not None

    def apply(self, inputs: Tensors) -> tuple[Tensors, Any]:
        """Runs the forward; the residual of a block without a VJP is torch's own pullback."""
        if self.vjp is None:
            return _autograd_vjp(self, inputs)
        outputs, residuals = self._checked((self.record or self.forward)(*inputs))
        return outputs, residuals

    def _checked(self, returned: tuple[Tensors, Any]) -> tuple[Tensors, Any]:
        outputs, residuals = returned
        if not isinstance(outputs, tuple):
            raise ShapeError(
                f"block {self.name!r} must return (outputs, residuals) with a tuple of outputs, "
                f"got a {type(outputs).__name__}; write `(y,), residuals` for a single output"
            )
        return outputs, residuals

    def pullback(self, residuals: Any, cotangents: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Input cotangents from output cotangents."""
        return (residuals if self.vjp is None else partial(self.vjp, residuals))(*cotangents)


def formula_block(name: str, formula: Callable[..., Any], vjp: Callable[..., Any] | None = None) -> Block:
    """A block of `formula(*inputs)`, one tensor or a tuple, whose VJP `vjp(*inputs, *cotangents)` needs its inputs
    alone."""

    def forward(*inputs: Tensor) -> tuple[Tensors, Tensors]:
        found = formula(*inputs)
        return found if isinstance(found, tuple) else (found,), inputs

    def pulled(inputs: Tensors, *cotangents: Tensor) -> Tensors:
        found = vjp(*inputs, *cotangents)  # type: ignore[misc]
        return found if isinstance(found, tuple) else (found,)

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
    """Whether gradients can flow to a tensor: floating point or complex, not None."""
    return tensor is not None and (tensor.is_floating_point() or tensor.is_complex())


def distinct(outputs: Tensors, known: set[int]) -> Tensors:
    """Outputs that are objects of their own: a repeated one, or one already known, becomes a view.

    A block may return an input as it is; told apart by identity, the two would share one cotangent."""
    ids = set(map(id, outputs))
    if len(ids) == len(outputs) and known.isdisjoint(ids):
        return outputs
    given: set[int] = set()
    own: list[Tensor | None] = []
    for out in outputs:
        shared = out is not None and (id(out) in known or id(out) in given)
        own.append(out.view_as(out) if shared and out is not None else out)
        given.add(id(out))
    return tuple(own)


def _autograd_vjp(block: Block, inputs: Tensors) -> tuple[Tensors, Callable[..., Any]]:
    """Outputs of a block and `pull(*cotangents)`, both from one evaluation of its forward."""
    where = [index for index, value in enumerate(inputs) if differentiable(value)]
    if not where:
        return block._checked(block.forward(*inputs))[0], lambda *_: [None] * len(inputs)
    layout: list[bool | None] = []  # of the outputs: None, or whether gradients flow to it

    def outputs_of(*varied: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        filled = list(inputs)
        for index, value in zip(where, varied, strict=True):
            filled[index] = value
        outputs = block._checked(block.forward(*filled))[0]
        layout[:] = (None if out is None else differentiable(out) for out in outputs)
        present = [out for out in outputs if out is not None]
        smooth, others = ([o for o in present if differentiable(o) == own] for own in (True, False))
        return tuple(smooth), tuple(others)

    varied = (inputs[index] for index in where)
    smooth, pull, others = torch.func.vjp(outputs_of, *varied, has_aux=True)  # type: ignore[misc]
    left = {True: iter(smooth), False: iter(others)}
    outputs = tuple(None if kind is None else next(left[kind]) for kind in layout)

    def pulled(*cotangents: Tensor) -> list[Tensor | None]:
        grads: list[Tensor | None] = [None] * len(inputs)
        flowing = tuple(cotangent for cotangent in cotangents if differentiable(cotangent))
        for index, grad in zip(where, pull(flowing), strict=True):
            grads[index] = grad
        return grads

    return outputs, pulled
