"""The kernels as operators of torch: one node under torch.compile, forward and backward, whatever the length.

torch.compile would unroll the token loop instead. It may store graphs on disk, so a config is passed as text. The
record of the forward pass is more than tensors, so the backward operator runs that pass again. [ENG-NUM-D10]
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hecate.engine.engine import Engine
from hecate.engine.tokens import Carry, Tokens
from hecate.engine.triton.ops import config_of, recorded, unshared
from hecate.rule import MemoryConfig
from hecate.structure import Memory
from hecate.tape import ByHand, Run, Tensors


class Facts(NamedTuple):
    """The arguments of the operators that are not tensors.

    Fields:
        engine: name of the engine whose kernels run.
        config: the config as text.
        memories: number of weights of a memory.
        there: which of the inputs are not None: memories, slots, starts and the fields of `Tokens`.
    """

    engine: str
    config: str
    memories: int
    there: list[bool]


def scanned(
    engine: str, config: MemoryConfig, tokens: Tokens, carry: Carry, initial: Memory, *, run: Run
) -> tuple[Tensor, Carry]:
    """Outputs and the new state, by the operators."""
    inputs, count = (*carry.memory, *carry.slots, *initial, *tokens), len(carry.memory)
    there = [item is not None for item in inputs]
    y, *states = kernel_scan(engine, config.text, count, there, [item for item in inputs if item is not None])
    return y, carry._replace(memory=tuple(states[:count]), slots=tuple(states[count:]))


def _kernel(facts: Facts, tensors: Sequence[Tensor]) -> tuple[ByHand, Tensors]:
    """The kernels and their inputs."""
    rest, engine = iter(tensors), Engine.registry[facts.engine]
    inputs = tuple(next(rest) if has else None for has in facts.there)
    return engine.kernel(config_of(facts.config), inputs), inputs  # type: ignore[attr-defined]


def _examples(facts: Facts, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors that have the outputs' shapes: v for y, and the memories and slots that go in."""
    starts = len(facts.there) - len(Tokens._fields) - facts.memories
    return [tensors[starts + facts.memories + Tokens._fields.index("v")], *tensors[:starts]]


@torch.library.custom_op("hecate::kernel_scan", mutates_args=())
def kernel_scan(
    engine: str, config: str, memories: int, there: Sequence[bool], tensors: Sequence[Tensor]
) -> list[Tensor]:
    """y, memories and slots."""
    kernel, inputs = _kernel(Facts(engine, config, memories, list(there)), tensors)
    outputs: Any = kernel.forward(inputs, False)[0]
    return unshared(outputs, tensors)


@kernel_scan.register_fake
def _(engine: str, config: str, memories: int, there: Sequence[bool], tensors: Sequence[Tensor]) -> list[Tensor]:
    examples = _examples(Facts(engine, config, memories, list(there)), tensors)
    return [item.new_empty(item.shape) for item in examples]


@torch.library.custom_op("hecate::kernel_scan_backward", mutates_args=())
def kernel_scan_backward(
    engine: str, config: str, memories: int, there: Sequence[bool], tensors: Sequence[Tensor],
    cotangents: Sequence[Tensor],
) -> list[Tensor]:  # fmt: skip
    """Cotangents of the tensors, empty for masks."""
    kernel, inputs = _kernel(Facts(engine, config, memories, list(there)), tensors)
    with recorded():
        grads: Any = kernel.vjp(inputs, kernel.forward(inputs, True)[1], tuple(cotangents))
    grads_of = []
    for item, grad in zip(inputs, grads, strict=True):
        if item is not None and not item.is_floating_point():
            grads_of.append(item.new_empty(0))
        elif item is not None:
            grads_of.append(torch.zeros_like(item, memory_format=torch.contiguous_format) if grad is None else grad)
    return unshared(grads_of, (*tensors, *cotangents))


@kernel_scan_backward.register_fake
def _(
    engine: str, config: str, memories: int, there: Sequence[bool], tensors: Sequence[Tensor], *_: Any
) -> list[Tensor]:
    return [item.new_empty(item.shape if item.is_floating_point() else (0,)) for item in tensors]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
    *ctx.facts, tensors = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, cotangents: Sequence[Tensor | None]) -> tuple[Any, ...]:
    tensors, examples = ctx.saved_tensors, _examples(Facts(*ctx.facts), ctx.saved_tensors)
    pairs = zip(cotangents, examples, strict=True)
    grads = kernel_scan_backward(
        *ctx.facts, list(tensors), [torch.zeros_like(item) if g is None else g for g, item in pairs]
    )
    return None, None, None, None, [g if x.is_floating_point() else None for g, x in zip(grads, tensors, strict=True)]


kernel_scan.register_autograd(_backward, setup_context=_setup)
