"""The token loop: the truth that every other engine is compared with.

Memory of the backward pass grows with sqrt(T): the sequence is cut into segments of about sqrt(T) tokens, the outer
tape keeps one carry per segment, and a segment is taped again when its turn comes.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hecate.algorithm import Token
from hecate.engine.call import Call
from hecate.engine.engine import TokenEngine
from hecate.engine.tokens import CONCAT, SELECT, UNBIND, Carry, Tokens, cut, in_folds, restart
from hecate.rule import MemoryConfig, TokenGates
from hecate.rule.state import frozen_gradients
from hecate.structure import Memory
from hecate.tape import Autodiff, Block, Run, Tensors, checkpoint, execute, one, several
from hecate.tape.ops import over, sum_to_gate


class Sequential(TokenEngine):
    """Token by token, for every config."""

    name = "sequential"
    truth = True

    def cost(self, call: Call) -> float:
        """Python and a few products per token."""
        return 1.0 + 100.0 * call.length

    def about(self, call: Call) -> str:
        """Of more tokens, what others say is more."""
        return "a single token" if call.length == 1 else ""

    def autodiff(self, config: MemoryConfig) -> Autodiff:
        """The tape: autograd would keep a state per token."""
        return "auto"

    def scan(self, call: Call, tokens: Tokens, carry: Carry, initial: Memory, *, run: Run) -> tuple[Tensor, Carry]:
        """Token by token."""
        return in_folds(sequential, call.config, tokens, carry, initial, run=run)


def sequential(
    config: MemoryConfig, tokens: Tokens, carry: Carry, initial: Memory, *, run: Run
) -> tuple[Tensor, Carry]:
    """Runs the token loop: outputs `[N, T, V]` and the final carry, with ceil(sqrt(T)) tokens between checkpoints;
    there are none where nothing is kept."""
    if run is execute:
        return _segment(config, tokens, carry, initial, run, 0)
    length = tokens.v.shape[1]
    size = max(1, math.isqrt(max(length - 1, 0)) + 1)
    sizes = [min(size, length - at) for at in range(0, length, size)]
    width, end = len(carry.flat), len(carry.flat) + len(initial)

    def loop(run: Run, *inputs: Tensor, first: int = 0) -> Tensors:
        own, start = carry.rebuilt(inputs[:width]), inputs[width:end]
        y, own = _segment(config, Tokens(*inputs[end:]), own, start, run, first)
        return y, *own.flat

    outputs: list[Tensor] = []
    flat = carry.flat
    for index, segment in enumerate(cut(tokens, sizes, run)):
        block = checkpoint("segment", partial(loop, first=index * size))
        y, *rest = several(run(block, *flat, *initial, *segment, label=f"segment {index}"))
        outputs.append(y)
        flat = tuple(rest)
    return one(run(CONCAT, *outputs, label="outputs")), carry.rebuilt(flat)


def _segment(
    config: MemoryConfig, tokens: Tokens, carry: Carry, initial: Memory, run: Run, first: int
) -> tuple[Tensor, Carry]:
    blocks = blocks_of(config)
    columns = [None if tensor is None else several(run(UNBIND, tensor, label="tokens")) for tensor in tokens]
    outputs: list[Tensor] = []
    weights: Memory | None = None
    for t in range(tokens.v.shape[1]):
        token = Tokens(*(None if column is None else column[t] for column in columns))  # type: ignore[arg-type]
        how: dict[str, Any] = {"run": run, "label": f"token {first + t}", "blocks": blocks}
        y, carry, weights = token_step(config, token, carry, initial, weights=weights, **how)
        outputs.append(y)
    return one(run(_STACK, *outputs, label="outputs")), carry


class TokenBlocks(NamedTuple):
    """What every token of a scan runs: the read, and the write where it is one block."""

    read: Block
    write: Block | None


def blocks_of(config: MemoryConfig) -> TokenBlocks:
    """The blocks of a config; a chunk's sum is not written by one block."""
    rule = config.rule
    write = rule.write_block() if config.commit == "token" else None
    return TokenBlocks(rule.structure.predict_block(), write)


def token_step(
    config: MemoryConfig,
    token: Tokens,
    carry: Carry,
    initial: Memory,
    *,
    run: Run,
    label: str = "",
    blocks: TokenBlocks | None = None,
    weights: Memory | None = None,
) -> tuple[Tensor, Carry, Memory | None]:
    """One token, time axis dropped: reset, read before, write, read after.

    `weights` are those of the carried memory where they are known; the third result are those of the new one, if this
    token has read them.
    """
    blocks = blocks or blocks_of(config)
    linked = partial(config.rule.weights, run=run, label=label)
    if token.reset is not None:
        carry = select(token.reset, restart(config, initial, carry), carry, run, label)
        weights = None
    before = carry
    at: Memory | None = None  # where the gradient is taken, if not at the memory itself
    anchor, kept = carry.memory, token.retain
    if carry.pending_retain:  # the product of the chunk's retain gates
        kept = one(run(_MULTIPLY, carry.pending_retain[0], kept, label=label))
    if frozen_gradients(config):
        opens = carry.position == 0
        anchor = tuple(
            one(run(SELECT, opens, now, then, label=label))
            for now, then in zip(carry.memory, carry.anchor, strict=True)
        )
        carry = carry._replace(anchor=anchor)
    if config.decay_order == "before_gradient":
        at = linked(config.rule.decayed(anchor, kept, run=run, label=label))
    elif frozen_gradients(config):
        at = linked(anchor)
    if weights is None and (at is None or config.read == "before"):
        weights = linked(carry.memory)
    if at is None and config.rule.retention.dual:
        at = weights
    commit = _commit_chunk if config.commit == "chunk" else partial(_commit_token, blocks.write)
    carry = commit(config, token, carry, at, kept, run, label)
    if token.write is not None:
        carry = select(token.write, carry, before, run, label)
    late = config.read == "after"
    weights = linked(carry.memory) if late or weights is None else weights
    y = one(run(blocks.read, token.phi_q, *weights, label=label))
    return y, carry, weights if late else None


def _commit_token(
    block: Block | None,
    config: MemoryConfig,
    token: Tokens,
    carry: Carry,
    weights: Memory | None,
    kept: Tensor,
    run: Run,
    label: str,
) -> Carry:
    gates = TokenGates(token.lr, token.retain, token.momentum)
    given = (token.phi_k, token.v)
    if block is not None:
        state = (*carry.memory, *carry.slots, *(weights or ()))
        new = several(run(block, *gates, *given, *state, label=label))
        memory, slots = new[: len(carry.memory)], new[len(carry.memory) :]
    else:
        memory, slots = config.rule.write(
            carry.memory, carry.slots, *given, gates, weights=weights, run=run, label=label
        )
    carry = carry._replace(memory=memory, slots=slots)
    if config.chunk == 1:
        return carry
    position = (carry.position + 1) % config.chunk
    if carry.pending_retain:
        left = one(run(SELECT, position == 0, torch.ones_like(kept), kept, label=label))
        carry = carry._replace(pending_retain=(left,))
    return carry._replace(position=position)


def _commit_chunk(
    config: MemoryConfig, token: Tokens, carry: Carry, weights: Memory | None, kept: Tensor, run: Run, label: str
) -> Carry:
    rule = config.rule
    own = Token(token.phi_k, token.v, token.lr)
    grads, slots = rule.descended(weights or carry.memory, own, carry.slots, run=run, label=label)
    carry = carry._replace(slots=slots)
    pending = tuple(
        one(run(_ACCUMULATE, total, token.lr, grad, label=label))
        for total, grad in zip(carry.pending, grads, strict=True)
    )
    gates = TokenGates(torch.ones_like(token.lr), kept, token.momentum)
    memory, slots = rule.apply(carry.memory, carry.slots, pending, gates, run=run, label=label)
    position = (carry.position + 1) % config.chunk
    committed = carry._replace(
        memory=memory,
        slots=slots,
        pending=tuple(torch.zeros_like(total) for total in pending),
        pending_retain=(torch.ones_like(kept),),
        position=position,
    )
    waiting = carry._replace(pending=pending, pending_retain=(kept,), position=position)
    return select(position == 0, committed, waiting, run, label)


def select(mask: Tensor, yes: Carry, no: Carry, run: Run, label: str = "") -> Carry:
    """Per memory, one carry or the other; the branch not taken gets exactly zero gradient."""
    chosen = [
        a if a is b else one(run(SELECT, mask, a, b, label=label)) for a, b in zip(yes.flat, no.flat, strict=True)
    ]
    return no.rebuilt(tuple(chosen))


def _stack(*rows: Tensor) -> tuple[Tensors, None]:
    return (torch.stack(rows, 1),), None


def _stack_vjp(_: None, g: Tensor) -> Any:
    return g.unbind(1)


def _accumulate(total: Tensor, lr: Tensor, grad: Tensor) -> tuple[Tensors, Tensors]:
    return (total + over(lr, grad) * grad,), (lr, grad)


def _accumulate_vjp(inputs: tuple[Tensor, Tensor], g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    lr, grad = inputs
    return g, sum_to_gate(g * grad, lr), over(lr, grad) * g


def _multiply(a: Tensor, b: Tensor) -> tuple[Tensors, Tensors]:
    return (a * b,), (a, b)


def _multiply_vjp(inputs: tuple[Tensor, Tensor], g: Tensor) -> tuple[Tensor, Tensor]:
    return g * inputs[1], g * inputs[0]


_STACK = Block("stack", _stack, _stack_vjp)
_ACCUMULATE = Block("accumulate", _accumulate, _accumulate_vjp)
_MULTIPLY = Block("multiply", _multiply, _multiply_vjp)
