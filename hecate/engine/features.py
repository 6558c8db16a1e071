"""From q, k, v and gates to tokens in phi-space, and from answers to the quotients of a sum normaliser: one path for
every engine and every read.

Norms and steps need squares, which overflow or underflow long before the features do. So features far from 1 are first
scaled to about 1 by a power of two, which rounds nothing and cancels in the quotient. [RULE-RANGE-I1]
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from hecate.engine.call import NO_PARAMS, Call, Inputs
from hecate.engine.tokens import CONCAT, SELECT, Carry, Scan, Tokens, by_head, cast, linear_block, split_time
from hecate.phi import Params
from hecate.rule import MemoryConfig
from hecate.structure import Memory
from hecate.tape import Block, Run, Tensors, by_hand, can_inspect, execute, formula_block, one, several
from hecate.tape.ops import largest, levelling, near_one, over, reach

NORMALIZED_EPS = 1e-6
FLOW_SERIES = 0.05  # below it eight terms of the series are exact to 1e-17


def to_tokens(
    config: MemoryConfig, inputs: Inputs, params: Params, dtype: torch.dtype, run: Run,
    *, l2: Block | None = None,
) -> Tokens:  # fmt: skip
    """Tokens `[B, T, H, *]` in `dtype`, after phi, key_norm, query_scale and the step rule. l2: a kernel for
    key_norm="l2"."""
    q, k, v, lr, *gates = cast_inputs(config, inputs, dtype, run)
    if inputs.position is not None:
        params = {**params, "position": inputs.position.unsqueeze(-1)}
    phi_k, phi_q = featured(config, k, q, params, run=run, l2=l2)
    if config.blocks:
        phi_k = cut_to_square(phi_k, run)
    if config.by_key:
        phi_k, v, lr = stepped(config, phi_k, v, lr, run)
    phi_w, retain_value = None, None
    if not inputs.erase is inputs.write_gate is inputs.retain_value is None:
        phi_k, phi_w, retain_value = _gated(config, phi_k, inputs, dtype, run)
    retain, momentum = gates
    write = None if inputs.write is None else by_head(inputs.write, lr.shape[2])
    reset = None if inputs.reset is None else by_head(inputs.reset, lr.shape[2])
    return Tokens(phi_k, phi_q, v, lr, retain, momentum, write, reset, phi_w, retain_value)


def featured(
    config: MemoryConfig, k: Tensor, q: Tensor, params: Params | None = None, *, run: Run, l2: Block | None = None
) -> tuple[Tensor, Tensor]:
    """phi, key_norm and query_scale of keys and queries."""
    phi_k, phi_q = k, q
    # The identity is run only where it shows: as a named call on a tape, and for autograd as a view, at which the
    # cotangents of several uses are summed up. A norm's block sums them up by itself.
    if run is not execute or not config.forms.identity or config.key_norm == "none":
        block, tensors = config.feature_map.block(NO_PARAMS if params is None else params)
        if block.vjp is not None and block.program is None:
            block = by_hand(block)
        phi_k = one(run(block, k, *tensors, label="phi(k)"))
        phi_q = one(run(block, q, *tensors, label="phi(q)"))
    if config.key_norm == "l2" and l2 is not None:  # the kernel takes one tensor at a time
        phi_k, phi_q = one(run(l2, phi_k, label="key_norm")), one(run(l2, phi_q, label="key_norm"))
    elif config.key_norm != "none":
        phi_k, phi_q = several(run(L2_NORM if config.key_norm == "l2" else SUM_NORM, phi_k, phi_q, label="key_norm"))
    if config.query_scale == "key_dim":
        phi_q = scaled(phi_q, 1 / math.sqrt(k.shape[-1]), run, "query_scale")
    return phi_k, phi_q


def faced(config: MemoryConfig, tokens: Tokens, run: Run) -> Tokens:
    """Tokens with keys and values exchanged, for a memory that learns keys from values; retain_value, which decays
    value channels, then decays the channels of its keys. Other tokens stay as they are."""
    if not config.forms.transposed:
        return tokens
    retain, value = tokens.retain, tokens.retain_value
    if value is not None:
        retain = one(run(_GATE, value, retain, label="retain"))
    return tokens._replace(phi_k=tokens.v, v=tokens.phi_k, retain=retain, retain_value=None)


def cast_inputs(
    config: MemoryConfig, inputs: Inputs, dtype: torch.dtype, run: Run, *, narrow: bool = False
) -> list[Tensor]:
    """q, k, v, lr, retain and momentum in `dtype`, all but q set to 0 at masked tokens; lr times (1 - momentum) if the
    algorithm dampens it."""
    tensors: list[Tensor] = []
    for tensor in inputs[:6]:
        fits = tensor.dtype == dtype or (narrow and tensor.itemsize < dtype.itemsize)
        tensors.append(tensor if fits else one(run(cast(dtype), tensor, label="inputs")))
    q, rest = tensors[0], tensors[1:]  # a list, also when traced
    if inputs.write is not None:
        # A masked token may carry garbage: it must not even be multiplied by zero.
        rest = [one(run(SELECT, inputs.write, tensor, torch.zeros_like(tensor), label="write_mask")) for tensor in rest]
    if config.forms.dampens:
        rest[2] = one(run(DAMPENED, rest[2], rest[4], label="dampening"))
    return [q, *rest]


def _gated(
    config: MemoryConfig, phi_k: Tensor, inputs: Inputs, dtype: torch.dtype, run: Run
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The keys to erase with, the keys to write with (None if they are the same) and retain_value, from gates that are
    cast and set to 1 at masked tokens."""
    gates: list[Tensor | None] = []
    for gate in inputs[9:12]:
        if gate is not None:
            gate = gate if gate.dtype == dtype else one(run(cast(dtype), gate, label="inputs"))
            if inputs.write is not None:
                gate = one(run(SELECT, inputs.write, gate, torch.ones_like(gate), label="write_mask"))
        gates.append(gate)
    erase, write, retain_value = gates
    erased = phi_k if erase is None else one(run(_GATE, phi_k, erase, label="erase"))
    written = phi_k if write is None else one(run(_GATE, phi_k, write, label="write"))
    if config.forms.target:  # bias dot, which erases nothing
        return written, None, retain_value
    return erased, None if written is erased else written, retain_value


DAMPENED = formula_block(
    "dampened", lambda lr, momentum: lr * (1 - momentum), lambda lr, momentum, g: (g * (1 - momentum), -g * lr)
)


def _gate(phi: Tensor, gate: Tensor) -> Tensor:
    return phi * (gate if gate.dim() == phi.dim() else gate.unsqueeze(-1))


def _gate_vjp(phi: Tensor, gate: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    return _gate(g, gate), g * phi if gate.dim() == phi.dim() else (g * phi).sum(-1)


_GATE = formula_block("gate", _gate, _gate_vjp)


def scaled(x: Tensor, factor: Tensor | float, run: Run, label: str) -> Tensor:
    """x times a constant."""
    return one(run(linear_block("scaled", lambda x: x * factor, lambda g: g * factor), x, label=label))


# key_norm.


def _norm(name: str, size_of: Callable[[Tensor], Tensor], root: bool, vjp: Callable[..., Tensor]) -> Block:
    """The block x / size_of(x), or x / sqrt(size_of(x)), of each x; a zero vector stays zero. Residuals: quotients and
    divisors."""

    def forward(*xs: Tensor) -> tuple[Tensors, list[tuple[Tensor, Tensor]]]:
        residuals, looks = [], can_inspect(*xs, free=True)
        for x in xs:
            size, level = size_of(x), None
            if not near_one(size, 0.5, looks):
                level = levelling(largest(x))
                x = x * level
                size = size_of(x)
            size = torch.where(size > 0, size, 1.0)  # before the root, whose derivative at 0 is infinite
            size = size.sqrt() if root else size
            residuals.append((x / size, size if level is None else size / level))
        return next(zip(*residuals, strict=True)), residuals

    def back(residuals: list[tuple[Tensor, Tensor]], *cotangents: Tensor) -> Tensors:
        return tuple(map(vjp, residuals, cotangents))

    return by_hand(Block(name, forward, back))


def _l2_norm_vjp(residuals: tuple[Tensor, Tensor], g: Tensor) -> Tensor:
    unit, norm = residuals
    product = unit * g
    along = product.sum(-1, keepdim=True)
    # Reuses `product`: for long sequences the pages of a new tensor cost more than the arithmetic.
    return torch.addcmul(g, unit, along, value=-1, out=product).div_(norm)


def _sum_norm_vjp(residuals: tuple[Tensor, Tensor], g: Tensor) -> Tensor:
    share, total = residuals
    return (g - (share * g).sum(-1, keepdim=True)) / total


L2_NORM = _norm("l2_norm", lambda x: x.square().sum(-1, keepdim=True), True, _l2_norm_vjp)
SUM_NORM = _norm("sum_norm", lambda x: x.sum(-1, keepdim=True), False, _sum_norm_vjp)


# Step sizes.


def stepped(config: MemoryConfig, phi: Tensor, v: Tensor, lr: Tensor, run: Run) -> tuple[Tensor, Tensor, Tensor]:
    """A token's key, value and step size under `config.step`.

    A step of lr/|phi|^2 writes (e/|phi|)(phi/|phi|)^T, which may be representable where |phi|^2 is not. If the gradient
    is linear in prediction and value, (c phi, c v) with lr/|c phi|^2 gives the same write, and under dot c phi with
    c lr/|c phi|^2, so that a factor c brings squares into range. Otherwise a key too long to be squared is shortened
    until it can be. [RULE-STEP-I2] Weighting the square error by lr is the same as multiplying key and value by
    sqrt(lr) and taking a step of 1. [RULE-STEP-D2]
    """
    if config.step == "weighted":
        phi, v = several(run(_WEIGHTED, phi, v, lr, label="step"))
        return phi, v, torch.ones_like(lr)
    rule, least = _STEPS[config.step]
    floor, dot = torch.full_like(lr, least), config.forms.target
    # A sum normaliser has the value 1, which does not scale with v.
    same = dot or (config.forms.error and config.normalizer == "none")
    same = same and config.forms.linear and config.algorithm.linear
    # The derivative contains |phi|^4.
    top = reach(phi.dtype, 0.2 if same else 0.4)
    if can_inspect(phi, free=True) and phi.numel() and largest(phi).amax().item() <= top:
        return phi, v, one(run(rule, lr, phi, floor, label="step"))
    size = largest(phi)
    level = torch.where(size > top, levelling(size) * (1.0 if same else top), 1.0)
    factor = level.squeeze(-1)
    phi = scaled(phi, level, run, "step")
    lr = one(run(rule, lr, phi, floor * factor.square() if same else floor, label="step"))
    if same and dot:
        lr = scaled(lr, factor, run, "step")
    elif same:
        v = scaled(v, level, run, "step")
    return phi, v, lr


def cut_to_square(phi: Tensor, run: Run) -> Tensor:
    """Keys; those too long to be squared are shortened until they can be. [RULE-STEP-I2]"""
    top = reach(phi.dtype, 0.4)
    if can_inspect(phi, free=True) and phi.numel() and largest(phi).amax().item() <= top:
        return phi
    size = largest(phi)
    return scaled(phi, torch.where(size > top, levelling(size) * top, 1.0), run, "step")


def _normalized(lr: Tensor, phi: Tensor, floor: Tensor) -> tuple[Tensors, Tensors]:
    square = phi.square().sum(-1)
    # A zero key writes nothing, but the slope of what it writes is this step.
    total = torch.where(square == 0, 1.0, floor + square)
    return (lr / total,), (lr, phi, total)


def _normalized_vjp(residuals: tuple[Tensor, Tensor, Tensor], g: Tensor) -> tuple[Tensor, Tensor, None]:
    lr, phi, total = residuals
    g = g / total
    return g, (-2 * g * (lr / total)).unsqueeze(-1) * phi, None


def _implicit(lr: Tensor, phi: Tensor, floor: Tensor) -> tuple[Tensors, Tensors]:
    total = floor + lr * phi.square().sum(-1)
    return (lr / total,), (lr / total, phi, floor / total / total)


def _implicit_vjp(residuals: tuple[Tensor, Tensor, Tensor], g: Tensor) -> tuple[Tensor, Tensor, None]:
    step, phi, slope = residuals
    return g * slope, (-2 * g * step * step).unsqueeze(-1) * phi, None


def _flow(lr: Tensor, phi: Tensor, floor: Tensor) -> tuple[Tensors, Tensors]:
    square = phi.square().sum(-1)
    time = lr / floor * square  # floor is 1, or the square of the factor on phi
    small = time < FLOW_SERIES
    step = torch.where(small, lr / floor * _series(time, 0), -torch.expm1(-time) / torch.where(small, 1.0, square))
    return (step,), (lr, phi, floor, square, time)


def _flow_vjp(residuals: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], g: Tensor) -> tuple[Tensor, Tensor, None]:
    lr, phi, floor, square, time = residuals
    small, decay = time < FLOW_SERIES, torch.exp(-time)
    whole = torch.where(small, 1.0, square)
    slope = torch.where(
        small, (lr / floor).square() * _series(time, 1), (lr / floor * decay + torch.expm1(-time) / whole) / whole
    )
    return g * decay / floor, (2 * g * slope).unsqueeze(-1) * phi, None


def _series(x: Tensor, order: int) -> Tensor:
    """(1 - exp(-x))/x near 0, or its derivative (order 1), by a series: the formulas lose their digits there."""
    x = x.clamp(max=FLOW_SERIES)
    total = torch.zeros_like(x)
    for n in reversed(range(8)):
        total = total * x + (-1) ** (n + order) * (1 + n * order) / math.factorial(n + 1 + order)
    return total


def _rooted(phi: Tensor, v: Tensor, lr: Tensor) -> tuple[Tensors, Tensors]:
    # A token of weight 0, such as a masked one, does not count: its gate gets no gradient.
    some = lr != 0
    root = torch.where(some, lr, 1.0).sqrt() * some
    return (phi * root.unsqueeze(-1), v * root.unsqueeze(-1)), (phi, v, root)


def _rooted_vjp(residuals: tuple[Tensor, Tensor, Tensor], gphi: Tensor, gv: Tensor) -> Tensors:
    phi, v, root = residuals
    wide = root.unsqueeze(-1)
    twice = 2 * torch.where(root == 0, torch.inf, root)
    both = ((gphi * phi).sum(-1) + (gv * v).sum(-1)) / twice
    return gphi * wide, gv * wide, both


_WEIGHTED = by_hand(Block("step.weighted", _rooted, _rooted_vjp))

# By hand under autograd too, which would take the derivative by lr as a difference of nearly equal terms.
_STEPS = {
    **dict.fromkeys(
        ("normalized", "key_normalized"),
        (by_hand(Block("step.normalized", _normalized, _normalized_vjp)), NORMALIZED_EPS),
    ),
    "implicit": (by_hand(Block("step.implicit", _implicit, _implicit_vjp)), 1.0),
    "flow": (by_hand(Block("step.flow", _flow, _flow_vjp)), 1.0),
}


# The sum normaliser: z, the same memory with bias dot and the value 1 at every token, and y = M phi(q) / z phi(q).


def normalized(scan: Scan, call: Call, tokens: Tokens, run: Run, *, along: bool) -> Tensors:
    """Outputs and the states' tensors of a memory with a sum normaliser; `along`: `scan` may run the normaliser as one
    more row of the memory."""
    memories, back = call.memories, None
    units: tuple[Tensor, ...] = ()
    if call.config.normalizer == "sum":
        tokens, memories, units, back = levelled(call.config, tokens, memories, run)
    counter = call.of_normalizer()
    if along and call.config.forms.target:
        results = _counting_along(scan, counter, tokens, memories, run)
    else:
        ones = counting(tokens)
        (initial, carry), (zero, sums) = memories
        results = [scan(call, tokens, carry, initial, run=run), scan(counter, ones, sums, zero, run=run)]
    (y, carry), (z, sums) = results
    y = quotient(call.config, y, z, run, call.inputs.floor, units)
    if back is not None:
        carry, sums = _times(carry, back, run), _times(sums, back, run)
    return y, *carry.flat, *sums.flat


def quotient(
    config: MemoryConfig, y: Tensor, z: Tensor, run: Run, floor: Tensor | None, units: tuple[Tensor, ...] = ()
) -> Tensor:
    """Answers y `[..., V]` divided by the sums of weights z `[..., 1]`, by `units` where z is 0; with
    normalizer="max", by the larger of |z| and a floor `[...]`."""
    if config.normalizer == "sum":
        return one(run(DIVIDE, y, z, *units, label="normalizer"))
    if floor is None:
        floor = torch.ones_like(z[..., 0])
    elif floor.dtype != z.dtype:
        floor = one(run(cast(z.dtype), floor, label="inputs"))
    return one(run(_DIVIDE_BY_MAX, y, z, floor, label="normalizer"))


def counting(tokens: Tokens) -> Tokens:
    """The tokens of a sum normaliser: values are 1, and the key to write with is the only key."""
    ones = torch.ones_like(tokens.v[..., :1])
    return tokens._replace(v=ones, phi_k=tokens.phi_k if tokens.phi_w is None else tokens.phi_w, phi_w=None)


def _counting_along(
    scan: Scan, counter: Call, tokens: Tokens, memories: list[tuple[Memory, Carry]], run: Run
) -> list[tuple[Tensor, Carry]]:
    """Outputs and states of a memory and of its normaliser, run as one more row of the memory. Exact where rows do not
    depend on one another and the two differ in their values only."""
    (initial, carry), (zero, count) = memories

    def joined(first: Memory, last: Memory) -> Memory:
        return tuple(one(run(CONCAT, *pair, label="normalizer")) for pair in zip(first, last, strict=True))

    tokens = tokens._replace(v=one(run(_WITH_ONE, tokens.v, label="normalizer")))
    both = carry._replace(memory=joined(carry.memory, count.memory), slots=joined(carry.slots, count.slots))
    y, both = scan(counter, tokens, both, joined(initial, zero), run=run)
    rows = y.shape[-1] - 1
    outputs = several(run(split_time([rows, 1], -1), y, label="normalizer"))
    apart = [several(run(split_time([rows, 1]), x, label="normalizer")) for x in (*both.memory, *both.slots)]
    return [
        (outputs[at], template._replace(memory=(apart[0][at],), slots=tuple(slot[at] for slot in apart[1:])))
        for at, template in enumerate((carry, count))
    ]


_WITH_ONE = linear_block("with_one", lambda v: torch.cat((v, torch.ones_like(v[..., :1])), -1), lambda g: g[..., :-1])


def levelled(
    config: MemoryConfig, tokens: Tokens, memories: list[tuple[Memory, Carry]], run: Run
) -> tuple[Tokens, list[tuple[Memory, Carry]], tuple[Tensor, ...], Tensor | None]:
    """Tokens and memories with features scaled to about 1, so that cotangents over a small sum of weights stay
    representable. The quotients do not change: a factor on a query cancels, and so does one on all keys and the states.

    Also returned: these factors, `[B, 1 or T, H, 1]`, and the factor `[N]` that the states have to be multiplied by in
    the end, None for none."""
    units: tuple[Tensor, ...] = ()
    size = largest(tokens.phi_q)
    if not near_one(size):
        units = (levelling(size),)
        tokens = tokens._replace(phi_q=scaled(tokens.phi_q, *units, run, "normalizer"))
    (initial, carry), (zero, sums) = memories
    if not config.forms.target or config.forms.algorithm is None:
        return tokens, memories, units, None
    batch, _, heads = tokens.lr.shape
    size = (largest(tokens.phi_k).squeeze(-1) * tokens.lr.detach().abs()).amax(1)
    size = torch.maximum(size, sums.memory[0].detach().abs().amax((1, 2)).unflatten(0, (batch, heads)))
    if near_one(size):
        return tokens, memories, units, None
    level = levelling(size)
    wide = level[:, None, :, None]
    tokens = tokens._replace(phi_k=scaled(tokens.phi_k, wide, run, "normalizer"))
    level = level.flatten()
    memory = _weighted(initial, level, run), _times(carry, level, run)
    return tokens, [memory, (_weighted(zero, level, run), _times(sums, level, run))], (*units, wide), 1 / level


def _times(carry: Carry, factor: Tensor, run: Run) -> Carry:
    """A state, all of whose tensors that are linear in the writes are multiplied by a constant `[N]`."""
    linear = (_weighted(item, factor, run) for item in carry[:4])
    return Carry(*linear, *carry[4:])  # type: ignore[arg-type, call-arg]


def _weighted(tensors: Memory, factor: Tensor, run: Run) -> Memory:
    return tuple(scaled(item, over(factor, item), run, "normalizer") for item in tensors)


def _divide(numerator: Tensor, denominator: Tensor, *units: Tensor) -> tuple[Tensors, Any]:
    # An empty memory has the sum 0, and a subnormal sum a derivative that is not finite: both divide by 1 instead, or
    # by `units`, which is what 1 becomes where features were scaled.
    filled = denominator >= torch.finfo(denominator.dtype).tiny
    divisors = [torch.where(filled, denominator, 1.0)]
    divisors += [torch.where(filled, 1.0, unit) for unit in units]
    mean = reduce(torch.div, divisors, numerator)
    return (mean,), (mean, divisors, filled)


def _divide_vjp(residuals: tuple[Tensor, list[Tensor], Tensor], g: Tensor) -> Tensors:
    mean, divisors, filled = residuals
    g = reduce(torch.div, divisors, g)
    gz = torch.where(filled, -(g * mean).sum(-1, keepdim=True), 0.0)
    return g, gz, *(None for _ in divisors[1:])


def _divide_by_max(y: Tensor, z: Tensor, floor: Tensor) -> Tensor:
    return y / torch.maximum(z.abs(), floor.unsqueeze(-1))


def _divide_by_max_vjp(y: Tensor, z: Tensor, floor: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    size, floor = z.abs(), floor.unsqueeze(-1)
    divisor, above = torch.maximum(size, floor), size > floor
    g = g / divisor
    gdivisor = -(g * y).sum(-1, keepdim=True) / divisor
    return g, torch.where(above, z.sign() * gdivisor, 0.0), torch.where(above, 0.0, gdivisor).squeeze(-1)


DIVIDE = by_hand(Block("normalizer", _divide, _divide_vjp))
_DIVIDE_BY_MAX = formula_block("normalizer.max", _divide_by_max, _divide_by_max_vjp)
