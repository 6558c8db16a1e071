"""The chunk engine with compiled steps: on a GPU a step is few launches, where one by one its elementwise parts between
the products are most of them.

`torch.compile` is given one step, and every chunk of the same size runs what comes of it, forward and backward: it
compiles once for a config, shapes and dtypes, some twenty seconds, not once for every chunk as where a whole model is
compiled. Where torch has to see every operation the step is the chunk engine's. [ENG-CHUNK-D8]
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from hecate.engine.call import Call, Plan
from hecate.engine.chunk.engine import Chunk, Step, chunked, dual_graph, step_of, steps_and_rows, steps_of
from hecate.engine.chunk.spans import Span
from hecate.engine.tokens import Carry, Tokens, in_folds
from hecate.errors import install_line
from hecate.rule import MemoryConfig
from hecate.structure import Memory
from hecate.tape import Block, ByHand, Run, Tensors, bridge, differentiable, execute, is_traced, several

BACKEND = "inductor"
Look = tuple[torch.Size, torch.dtype, torch.device]


class Fused(Chunk):
    """Chunks whose steps `torch.compile` has made."""

    name = "fused"
    automatic = False  # nobody is to wait for a compiler

    def unfit(self, plan: Plan) -> str | None:
        """A CPU, or a GPU for which torch cannot compile; and what the chunk engine says."""
        if plan.device in (*bridge.AT_ONCE, "meta"):
            return "it compiles steps for a GPU; on a CPU they take as long as engine='chunk'"
        if plan.device == "cuda" and find_spec("triton") is None:
            return f"torch compiles for a GPU by triton, which is not here: {install_line('gpu')}"
        return super().unfit(plan)

    def about(self, plan: Plan) -> str:
        """Tells how often it runs the step that it compiles."""
        return f"runs one compiled step {steps_of(plan)} times, if asked for"

    def scan(self, call: Call, tokens: Tokens, carry: Carry, initial: Memory, *, run: Run) -> tuple[Tensor, Carry]:
        """As the chunk engine."""
        walk = partial(chunked, position=call.place, steps=_compiled_steps)
        return in_folds(walk, call.config, tokens, carry, initial, run=run)


def _compiled_steps(config: MemoryConfig, tokens: Tokens, sizes: list[int], run: Run) -> tuple[Step, list[Tensors]]:
    plain, rows = steps_and_rows(config, tokens, sizes, run)
    if is_traced(*tokens):
        return plain, rows

    def step(carry: Carry, row: Tensors, span: Span, run: Run) -> tuple[Tensor, Carry]:
        flat = (*carry.flat, *row, *[item if isinstance(item, Tensor) else None for item in span[1:]])
        known = Span(span.size, *[None if isinstance(item, Tensor) else item for item in span[1:]])  # type: ignore[arg-type]
        looks = tuple([None if item is None else (item.shape, item.dtype, item.device) for item in flat])
        block = _block(config, tokens.retain.dim() == 3, tuple(map(len, carry[:-1])), known, looks)
        y, *new = several(run(block, *flat, label="step"))
        return y, carry.rebuilt((*new, carry.position))

    return step, rows


@lru_cache(256)
def _block(
    config: MemoryConfig, channelwise: bool, counts: tuple[int, ...], known: Span, looks: tuple[Look | None, ...]
) -> Block:
    """(*carry, *row, *masks of the span) -> outputs and the new carry but for its position."""
    first, step = sum(counts) + 1, step_of(config, dual_graph(config, channelwise))

    def plain(*flat: Tensor | None) -> Tensors:
        masks = [own if given is None else given for own, given in zip(known[1:], flat[-3:], strict=True)]
        y, carry = step(Carry.of(counts, flat), flat[first:-3], Span(known.size, *masks), execute)  # type: ignore[arg-type]
        return y, *carry.flat[:-1]

    # Dynamo counts what it compiles by code object, beyond eight of which it gives up.
    plain.__code__ = plain.__code__.replace()
    program = torch.compile(plain, backend=BACKEND, fullgraph=True, dynamic=False)

    def forward(inputs: Tensors, keeps: bool) -> tuple[Tensors, Any]:
        if not keeps:
            return program(*inputs), None
        with torch.enable_grad():
            own = [None if item is None else item.detach().requires_grad_(differentiable(item)) for item in inputs]
            made = program(*own)
        return tuple([item.detach() for item in several(made)]), (own, made)

    def vjp(inputs: Tensors, record: Any, cotangents: Sequence[Tensor]) -> Tensors:
        own, made = record
        leaves = [item for item in own if differentiable(item)]
        pairs = [pair for pair in zip(made, cotangents, strict=True) if pair[0].requires_grad]
        outputs, given = zip(*pairs, strict=True)
        found = iter(torch.autograd.grad(outputs, leaves, given, retain_graph=True, allow_unused=True))
        return tuple([next(found) if differentiable(item) else None for item in own])

    return ByHand("chunk.step", forward, vjp, plain).block()
