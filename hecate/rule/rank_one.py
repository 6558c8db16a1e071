"""A write whose gradient has rank one in every layer, as one block that never builds it.

Where retention keeps `a X + D` and the direction is linear in the gradients d h^T, a token's write is two rank-one
products per layer and its derivative needs those of d and h alone. It equals the gradient followed by the step, block
by block, which is its program. The gradient is taken at the memory X itself, or at other weights: those of a dual state
X, or of a chunk's start. [RULE-WRITE-D1]
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hecate.algorithm import AlgorithmKind, Momentum
from hecate.bias import BiasKind
from hecate.retention import RetentionKind
from hecate.structure import Layered, Memory, StructureKind
from hecate.structure.graph import Graph, factors, factors_vjp, outers, through, trace
from hecate.tape import Block, Run, Tensors, one
from hecate.tape.ops import over, sum_to_gate


def has_rank_one(structure: StructureKind, retention: RetentionKind, algorithm: AlgorithmKind) -> bool:
    """Whether a write is `a X - lr d h^T` per layer, with momentum or without."""
    plain = algorithm.kind == "gd" or (isinstance(algorithm, Momentum) and not algorithm.nesterov)
    return plain and retention.additive and isinstance(structure, Layered) and structure.factored


def rank_one_block(
    graph: Graph, bias: BiasKind, retention: RetentionKind, per_weight: int, step: Block, gradient: Block
) -> Block:
    """(lr, retain, momentum, p, v, *memory, *slots, *weights) -> (*memory, *slots).

    `step` and `gradient` are the blocks that it stands for, `per_weight` counts slots; weights are left out where they
    are the memory.
    """
    loss, decays = bias.block(), retention.uses_retain
    count, split = graph.weights, graph.weights * (1 + per_weight)

    def forward(
        lr: Tensor, retain: Tensor, momentum: Tensor, p: Tensor, v: Tensor, *state: Tensor
    ) -> tuple[Tensors, Any]:
        memory, slots = state[:count], state[count:split]
        weights = state[split:] or memory
        past = trace(graph, weights, p.unsqueeze(1))
        outputs, of_bias = loss.apply((past.values[-1].squeeze(1), v))
        d, h, flowed = factors(graph, weights, past, one(outputs).unsqueeze(1))
        down = -over(lr, memory[0])
        stepped = [down * di for di in d]
        keep = over(retain, memory[0]) if decays else None
        centred = partial(retention.centred, retain=retain)
        new, carried = _advanced(memory, slots, keep, momentum, centred, stepped, h)
        gates = (down, keep, retain, momentum)
        return (*new, *carried), (gates, state, past, d, h, stepped, flowed, of_bias)

    def vjp(residuals: Any, *cotangents: Tensor) -> Tensors:
        gates, state, past, d, h, stepped, flowed, of_bias = residuals
        down, keep, retain, momentum = gates
        memory, slots, weights = state[:count], state[count:split], state[split:]
        kept, later = list(cotangents[:count]), cotangents[count:]
        gretain = gmomentum = None
        known, gslots = kept, []
        if keep is not None:
            known = [keep * g for g in kept]
            gretain = _sum([sum_to_gate(g * m, retain) for g, m in zip(kept, memory, strict=True)])
        kept = [retention.centred(g, retain) for g in kept]
        if slots:
            kept = [a + b for a, b in zip(kept, later, strict=True)]
            gslots = [over(momentum, g) * g for g in kept]
            gmomentum = _sum([sum_to_gate(g * s, momentum) for g, s in zip(kept, slots, strict=True)])
        pulled = [torch.bmm(hi, g.mT) for hi, g in zip(h, kept, strict=True)]
        glr = -_sum([(di * x).sum((1, 2)) for di, x in zip(d, pulled, strict=True)])
        gd = [down * x for x in pulled]
        gh = [torch.bmm(di, g) for di, g in zip(stepped, kept, strict=True)]
        at, merged = (weights, None) if weights else (memory, known)
        above, gu, values = factors_vjp(graph, at, past, flowed, gd, gh, merged)
        gu = torch.zeros_like(past.values[-1]) if gu is None else gu
        gpred, gv = loss.pullback(of_bias, [gu.squeeze(1)])
        values.add(len(graph.nodes), None if gpred is None else gpred.unsqueeze(1))
        gweights, gp = through(graph, at, past, values, above)
        own = (*known, *gslots, *gweights) if weights else (*gweights, *gslots)
        return glr, gretain, gmomentum, gp.squeeze(1), gv, *own

    def program(
        run: Run, lr: Tensor, retain: Tensor, momentum: Tensor, p: Tensor, v: Tensor, *state: Tensor
    ) -> Tensors:
        grads = run(gradient, p, v, *(state[split:] or state[:count]))
        return run(step, lr, retain, momentum, *grads, *state[:split])

    return Block(f"write.{step.name.removeprefix('step.')}", forward, vjp, program)


def _advanced(
    memory: Memory,
    slots: Memory,
    keep: Tensor | None,
    momentum: Tensor,
    centred: Callable[[Tensor], Tensor],
    d: list[Tensor],
    h: Memory,
) -> tuple[list[Tensor], list[Tensor]]:
    """Memory and slots after the step d h^T."""
    if slots:
        kept = over(momentum, slots[0])
        carried = [outers(kept * s, di, hi) for s, di, hi in zip(slots, d, h, strict=True)]
        pairs = zip(map(centred, carried), memory, strict=True)
        return [s + m if keep is None else torch.addcmul(s, keep, m) for s, m in pairs], carried
    left = memory if keep is None else [keep * weight for weight in memory]
    rows = zip(left, d, map(centred, h), strict=True)
    return [outers(m, di, hi) for m, di, hi in rows], []


def _sum(shares: list[Tensor]) -> Tensor:
    total = shares[0]
    for share in shares[1:]:
        total = total + share
    return total
