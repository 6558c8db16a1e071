"""The exact chunk-parallel engine for linear memories.

Within a block of C tokens every state is a combination of the block's first state and its own writes, with coefficients
that depend on the gates alone. With R[t, j] the product of retain over j < l <= t, P[j, i] that of momentum over i < l
<= j, and K = R P (both lower triangular):

    M_t = a_t M_0 + s_t S_0 - sum_{i <= t} K[t, i] lr_i u_i p_i^T

For bias dot u_t = -v_t; for l2 the errors solve one unit lower triangular system. gd is the case P = I. A masked token
multiplies by one and adds nothing; a reset cuts every product that crosses it.

Groups of blocks are walked one after the other. The forward keeps the state of every block and the writes; the backward
goes through the groups in reverse. The walk over states and the solves are pulled back by hand; what depends on gates
and keys alone is made again and recorded by autograd for one group at a time. So memory grows with T / C states and the
work stays in cache.

Measured against autograd recording it all (8 memories of 64 x 64, float32, one thread, processor time of forward and
backward): 0.6 to 0.8 of the time at T = 2048, 0.33 to 0.6 at T = 16384, where the peak falls from 600 to 220 MiB
without gates and from 1030 to 260 MiB for gated delta. [ENG-PAR-D1, ENG-PAR-D3]
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from hecate.engine.call import Call
from hecate.engine.coordinates import by_coordinate, coordinate_refusal
from hecate.engine.engine import TokenEngine
from hecate.engine.parallel.blocks import Matrices, States, matrices_of, walk, walk_vjp
from hecate.engine.tokens import Carry, Tokens, form_of, in_folds
from hecate.rule import MemoryConfig
from hecate.rule.rule import several
from hecate.structure import Memory
from hecate.tape import ByHand, Run, Tensors

CHUNK = 64
CHANNEL_CHUNK = 16  # per-channel products are C x C x P tensors
DIAGONAL_CHUNK = 8  # a memory of one number has C x C coefficients and nothing to multiply
GROUP = 1 << 17  # numbers per tensor of a group: what is worked on at once stays in cache
DEVICE_GROUP = 1 << 24  # the same where batches must be large to fill the device


class Parallel(TokenEngine):
    """Blocks of tokens at once, for linear memories with linear retention."""

    name = "parallel"
    counts_along = True

    def refuses(self, config: MemoryConfig) -> str | None:
        """What is not linear in the state, or takes gradients elsewhere."""
        rule = config.rule
        if config.chunk > 1 or config.commit == "chunk":
            return f"chunk={config.chunk}, commit={config.commit!r} take gradients at a remembered state"
        if not rule.structure.linear:
            return f"structure {rule.structure.kind!r} is not linear in its weights"
        if not rule.retention.linear:
            return f"retention {rule.retention.kind!r} is not linear"
        if rule.algorithm.kernel_form() is None:
            return f"algorithm {rule.algorithm.kind!r} is not a linear recurrence of the gates alone"
        return coordinate_refusal(config)

    def cost(self, call: Call) -> float:
        """More than a single token of the loop, less than two."""
        return 60.0 * (1 + call.length)

    def about(self, call: Call) -> str:
        """What is always so."""
        return "linear memory with linear retention: exact in blocks"

    def scan(self, call: Call, tokens: Tokens, carry: Carry, initial: Memory, *, run: Run) -> tuple[Tensor, Carry]:
        """Block by block."""
        return in_folds(parallel, call.config, tokens, carry, initial, run=run)


def parallel(
    config: MemoryConfig, tokens: Tokens, carry: Carry, initial: Memory, *, run: Run, size: int = CHUNK
) -> tuple[Tensor, Carry]:
    """Runs a sequence block by block: outputs `[N, T, V]` and the final carry.

    The backward pass is by hand, torch's own where it has to see every operation; see `ByHand`.
    """
    if carry.memory[0].dim() == 2:
        engine = partial(parallel, size=min(size, DIAGONAL_CHUNK))
        return by_coordinate(engine, config, tokens, carry, initial, run=run)
    states, form = len(carry.memory) + len(carry.slots), form_of(config.bias)

    def forward(inputs: Tensors, keeps: bool) -> tuple[Tensors, Tensors]:
        return _scan(config, form, *_named(inputs, states), size, keeps=keeps, by_hand=True)

    def vjp(inputs: Tensors, record: Tensors, cotangents: Sequence[Tensor]) -> Tensors:
        return _scan_vjp(config, form, *_named(inputs, states), size, record, cotangents)

    def plain(*inputs: Tensor | None) -> Tensors:
        return _scan(config, form, *_named(inputs, states), size, keeps=False, by_hand=False)[0]

    block = ByHand("engine.parallel", forward, vjp, plain).block()
    y, memory, *slots = several(run(block, *carry.memory, *carry.slots, *initial, *tokens, label="blocks"))
    return y, carry._replace(memory=(memory,), slots=tuple(slots))


def _named(inputs: Tensors, states: int) -> tuple[Tokens, States]:
    tokens = Tokens(*inputs[states + 1 :])  # type: ignore[arg-type]
    slot = inputs[1] if states > 1 else None
    initial = inputs[states] if tokens.reset is not None else None
    return tokens, States(inputs[0], slot, initial)  # type: ignore[arg-type]


def _scan(
    config: MemoryConfig, form: str | None, tokens: Tokens, states: States, size: int, *, keeps: bool, by_hand: bool
) -> tuple[Tensors, Tensors]:
    """Outputs and last states; if asked for, the record for `_scan_vjp`: per group the base states of its blocks and,
    where they are not the values themselves, its writes."""
    outputs: list[Tensor] = []
    record: list[Tensor] = []
    for start, stop, block in _groups(tokens, size):
        chunks = _chunked(tokens, start, stop, block)
        matrices = matrices_of(config, form, chunks)
        y, bases, writes, states = walk(config.bias, form, matrices, chunks.v, states, by_hand=by_hand)
        outputs.append(y.transpose(0, 1))
        if keeps:
            record += [bases] if writes is chunks.v else [bases, writes]
    y = torch.cat(outputs, 1).flatten(1, 2)[:, : tokens.v.shape[1]]
    return (y, states.memory, *(() if states.slot is None else (states.slot,))), tuple(record)


def _scan_vjp(
    config: MemoryConfig,
    form: str | None,
    tokens: Tokens,
    states: States,
    size: int,
    record: Tensors,
    cotangents: Sequence[Tensor],
) -> Tensors:
    """Cotangents of all inputs."""
    gy, gmemory, *gslots = cotangents
    initial = None if states.initial is None else torch.zeros_like(states.initial)
    later = States(gmemory, gslots[0] if gslots else None, initial)
    used = (True,) * 4 + (config.retention.uses_retain, config.algorithm.uses_momentum)
    found = [torch.empty_like(item) if needed else None for item, needed in zip(tokens, used, strict=False)]  # type: ignore[arg-type]
    kept = list(several(record))
    for start, stop, block in reversed(_groups(tokens, size)):
        chunks = _chunked(tokens, start, stop, block)
        writes = chunks.v if form == "target" else kept.pop()
        (g,) = _blocks((gy[:, start:stop],), block)
        own, later = _group_vjp(config, form, chunks, g, kept.pop(), writes, later)  # type: ignore[arg-type]
        _put(own, found, start, stop)
    slots = () if later.slot is None else (later.slot,)
    return (later.memory, *slots, later.initial, *found, None, None)


def _group_vjp(
    config: MemoryConfig, form: str | None, chunks: Tokens, gy: Tensor, bases: Tensor, writes: Tensor, later: States
) -> tuple[Tokens, States]:
    """Cotangents of a group's tokens and of the states that enter it."""
    with torch.enable_grad():
        leaves = [chunks.phi_k, chunks.phi_q, chunks.lr, chunks.retain, chunks.momentum]
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        k, q, lr, retain, momentum = leaves
        matrices = matrices_of(config, form, Tokens(k, q, chunks.v, lr, retain, momentum, *chunks[6:]))
    plain = Matrices(*[None if matrix is None else matrix.detach() for matrix in matrices])  # type: ignore[arg-type]
    cotangents, gv, later = walk_vjp(config.bias, form, plain, chunks.v, bases, writes, gy, later)
    pairs = zip(matrices, cotangents, strict=True)
    used, given = zip(*[pair for pair in pairs if pair[0] is not None and pair[0].requires_grad], strict=True)
    gk, gq, *gates = torch.autograd.grad(used, leaves, given, allow_unused=True)
    return Tokens(gk, gq, gv, *gates), later


def _put(shares: Tokens, found: list[Tensor | None], start: int, stop: int) -> None:
    """Writes a group's blocks `[g, N, C, ...]` into whole sequences `[N, T, ...]`, without the padding."""
    for whole, share in zip(found, shares, strict=False):
        if whole is None or share is None:
            continue
        blocks, tokens = share.transpose(0, 1), whole[:, start:stop]
        if stop - start < blocks.shape[1] * blocks.shape[2]:
            tokens.copy_(blocks.flatten(1, 2)[:, : stop - start])
        else:
            tokens.unflatten(1, blocks.shape[1:3]).copy_(blocks)


def _groups(tokens: Tokens, size: int) -> list[tuple[int, int, int]]:
    """First and last token of every group of blocks, and the size of its blocks."""
    count, length = tokens.v.shape[:2]
    if tokens.retain.dim() == 3:
        size = min(size, CHANNEL_CHUNK)
    size = min(size, length)
    most = GROUP if tokens.v.device.type == "cpu" else DEVICE_GROUP
    numbers = count * size * max(tokens.phi_k.shape[-1], tokens.v.shape[-1])
    step = size * max(1, most // max(1, numbers))
    return [(start, min(start + step, length), size) for start in range(0, length, step)]


def _chunked(tokens: Tokens, start: int, stop: int, size: int) -> Tokens:
    """Tokens of a group as blocks `[g, N, C, ...]`; padding writes nothing."""
    if tokens.write is None and (stop - start) % size:
        tokens = tokens._replace(write=torch.ones_like(tokens.lr, dtype=torch.bool))
    group = [None if tensor is None else tensor[:, start:stop] for tensor in tokens]
    return Tokens(*_blocks(group, size, fills=(0, 0, 0, 0, 1, 1, 0, 0)))  # type: ignore[arg-type]


def _blocks(tensors: Sequence[Tensor | None], size: int, fills: tuple[float, ...] = (0,)) -> list[Tensor | None]:
    """`[N, t, ...]` as `[g, N, C, ...]`, each padded with its own fill."""
    blocks: list[Tensor | None] = []
    for tensor, fill in zip(tensors, fills, strict=True):
        if tensor is not None:
            missing = -tensor.shape[1] % size
            if missing:
                tail = tensor.new_full((tensor.shape[0], missing, *tensor.shape[2:]), fill)
                tensor = torch.cat([tensor, tail], 1)
            tensor = tensor.unflatten(1, (-1, size)).transpose(0, 1).contiguous()
        blocks.append(tensor)
    return blocks
