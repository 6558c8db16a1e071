"""A memory rule: the four knobs and the one formula that joins them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from operator import add
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hecate.algorithm import GD, AlgorithmKind, Token
from hecate.bias import L2, BiasKind
from hecate.retention import NoRetention, RetentionKind
from hecate.structure import Matrix, Memory, StructureKind
from hecate.structure.graph import Graph, descent, descent_vjp, outers
from hecate.tape import Block, Run, Tensors, execute
from hecate.tape import one as one
from hecate.tape import several as several
from hecate.tape.ops import over, sum_to_gate
from hecate.variant import Config


class TokenGates(NamedTuple):
    """Gates of one token for N memories: lr and momentum `[N]`, retain `[N]` or `[N, P]`."""

    lr: Tensor
    retain: Tensor
    momentum: Tensor


class MemoryRule(Config):
    """Structure, attentional bias, retention and algorithm: the four choices of MIRAS.

    Every method works on phi(k) and phi(q), never on keys themselves, which is why any feature map goes with any rule.
    All are pure: they return new tensors and touch nothing. `run` executes the blocks: `execute` forgets them, a `Tape`
    records them.

    `memory` is what is carried from token to token, `weights` what predicts: the same, unless the retention carries a
    dual state. A write is retain times what is carried plus the step on the gradient by the weights.

    Shapes: phi_k, phi_q `[N, P]`, v `[N, V]`; weights and slots `[N, ...]` in the structure's order, slots of one
    weight after the other. [RULE-WRITE-D1]
    """

    structure: StructureKind = Matrix()
    bias: BiasKind = L2()
    retention: RetentionKind = NoRetention()
    algorithm: AlgorithmKind = GD()

    def weights(self, memory: Memory, *, run: Run = execute, label: str = "") -> Memory:
        """The weights of what a memory carries."""
        if not self.retention.dual:
            return memory
        block = self.retention.weights_block()
        return tuple(one(run(block, item, label=label)) for item in memory)

    def read(self, memory: Memory, phi_q: Tensor, *, run: Run = execute, label: str = "") -> Tensor:
        """y = f(weights, phi_q)."""
        weights = self.weights(memory, run=run, label=label)
        return one(run(self.structure.predict_block(), phi_q, *weights, label=label))

    def gradient(self, memory: Memory, phi_k: Tensor, v: Tensor, *, run: Run = execute, label: str = "") -> Memory:
        """Gradient of the inner loss by the weights, taken at those of a memory."""
        weights = self.weights(memory, run=run, label=label)
        return _Loss(self, weights, run, label).gradient(phi_k, v)

    def descended(
        self, weights: Memory, token: Token, slots: Memory = (), *, run: Run = execute, label: str = ""
    ) -> tuple[Memory, Memory]:
        """The gradient that the algorithm descends at weights, and the slots with its context."""
        context = len(self.algorithm.slots) * len(weights)
        loss = _Loss(self, weights, run, label)
        grads, kept = self.algorithm.gradient(loss, token, slots[context:])
        return grads, (*slots[:context], *kept)

    def apply(
        self, memory: Memory, slots: Memory, gradient: Memory, gates: TokenGates, *, run: Run = execute, label: str = ""
    ) -> tuple[Memory, Memory]:
        """One step of the algorithm followed by retention: the new memory and slots."""
        context = len(self.algorithm.slots) * len(memory)
        own = slots[:context]
        new = several(run(self.step_block(), *gates, *gradient, *memory, *own, label=label))
        return new[: len(memory)], (*new[len(memory) :], *slots[context:])

    def step_block(self) -> Block:
        """`apply` as one block: (lr, retain, momentum, *gradient, *memory, *slots) -> (*memory, *slots).

        Its derivative is the chain rule over those of the algorithm and of the retention.
        """
        algorithm, retention = self.algorithm.block(), self.retention.block()
        count = len(self.algorithm.slots)

        def forward(*inputs: Tensor) -> tuple[Tensors, Any]:
            kept: list[Any] = []

            def run(block: Block, *inputs: Tensor | None, label: str = "") -> Tensors:
                outputs, residuals = block.apply(inputs)
                kept.append(residuals)
                return outputs

            return program(run, *inputs), kept

        def vjp(kept: list[Any], *cotangents: Tensor) -> Tensors:
            of_memory = cotangents[: len(kept) // 2]
            of_slots = cotangents[len(of_memory) :]
            glr = gretain = gmomentum = None
            ggradient: list[Tensor | None] = []
            gmemory: list[Tensor | None] = []
            gslots: list[Tensor | None] = []
            for index, g in enumerate(of_memory):
                gweight, gdirection, more = retention.pullback(kept[2 * index + 1], [g])
                if gdirection is None:
                    gdirection = torch.zeros_like(g)
                gretain = _added(gretain, more)
                into = of_slots[index * count : (index + 1) * count]
                pulled = algorithm.pullback(kept[2 * index], [gdirection, *into])
                glr, gmomentum = _added(glr, pulled[1]), _added(gmomentum, pulled[2])
                ggradient.append(pulled[0])
                gmemory.append(gweight)
                gslots += pulled[3:]
            return glr, gretain, gmomentum, *ggradient, *gmemory, *gslots

        def program(run: Run, lr: Tensor, retain: Tensor, momentum: Tensor, *rest: Tensor) -> Tensors:
            weights = len(rest) // (2 + count)
            gradient, memory, slots = (rest[:weights], rest[weights : 2 * weights], rest[2 * weights :])
            new: list[Tensor | None] = []
            carried: list[Tensor | None] = []
            for index, (grad, weight) in enumerate(zip(gradient, memory, strict=True)):
                own = slots[index * count : (index + 1) * count]
                direction, *more = run(algorithm, grad, lr, momentum, *own)
                new += run(retention, weight, direction, retain)
                carried += more
            return *new, *carried

        return Block(f"step.{self.algorithm.kind}.{self.retention.kind}", forward, vjp, program)

    def write(
        self,
        memory: Memory,
        slots: Memory,
        phi_k: Tensor,
        v: Tensor,
        gates: TokenGates,
        *,
        weights: Memory | None = None,
        run: Run = execute,
        label: str = "",
    ) -> tuple[Memory, Memory]:
        """One token's write; the gradient is taken at weights, by default those of the memory."""
        if weights is None and self.retention.dual:
            weights = self.weights(memory, run=run, label=label)
        block = self.write_block()
        if block is not None:
            state = (*memory, *slots, *(weights or ()))
            new = several(run(block, *gates, phi_k, v, *state, label=label))
            return new[: len(memory)], new[len(memory) :]
        token = Token(phi_k, v, gates.lr)
        grads, slots = self.descended(weights or memory, token, slots, run=run, label=label)
        return self.apply(memory, slots, grads, gates, run=run, label=label)

    def write_block(self) -> Block | None:
        """`write` as one block where gradients need not be built; None elsewhere.

        (lr, retain, momentum, phi_k, v, *memory, *slots, *weights) -> (*memory, *slots), weights left out where they
        are the memory.
        """
        form = self.algorithm.kernel_form()
        if form is None or form.nesterov or not (self.retention.additive and self.structure.factored):
            return None
        gradient = self.structure.gradient_block(self.bias.block())
        knobs = (self.bias, self.retention, len(self.algorithm.slots))
        return rank_one_block(self.structure.graph(), *knobs, self.step_block(), gradient)

    def decayed(self, memory: Memory, retain: Tensor, *, run: Run = execute, label: str = "") -> Memory:
        """What is carried after retention and before any step: where `before_gradient` takes the gradient.

        `retain` is the token's gate, or in a chunk the product of its gates up to the token.
        """
        block = self.retention.block()
        return tuple(one(run(block, weight, torch.zeros_like(weight), retain, label=label)) for weight in memory)


class _Loss(NamedTuple):
    """The inner loss of a rule at some weights. [RULE-LOSS-D1]"""

    rule: MemoryRule
    weights: Memory
    runner: Run
    label: str

    @property
    def curvature(self) -> float | None:
        return self.rule.bias.curvature

    @property
    def diagonal(self) -> bool:
        return self.rule.structure.diagonal

    def gradient(self, phi_k: Tensor, v: Tensor) -> Memory:
        block = self.rule.structure.gradient_block(self.rule.bias.block())
        return self.run(block, phi_k, v, *self.weights)

    def error(self, phi_k: Tensor, v: Tensor) -> Tensor:
        pred = one(self.run(self.rule.structure.predict_block(), phi_k, *self.weights))
        return one(self.run(self.rule.bias.block(), pred, v))

    def pullback(self, phi_k: Tensor, u: Tensor) -> Memory:
        return self.run(self.rule.structure.pullback_block(), phi_k, u, *self.weights)

    def run(self, block: Block, *inputs: Tensor) -> tuple[Tensor, ...]:
        return several(self.runner(block, *inputs, label=self.label))


def _added(total: Tensor | None, more: Tensor | None) -> Tensor | None:
    return more if total is None else total if more is None else total + more


def rank_one_block(
    graph: Graph, bias: BiasKind, retention: RetentionKind, per_weight: int, step: Block, gradient: Block
) -> Block:
    """A write whose gradient has rank one in every layer, as one block that never builds it.

    (lr, retain, momentum, p, v, *memory, *slots, *weights) -> (*memory, *slots).

    Where retention keeps `a X + D` and the direction is linear in the gradients d h^T, a token's write is two rank-one
    products per layer and its derivative needs those of d and h alone. It equals the gradient followed by the step,
    block by block, which is its program. The gradient is taken at the memory X itself, or at other weights: those of a
    dual state X, or of a chunk's start. [RULE-WRITE-D1]

    `step` and `gradient` are the blocks that it stands for, `per_weight` counts slots; weights are left out where they
    are the memory.
    """
    loss, decays = bias.block(), retention.uses_retain
    count, split = graph.weights, graph.weights * (1 + per_weight)

    def forward(
        lr: Tensor, retain: Tensor, momentum: Tensor, p: Tensor, v: Tensor, *state: Tensor
    ) -> tuple[Tensors, Any]:
        memory, slots = state[:count], state[count:split]
        found = descent(graph, loss, state[split:] or memory, p, v)
        down = -over(lr, memory[0])
        stepped = [down * di for di in found.d]
        keep = over(retain, memory[0]) if decays else None
        centred = partial(retention.centred, retain=retain)
        new, carried = _advanced(memory, slots, keep, momentum, centred, stepped, found.h)
        return (*new, *carried), ((down, keep, retain, momentum), state, stepped, found)

    def vjp(residuals: Any, *cotangents: Tensor) -> Tensors:
        (down, keep, retain, momentum), state, stepped, found = residuals
        memory, slots, weights = state[:count], state[count:split], state[split:]
        kept, later = list(cotangents[:count]), cotangents[count:]
        gretain = gmomentum = None
        known, gslots = kept, []
        if keep is not None:
            known = [keep * g for g in kept]
            gretain = reduce(add, [sum_to_gate(g * m, retain) for g, m in zip(kept, memory, strict=True)])
        kept = [retention.centred(g, retain) for g in kept]
        if slots:
            kept = [a + b for a, b in zip(kept, later, strict=True)]
            gslots = [over(momentum, g) * g for g in kept]
            gmomentum = reduce(add, [sum_to_gate(g * s, momentum) for g, s in zip(kept, slots, strict=True)])
        pulled = [torch.bmm(hi, g.mT) for hi, g in zip(found.h, kept, strict=True)]
        glr = -reduce(add, [(di * x).sum((1, 2)) for di, x in zip(found.d, pulled, strict=True)])
        gd = [down * x for x in pulled]
        gh = [torch.bmm(di, g) for di, g in zip(stepped, kept, strict=True)]
        at, merged = (weights, None) if weights else (memory, known)
        gweights, gp, gv = descent_vjp(graph, loss, at, found, gd, gh, merged)
        own = (*known, *gslots, *gweights) if weights else (*gweights, *gslots)
        return glr, gretain, gmomentum, gp, gv, *own

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
