"""A write whose gradient has rank one in every layer, as one block that never builds it.

Where retention keeps `a M + D` and the direction is linear in the gradients d h^T, a token's write
is two rank-one products per layer and its derivative needs those of d and h alone. It equals the
gradient followed by the step, block by block, which is its program. [RULE-WRITE-D1]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hecate.algorithm import AlgorithmKind, Momentum
from hecate.bias import BiasKind
from hecate.retention import RetentionKind
from hecate.structure import Layered, StructureKind
from hecate.structure.graph import Graph, factors, factors_vjp, outers, through, trace
from hecate.tape import Block, Run, Tensors, one
from hecate.tape.ops import over, sum_to_gate


def has_rank_one(
    structure: StructureKind, retention: RetentionKind, algorithm: AlgorithmKind
) -> bool:
    """Whether a write is `a M - lr d h^T` per layer, with momentum or without."""
    plain = algorithm.kind == "gd" or (isinstance(algorithm, Momentum) and not algorithm.nesterov)
    return plain and retention.linear and isinstance(structure, Layered) and structure.factored


def rank_one_block(
    graph: Graph, bias: BiasKind, decays: bool, step: Block, gradient: Block
) -> Block:
    """(lr, retain, momentum, p, v, *memory, *slots) -> (*memory, *slots).

    `step` and `gradient` are the blocks that it stands for; `decays` says whether `retain` counts.
    """
    loss = bias.block()
    count = graph.weights

    def forward(
        lr: Tensor, retain: Tensor, momentum: Tensor, p: Tensor, v: Tensor, *state: Tensor
    ) -> tuple[Tensors, Any]:
        memory, slots = state[:count], state[count:]
        past = trace(graph, memory, p.unsqueeze(1))
        outputs, of_bias = loss.apply((past.values[-1].squeeze(1), v))
        d, h, flowed = factors(graph, memory, past, one(outputs).unsqueeze(1))
        down = -over(lr, memory[0])
        stepped = [down * di for di in d]
        keep = over(retain, memory[0]) if decays else None
        if slots:
            kept = over(momentum, slots[0])
            carried = [
                outers(kept * s, di, hi) for s, di, hi in zip(slots, stepped, h, strict=True)
            ]
            pairs = zip(carried, memory, strict=True)
            new = [s + m if keep is None else torch.addcmul(s, keep, m) for s, m in pairs]
        else:
            carried = []
            left = memory if keep is None else [keep * weight for weight in memory]
            new = [outers(m, di, hi) for m, di, hi in zip(left, stepped, h, strict=True)]
        gates = (down, keep, retain, momentum)
        return (*new, *carried), (gates, memory, slots, past, d, h, stepped, flowed, of_bias)

    def vjp(residuals: Any, *cotangents: Tensor) -> Tensors:
        gates, memory, slots, past, d, h, stepped, flowed, of_bias = residuals
        down, keep, retain, momentum = gates
        kept, later = list(cotangents[:count]), cotangents[count:]
        gretain = gmomentum = None
        known, gslots = kept, []
        if keep is not None:
            known = [keep * g for g in kept]
            gretain = _sum([sum_to_gate(g * m, retain) for g, m in zip(kept, memory, strict=True)])
        if slots:
            kept = [a + b for a, b in zip(kept, later, strict=True)]
            gslots = [over(momentum, g) * g for g in kept]
            gmomentum = _sum(
                [sum_to_gate(g * s, momentum) for g, s in zip(kept, slots, strict=True)]
            )
        pulled = [torch.bmm(hi, g.mT) for hi, g in zip(h, kept, strict=True)]
        glr = -_sum([(di * x).sum((1, 2)) for di, x in zip(d, pulled, strict=True)])
        gd = [down * x for x in pulled]
        gh = [torch.bmm(di, g) for di, g in zip(stepped, kept, strict=True)]
        above, gu, values = factors_vjp(graph, memory, past, flowed, gd, gh, known)
        gu = torch.zeros_like(past.values[-1]) if gu is None else gu
        gpred, gv = loss.pullback(of_bias, [gu.squeeze(1)])
        values.add(len(graph.nodes), None if gpred is None else gpred.unsqueeze(1))
        gmemory, gp = through(graph, memory, past, values, above)
        return glr, gretain, gmomentum, gp.squeeze(1), gv, *gmemory, *gslots

    def program(
        run: Run, lr: Tensor, retain: Tensor, momentum: Tensor, p: Tensor, v: Tensor, *state: Tensor
    ) -> Tensors:
        grads = run(gradient, p, v, *state[:count])
        return run(step, lr, retain, momentum, *grads, *state)

    return Block(f"write.{step.name.removeprefix('step.')}", forward, vjp, program)


def _sum(shares: list[Tensor]) -> Tensor:
    total = shares[0]
    for share in shares[1:]:
        total = total + share
    return total
