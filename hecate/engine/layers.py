"""A stack of linear layers over the tokens of a chunk, as blocks of batched products.

Gradients of all tokens are taken at one anchor, where each is rank one per layer, G_i = d_i h_i^T:
h_i the layer's input, d_i the cotangent of its output. States between the tokens are read through
their coefficients (`hecate.engine.coefficients`) and never built. [ENG-CHUNK-D2]

Shapes: h, d `[N, C, width]`, weights W, M, S `[N, out, in]`, coefficients `[N, C]` or `[N, C, C]`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hecate.rule import MemoryConfig
from hecate.rule.rule import one, several
from hecate.structure import MLP, Matrix, Memory
from hecate.tape import Block, Run, Tensors
from hecate.tape.activation import Activation, activate
from hecate.tape.ops import over, sum_to_gate

STRUCTURES = (Matrix, MLP)


class Gradients(NamedTuple):
    """The gradients of a chunk's tokens in factors, one pair for each layer."""

    d: Memory
    h: Memory


class Reads(NamedTuple):
    """The states that a chunk's tokens read: `a M + s S - weights d h^T`.

    `weights[t, i]` is K[t, i] lr_i; `a` is None where it is 1, `s` where there is no momentum.
    """

    weights: Tensor
    a: Tensor | None
    s: Tensor | None


class Leaves(NamedTuple):
    """The states that leave a chunk: `a M + s S - (into d) h^T` and `e S - (slot d) h^T`."""

    into: Tensor
    a: Tensor | None
    s: Tensor | None
    slot: Tensor | None
    e: Tensor | None


def predict(config: MemoryConfig, weights: Memory, p: Tensor, *, run: Run, label: str) -> Tensor:
    """The answers of one memory to many keys or queries."""
    return _forward(config, weights, p, run, label)[-1]


def gradients(
    config: MemoryConfig, weights: Memory, p: Tensor, v: Tensor, *, run: Run, label: str
) -> Gradients:
    """The inner gradients of all tokens at one anchor."""
    *h, pred = _forward(config, weights, p, run, label)
    d = [one(run(config.bias.block(), pred, v, label=label))]
    inputs = h[::2]
    for index in reversed(range(1, len(weights))):
        block = _pull(_activation(config))
        d.insert(0, one(run(block, d[0], weights[index], h[2 * index - 1], label=label)))
    return Gradients(tuple(d), tuple(inputs))


def read(
    config: MemoryConfig,
    memory: Memory,
    slots: Memory,
    grads: Gradients,
    reads: Reads,
    q: Tensor,
    *,
    run: Run,
    label: str,
) -> Tensor:
    """Each query through the layers of its own token's state."""
    h = q
    for index, weight in enumerate(memory):
        if index:
            h = one(run(_act(_activation(config)), h, label=label))
        slot = slots[index] if slots else None
        h = one(run(_READ, h, grads.h[index], grads.d[index], *reads, weight, slot, label=label))
    return _residual(config, h, q, run, label)


def write(
    memory: Memory, slots: Memory, grads: Gradients, leaves: Leaves, *, run: Run, label: str
) -> tuple[Memory, Memory]:
    """Weights and slots after the chunk's last token."""
    new: list[Tensor] = []
    carried: list[Tensor] = []
    for index, weight in enumerate(memory):
        slot = slots[index] if slots else None
        written, *rest = several(
            run(_WRITE, weight, slot, grads.d[index], grads.h[index], *leaves, label=label)
        )
        new.append(written)
        carried += rest
    return tuple(new), tuple(carried)


def summed(pending: Memory, grads: Gradients, lr: Tensor, *, run: Run, label: str) -> Memory:
    """lr-weighted gradients added to those of the chunk so far."""
    return tuple(
        one(run(_SUM, total, d, h, lr, label=label))
        for total, d, h in zip(pending, grads.d, grads.h, strict=True)
    )


def _forward(
    config: MemoryConfig, weights: Memory, p: Tensor, run: Run, label: str
) -> list[Tensor]:
    """h_0, z_1, h_1, z_2, ..., the last of them the prediction."""
    out = [p]
    for index, weight in enumerate(weights):
        if index:
            out.append(one(run(_act(_activation(config)), out[-1], label=label)))
        out.append(one(run(_LINEAR, out[-1], weight, label=label)))
    out[-1] = _residual(config, out[-1], p, run, label)
    return out


def _residual(config: MemoryConfig, z: Tensor, p: Tensor, run: Run, label: str) -> Tensor:
    if isinstance(config.structure, MLP) and config.structure.residual:
        return one(run(_ADD, z, p, label=label))
    return z


def _activation(config: MemoryConfig) -> Activation:
    if not isinstance(config.structure, MLP):
        raise TypeError(f"structure {config.structure.kind!r} has no activation")
    return config.structure.activation


def _linear(h: Tensor, weight: Tensor) -> tuple[Tensors, Tensors]:
    return (h @ weight.mT,), (h, weight)


def _linear_vjp(inputs: tuple[Tensor, Tensor], g: Tensor) -> tuple[Tensor, Tensor]:
    h, weight = inputs
    return g @ weight, g.mT @ h


def _act(name: Activation) -> Block:
    def forward(z: Tensor) -> tuple[Tensors, Tensor]:
        return (activate(name, z, 0),), z

    def vjp(z: Tensor, g: Tensor) -> tuple[Tensor]:
        return (g * activate(name, z, 1),)

    return Block(f"chunk.{name}", forward, vjp)


def _pull(name: Activation) -> Block:
    """d below a layer: (d W) act'(z)."""

    def forward(d: Tensor, weight: Tensor, z: Tensor) -> tuple[Tensors, Tensors]:
        pushed, slope = d @ weight, activate(name, z, 1)
        return (pushed * slope,), (d, weight, z, pushed, slope)

    def vjp(residuals: Memory, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        d, weight, z, pushed, slope = residuals
        scaled = g * slope
        return scaled @ weight.mT, d.mT @ scaled, g * pushed * activate(name, z, 2)

    return Block(f"chunk.{name}.pull", forward, vjp)


def _read(
    q: Tensor,
    h: Tensor,
    d: Tensor,
    weights: Tensor,
    a: Tensor | None,
    s: Tensor | None,
    memory: Tensor,
    slot: Tensor | None,
) -> tuple[Tensors, Any]:
    scores = q @ h.mT
    attend = scores * weights
    base = _times(a, q @ memory.mT)
    if s is not None and slot is not None:
        base = torch.addcmul(base, s.unsqueeze(-1), q @ slot.mT)
    z = torch.baddbmm(base, attend, d, alpha=-1)
    return (z,), (q, h, d, weights, a, s, memory, slot, scores, attend)


def _read_vjp(residuals: Any, g: Tensor) -> Tensors:
    q, h, d, weights, a, s, memory, slot, scores, attend = residuals
    gattend = -g @ d.mT
    gscores = gattend * weights
    # z = a (q M^T) + ...: the cotangents of q and of a share g M.
    back = g @ memory
    gq = torch.baddbmm(_times(a, back), gscores, h)
    ga = None if a is None else (back * q).sum(-1)
    gmemory = _times(a, g).mT @ q
    gs = gslot = None
    if slot is not None:
        back = g @ slot
        gs, gq = (back * q).sum(-1), torch.addcmul(gq, s.unsqueeze(-1), back)
        gslot = _times(s, g).mT @ q
    return gq, gscores.mT @ q, -attend.mT @ g, gattend * scores, ga, gs, gmemory, gslot


def _write(
    memory: Tensor,
    slot: Tensor | None,
    d: Tensor,
    h: Tensor,
    into: Tensor,
    a: Tensor | None,
    s: Tensor | None,
    slot_into: Tensor | None,
    e: Tensor | None,
) -> tuple[Tensors, Any]:
    inputs = (memory, slot, d, h, into, a, s, slot_into, e)
    kept = memory if a is None else over(a, memory) * memory
    if slot is None or s is None or slot_into is None or e is None:
        return (torch.baddbmm(kept, _times(into, d).mT, h, alpha=-1),), inputs
    kept = torch.addcmul(kept, over(s, slot), slot)
    new = torch.baddbmm(kept, _times(into, d).mT, h, alpha=-1)
    carried = torch.baddbmm(over(e, slot) * slot, _times(slot_into, d).mT, h, alpha=-1)
    return (new, carried), inputs


def _write_vjp(inputs: Any, g: Tensor, gcarried: Tensor | None = None) -> Tensors:
    memory, slot, d, h, into, a, s, slot_into, e = inputs
    gd, ginto, gh = (-item for item in _sum_pulled(d, h, into, g))
    gmemory, ga = (g, None) if a is None else (over(a, g) * g, sum_to_gate(g * memory, a))
    if gcarried is None:
        return gmemory, None, gd, gh, ginto, ga, None, None, None
    more_d, gslot_into, more_h = _sum_pulled(d, h, slot_into, gcarried)
    gslot = torch.addcmul(over(s, g) * g, over(e, g), gcarried)
    gs, ge = sum_to_gate(g * slot, s), sum_to_gate(gcarried * slot, e)
    return gmemory, gslot, gd - more_d, gh - more_h, ginto, ga, gs, -gslot_into, ge


def _times(weight: Tensor | None, rows: Tensor) -> Tensor:
    """`[N, C]` times `[N, C, width]`; None is 1."""
    return rows if weight is None else weight.unsqueeze(-1) * rows


def _sum(total: Tensor, d: Tensor, h: Tensor, lr: Tensor) -> tuple[Tensors, Tensors]:
    return (torch.baddbmm(total, _times(lr, d).mT, h),), (d, h, lr)


def _sum_vjp(inputs: tuple[Tensor, Tensor, Tensor], g: Tensor) -> Tensors:
    gd, glr, gh = _sum_pulled(*inputs, g)
    return g, gd, gh, glr


def _sum_pulled(d: Tensor, h: Tensor, weight: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """Cotangents of (d, weight, h) from that of sum_i weight_i d_i h_i^T."""
    pulled = h @ g.mT
    return _times(weight, pulled), (d * pulled).sum(-1), _times(weight, d) @ g


def _add(x: Tensor, y: Tensor) -> tuple[Tensors, None]:
    return (x + y,), None


def _add_vjp(_: None, g: Tensor) -> tuple[Tensor, Tensor]:
    return g, g


_LINEAR = Block("chunk.linear", _linear, _linear_vjp)
_READ = Block("chunk.read", _read, _read_vjp)
_WRITE = Block("chunk.write", _write, _write_vjp)
_SUM = Block("chunk.sum", _sum, _sum_vjp)
_ADD = Block("chunk.residual", _add, _add_vjp)
