"""The exact chunk-parallel engine for linear memories.

Within a block of C tokens every state is a combination of the block's first state and its own writes, with coefficients
that depend on the gates alone (`hecate.engine.coefficients`), G_i = u_i p_i^T. For bias dot u_t = -v_t; for l2 the
errors solve one unit lower triangular system. A masked token multiplies by one and adds nothing; a reset cuts every
product that crosses it.

Groups of blocks are walked one after the other. The forward keeps the state of every block and the writes; the backward
goes through the groups in reverse. The walk over states and the solves are pulled back by hand; what depends on gates
and keys alone is made again and recorded by autograd for one group at a time. So memory grows with T / C states and the
working set stays in cache.

Under a bias that is neither linear nor blind to the memory the gradients of a block are solved for in
`hecate.engine.implicit`.

Measured against autograd recording it all (8 memories of 64 x 64, float32, one thread, processor time of forward and
backward): 0.6 to 0.8 of the time at T = 2048, 0.33 to 0.6 at T = 16384, where the peak falls from 600 to 220 MiB
without gates and from 1030 to 260 MiB for gated delta. [ENG-PAR-D1, ENG-PAR-D3]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat

import torch
from torch import Tensor

from hecate.engine.call import GENERAL, Call, Plan
from hecate.engine.coefficients import (
    Matrices,
    States,
    cotangents_of,
    matrices_of,
    plus,
    solve_columns,
    solve_rows,
    states_of,
    transposed_reads,
    walk_linear,
    walk_linear_vjp,
)
from hecate.engine.engine import Engine, TokenEngine, chunk_refusal
from hecate.engine.implicit import adjoint, implicit_gradients, solve
from hecate.engine.loop import sequential
from hecate.engine.tokens import NEUTRAL, NUMBERS, VECTORS, Carry, Scan, Tokens, in_folds, linear_block, run_by_hand
from hecate.rule import MemoryConfig
from hecate.structure import Memory
from hecate.tape import Block, ByHand, Run, Tensors, bridge, can_inspect, execute, one, several
from hecate.tape.ops import over, reach

CHUNK = 64
CHANNEL_CHUNK = 16  # per-channel products are C x C x P tensors
DIAGONAL_CHUNK = 8  # a memory of one number has C x C coefficients and nothing to multiply
GROUP = 1 << 17  # numbers per tensor of a group: what is worked on at once stays in cache
DEVICE_GROUP = 1 << 24  # the same where batches must be large to fill the device


class Parallel(TokenEngine):
    """Blocks of tokens at once, for linear memories with linear retention."""

    name = "parallel"
    reason = "linear memory with linear retention: exact in blocks"
    counts_along = True
    takes = GENERAL
    transposes = True

    def refuses(self, config: MemoryConfig) -> str | None:
        """Refuses configs that are not linear in the state, or take gradients elsewhere."""
        rule = config.rule
        if (reason := chunk_refusal(config)) is not None:
            return reason
        if not (config.forms.linear or config.forms.transposed):
            return f"structure {rule.structure.kind!r} is not linear in its weights"
        if not rule.retention.linear:
            return f"retention {rule.retention.kind!r} is not linear"
        if config.forms.algorithm is None:
            return f"algorithm {rule.algorithm.kind!r} is not a linear recurrence of the gates alone"
        return coordinate_refusal(config)

    def unfit(self, plan: Plan) -> str | None:
        """A decay of value channels too strong for the one triangular system that they all share."""
        if "retain_value" not in plan.general or plan.config.forms.transposed:
            return None
        config, gate = plan.config, "a retain per value channel"
        if config.algorithm.uses_momentum:
            return f"{gate} decays the memory and not its momentum: no common factor of a block"
        if not (config.forms.error or config.forms.target):
            return f"{gate} scales errors, and bias {config.bias.kind!r} is not linear in them"
        if config.forms.error and config.decay_order == "with_step":
            return f"{gate} with decay_order='with_step' gives every value channel a system of its own"
        retain = None if plan.steps is not None else plan.tensors.inputs.retain_value  # a sketch tells none
        if retain is None or not can_inspect(retain, free=True):
            return f"{gate} may leave the range of numbers in a block, and nothing may look"
        least = float(retain.detach().amin()) if retain.numel() else 1.0
        if least**CHANNEL_CHUNK * reach(plan.dtype, 0.75) < 1:
            return f"{gate} of {least:.2g} leaves the range of {plan.dtype} within {CHANNEL_CHUNK} tokens"
        return None

    def cost(self, plan: Plan) -> float:
        """More than one token of the loop costs, less than two."""
        return 60.0 * (1 + plan.length)

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
        scalars = partial(parallel, size=min(size, DIAGONAL_CHUNK))
        return by_coordinate(scalars, config, tokens, carry, initial, run=run)

    def plain(*inputs: Tensor | None) -> Tensors:
        if tokens.retain_value is not None:
            return _scan_values(config, inputs)
        return _scan(config, size, inputs, False, by_hand=False)[0]

    engine: ByHand | Block = ByHand(
        "engine.parallel", partial(_scan, config, size), partial(_scan_vjp, config, size), plain
    )
    if config.forms.transposed or tokens.retain_value is not None:
        engine = Block("engine.parallel", lambda *inputs: (plain(*inputs), inputs))
    return run_by_hand(engine, tokens, carry, initial, run=run)


def by_torch(config: MemoryConfig, like: Carry, engine: Scan | None = None) -> Callable[..., Tensors]:
    """A kernel's function of (memory, *slots, initial, *tokens), in plain torch: by an engine, or by blocks where they
    are exact."""
    states = 1 + len(like.slots)

    def plain(*inputs: Tensor | None) -> Tensors:
        tokens = Tokens(*inputs[states + 1 :])  # type: ignore[arg-type]
        blocks = tokens.retain_value is None and not Engine.registry["parallel"].refuses(config)
        scan = engine or (parallel if blocks else sequential)
        memory, *slots = several(inputs[:states])
        carry = like._replace(memory=(memory,), slots=tuple(slots))
        y, new = in_folds(scan, config, tokens, carry, several(inputs[states : states + 1]), run=execute)
        return y, *new.memory, *new.slots

    return plain


def _tokens_and_states(config: MemoryConfig, inputs: Tensors) -> tuple[Tokens, States]:
    memory, *slots = inputs[: 1 + len(config.algorithm.slots)]
    initial, *rest = inputs[1 + len(slots) :]
    tokens = Tokens(*rest)  # type: ignore[arg-type]
    return tokens, States(memory, slots[0] if slots else None, None if tokens.reset is None else initial)  # type: ignore[arg-type]


def _scan(
    config: MemoryConfig, size: int, inputs: Tensors, keeps: bool, *, by_hand: bool = True
) -> tuple[Tensors, Tensors]:
    """Outputs and last states; if asked for, the record for `_scan_vjp`: per group the base states of its blocks and,
    where they are not the values themselves, its writes."""
    tokens, states = _tokens_and_states(config, inputs)
    outputs: list[Tensor] = []
    record: list[Tensor] = []
    groups, block = _groups(tokens, size)
    for group in groups:
        chunks = chunked(tokens, group, block)
        asked, combined = chunks, None
        if config.forms.transposed:  # the memory is not read as usual: queries are as wide as its predictions
            asked, combined = chunks._replace(phi_q=chunks.phi_k), states_of(config, chunks)
        matrices = matrices_of(config, asked, combined)
        y, bases, writes, states = walk(config, matrices, chunks.v, states, by_hand=by_hand)
        if combined is not None:
            y = transposed_reads(combined[0] if config.read == "after" else combined[1], chunks, bases, writes)
        outputs.append(y.transpose(0, 1))
        if keeps:
            record += [bases] if writes is chunks.v else [bases, writes]
    y = torch.cat(outputs, 1).flatten(1, 2)[:, : tokens.v.shape[1]]
    return (y, states.memory, *(() if states.slot is None else (states.slot,))), tuple(record)


def _scan_values(config: MemoryConfig, inputs: Tensors) -> Tensors:
    """Outputs and last states where value channels decay, recorded by autograd.

    With D_t the products of retain_value since the block's start or the last reset, D^-1 M is a memory without that
    decay which is written with D^-1 v: one system for all value channels. [ENG-PAR-D5]
    """
    tokens, states = _tokens_and_states(config, inputs)
    outputs: list[Tensor] = []
    for start in range(0, tokens.v.shape[1], CHANNEL_CHUNK):
        group = slice(start, min(start + CHANNEL_CHUNK, tokens.v.shape[1]))
        chunks = chunked(tokens, group, group.stop - start)
        gates, resets = one((chunks.retain_value,))[0], chunks.reset
        before, after = [], [torch.ones_like(gates[:, 0])]
        for t, gate in enumerate(gates.unbind(1)):
            last = after[-1] if resets is None else torch.where(resets[0, :, t, None], 1.0, after[-1])
            before.append(last)
            after.append(last * gate)
        scale = torch.stack(after[1:], 1)
        matrices = matrices_of(config, chunks)
        y, *_, states = walk(config, matrices, chunks.v / scale, states, by_hand=False)
        outputs.append(y[0] * (scale if config.read == "after" else torch.stack(before, 1)))
        states = states._replace(memory=scale[:, -1].unsqueeze(-1) * states.memory)
    return torch.cat(outputs, 1), states.memory


def _scan_vjp(
    config: MemoryConfig, size: int, inputs: Tensors, record: Tensors, cotangents: Sequence[Tensor]
) -> Tensors:
    """Cotangents of all inputs."""
    (tokens, states), (gy, gmemory, *gslots) = _tokens_and_states(config, inputs), cotangents
    initial = None if states.initial is None else torch.zeros_like(states.initial)
    later = States(gmemory, gslots[0] if gslots else None, initial)
    used = (True, True, True, *config.forms.gates, False, False, tokens.phi_w is not None, False)
    (groups, block), length = _groups(tokens, size), tokens.v.shape[1]
    gtokens = [
        item.new_empty(len(item), -(-length // block), block, *item.shape[2:]) if item is not None and needed else None
        for item, needed in zip(tokens, used, strict=True)
    ]
    stack = list(several(record))
    for group in reversed(groups):
        chunks = chunked(tokens, group, block)
        writes = chunks.v if config.forms.target else stack.pop()
        shares, later = _group_vjp(config, chunks, one(in_blocks([gy], group, block)), stack.pop(), writes, later)
        first = group.start // block
        for whole, share in zip(gtokens, shares, strict=True):
            if whole is not None and share is not None:
                whole[:, first : first + len(share)] = share.transpose(0, 1)
    slots = () if later.slot is None else (later.slot,)
    for at, whole in enumerate(gtokens):
        gtokens[at] = None if whole is None else whole.flatten(1, 2)[:, :length]
    return (later.memory, *slots, later.initial, *gtokens)


def _group_vjp(
    config: MemoryConfig, chunks: Tokens, gy: Tensor, bases: Tensor, writes: Tensor, later: States
) -> tuple[Tokens, States]:
    """Cotangents of a group's tokens and of the states that enter it."""
    with torch.enable_grad():
        tensors = (*chunks[:NUMBERS], *([] if chunks.phi_w is None else [chunks.phi_w]))
        leaves = [leaf.detach().requires_grad_() for leaf in tensors]  # type: ignore[union-attr]
        phi_w = leaves[NUMBERS] if len(leaves) > NUMBERS else None
        matrices = matrices_of(config, Tokens(*leaves[:NUMBERS], *chunks[NUMBERS:])._replace(phi_w=phi_w))
    plain = Matrices(*[None if matrix is None else matrix.detach() for matrix in matrices])  # type: ignore[arg-type]
    cotangents, gv, later = walk_vjp(config, plain, chunks.v, bases, writes, gy, later)
    pairs = zip(matrices, cotangents, strict=True)
    used, gs = zip(*[pair for pair in pairs if pair[0] is not None and pair[0].requires_grad], strict=True)
    grads = torch.autograd.grad(used, leaves, gs, allow_unused=True)
    gphi_w = None if phi_w is None else grads[NUMBERS]
    return Tokens(*grads[:NUMBERS])._replace(v=gv, phi_w=gphi_w), later


def _groups(tokens: Tokens, size: int) -> tuple[list[slice], int]:
    """The tokens of every group of blocks, and the size of the blocks."""
    count, length = tokens.v.shape[:2]
    channels, late = tokens.retain.dim() == 3, tokens.v.device.type not in bridge.AT_ONCE
    size = min(size, CHANNEL_CHUNK if channels else size, length)
    numbers = count * size * max(tokens.phi_k.shape[-1], tokens.v.shape[-1])
    if channels and late:  # a coefficient for each pair of tokens and channel
        numbers = max(numbers, count * size * size * tokens.phi_k.shape[-1])
    most = DEVICE_GROUP if late else GROUP
    step = size * max(1, most // max(1, numbers))
    return [slice(start, min(start + step, length)) for start in range(0, length, step)], size


def chunked(tokens: Tokens, group: slice, size: int) -> Tokens:
    """Tokens of a group as blocks `[g, N, C, ...]`; padding writes nothing."""
    if tokens.write is None and (group.stop - group.start) % size:
        tokens = tokens._replace(write=torch.ones_like(tokens.lr, dtype=torch.bool))
    return Tokens(*in_blocks(tokens, group, size, NEUTRAL))  # type: ignore[arg-type]


def in_blocks(tensors: Sequence[Tensor | None], group: slice, size: int, fills: Sequence[float] = (0,)) -> Tensors:
    """A group of tokens `[N, T, ...]` as blocks `[g, N, C, ...]`, padded."""
    blocks: list[Tensor | None] = []
    for item, fill in zip(tensors, fills, strict=True):
        if item is not None:
            item = item[:, group]
            missing = -item.shape[1] % size
            if missing:
                item = torch.cat([item, item.new_full((len(item), missing, *item.shape[2:]), fill)], 1)
            item = item.unflatten(1, (-1, size)).transpose(0, 1).contiguous()
        blocks.append(item)
    return tuple(blocks)


# The walk over the states of a group's blocks, and the same backwards, by hand.


def walk(
    config: MemoryConfig, matrices: Matrices, v: Tensor, states: States, *, by_hand: bool
) -> tuple[Tensor, Tensor, Tensor, States]:
    """Outputs, base states and writes of all blocks, and the states that leave the last.

    `by_hand` says that no derivative of the operations is wanted, so that a solution need not carry its own.
    """
    if by_hand and v.device.type not in bridge.AT_ONCE and (config.forms.target or config.forms.error):
        return walk_linear(matrices, v, states)
    all_bases, all_writes = [], []
    for block, target in zip(_split(matrices), v.unbind(0), strict=True):
        tensors = [*filter(torch.is_tensor, states)]
        base = torch.cat(tensors, -1) if len(tensors) > 1 else tensors[0]
        writes = _writes(config, block, base, target, by_hand)
        all_bases.append(base)
        all_writes.append(writes)
        memory = tensors[0]
        if block.leaving is not None:
            first, *rest = block.leaving.unsqueeze(1).unbind(-1)
            memory = first * memory
            for weight, state in zip(rest, tensors[1:], strict=True):
                memory = torch.addcmul(memory, weight, state)
        memory = torch.baddbmm(memory, writes.mT, block.keys)
        slot = states.slot
        if slot is not None and block.slot_leaving is not None and block.slot_keys is not None:
            slot = over(block.slot_leaving, slot) * slot
            slot = torch.baddbmm(slot, writes.mT, block.slot_keys)
        states = States(memory, slot, states.initial)
    bases = torch.stack(all_bases)
    writes = v if matrices.seen is None else torch.stack(all_writes)
    return plus(matrices.read @ bases.mT, matrices.attend, writes), bases, writes, states


def walk_vjp(
    config: MemoryConfig, matrices: Matrices, v: Tensor, bases: Tensor, writes: Tensor, gy: Tensor, later: States
) -> tuple[Matrices, Tensor, States]:
    """Cotangents of the matrices, of v and of the first states, from those of outputs and last states.

    Block by block from the last. With U the cotangent of the memory that leaves,

        g_w = attend^T g_y + keys U^T,   g_base = g_y^T read + e^T seen + leaving U

    where e, the cotangent of the base predictions, solves the transposed system (dot has none).
    """
    if v.device.type not in bridge.AT_ONCE and (config.forms.target or config.forms.error):
        return walk_linear_vjp(matrices, v, bases, writes, gy, later)
    width = matrices.keys.shape[-1]
    pulled, drawn = matrices.attend.mT @ gy, gy.mT @ matrices.read
    pred = v
    if matrices.seen is not None and matrices.lower is not None and not config.forms.error:
        pred = plus(matrices.seen @ bases.mT, matrices.lower, writes)
    received: list[States] = []
    slopes, values = [], []
    blocks = zip(_split(matrices), *map(Tensor.unbind, (pulled, drawn, pred, v)), strict=True)
    for block, gw, gbase, at, target in reversed(list(blocks)):
        received.append(later)
        if block.seen is not None:
            slope, gv = _writes_vjp(config, block, at, target, _write_cotangents(gw, block, later))
            gbase = torch.baddbmm(gbase, slope.mT, block.seen)
            slopes.append(slope)
            values.append(gv)
        later = _earlier(block, gbase.split(width, -1), later)
    gpred = torch.stack(slopes[::-1]) if slopes else None
    memories, slots, _ = zip(*reversed(received), strict=True)
    gmemory, gslot = torch.stack(memories), None if slots[0] is None else torch.stack(slots)
    left = States(gmemory, gslot, None)
    cotangents = cotangents_of(matrices, bases, writes, gy, gpred, left)
    return cotangents, torch.stack(values[::-1]) if values else _write_cotangents(pulled, matrices, left), later


def _split(matrices: Matrices) -> list[Matrices]:
    """The matrices of each block."""
    columns = [repeat(None) if item is None else item.unbind(0) for item in matrices]
    return [Matrices(*block) for block in zip(*columns)]  # noqa: B905


def _earlier(block: Matrices, drawn: tuple[Tensor, ...], later: States) -> States:
    """Cotangents of a block's first states, from its own tokens' use of them and the cotangents of later states.

    That of the initial weights adds up.
    """
    if block.leaving is None:
        return later._replace(memory=drawn[0] + later.memory)
    weights = block.leaving.unsqueeze(1).unbind(-1)
    pulled = [*map(torch.addcmul, drawn, weights, repeat(later.memory))]
    slot, initial = later.slot, later.initial
    if slot is not None and block.slot_leaving is not None:
        slot = torch.addcmul(pulled[1], over(block.slot_leaving, slot), slot)
    if initial is not None:
        initial = initial + pulled[-1]
    return States(pulled[0], slot, initial)


def _write_cotangents(gw: Tensor, block: Matrices, later: States) -> Tensor:
    """The cotangent of writes, from their use within the block and in the states after it."""
    gw = plus(gw, block.keys, later.memory.mT)
    if later.slot is not None and block.slot_keys is not None:
        gw = plus(gw, block.slot_keys, later.slot.mT)
    return gw


def _writes(config: MemoryConfig, block: Matrices, base: Tensor, v: Tensor, by_hand: bool) -> Tensor:
    """w = -u: minus the gradients by the predictions."""
    if block.seen is None or block.lower is None:
        return v
    if config.forms.error:
        # (I + L) W = V - predictions
        return solve_rows(block.lower, torch.baddbmm(v, block.seen, base.mT, alpha=-1))
    errors = (solve if by_hand else implicit_gradients)(config.bias, block.seen @ base.mT, block.lower, v)
    return -errors


def _writes_vjp(config: MemoryConfig, block: Matrices, pred: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Cotangents of the base predictions and of v from that of w."""
    lower = one((block.lower,))
    if config.forms.error:
        pulled = solve_columns(lower, g)
        return -pulled, pulled
    g, bias = -g, config.bias
    slope = adjoint(bias, pred, lower, v, g)
    return slope, bias.grad_vjp(pred, v, torch.baddbmm(g, lower.mT, slope, alpha=-1))[1]


# A diagonal memory of width P as P memories of one number. [STR-VECTOR-R1]


def coordinate_refusal(config: MemoryConfig) -> str | None:
    """Reason why a diagonal memory is not a memory per coordinate; None if it is, or is not diagonal."""
    if config.structure.diagonal and not config.forms.apart:
        return (
            f"bias {config.bias.kind!r} as configured is not known to treat coordinates apart, "
            f"as structure {config.structure.kind!r} needs here"
        )
    return None


def by_coordinate(
    engine: Scan, config: MemoryConfig, tokens: Tokens, carry: Carry, initial: Memory, *, run: Run
) -> tuple[Tensor, Carry]:
    """Runs an engine for matrix memories on the coordinates of diagonal ones.

    Each is a 1 x 1 matrix memory with its own key, query and value and the token's gates, so `[N, T, P]` becomes
    `[N P, T, 1]`, and retain per channel a gate per memory: exact for a bias that treats coordinates apart.
    """
    width = tokens.v.shape[-1]

    def of(tensors: Tensors, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Memory:
        block = linear_block("coordinates", there, back)
        return tuple(one(run(block, tensor, label="coordinates")) for tensor in tensors)

    def split(x: Tensor) -> Tensor:  # `[N P, ...]` -> `[N, P, ...]`
        return x.unflatten(0, (-1, width))

    scalars = (lambda x: x.repeat_interleave(width, 0)), (lambda g: split(g).sum(1))
    channels = (lambda x: x.mT.flatten(0, 1)), (lambda g: split(g).mT)
    vectors = (lambda x: x.mT.flatten(0, 1).unsqueeze(-1)), (lambda g: split(g.squeeze(-1)).mT)
    weights = (lambda w: w.reshape(-1, 1, 1)), (lambda g: g.reshape(-1, width))
    gates = [one(of((gate,), *(channels if gate.dim() == 3 else scalars))) for gate in several(tokens[VECTORS:NUMBERS])]
    write, reset = (None if mask is None else mask.repeat_interleave(width, 0) for mask in (tokens.write, tokens.reset))
    phi_w = None if tokens.phi_w is None else one(of((tokens.phi_w,), *vectors))
    coordinates = Tokens(*of(tokens[:VECTORS], *vectors), *gates)._replace(write=write, reset=reset, phi_w=phi_w)
    memory, slots, first = (of(item, *weights) for item in (carry.memory, carry.slots, initial))
    y, new = engine(config, coordinates, carry._replace(memory=memory, slots=slots), first, run=run)
    memory, slots = (of(item, *weights[::-1]) for item in (new.memory, new.slots))
    return one(of((y,), *vectors[::-1])), carry._replace(memory=memory, slots=slots)
