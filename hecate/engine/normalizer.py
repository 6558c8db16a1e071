"""The sum normaliser: z, the same memory with bias dot and the value 1 at every token, and y = M phi(q) / z phi(q)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hecate.engine.call import Call
from hecate.engine.features import scaled
from hecate.engine.tokens import Carry, Tokens, form_of
from hecate.rule import MemoryConfig
from hecate.structure import Memory
from hecate.tape import Block, ByHand, Run, Tensors, execute, one, several
from hecate.tape.ops import largest, levelling, near_one, over

Scan = Callable[..., tuple[Tensor, Carry]]  # (call, tokens, carry, initial, run=run)


def normalized(scan: Scan, call: Call, tokens: Tokens, run: Run, *, along: bool) -> Tensors:
    """Outputs and the states' tensors of a memory and its sum normaliser; `along` says that `scan` may run both as one
    memory of one more row."""
    tokens, memories, units, back = levelled(call.config, tokens, call.memories, run)
    counter = call.of_normalizer()
    if along and form_of(call.config.bias) == "target":
        results = _counting_along(scan, counter, tokens, memories, run)
    else:
        ones = counting(tokens)
        (initial, carry), (zero, held) = memories
        results = [scan(call, tokens, carry, initial, run=run), scan(counter, ones, held, zero, run=run)]
    (y, carry), (z, held) = results
    y = one(run(DIVIDE.block(keeps=run is not execute), y, z, *units, label="normalizer"))
    if back is not None:
        carry, held = _times(carry, back, run), _times(held, back, run)
    return y, *carry.flat, *held.flat


def counting(tokens: Tokens) -> Tokens:
    """The tokens of a sum normaliser: the value is 1."""
    return tokens._replace(v=torch.ones_like(tokens.v[..., :1]))


def _counting_along(
    scan: Scan, counter: Call, tokens: Tokens, memories: list[tuple[Memory, Carry]], run: Run
) -> list[tuple[Tensor, Carry]]:
    """Outputs and states of a memory and of its normaliser, run as one more row of the memory.

    That is exact where a row never looks at another and the value is all that differs.
    """
    (initial, carry), (zero, count) = memories

    def joined(own: Memory, last: Memory) -> Memory:
        return tuple(one(run(_WITH_LAST, *pair, label="normalizer")) for pair in zip(own, last, strict=True))

    tokens = tokens._replace(v=one(run(_WITH_ONE, tokens.v, label="normalizer")))
    both = carry._replace(memory=joined(carry.memory, count.memory), slots=joined(carry.slots, count.slots))
    y, both = scan(counter, tokens, both, joined(initial, zero), run=run)
    outputs = several(run(_last_apart(-1), y, label="normalizer"))
    rows = [several(run(_last_apart(1), item, label="normalizer")) for item in (*both.memory, *both.slots)]
    return [
        (outputs[at], own._replace(memory=(rows[0][at],), slots=tuple(row[at] for row in rows[1:])))
        for at, own in enumerate((carry, count))
    ]


def _last_apart(axis: int) -> Block:
    """All but the last along an axis, and the last."""

    def forward(x: Tensor) -> tuple[Tensors, None]:
        size = x.shape[axis] - 1
        return (x.narrow(axis, 0, size), x.narrow(axis, size, 1)), None

    def vjp(_: None, *cotangents: Tensor) -> tuple[Tensor]:
        return (torch.cat(cotangents, axis),)

    return Block("last_apart", forward, vjp)


_WITH_LAST = Block("with_last", lambda x, last: ((torch.cat((x, last), 1),), None), lambda _, g: (g[:, :-1], g[:, -1:]))
_WITH_ONE = Block(
    "with_one", lambda v: ((torch.cat((v, torch.ones_like(v[..., :1])), -1),), None), lambda _, g: (g[..., :-1],)
)


def levelled(
    config: MemoryConfig, tokens: Tokens, memories: list[tuple[Memory, Carry]], run: Run
) -> tuple[Tokens, list[tuple[Memory, Carry]], tuple[Tensor, ...], Tensor | None]:
    """The same quotients from features near 1, so that a cotangent over a small sum of weights stays representable:
    those of a query cancel, and so do those of all keys with the states.

    Beside tokens and memories, the factors `[B, 1 or T, H, 1]` by which the features came there, and what the states
    are to be multiplied by at the end `[N]`."""
    units: tuple[Tensor, ...] = ()
    size = largest(tokens.phi_q)
    if not near_one(size):
        units = (levelling(size),)
        tokens = tokens._replace(phi_q=scaled(tokens.phi_q, *units, run, "normalizer"))
    (initial, carry), (zero, held) = memories
    if form_of(config.bias) != "target" or config.algorithm.kernel_form() is None:
        return tokens, memories, units, None
    batch, _, heads = tokens.lr.shape
    size = (largest(tokens.phi_k).squeeze(-1) * tokens.lr.detach().abs()).amax(1)
    size = torch.maximum(size, held.memory[0].detach().abs().amax((1, 2)).unflatten(0, (batch, heads)))
    if near_one(size):
        return tokens, memories, units, None
    level = levelling(size)
    wide = level[:, None, :, None]
    tokens = tokens._replace(phi_k=scaled(tokens.phi_k, wide, run, "normalizer"))
    level = level.flatten()
    own = _weighted(initial, level, run), _times(carry, level, run)
    return tokens, [own, (_weighted(zero, level, run), _times(held, level, run))], (*units, wide), 1 / level


def _times(carry: Carry, factor: Tensor, run: Run) -> Carry:
    """A state with everything that is linear in the writes times a constant `[N]`."""
    linear = (_weighted(item, factor, run) for item in carry[:4])
    return Carry(*linear, *carry[4:])  # type: ignore[arg-type, call-arg]


def _weighted(tensors: Memory, factor: Tensor, run: Run) -> Memory:
    return tuple(scaled(item, over(factor, item), run, "normalizer") for item in tensors)


def _divide(numerator: Tensor, denominator: Tensor, *units: Tensor) -> tuple[Tensors, Any]:
    # The sum of weights is 0 for an empty memory; one that is no normal number would have a derivative that is no
    # number. What is divided by 1 then is divided by what 1 has become.
    filled = denominator >= torch.finfo(denominator.dtype).tiny
    divisors = [torch.where(filled, denominator, 1.0)]
    divisors += [torch.where(filled, 1.0, unit) for unit in units]
    mean = _over_all(numerator, divisors)
    return (mean,), (mean, divisors, filled)


def _divide_vjp(kept: tuple[Tensor, list[Tensor], Tensor], g: Tensor) -> Tensors:
    mean, divisors, filled = kept
    g = _over_all(g, divisors)
    gz = torch.where(filled, -(g * mean).sum(-1, keepdim=True), 0.0)
    return g, gz, *(None for _ in divisors[1:])


def _over_all(x: Tensor, divisors: list[Tensor]) -> Tensor:
    for divisor in divisors:
        x = x / divisor
    return x


DIVIDE = ByHand.of(Block("normalizer", _divide, _divide_vjp))
