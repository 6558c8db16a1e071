"""Blocks with a hand-written backward pass that leave the work to torch where it must see all.

A hand-written pass is a function of numbers: it cannot be differentiated again, nor mapped, nor traced. So each has a
plain program of differentiable operations beside it, which takes its place under `torch.compile`, `torch.func`,
dispatch modes, forward mode and batched cotangents, and for second derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _python_dispatch
from torch.utils._pytree import tree_flatten, tree_unflatten

from hecate.rule.rule import one, several
from hecate.tape import Block, Tensors, differentiable
from hecate.tape.block import distinct

# Of tensors under `is_grads_batched`; looking a key up by its name costs more than all else here.
_BATCHED = torch._C._parse_dispatch_key("Batched")


class ByHand(NamedTuple):
    """A forward pass, its hand-written backward pass, and the same in plain torch.

    forward: (inputs, keeps) -> (outputs, record), the record, tensors in any nesting, being needed only if it is to be
    kept.
    vjp: (inputs, record, cotangents) -> cotangents of the inputs.
    plain: (*inputs) -> outputs, in differentiable operations only.
    """

    name: str
    forward: Callable[[Tensors, bool], tuple[Tensors, Any]]
    vjp: Callable[[Tensors, Any, Sequence[Tensor]], Sequence[Tensor | None]]
    plain: Callable[..., Tensors]

    @classmethod
    def of(cls, block: Block) -> ByHand:
        """A block with its own VJP under autograd too, where recording its operations one by one would pass over the
        tensors several times as often."""
        return cls(
            block.name,
            lambda inputs, _: block.forward(*inputs),
            lambda _, residuals, cotangents: block.pullback(residuals, cotangents),
            lambda *inputs: block.forward(*inputs)[0],
        )

    def block(self, *, keeps: bool) -> Block:
        """As a tape block; `keeps` says whether a tape will pull it back."""

        def forward(*inputs: Tensor | None) -> tuple[Tensors, Any]:
            if is_traced(*inputs):
                return self.plain(*inputs), (inputs, None)
            if is_recorded(inputs):
                outputs: Tensors = _Function.apply(self, *inputs)  # type: ignore[no-untyped-call]
                return outputs, (inputs, None)
            outputs, record = self.forward(inputs, keeps)
            return outputs, (inputs, record if keeps else None)

        def vjp(residuals: tuple[Tensors, Any], *cotangents: Tensor) -> Sequence[Tensor | None]:
            return self.pullback(*residuals, cotangents)

        return Block(self.name, forward, vjp)

    def pullback(self, inputs: Tensors, record: Any, cotangents: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Cotangents of the inputs: by hand, or by torch where it has to see every operation."""
        if is_traced(*inputs):
            blank = Block(self.name, lambda *inputs: (self.plain(*inputs), None))
            return tuple(blank.pullback(blank.apply(inputs)[1], cotangents))
        if is_recorded((*inputs, *cotangents)) or is_traced(*cotangents):
            return self.by_autograd(inputs, cotangents)
        if record is None:
            record = self.forward(inputs, True)[1]
        return self.vjp(inputs, record, cotangents)

    def by_autograd(self, inputs: Tensors, cotangents: Sequence[Tensor]) -> Tensors:
        """Cotangents of inputs by autograd, which records them in turn if asked to."""
        where = [index for index, value in enumerate(inputs) if differentiable(value)]
        own = list(inputs)
        create_graph = torch.is_grad_enabled()
        with torch.enable_grad():
            for index in where:
                value = one((inputs[index],))
                own[index] = value.view_as(value) if value.requires_grad else value.detach()
                one((own[index],)).requires_grad_()
            outputs = several(self.plain(*own))
            grads = torch.autograd.grad(
                outputs, [one((own[index],)) for index in where], cotangents,
                create_graph=create_graph, allow_unused=True,
            )  # fmt: skip
        found: list[Tensor | None] = [None] * len(inputs)
        for index, grad in zip(where, grads, strict=True):
            found[index] = grad
        return tuple(found)


class _Function(torch.autograd.Function):
    """Keeps what the backward pass needs, so that under autograd nothing runs twice."""

    @staticmethod
    def forward(ctx: Any, hand: ByHand, *inputs: Tensor | None) -> Tensors:
        outputs, record = hand.forward(inputs, True)
        leaves, ctx.layout = tree_flatten(record)
        tensors = [leaf if isinstance(leaf, Tensor) else None for leaf in leaves]
        ctx.numbers = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        ctx.hand, ctx.count = hand, len(inputs)
        ctx.save_for_backward(*inputs, *tensors)
        return distinct(outputs, set(map(id, inputs)))

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: activation checkpointing hands them out a single time
        pairs = zip(saved[ctx.count :], ctx.numbers, strict=True)
        leaves = [number if tensor is None else tensor for tensor, number in pairs]
        record = tree_unflatten(leaves, ctx.layout)
        return None, *ctx.hand.pullback(saved[: ctx.count], record, cotangents)


def is_traced(*tensors: Tensor | None) -> bool:
    """Whether torch has to see every operation: tracing, transforms, forward mode, subclasses."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return True
    if _python_dispatch._get_current_dispatch_mode() is not None or forward_ad._current_level >= 0:
        return True
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    return any(
        torch._C._dispatch_keys(tensor).has(_BATCHED)  # type: ignore[arg-type]
        or type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
        for tensor in tensors
        if tensor is not None
    )


def may_look(*tensors: Tensor) -> bool:
    """Whether values may steer Python at no cost: on a CPU, where torch need not see all."""
    return all(tensor.device.type == "cpu" for tensor in tensors) and not is_traced(*tensors)


def is_recorded(tensors: Tensors) -> bool:
    """Whether autograd records what is done with these tensors."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
