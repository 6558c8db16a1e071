"""Log-linear attention: one affine memory whose content is kept apart by age, in a tree of levels. [ENG-TREE-D1]

The memory of an affine rule is the sum of what each token has left in it. Level 0 holds the present token; before the
next one is written, levels 0 .. l, l the trailing zeros of its number, are summed into level l + 1 and restart at 0. So
a token s lies at t in the level of the highest bit in which their numbers differ, bit_length(t xor s). All levels decay
and unlearn alike, and the read weighs them, y_t = sum_l lambda_l(t) M^(l) q_t; with lambda = 1 that is the plain rule.
The last level keeps what it has got: what is older than the tree is read as the plain rule reads it.

Rows of a matrix memory do not see one another under an affine rule, so the levels are rows of one memory, values being
written to those of level 0 alone: that is the token loop. In blocks of C tokens the triangular system of a block's own
writes is solved once, for all levels and tokens alike: a pair of tokens then has one coefficient, weighed by lambda of
its level, and a token one query of every level that came into the block, weighed by lambda of what that has become.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from hecate.checks import expect, expect_choice
from hecate.engine import nonfinite
from hecate.engine.call import Call, Plan
from hecate.engine.coefficients import matrices_of
from hecate.engine.engine import apart
from hecate.engine.features import to_tokens
from hecate.engine.loop import in_segments, per_weight, root, token_by_token
from hecate.engine.parallel import CHANNEL_CHUNK, CHUNK, chunked, in_blocks
from hecate.engine.reductions import one_write_each, read_once
from hecate.engine.tokens import Carry, Tokens, cast, cut, fold_heads, unfold_heads, written_before
from hecate.errors import ConfigError, ShapeError
from hecate.rule import Gates, MemoryConfig, MemoryState
from hecate.structure import Memory
from hecate.tape import Autodiff, Block, Run, Tensors, can_inspect, differentiate, formula_block, one, several, steady
from hecate.tape.ops import joined

SEGMENT = 16  # blocks between checkpoints
WAYS = ("auto", "sequential", "parallel")
FAR = 1 << 48  # from any token's number: a move to the last level
MOST_LEVELS = 48  # of which the oldest but one takes 2^46 tokens to fill; as numbers, places stay exact in float64


def tree_refusal(config: MemoryConfig) -> tuple[str, str] | None:
    """The field that rules out keeping a memory's content apart by age, and the reason; None if nothing does."""
    if config.chunk > 1 or config.commit == "chunk":
        return "chunk", f"chunk={config.chunk} takes gradients at a remembered state; use chunk=1, commit='token'"
    if config.structure.diagonal or not config.forms.linear:
        return "structure", f"structure {config.structure.kind!r} has no rows for levels; use structure 'matrix'"
    if not (config.forms.target or config.forms.error):
        return "bias", f"bias {config.bias.kind!r} is not affine in the prediction; use bias 'l2' or 'dot'"
    if not config.retention.linear:
        return "retention", f"retention {config.retention.kind!r} is not linear; use retention 'none' or 'decay'"
    if config.forms.algorithm is None:
        return "algorithm", f"algorithm {config.algorithm.kind!r} is not linear; use algorithm 'gd' or 'momentum'"
    if config.normalizer != "none":
        return "normalizer", f"normalizer={config.normalizer!r} divides by one sum for all levels; use 'none'"
    if config.on_nonfinite == "skip":
        return "on_nonfinite", "'skip' would leave out tokens that the tree has counted; use 'raise' or 'propagate'"
    return None


def log_linear_scan(
    config: MemoryConfig,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates | None = None,
    *,
    scale: Tensor,
    state: MemoryState | None = None,
    engine: str = "auto",
    autodiff: Autodiff = "auto",
    name: str = "memory",
    **options: Any,
) -> tuple[Tensor, MemoryState]:
    """`memory_scan` of an affine rule, whose reads weigh each level, the content of one age, by a number of its own.

    Shapes: as in `memory_scan`; scale, the lambda of L levels, `[B, T, H, L]`. In a state memory and momentum are
    `[B, H, L, V, P]`, and `position` counts the tokens written, `[B, H]`; `initial` starts in the last level.
    VJP: autograd of the blocks; autodiff "tape" keeps a state in 16 blocks, of the token loop one in sqrt(T) tokens.
    Cost: a state is L times as large; beside a block's own products 3 L V P multiplications per token.

    Raises:
        ConfigError: a rule that is not affine, an engine that is none of "auto", "sequential" and "parallel".
        ShapeError, NonFiniteError: as `memory_scan`.
    References: Guo et al., 2025 (arXiv 2506.04761).
    """
    if refusal := tree_refusal(config):
        raise ConfigError(f"levels of a tree: {refusal[1]}", path=(refusal[0],))
    expect_choice(engine, "engine", WAYS)
    rule, writes = config, config.writes
    expect(scale, "B T H L", name="scale")
    expect(scale, "B T H L", name="scale", sizes=(*q.shape[:3], max(1, scale.shape[-1])), like=q, other="q")
    if writes > 1:
        rule, (q, k, v, gates), options = one_write_each(config, q, k, v, gates, **options)
        scale = scale.repeat_interleave(writes, 1)
    plain = Call.of(rule, q, k, v, gates, state=None if state is None else as_plain(state, scale.shape[-1]), **options)
    call = _in_levels(plain, state, scale.shape[-1])
    places, count = _places(call, state, writes)
    if v.numel() == 0:
        outputs = (joined(torch.zeros_like(v), scale, *call.flat), *(x.clone() for x in call.memories[0][1].flat))
    else:
        program = partial(_program, call.plan, _by_blocks(call, engine))
        flat = (scale.to(call.dtype), *places, *call.flat)
        outputs = several(differentiate(program, flat, "torch" if autodiff == "auto" else autodiff))
        if rule.on_nonfinite == "raise":
            nonfinite.check(plain, name, outputs)
    y, after = call.result(outputs)
    if rule.on_nonfinite == "raise" and y.requires_grad:
        nonfinite.watch_cotangents(name, y, after, call.traced)
    after = after._replace(position=count.unsqueeze(1).expand_as(after.position).clone())
    return (y if writes == 1 else read_once(config, y)), after


def as_plain(state: MemoryState, levels: int) -> MemoryState:
    """The state of the plain rule, the sum of all levels."""
    for tensor in (*state.memory.values(), *state.slots.values()):
        if tensor.dim() != 5 or tensor.shape[2] != levels:
            raise ShapeError(
                f"state.memory and state.slots must be [B, H, L, V, P] with L = {levels} levels, got "
                f"{list(tensor.shape)}; was the state made by another scan?"
            )
    memory, slots = ({name: tensor.sum(2) for name, tensor in kind.items()} for kind in (state.memory, state.slots))
    return state._replace(memory=memory, slots=slots)


def _in_levels(call: Call, state: MemoryState | None, levels: int) -> Call:
    """The call with states `[N, L, V, P]` in place of its own."""
    start, carry = call.memories[0]
    if state is None:
        memory, slots = (tuple(_oldest(item, levels) for item in kind) for kind in (carry.memory, carry.slots))
    else:
        memory, slots = (
            tuple(item.flatten(0, 1).to(call.dtype) for item in kind.values()) for kind in (state.memory, state.slots)
        )
    carry = carry._replace(memory=memory, slots=slots)
    return Call(call.plan, (*call.flat[: call.plan.first], *start, *carry.flat), call.seen)


def _oldest(weight: Tensor, levels: int) -> Tensor:
    """Levels `[N, L, V, P]` of which the last holds a weight `[N, V, P]`."""
    empty = weight.new_zeros(weight.shape[0], levels - 1, *weight.shape[1:])
    return torch.cat([empty, weight.unsqueeze(1)], 1)


class Places(NamedTuple):
    """Numbers of tokens `[B, T]`: at which a token is read, which it has itself if it is written, and at which the
    token before was read; FAR where there was none, whose memory lies in the last level, as a move to it finds."""

    read: Tensor
    wrote: Tensor
    before: Tensor


def _places(call: Call, state: MemoryState | None, writes: int) -> tuple[Places, Tensor]:
    """The places of all tokens, and how many writes there have been after the last, `[B]`."""
    inputs = call.inputs
    start = torch.zeros(len(inputs.k), dtype=torch.int64, device=inputs.k.device)
    if state is not None:
        start = state.position.sum(1) // max(1, state.position.shape[1])
    earlier = written_before(start, inputs.write, inputs.reset, call.length)
    count = earlier + (1 if inputs.write is None else inputs.write)
    ahead = torch.where(start == 0, FAR, start - 1).unsqueeze(1)
    read = torch.cat([ahead, (count - 1).clamp(min=0)], 1) // writes
    return Places(read[:, 1:], earlier // writes, read[:, :-1]), count[:, -1] if call.length else start.clone()


def level_of(difference: Tensor, levels: int) -> Tensor:
    """bit_length of the xor of two places, at most the last level."""
    return torch.frexp(difference.double()).exponent.long().clamp(max=levels - 1)


def moved_on(states: Tensor, age: Tensor, axis: int) -> Tensor:
    """Levels on an axis of `[N, ...]` after a move by which all up to level `age` `[N]` come to lie in that level."""
    shape = [len(age)] + [1] * (states.dim() - 1)
    levels, age = torch.arange(states.shape[axis], device=states.device), age.view(shape)
    levels = levels.view([-1 if at == axis else 1 for at in range(states.dim())])
    young = torch.where(levels <= age, states, 0.0)
    return torch.where(levels == age, young.sum(axis, keepdim=True), states - young)


# What runs.


def _by_blocks(call: Call, engine: str) -> bool:
    """True if a call runs in blocks rather than token by token."""
    apart = "retain_value" in call.general  # which gives every value channel a system of its own
    if apart and engine == "parallel":
        raise ConfigError("engine='parallel' cannot run levels of a tree with gates.retain_value; use 'sequential'")
    if engine == "parallel" and steady():
        raise ConfigError("engine='parallel' takes tokens in blocks, and exact does not: use engine='auto'")
    return engine == "parallel" or (engine == "auto" and call.length > 1 and not apart and not steady())


def _program(plan: Plan, blocks: bool, run: Run, scale: Tensor, *flat: Tensor | None) -> Tensors:
    """y in v's dtype, and the states, of lambda, places and a call's tensors."""
    places, call = flat[:3], Call(plan, flat[3:])
    tokens = fold_heads(to_tokens(call.config, call.inputs, call.params, plan.dtype, run), run)
    (initial, carry), heads = call.memories[0], scale.shape[2]
    size = SEGMENT * CHUNK if blocks else root(call.length)
    sizes = [min(size, call.length - at) for at in range(0, call.length, size)]
    rows = cut((one(run(_FOLD, scale, label="scale")), *places, *tokens), sizes, run)
    way = partial(_segment_in_blocks if blocks else _segment, call.config)
    y, carry = in_segments(way, rows, carry, initial, run)
    y = one(run(unfold_heads(heads), y, label="heads"))
    if y.dtype != call.values:
        y = one(run(cast(call.values), y, label="outputs"))
    return y, *apart(carry.flat, call.flat, run)


def _split(rows: list[Tensors], carry: Carry) -> tuple[Tensor, Places, Tokens]:
    """Of a segment: lambda `[N, T, L]`, places `[N, T]` and tokens."""
    scale, *others = rows[0]
    heads = len(scale) // len(others[0])  # type: ignore[arg-type]
    places = [place.repeat_interleave(heads, 0) for place in several(tuple(others[:3]))]
    return scale, Places(*places), Tokens(*others[3:])  # type: ignore[arg-type, return-value]


_FOLD = formula_block("fold_heads", lambda x: x.transpose(1, 2).flatten(0, 1))


# Token by token.


def _segment(
    config: MemoryConfig, rows: list[Tensors], carry: Carry, initial: Memory, run: Run, first: int
) -> tuple[Tensor, Carry]:
    """Outputs `[N, T, V]` and the carry: levels as rows of one memory, moved on before each token."""
    scale, places, tokens = _split(rows, carry)
    levels, length = scale.shape[-1], scale.shape[1]
    ages = level_of(places.read ^ places.before, levels)
    rowed = formula_block("rows", lambda x: x.flatten(1, 2))
    newest = formula_block("newest", lambda v: pad(v, (0, (levels - 1) * v.shape[-1])))
    alike = formula_block("alike", lambda gate: gate.repeat(1, 1, levels))
    oldest = formula_block("oldest", lambda weight: _oldest(weight, levels).flatten(1, 2))
    weighed = formula_block("weighed", lambda scale, y: (scale.unsqueeze(-1) * y.unflatten(-1, (levels, -1))).sum(2))
    gate = tokens.retain_value
    tokens = tokens._replace(v=one(run(newest, tokens.v)), retain_value=None if gate is None else one(run(alike, gate)))
    initial = per_weight(run, oldest, initial)
    back = formula_block("levels", lambda x: x.unflatten(1, (levels, -1)))

    def moved(t: int, carry: Carry, run: Run) -> Carry:
        return _mapped(run, formula_block("move", partial(_rows_moved_on, age=ages[:, t], levels=levels)), carry)

    y, carry = token_by_token(config, tokens, _mapped(run, rowed, carry), initial, run, first * length, moved)
    return one(run(weighed, scale, y)), _mapped(run, back, carry)


def _mapped(run: Run, block: Block, carry: Carry) -> Carry:
    return carry._replace(memory=per_weight(run, block, carry.memory), slots=per_weight(run, block, carry.slots))


def _rows_moved_on(rows: Tensor, age: Tensor, levels: int) -> Tensor:
    return moved_on(rows.unflatten(1, (levels, -1)), age, 1).flatten(1, 2)


# In blocks. Levels lie as `[N, P, L V]`.


def _segment_in_blocks(
    config: MemoryConfig, rows: list[Tensors], carry: Carry, initial: Memory, run: Run, first: int
) -> tuple[Tensor, Carry]:
    """Outputs `[N, T, V]` and the carry: the blocks of a segment at once, but for the walk over their states."""
    states = len(carry.memory) + len(carry.slots)

    def forward(*inputs: Tensor | None) -> tuple[Tensors, None]:
        levels, (start, *row) = several(inputs[:states]), inputs[states:]
        return _in_blocks(config, levels, start, *_split([tuple(row)], carry)), None  # type: ignore[arg-type]

    block = Block("engine.log_linear", forward)
    y, memory, *slots = several(run(block, *carry.memory, *carry.slots, *initial, *rows[0], label=f"segment {first}"))
    return y, carry._replace(memory=(memory,), slots=tuple(slots))


class Solved(NamedTuple):
    """Blocks `[g, N, ...]` whose own writes are accounted for: base states on an axis b P, first M, first S, initial M,
    where they exist."""

    pairs: Tensor  # [C, C]: the weight of each value in each token's answer
    query: Tensor  # [C, b P]: the queries to the base states
    keys: list[Tensor]  # [C, P]: the key of each value in the last M, and in S
    leaving: list[Tensor] | None  # [1 or P, b]: weights of the base states in the last M, and in S; None where M stays
    moves: list[Tensor] | None  # [P, b P]: the same, if writes erase from the base states


def _solved(config: MemoryConfig, chunks: Tokens) -> Solved:
    matrices = matrices_of(config, chunks)
    pairs, query = matrices.attend, matrices.read
    keys = [key for key in (matrices.keys, matrices.slot_keys) if key is not None]
    leaving = None if matrices.leaving is None else [matrices.leaving]
    if leaving is not None and matrices.slot_leaving is not None:  # S alone, with nothing of M and of the initial M
        whole = matrices.slot_leaving[..., None, None]
        leaving.append(pad(whole, (1, leaving[0].shape[-1] - 2)))
    if matrices.lower is None or matrices.seen is None:
        return Solved(pairs, query, keys, leaving, None)
    identity = torch.eye(pairs.shape[-1], dtype=pairs.dtype, device=pairs.device).expand(pairs.shape)
    right = torch.cat((matrices.seen, identity), -1)
    solved = torch.linalg.solve_triangular(matrices.lower, right, upper=False, unitriangular=True)
    taken, inverse = solved.split((query.shape[-1], pairs.shape[-1]), -1)
    moves = []
    for key, weights in zip(keys, [None] if leaving is None else leaving, strict=True):
        one_each = key.new_ones(1, 1) if weights is None else weights
        diagonal = one_each.mT.expand(*key.shape[:2], -1, key.shape[-1]).diag_embed()  # [b, P, P]
        moves.append(diagonal.transpose(-3, -2).flatten(-2) - key.mT @ taken)
    keys = [inverse.mT @ key for key in keys]
    return Solved(pairs @ inverse, query - pairs @ taken, keys, leaving, moves)


def _in_blocks(
    config: MemoryConfig, carried: tuple[Tensor, ...], initial: Tensor, scale: Tensor, places: Places, tokens: Tokens
) -> Tensors:
    (_, length, levels), width = scale.shape, tokens.v.shape[-1]
    size = min(length, CHUNK if tokens.retain.dim() == 2 else CHANNEL_CHUNK)
    whole = slice(0, length)
    chunks = chunked(tokens, whole, size)
    weights, read, wrote, before = several(in_blocks((scale, *places), whole, size, (0, 0, 0, 0)))
    solved = _solved(config, chunks)
    # Between blocks states are as the next one's first token finds them, after the last one as that has left them.
    first, final = read[:, :, 0], read[-1:, :, (length - 1) % size]
    entering, then = level_of(first ^ before[:, :, 0], levels), torch.cat((first[1:], final))
    low = _empty(entering)
    pairs = level_of(read.unsqueeze(-1) ^ wrote.unsqueeze(-2), levels)
    became = level_of(read ^ first.unsqueeze(-1), levels).unsqueeze(-1)
    became = torch.maximum(became, torch.arange(low, levels, device=became.device))
    y = (solved.pairs * weights.gather(-1, pairs)) @ chunks.v
    states = [moved_on(item.permute(0, 3, 1, 2), entering[0], 2)[:, :, low:].flatten(2) for item in carried]
    start = None if tokens.reset is None else _oldest(initial, levels).permute(0, 3, 1, 2)[:, :, low:].flatten(2)
    news = _news(solved, chunks.v, level_of(then.unsqueeze(-1) ^ wrote, levels), levels, low)
    moves, leaving = _by_block(solved.moves), _by_block(solved.leaving)
    bases: list[Tensor] = []
    for at, (new, age) in enumerate(zip(news, level_of(then ^ first, levels), strict=True)):
        base = states if start is None else [*states, start]
        side = torch.cat(base, 1) if len(base) > 1 else base[0]
        bases.append(side)
        if moves is not None:
            states = [move @ side for move in moves[at]]
        elif leaving is not None:
            states = [_weighted_sum(weights, base) for weights in leaving[at]]
        below = 0 if at + 1 == len(read) else low
        padded = [pad(item.unflatten(-1, (-1, width)), (0, 0, low - below, 0)) for item in states]
        states = [moved_on(item, age - below, 2).flatten(2) + write for item, write in zip(padded, new, strict=True)]
    answers = (solved.query @ torch.stack(bases)).unflatten(-1, (-1, width))
    y = y + (weights.gather(-1, became).unsqueeze(-1) * answers).sum(-2)
    y = y.transpose(0, 1).flatten(1, 2)[:, :length]
    return y, *(item.unflatten(-1, (levels, width)).permute(0, 2, 3, 1) for item in states)


def _empty(entering: Tensor) -> int:
    """Number of levels that hold nothing at the first token of any block, from the level up to which it moves all: 7
    where blocks begin at multiples of 64. Read only where that costs nothing, else 0."""
    if entering.device.type != "cpu" or not can_inspect(entering) or not entering.numel():
        return 0
    return int(entering.min())


def _news(solved: Solved, v: Tensor, index: Tensor, levels: int, low: int) -> list[tuple[Tensor, ...]]:
    """Additions of each block's tokens to M, and S, `[N, P, L V]`, in the levels in which they lie after it: without
    the `low` first levels except after the last block."""
    additions = []
    for part, least in ((slice(0, -1), low), (slice(-1, None), 0)):
        hot = one_hot((index[part] - least).clamp(min=0), levels - least).to(v.dtype)
        rows = (hot.unsqueeze(-1) * v[part].unsqueeze(-2)).flatten(-2)
        additions += list(zip(*[(key[part].mT @ rows).unbind(0) for key in solved.keys], strict=True))
    return additions


def _by_block(of_states: list[Tensor] | None) -> list[tuple[Tensor, ...]] | None:
    return None if of_states is None else list(zip(*[item.unbind(0) for item in of_states], strict=True))


def _weighted_sum(weights: Tensor, states: list[Tensor]) -> Tensor:
    """The sum of states `[N, P, L V]` with weights `[N, 1 or P, b]`."""
    first, *rest = (weight * state for weight, state in zip(weights.split(1, -1), states, strict=True))
    return sum(rest, first)
