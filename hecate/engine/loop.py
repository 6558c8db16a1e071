"""The token loop: the truth that every other engine is compared with.

The memory that a backward pass needs grows with sqrt(T): the sequence is cut into segments of about sqrt(T) tokens, the
outer tape keeps one carry per segment, and the backward pass tapes one segment after another again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from hecate.algorithm import Token
from hecate.engine.call import GENERAL, RATES, Call, Plan
from hecate.engine.engine import TokenEngine
from hecate.engine.tokens import CONCAT, NUMBERS, SELECT, VECTORS, Carry, Tokens, by_token, cut, in_folds, linear_block
from hecate.rule import MemoryConfig, TokenGates
from hecate.structure import Memory
from hecate.structure.bound import KEYS, lengths
from hecate.tape import Autodiff, Block, Run, Tensors, can_inspect, checkpoint, execute, formula_block, one, several
from hecate.tape.ops import over, sum_to_gate

Program = Callable[..., tuple[Tensor, Carry]]  # (rows, carry, initial, run, first)


class Sequential(TokenEngine):
    """Token by token, for every config."""

    name = "sequential"
    truth = steady = transposes = anchors = bounds = True
    takes = (*GENERAL, RATES)

    def steps(self, plan: Plan | Call) -> int:
        """Every token."""
        return plan.length

    def cost(self, plan: Plan) -> float:
        """Python and a few products per token."""
        return 1.0 + 100.0 * plan.length

    def about(self, plan: Plan) -> str:
        """Of more tokens, what others say is more."""
        return "a single token" if plan.length == 1 else ""

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
    # Nothing is recorded, so checkpoints would only cost time.
    if run is execute:
        return token_by_token(config, tokens, carry, initial, run, 0)
    length = tokens.v.shape[1]
    size = root(length)
    rows = cut(tokens, [min(size, length - at) for at in range(0, length, size)], run)

    def program(rows: list[Tensors], carry: Carry, initial: Memory, run: Run, first: int) -> tuple[Tensor, Carry]:
        return token_by_token(config, Tokens(*rows[0]), carry, initial, run, first * size)  # type: ignore[arg-type]

    return in_segments(program, rows, carry, initial, run)


def root(length: int) -> int:
    """Tokens between two states that are kept, of so many: as many as there are such states."""
    return math.isqrt(max(length - 1, 0)) + 1


def in_segments(
    program: Program, rows: list[Tensors], carry: Carry, initial: Memory, run: Run, *, each: int = 1, keep: bool = False
) -> tuple[Tensor, Carry]:
    """Outputs and last carry of `program(rows, carry, initial, run, first)`, with a checkpoint for every `each` rows,
    `first` being the number of the first of them; `keep` is that of `checkpoint`."""
    begin, width = len(carry.flat), len(rows[0])
    end = begin + len(initial)

    def segment(run: Run, *inputs: Tensor, first: int) -> Tensors:
        spans = [inputs[at : at + width] for at in range(end, len(inputs), width)]
        y, new = program(spans, carry.rebuilt(inputs[:begin]), inputs[begin:end], run, first)
        return y, *new.flat

    outputs: list[Tensor] = []
    flat = carry.flat
    for first in range(0, len(rows), each):
        block = checkpoint("segment", partial(segment, first=first), keep=keep)
        tensors = chain.from_iterable(rows[first : first + each])
        y, *last = several(run(block, *flat, *initial, *tensors, label=f"segment {first // each}"))
        outputs.append(y)
        flat = tuple(last)
    return one(run(CONCAT, *outputs, label="outputs")), carry.rebuilt(flat)


def labelled(run: Run, label: str) -> Run:
    """`run` under one label."""

    def under(block: Block, *inputs: Tensor | None, **_: str) -> Tensors:
        return run(block, *inputs, label=label)

    return run if run is execute else under


def per_weight(run: Run, block: Block, *columns: Memory) -> Memory:
    """A block of one output on the tensors of every weight."""
    return tuple([one(run(block, *row)) for row in zip(*columns, strict=True)])


def token_by_token(
    config: MemoryConfig, tokens: Tokens, carry: Carry, initial: Memory, run: Run, first: int,
    moved: Callable[[int, Carry, Run], Carry] | None = None,
) -> tuple[Tensor, Carry]:  # fmt: skip
    """Tokens one after the other, `first` the number of the first: outputs `[N, T, V]` and the final carry. `moved`
    says what each token finds in place of the carry."""
    blocks = blocks_of(config)
    outputs: list[Tensor] = []
    weights: Memory | None = None
    for t, token in enumerate(by_token(tokens, run)):
        token_run = labelled(run, f"token {first + t}")
        if moved is not None:
            carry, weights = moved(t, carry, token_run), None
        y, carry, weights = token_step(config, token, carry, initial, run=token_run, blocks=blocks, weights=weights)
        outputs.append(y)
    return one(run(STACK, *outputs, label="outputs")), carry


def blocks_of(config: MemoryConfig) -> tuple[Block, Block | None]:
    """Blocks that every token runs: the read, and the write if it is a single block; a chunk's sum never is."""
    write = config.rule.write_block() if config.commit == "token" else None
    return config.structure.read_block(), write


def token_step(
    config: MemoryConfig,
    token: Tokens,
    carry: Carry,
    initial: Memory,
    *,
    run: Run,
    blocks: tuple[Block, Block | None] | None = None,
    weights: Memory | None = None,
) -> tuple[Tensor, Carry, Memory | None]:
    """One token, time axis dropped: reset, read before, write, read after.

    `weights` are those of the carried memory, if known; the third result are those of the new memory, if this token has
    computed them for its read.
    """
    read, write = blocks or blocks_of(config)
    linked = partial(config.rule.weights, run=run)
    if token.reset is not None:
        carry = restarted(config, token.reset, initial, carry, run)
        weights = None
    if token.retain_value is not None:
        token = token._replace(retain=one(run(CELLS, token.retain, token.retain_value)), retain_value=None)
    before = carry
    at: Memory | None = None  # where the gradient is taken, if not at the memory itself
    anchor, decay = carry.memory, token.retain
    if carry.pending_retain:  # the product of the chunk's retain gates
        decay = one(run(MULTIPLY, carry.pending_retain[0], decay))
    if config.frozen_gradients:
        # The memory at a chunk's start is its anchor, at which its gradients are taken.
        opens = carry.position == 0
        anchor = per_weight(run, SELECT, (opens,) * len(anchor), carry.memory, carry.anchor)
        carry = carry._replace(anchor=anchor)
    if config.decay_order == "before_gradient":
        at = linked(regained(config, config.rule.decayed(anchor, decay, run=run), initial, decay, run))
    elif config.frozen_gradients:
        at = linked(anchor)
    borders = config.retention.links != "token"
    if weights is None and not borders and (at is None or config.read == "before"):
        weights = linked(carry.memory)
    if at is None and config.rule.retention.dual:
        at = weights
    opened = carry
    if config.blocks:
        token, carry = normalised(config, token, carry, at or carry.memory, run)
    commit = _commit_chunk if config.commit == "chunk" else partial(_commit_token, write)
    carry = commit(config, token, carry, at, decay, initial, run)
    # A masked token runs like any other, and its effect on the state is discarded.
    if token.write is not None:
        carry = select(token.write, carry, before, run)
    late = config.read == "after"
    if borders:
        weights = _in_chunk(config, token, opened, carry if late else opened, at or (), decay, late, run)
        return one(run(read, token.phi_q, *weights)), carry, None
    weights = linked(carry.memory) if late or weights is None else weights
    y = one(run(read, token.phi_q, *weights))
    return y, carry, weights if late else None


def _in_chunk(
    config: MemoryConfig, token: Tokens, opened: Carry, new: Carry, weights: Memory, decay: Tensor, late: bool, run: Run
) -> Memory:
    """The weights that answer a token where the link is taken at the chunk's start: `weights`, or what has become of
    them. `opened` is the carry before the token, its anchor the chunk's."""
    if config.retention.links == "chunk":
        return weights
    (before,) = opened.pending_retain
    if not late:
        decay = before
    elif token.write is not None:
        decay = one(run(SELECT, token.write, decay, before))
    return config.rule.moved(new.memory, opened.anchor, weights, decay, run=run)


def regained(config: MemoryConfig, memory: Memory, initial: Memory, retain: Tensor, run: Run) -> Memory:
    """A memory after a step, plus (1 - retain) times its start if it forgets towards that. [RET-START-D2]"""
    if not config.retention.anchored:
        return memory
    return per_weight(run, _REGAINED, memory, initial, (retain,) * len(memory))


def normalised(config: MemoryConfig, token: Tokens, carry: Carry, at: Memory, run: Run) -> tuple[Tokens, Carry]:
    """A token whose lr is normalised, and the carry with its key remembered; gradients are taken at the weights `at`.
    [RULE-STEP-D3]"""
    p = one(run(_ROW, token.phi_k))
    keys = carry.keys[0] if carry.keys else p[:, :0]
    c = one(run(lengths(config.structure.graph(), config.blocks), p, None, keys, *at))
    lr = one(run(MULTIPLY, token.lr, one(run(_ONLY, c))))
    if carry.keys:
        carry = carry._replace(keys=several(run(KEYS, keys, p, None)))
    return token._replace(lr=lr), carry


def _commit_token(
    block: Block | None,
    config: MemoryConfig,
    token: Tokens,
    carry: Carry,
    at: Memory | None,
    decay: Tensor,
    initial: Memory,
    run: Run,
) -> Carry:
    gates, pair = TokenGates(*token[VECTORS:NUMBERS]), (token.phi_k, token.v)  # type: ignore[arg-type]
    if block is not None and token.phi_w is None and token.retain.dim() < 3:
        new = several(run(block, *gates, *pair, *carry.memory, *carry.slots, *(at or ())))
        memory, slots = new[: len(carry.memory)], new[len(carry.memory) :]
    else:
        memory, slots = config.rule.write(
            carry.memory, carry.slots, *pair, gates, phi_w=token.phi_w, weights=at, run=run
        )
    carry = carry._replace(memory=regained(config, memory, initial, token.retain, run), slots=slots)
    if config.chunk == 1:
        return carry
    position = (carry.position + 1) % config.chunk
    if carry.pending_retain:
        # The product of a chunk's retain gates starts at 1.
        product = one(run(SELECT, position == 0, torch.ones_like(decay), decay))
        carry = carry._replace(pending_retain=(product,))
    return carry._replace(position=position)


def _commit_chunk(
    config: MemoryConfig, token: Tokens, carry: Carry, at: Memory | None, decay: Tensor, initial: Memory, run: Run
) -> Carry:
    pair = Token(token.phi_k, token.v, token.lr, token.phi_w)
    grads, slots = config.rule.descended(at or carry.memory, pair, carry.slots, run=run)
    rates = rates_of(token.lr, 1, len(grads), run)
    pending = per_weight(run, _ACCUMULATE, carry.pending, rates, grads)
    position = (carry.position + 1) % config.chunk
    waiting = carry._replace(slots=slots, pending=pending, pending_retain=(decay,), position=position)
    if run is execute and not torch.is_grad_enabled() and can_inspect(position, free=True) and position.all():
        return waiting  # no chunk ends here, so the step would change nothing
    committed = committed_chunk(config, waiting, initial, token.momentum, run)
    return select(position == 0, committed, waiting, run)


def committed_chunk(config: MemoryConfig, carry: Carry, initial: Memory, momentum: Tensor, run: Run) -> Carry:
    """The carry after the one step on a chunk's sum, with the momentum gate of its last token."""
    (decay,) = carry.pending_retain
    gates = TokenGates(torch.ones_like(momentum), decay, momentum)
    memory, slots = config.rule.apply(carry.memory, carry.slots, carry.pending, gates, run=run)
    memory = regained(config, memory, initial, decay, run)
    pending = tuple(torch.zeros_like(total) for total in carry.pending)
    return carry._replace(memory=memory, slots=slots, pending=pending, pending_retain=(torch.ones_like(decay),))


def rates_of(lr: Tensor, axes: int, count: int, run: Run) -> Memory:
    """lr for each of `count` weights: lr itself for all if it has `axes` axes, else its columns. [ENG-RATES-D1]"""
    return (lr,) * count if lr.dim() == axes else several(run(_COLUMNS, lr))


def select(mask: Tensor, yes: Carry, no: Carry, run: Run) -> Carry:
    """Per memory, one carry or the other; the branch not taken gets exactly zero gradient."""
    pairs = zip(yes.flat, no.flat, strict=True)
    return no.rebuilt(tuple(a if a is b else one(run(SELECT, mask, a, b)) for a, b in pairs))


def restarted(config: MemoryConfig, mask: Tensor, initial: Memory, carry: Carry, run: Run) -> Carry:
    """The carry, in which the memories of the mask start anew from `initial`."""
    slots, pending, keys = [tuple(map(torch.zeros_like, kind)) for kind in (carry.slots, carry.pending, carry.keys)]
    anchor, retain = initial if config.frozen_gradients else (), tuple(map(torch.ones_like, carry.pending_retain))
    anew = Carry(initial, slots, anchor, pending, retain, keys, torch.zeros_like(carry.position))
    return select(mask, anew, carry, run)


def _accumulate_vjp(_: Tensor, lr: Tensor, grad: Tensor, g: Tensor) -> Tensors:
    return g, sum_to_gate(g * grad, lr), over(lr, grad) * g


def _cells(retain: Tensor, value: Tensor) -> Tensor:
    return (retain.unsqueeze(1) if retain.dim() == 2 else retain[:, None, None]) * value.unsqueeze(-1)


def _cells_vjp(retain: Tensor, value: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    wide = retain.unsqueeze(1) if retain.dim() == 2 else retain[:, None, None]
    product = g * value.unsqueeze(-1)
    return product.sum(1) if retain.dim() == 2 else product.sum((1, 2)), (g * wide).sum(-1)


STACK = Block("stack", lambda *rows: ((torch.stack(rows, 1),), None), lambda _, g: g.unbind(1))
_ACCUMULATE = formula_block("accumulate", lambda total, lr, grad: total + over(lr, grad) * grad, _accumulate_vjp)
CELLS = formula_block("retain.cells", _cells, _cells_vjp)  # `[N, 1 or V, 1 or P]`
_REGAINED = formula_block(
    "retention.regained",
    lambda memory, start, retain: memory + over(1 - retain, memory) * start,
    lambda memory, start, retain, g: (g, over(1 - retain, g) * g, -sum_to_gate(g * start, retain)),
)
_COLUMNS = Block("lr.columns", lambda lr: (lr.unbind(-1), None), lambda _, *g: (torch.stack(g, -1),))
_ROW = linear_block("token.row", lambda x: x.unsqueeze(1), lambda g: g.squeeze(1))
_ONLY = linear_block("token.only", lambda x: x.squeeze(1), lambda g: g.unsqueeze(1))
MULTIPLY = formula_block("multiply", torch.mul, lambda a, b, g: (g * b, g * a))
